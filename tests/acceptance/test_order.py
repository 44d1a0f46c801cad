"""Order and exclusion: 50 questions at once from five producers run one by one, as they were recorded."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import pytest
from rq import Queue
from rq.serializers import JSONSerializer

from scripts.bench.kit.llm_server import Reply, Request
from shared.client import Client
from shared.settings import Settings
from tests.acceptance.lab import HEIR, STORES, Lab, open_lab

ANSWER_SECONDS = 0.02  # two requests closer than that ran side by side
BY_COMMAND, BY_CLIENT, BY_RQ = 4, 15, 8  # questions of one producer: one, two and two of them
SAME = 10  # deliveries of one job


@pytest.mark.parametrize("store", STORES)
def test_order_of_one_conversation(store: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    with open_lab(store, request, tmp_path) as lab:
        arrived: list[tuple[float, list[str]]] = []

        def answer(call: Request) -> Reply:
            questions = [m["content"] for m in call.messages if m["role"] == "user"]
            arrived.append((time.monotonic(), questions))
            return Reply(f"To {questions[-1]}.", delay_seconds=ANSWER_SECONDS)

        lab.llm.script(answer)
        for worker in [lab.worker(HEIR), lab.worker(HEIR)]:
            worker.wait_for("worker_ready")
        conversation = str(uuid.uuid4())
        _ask_all(lab, conversation)
        count = BY_COMMAND + 2 * BY_CLIENT + 2 * BY_RQ
        lab.until(lambda: lab.ended(conversation, count), f"{count} turns")
        story = lab.story(conversation)
        assert lab.broken(conversation) == []
        assert [turn["status"] for turn in story.turns] == ["completed"] * count
        recorded = [event["data"]["ask"] for event in story.named("user_message")]
        assert len(set(recorded)) == count
        assert [questions for _, questions in arrived] == [recorded[: n + 1] for n in range(count)]
        moments = [moment for moment, _ in arrived]
        assert min(later - earlier for earlier, later in pairwise(moments)) >= ANSWER_SECONDS
        for producer in ("command", "client-0", "client-1"):
            own = [text for text in recorded if text.startswith(f"{producer} ")]
            assert own == sorted(own), producer
        _check_one_job_many_times(lab)


def _ask_all(lab: Lab, conversation: str) -> None:
    """Five producers at once."""
    with ThreadPoolExecutor(5) as producers:
        done = [
            producers.submit(_by_command, lab, conversation),
            *(producers.submit(_by_client, lab, conversation, f"client-{n}") for n in range(2)),
            *(producers.submit(_by_rq, lab, conversation, f"rq-{n}") for n in range(2)),
        ]
        for producer in done:
            producer.result()


def _by_command(lab: Lab, conversation: str) -> None:
    ask = [sys.executable, "-m", "scripts.cli", "ask", "--no-wait", "--queue", HEIR, "--conversation", conversation]
    for number in range(BY_COMMAND):
        command = [*ask, f"command {number:02}"]
        subprocess.run(command, env=lab.environment(), check=True, capture_output=True, timeout=60)


def _by_client(lab: Lab, conversation: str, name: str) -> None:
    async def ask() -> None:
        where = {"redis_url": lab.redis_url, "home": lab.settings.home, "database_url": lab.settings.database_url}
        supabase = {"supabase_url": lab.settings.supabase_url, "supabase_key": lab.settings.supabase_key}
        async with Client.connect(Settings(**where, **supabase)) as client:
            for number in range(BY_CLIENT):
                await client.ask(f"{name} {number:02}", conversation_id=conversation, queue=HEIR)

    asyncio.run(ask())


def _by_rq(lab: Lab, conversation: str, name: str) -> None:
    for number in range(BY_RQ):
        lab.ask(f"{name} {number:02}", conversation)


def _check_one_job_many_times(lab: Lab) -> None:
    """The id of one job stands in the queue many times, and other jobs bring the same request: it is one turn."""
    conversation = str(uuid.uuid4())
    fields = {"conversation_id": conversation, "ask": "only once", "request_id": f"once-{conversation}"}
    queue = Queue(HEIR, connection=lab.redis, serializer=JSONSerializer)
    jobs = [lab.enqueue(HEIR, "ask", **fields) for _ in range(SAME)]
    for _ in range(SAME):
        queue.push_job_id(jobs[0].id)
    lab.until(lambda: all(job.latest_result() for job in jobs) and queue.count == 0, "every delivery is answered")
    lab.until(lambda: lab.ended(conversation, 1), "the turn")
    story = lab.story(conversation)
    assert lab.broken(conversation) == []
    assert [(turn["status"], turn["attempt"]) for turn in story.turns] == [("completed", 1)]
    assert [event["event"] for event in story.events] == ["user_message", "ai_message", "answer_end"]
    assert {job.get_status().value for job in jobs} <= {"finished", "queued", "started"}

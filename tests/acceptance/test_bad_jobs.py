"""Jobs that nobody should have sent: each ends with a clear error where its sender sees it, and harms nothing else."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
import uuid
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rq import Callback, Queue
from rq.job import Job
from rq.serializers import JSONSerializer

from scripts.bench.kit.llm_server import Reply, Request
from tests.acceptance.lab import STORES, Lab, open_lab

MEGABYTE = 1_000_000
UNKNOWN = str(uuid.uuid4())

WRONG_FIELDS: dict[str, Any] = {
    "ask": 7,
    "conversation_id": ["c"],
    "account_id": {},
    "user_id": 7,
    "team_id": [],
    "request_id": {"id": 1},
    "images": "cat.png",
    "model": 7,
    "target": "web-1",
    "tool_decisions": {"tool_call_id": "c1"},
    "supersede": {},
    "frontend_tools": "look",
    "frontend_tool_results": [7],
    "approval_mode": "never",
    "response_format": "json",
    "additional_system_prompt": ["be", "kind"],
    "metadata": "text",
    "queue": "a queue",
    "schema_version": "newest",
    "colour": "blue",
}
"""A wrong value for every field of a question, and a field that there is not."""


class Bomb:
    """Leaves a file behind when somebody unpickles it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.path,))


@pytest.fixture(params=STORES)
def lab(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Lab]:
    with open_lab(request.param, request, tmp_path) as made:
        made.llm.script(_answer)
        yield made


def _answer(request: Request) -> Reply:
    return Reply(f"You said {request.messages[-1]['content']}.")


def _result(lab: Lab, job: Job) -> dict[str, Any]:
    lab.until(lambda: job.is_finished, f"{job.id} ends")
    value = job.return_value()
    assert isinstance(value, dict)
    return value


def test_bad_jobs_among_good_ones(lab: Lab, tmp_path: Path) -> None:
    worker = lab.worker("interactive")
    good, refused, failed = str(uuid.uuid4()), {}, {}
    first = lab.enqueue("interactive", "ask", conversation_id=good, ask="hello", account_id="ours", user_id="ana")
    assert _result(lab, first)["status"] == "completed"
    before = lab.story(good)

    def ask(**arguments: Any) -> Job:
        return lab.enqueue("interactive", "ask", **arguments)

    def refuse(code: str, job: Job) -> None:
        refused[job.id] = (code, job)

    # Refused requests: the job's result says so
    for field, value in WRONG_FIELDS.items():
        refuse("request_invalid", ask(**{"ask": "?", field: value}))
    refuse("request_invalid", ask())
    refuse("request_invalid", ask(ask="?", conversation_id="not-a-uuid"))
    refuse("request_invalid", ask(ask="?", schema_version=2))
    refuse("request_too_large", ask(ask="x" * 20 * MEGABYTE))
    refuse("request_invalid", lab.enqueue("interactive", "tool_decisions", conversation_id=good))
    refuse("request_invalid", lab.enqueue("interactive", "turn"))
    for function in ("tool_decisions", "retry"):
        arguments = {"tool_decisions": [{"tool_call_id": "c1", "approved": True}]} if function != "retry" else {}
        refuse("conversation_unknown", lab.enqueue("interactive", function, conversation_id=UNKNOWN, **arguments))
    decision = {"tool_decisions": [{"tool_call_id": "c1", "approved": True, "approval_token": "guessed"}]}
    theirs = {"conversation_id": good, "account_id": "theirs"}
    refuse("identity_mismatch", ask(ask="Whose is this?", **theirs))
    refuse("identity_mismatch", lab.enqueue("interactive", "tool_decisions", **theirs, **decision))
    refuse("identity_mismatch", lab.enqueue("interactive", "retry", **theirs))
    refuse("identity_mismatch", ask(ask="And I?", conversation_id=good, account_id="ours", user_id="eve"))

    # Jobs that are none of ours: they fail in RQ
    queue = Queue("interactive", connection=lab.redis, serializer=JSONSerializer)
    bomb = tmp_path / "exploded"
    pickled = queue.enqueue("worker.jobs.turn")
    lab.redis.hset(pickled.key, "data", zlib.compress(pickle.dumps(("worker.jobs.turn", None, (), {"x": Bomb(bomb)}))))
    for job in (
        pickled,
        queue.enqueue("os.system", f"touch {bomb}"),
        queue.enqueue("worker.jobs.ask", "by position"),
        queue.enqueue("worker.jobs.ask", ask="?", on_success=Callback("os.abort")),
        queue.enqueue("worker.jobs.ask", ask="?", on_failure=Callback("os.abort")),
    ):
        failed[job.id] = job

    for code, job in refused.values():
        answer = _result(lab, job)
        assert (answer["status"], answer["error"]["code"]) == ("refused", code), (job.kwargs, answer)
        assert answer["error"]["description"]
    for job in failed.values():
        lab.until(lambda job=job: job.is_failed, f"{job.id} fails")  # type: ignore[misc]
        result = job.latest_result()
        assert result is not None
        assert "refused" in str(result.exc_string) or "not loaded" in str(result.exc_string)
    assert not bomb.exists()

    letters = {str(row["job_id"]): row for row in lab.database.rows("SELECT * FROM dead_letters")}
    assert set(letters) == set(refused) | set(failed)
    assert {job_id: letters[job_id]["code"] for job_id in refused} == {i: code for i, (code, _) in refused.items()}
    assert max(len(json.dumps(row, default=str)) for row in letters.values()) < MEGABYTE
    said = _doctor(lab)
    assert all(str(row["letter_id"]) in said and row["code"] in said for row in letters.values())

    # Nobody else felt it
    assert lab.story(good) == before
    assert worker.ended is None
    again = ask(ask="still there?", conversation_id=good, account_id="ours", user_id="ana")
    assert _result(lab, again)["turn"] == 2
    assert [row["conversation_id"] for row in lab.database.rows("SELECT conversation_id FROM conversations")] == [
        lab.story(good).turns[0]["conversation_id"]
    ]
    assert lab.broken(good) == []
    assert len(lab.llm.requests) == 2


def test_the_same_job_ten_times(lab: Lab) -> None:
    """One job id ten times in the queue, and one request under ten job ids: each is one turn, worked on once."""
    conversation, other = str(uuid.uuid4()), str(uuid.uuid4())
    job = lab.enqueue("interactive", "ask", conversation_id=conversation, ask="once")
    for _ in range(9):
        lab.redis.rpush("rq:queue:interactive", job.id)
    arguments = {"conversation_id": other, "ask": "also once", "request_id": "r-1"}
    jobs = [lab.enqueue("interactive", "ask", **arguments) for _ in range(10)]
    lab.worker("interactive")
    lab.worker("interactive")
    results = [_result(lab, same) for same in jobs]
    lab.until(lambda: lab.ended(conversation, 1) and lab.ended(other, 1), "both end")
    lab.until(lambda: lab.redis.llen("rq:queue:interactive") == 0 == lab.redis.llen(INTERMEDIATE), "all are taken")
    assert {(r["conversation_id"], r["turn"]) for r in results} == {(other, 1)}
    assert [r["status"] for r in results].count("completed") >= 1
    assert len(lab.llm.requests) == 2
    for one in (conversation, other):
        story = lab.story(one)
        assert [e["event"] for e in story.events] == ["user_message", "ai_message", "answer_end"]
        assert lab.broken(one) == []

    changed = lab.enqueue("interactive", "ask", **{**arguments, "ask": "twice"})
    answer = _result(lab, changed)
    assert (answer["status"], answer["error"]["code"]) == ("refused", "request_conflict")


def test_a_ring_for_an_unknown_conversation_is_no_harm(lab: Lab) -> None:
    lab.worker("interactive")
    rings = [lab.enqueue("interactive", "turn", conversation_id=c) for c in (UNKNOWN, "not-a-uuid", "", "a" * 100_000)]
    answers = [_result(lab, ring) for ring in rings]
    assert answers[0]["status"] in ("idle", "refused")
    assert {answer["status"] for answer in answers} <= {"idle", "refused"}
    assert lab.database.rows("SELECT * FROM conversations") == []


INTERMEDIATE = "rq:queue:interactive:intermediate"


def _doctor(lab: Lab) -> str:
    """What ``turnkeeper doctor`` says; its status depends on the model provider, which is none here."""
    done = subprocess.run(
        [sys.executable, "-m", "scripts.cli", "doctor", "--json"],
        env=lab.environment(),
        capture_output=True,
        text=True,
        timeout=60,
        cwd=lab.folder,
    )
    assert done.stdout, done.stderr
    return done.stdout

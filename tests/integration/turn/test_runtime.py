"""The runtime between a job and its turns: what a job's result says, and what becomes of one that is refused."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from shared.requests import Ask, record_of
from shared.settings import Settings
from shared.store.sqlite import SqliteStore
from tests.integration.turn.conftest import Tools
from tests.support.agent import Held, Model, call, says, soon
from worker.agent.tools import ToolRegistry
from worker.agent.tools.declare import FunctionTool
from worker.agent.tools.threads import ToolThreads
from worker.bootstrap import Runtime
from worker.jobs import JobControl, JobFunction, TurnJob

Start = Callable[..., Any]


@pytest.fixture
async def store(tmp_path: Path, redis_url: str) -> AsyncIterator[SqliteStore]:
    store = await SqliteStore(Settings(home=tmp_path)).open()
    yield store
    await store.close()


@pytest.fixture
async def start(tmp_path: Path, redis_url: str, tools: Tools) -> AsyncIterator[Start]:
    """Start a runtime whose model gives these replies."""
    runtimes: list[Runtime] = []

    async def start(*replies: Any) -> Runtime:
        settings = Settings(home=tmp_path, redis_url=redis_url, model="m", lease_seconds=30)
        toolbox = ToolRegistry([FunctionTool(f, ToolThreads(2)) for f in tools.functions()])
        runtime = Runtime(settings, model=Model(replies), toolbox=toolbox)
        await runtime.start("worker-1")
        runtimes.append(runtime)
        return runtime

    yield start
    for runtime in runtimes:
        await runtime.close()


def job(
    function: JobFunction, job_id: str = "j1", *, timeout_seconds: float | None = None, **arguments: Any
) -> TurnJob:
    return TurnJob(function, arguments, job_id, "interactive", timeout_seconds)


async def test_a_plain_job_creates_its_conversation_and_says_how_its_turn_ended(
    start: Start, store: SqliteStore
) -> None:
    runtime = await start("Because.")
    conversation_id = str(uuid.uuid4())
    result = await runtime.run(job("ask", conversation_id=conversation_id, ask="Why?"), JobControl())
    assert (result["status"], result["turn"], result["request_id"]) == ("completed", 1, "j1")
    assert result["conversation_id"] == conversation_id
    assert [row["event"] for row in await store.events(conversation_id)] == ["user_message", "ai_message", "answer_end"]


async def test_the_same_job_twice_is_one_turn(start: Start, store: SqliteStore) -> None:
    """Case 25."""
    runtime = await start("Because.")
    conversation_id = str(uuid.uuid4())
    asked = job("ask", conversation_id=conversation_id, ask="Why?")
    await runtime.run(asked, JobControl())
    before = await store.events(conversation_id)
    again = await runtime.run(asked, JobControl())
    assert (again["status"], again["turn"]) == ("completed", 1)
    assert await store.events(conversation_id) == before


async def test_turns_queued_before_the_jobs_own_come_first(start: Start, store: SqliteStore) -> None:
    held = Held(reply=says("One."))
    runtime = await start(held, "Two.", "Three.")
    conversation_id = str(uuid.uuid4())
    first = asyncio.create_task(runtime.run(job("ask", "j1", conversation_id=conversation_id, ask="1?"), JobControl()))
    await soon(held.started)
    busy = await runtime.run(job("ask", "j2", conversation_id=conversation_id, ask="2?"), JobControl())
    assert (busy["status"], busy["turn"], busy["reason"]) == ("pending", 2, "busy")
    held.go_on.set()
    assert (await first)["turn"] == 1
    third = await runtime.run(job("ask", "j3", conversation_id=conversation_id, ask="3?"), JobControl())
    assert (third["turn"], third["status"]) == (3, "completed")
    assert [t["status"] for t in await store.turns(conversation_id)] == ["completed"] * 3


async def test_stopping_the_job_stops_the_turn(start: Start, store: SqliteStore) -> None:
    held = Held("Once upon")
    runtime = await start(held)
    control = JobControl()
    conversation_id = str(uuid.uuid4())
    running = asyncio.create_task(runtime.run(job("ask", conversation_id=conversation_id, ask="?"), control))
    await soon(held.started)
    control.stop_requested.set()
    assert (await running)["status"] == "stopped"
    assert (await store.turns(conversation_id))[0]["stop_requested_at"] is not None


async def test_stop_and_time_of_a_job_are_not_for_the_turns_before_its_own(start: Start, store: SqliteStore) -> None:
    """The first turn's ring was lost, so the second's job runs it first."""
    held = Held("Because.")
    runtime = await start(held)
    conversation_id = str(uuid.uuid4())
    for text in ("1?", "2?"):
        await store.submit(record_of(Ask(conversation_id=uuid.UUID(conversation_id), ask=text, request_id=text)))
    control = JobControl()
    second = job("ask", "2?", conversation_id=conversation_id, ask="2?", timeout_seconds=0.05)
    running = asyncio.create_task(runtime.run(second, control))
    await soon(held.started)
    control.stop_requested.set()
    await asyncio.sleep(0.1)  # the job's time is over
    held.go_on.set()
    assert (await running)["status"] == "stopped"
    assert [t["status"] for t in await store.turns(conversation_id)] == ["completed", "stopped"]


async def test_the_time_of_the_job_ends_its_turn(start: Start) -> None:
    runtime = await start(Held())
    result = await runtime.run(job("ask", ask="?", timeout_seconds=0.1), JobControl())
    assert (result["status"], result["error"]["code"]) == ("failed", "turn_timeout")


async def test_a_drained_runtime_hands_its_turn_back(start: Start, store: SqliteStore, tools: Tools) -> None:
    begun, go_on = tools.hold("look")
    runtime = await start(says(None, call("look", pod="web")))
    running = asyncio.create_task(runtime.run(job("ask", ask="?"), JobControl()))
    await soon(begun)
    draining = asyncio.create_task(runtime.drain())
    await asyncio.sleep(0)
    go_on.set()
    result = await running
    await draining
    assert (result["status"], result["finish_reason"]) == ("pending", "handed_back")


@pytest.mark.parametrize(
    ("refused", "code"),
    [
        (job("ask", ask=""), "request_invalid"),
        (job("ask", ask="?", colour="red"), "request_invalid"),
        (job("turn"), "request_invalid"),
        (job("tool_decisions", conversation_id=str(uuid.uuid4()), tool_decisions=[]), "request_invalid"),
        (
            job(
                "tool_decisions",
                conversation_id=str(uuid.uuid4()),
                tool_decisions=[{"tool_call_id": "c1", "approved": True}],
            ),
            "conversation_unknown",
        ),
    ],
)
async def test_a_refused_job_is_a_result_and_a_dead_letter(
    start: Start, store: SqliteStore, refused: TurnJob, code: str
) -> None:
    runtime = await start()
    result = await runtime.run(refused, JobControl())
    assert (result["status"], result["error"]["code"]) == ("refused", code)
    (letter,) = await store.dead_letters()
    assert (letter["code"], letter["job_id"]) == (code, "j1")
    assert letter["payload"] == refused.arguments


async def test_a_ring_for_nothing_is_idle(start: Start, store: SqliteStore) -> None:
    runtime = await start("Because.")
    asked = await runtime.run(job("ask", ask="?"), JobControl())
    result = await runtime.run(job("turn", "j2", conversation_id=asked["conversation_id"]), JobControl())
    assert result["status"] == "idle"

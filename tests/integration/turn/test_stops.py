"""Stopping: what people saw is kept, what began is told as unknown, and the next question works."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from shared.store.base import NotClaimed
from tests.integration.turn.conftest import Tools
from tests.support.agent import Held, Lab, Process, approve, call, results_of, says, soon


async def stop(lab: Lab, process: Process) -> None:
    """As the keeper tells it: flagged in the store, then heard of by the attempt."""
    await lab.store.stop(lab.conversation_id)
    assert process.attempt is not None
    process.attempt.stop()


async def test_while_the_model_streams_the_text_is_kept(lab: Lab) -> None:
    await lab.ask("Tell me a story.")
    held = Held("Once upon a")
    process = lab.process([held])
    running = asyncio.create_task(process.run())
    await soon(held.started)
    await stop(lab, process)
    report = await running
    assert (report.status, report.finish_reason) == ("stopped", "stopped")
    assert await lab.names() == ["user_message", "ai_message", "turn_stopped"]
    partial = (await lab.events())[1]["data"]
    assert partial["interrupted"] is True
    assert partial["message"] == {"role": "assistant", "content": "Once upon a"}
    await lab.ask("Another one.")
    following = lab.process(["No."])
    assert (await following.run()).status == "completed"
    assert [m["content"] for m in following.model.requests[0].messages] == [
        "Be brief.",
        "Tell me a story.",
        "Once upon a",
        "Another one.",
    ]
    await lab.check()


async def test_before_any_text_nothing_is_kept(lab: Lab) -> None:
    await lab.ask()
    held = Held()
    process = lab.process([held])
    running = asyncio.create_task(process.run())
    await soon(held.started)
    await stop(lab, process)
    await running
    assert await lab.names() == ["user_message", "turn_stopped"]
    assert (await lab.last())["code"] == "stopped"


@pytest.mark.parametrize(("tool", "state"), [("look", "superseded"), ("notify", "unknown")])
async def test_while_a_tool_runs(lab: Lab, tools: Tools, tool: str, state: str) -> None:
    begun, _ = tools.hold(tool)
    await lab.ask()
    process = lab.process([says("One moment.", call(tool, **{"pod" if tool == "look" else "text": "x"}))])
    running = asyncio.create_task(process.run())
    await soon(begun)
    await stop(lab, process)
    assert (await running).status == "stopped"
    assert tools.ended == []
    assert await lab.states() == [state]
    await lab.ask("And now?")
    following = lab.process(["Stopped."])
    assert (await following.run()).status == "completed"
    (told,) = results_of(following.model.requests[0])
    assert told.startswith("Outcome unknown" if state == "unknown" else "Not executed")
    await lab.check()


async def test_before_the_claim_the_turn_ends_without_a_worker(lab: Lab) -> None:
    await lab.ask()
    assert (await lab.store.stop(lab.conversation_id)).effect == "flagged"
    claimed, _ = await lab.process().claim()
    assert isinstance(claimed, NotClaimed)
    assert await lab.names() == ["user_message", "turn_stopped"]
    await lab.check()


async def test_a_flag_that_only_the_store_knows_is_heard_with_the_next_batch(lab: Lab, tools: Tools) -> None:
    begun, go_on = tools.hold("look")
    await lab.ask()
    process = lab.process([says(None, call("look", pod="x")), Held()], batch_age_seconds=0.0)
    running = asyncio.create_task(process.run())
    await soon(begun)
    await lab.store.stop(lab.conversation_id)
    go_on.set()
    assert (await running).status == "stopped"
    await lab.check()


async def test_an_approval_that_meets_the_flag_becomes_a_stop(lab: Lab) -> None:
    held = Held(reply=says(None, call("restart", name="web")))
    await lab.ask()
    process = lab.process([held])

    async def flag(arguments: tuple[Any, ...]) -> None:
        if arguments[3] is not None:
            await lab.store.stop(lab.conversation_id)

    process.store.before["append"] = flag
    held.go_on.set()
    report = await process.run()
    assert (report.status, report.finish_reason) == ("stopped", "stopped")
    assert (await lab.names())[-1] == "turn_stopped"
    assert await lab.states() == ["superseded"]
    await lab.check()


async def test_an_answer_beats_the_flag(lab: Lab) -> None:
    await lab.ask()
    process = lab.process(["Done already."])

    async def flag(_: tuple[Any, ...]) -> None:
        await lab.store.stop(lab.conversation_id)

    process.store.before["append"] = flag
    assert (await process.run()).status == "completed"
    assert (await lab.names())[-1] == "answer_end"
    await lab.check()


async def test_a_stop_touches_no_other_turn(lab: Lab) -> None:
    await lab.ask("First?")
    await lab.ask("Second?")
    await lab.store.stop(lab.conversation_id, 1)
    process = lab.process(["Two."])
    report = await process.run()
    assert (report.turn, report.status) == (2, "completed")
    assert [t["status"] for t in await lab.store.turns(lab.conversation_id)] == ["stopped", "completed"]
    await lab.check()


async def test_stopping_a_resumed_turn_closes_what_it_had_not_begun(lab: Lab, tools: Tools) -> None:
    await lab.talk("Both.", says(None, call("restart", "c1", name="a"), call("restart", "c2", name="b")))
    a, b = await lab.approvals()
    begun, _ = tools.hold("restart")
    await lab.decide(approve(a))
    process = lab.process()
    running = asyncio.create_task(process.run())
    await soon(begun)
    await stop(lab, process)
    await running
    assert await lab.states() == ["unknown", "superseded"]
    assert (await lab.decide(approve(b))).decisions == {"c2": "stale"}
    assert tools.ran == ["restart a"]
    await lab.check()

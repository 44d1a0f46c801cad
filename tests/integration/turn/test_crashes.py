"""A worker that dies at any point: what the next one does again, and what it never does twice."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from shared.errors import StoreUnavailable
from shared.events import EventDraft
from shared.store.base import NotClaimed
from tests.integration.turn.conftest import Tools
from tests.support.agent import Held, Lab, Process, approve, call, results_of, says, soon
from worker.leases import lease_clock

Matches = Callable[[Sequence[EventDraft], Any], bool]

BOTH = says("Let me see.", call("look", "l", pod="web"), call("notify", "n", text="x"))
UNKNOWN = "Outcome unknown: the call had begun and was interrupted."


def starting(events: Sequence[EventDraft], _: Any) -> bool:
    return any(change["op"] == "start" for event in events for change in event.calls)


def ending(call_id: str) -> Matches:
    def matches(events: Sequence[EventDraft], _: Any) -> bool:
        return any(e.event == "tool_call_result" and e.data["tool_call_id"] == call_id for e in events)

    return matches


def answering(events: Sequence[EventDraft], _: Any) -> bool:
    return any(event.event == "ai_message" for event in events)


def finishing(_: Sequence[EventDraft], finish: Any) -> bool:
    return finish is not None


async def crash(lab: Lab, process: Process) -> None:
    report = await process.run()
    assert report.status == "lost"
    lab.expire_lease()


async def finish(lab: Lab, *replies: Any) -> Process:
    process = lab.process(replies)
    report = await process.run()
    assert report.status == "completed"
    assert report.attempt == 2
    resumed = [row["data"] for row in await lab.events() if row["event"] == "turn_resumed"]
    assert [(r["why"], r["attempt"]) for r in resumed] == [("crash", 2)]
    await lab.check()
    return process


async def test_after_the_claim(lab: Lab, tools: Tools) -> None:
    await lab.ask()
    held = Held("Let me")
    first = lab.process([held])
    running = asyncio.create_task(first.run())
    await soon(held.started)
    first.kill()
    assert (await running).status == "lost"
    lab.expire_lease()
    await finish(lab, BOTH, "Done.")
    assert tools.ran == ["look web", "notify x"]


async def test_after_the_answer_was_stored(lab: Lab, tools: Tools) -> None:
    await lab.ask()
    first = lab.process([BOTH], batch_events=1)
    first.kill_at("before", "append", starting)
    await crash(lab, first)
    tools.ran.clear()
    second = await finish(lab, "Done.")
    assert tools.ran == ["look web", "notify x"]
    assert results_of(second.model.requests[0]) == ["look web: ok", "notify x: ok"]


async def test_after_the_start_was_committed(lab: Lab, tools: Tools) -> None:
    """Nobody can know any more whether the call ran: it is not run again."""
    await lab.ask()
    first = lab.process([BOTH])
    first.kill_at("after", "append", starting)
    await crash(lab, first)
    second = await finish(lab, "Done.")
    assert tools.ran.count("notify x") == 0
    looked, told = results_of(second.model.requests[0])
    assert looked == "look web: ok"
    assert told.startswith(UNKNOWN)
    assert [row["state"] for row in await lab.calls()] == ["done", "unknown"]


async def test_after_the_tool_ran_and_before_its_result_was_stored(lab: Lab, tools: Tools) -> None:
    """Case 20."""
    await lab.ask()
    first = lab.process([BOTH, "never sent"])
    first.kill_at("before", "append", ending("n"))
    await crash(lab, first)
    second = await finish(lab, "Done.")
    assert tools.ran.count("notify x") == 1
    assert results_of(second.model.requests[0])[1].startswith(UNKNOWN)
    told = [r["data"]["status"] for r in await lab.events() if r["event"] == "tool_call_result"]
    assert told.count("unknown") == 1


async def test_half_way_through_a_parallel_batch(lab: Lab, tools: Tools) -> None:
    """Case 02: a is stored, b had not ended, c had begun."""

    async def look(pod: str) -> None:
        if pod == "b":
            await asyncio.Event().wait()

    tools.on["look"] = look
    tools.hold("notify")
    await lab.ask("Check a, b, c.")
    calls = call("look", "a1", pod="a"), call("look", "b1", pod="b"), call("notify", "c1", text="c")
    first = lab.process([says(None, *calls)], batch_age_seconds=0.0)
    first.kill_at("after", "append", ending("a1"))
    await crash(lab, first)
    tools.on.clear()
    second = await finish(lab, "Checked.")
    assert [ran for ran in tools.ran if ran.startswith("look a")] == ["look a"]
    assert [ran for ran in tools.ran if ran.startswith("look b")] == ["look b", "look b"]
    a, b, c = results_of(second.model.requests[0])
    assert (a, b) == ("look a: ok", "look b: ok")
    assert c.startswith(UNKNOWN)


async def test_after_the_results_were_stored(lab: Lab, tools: Tools) -> None:
    await lab.ask()
    first = lab.process([BOTH, Held()], batch_age_seconds=0.0)
    first.kill_at("after", "append", ending("n"))
    await crash(lab, first)
    ran = list(tools.ran)
    second = await finish(lab, "Done.")
    assert tools.ran == ran == ["look web", "notify x"]
    assert results_of(second.model.requests[0]) == ["look web: ok", "notify x: ok"]


async def test_before_the_end_the_last_answer_is_asked_for_again(lab: Lab) -> None:
    await lab.ask()
    first = lab.process(["One."])
    first.kill_at("before", "append", finishing)
    await crash(lab, first)
    await finish(lab, "Two.")
    assert (await lab.last())["content"] == "Two."


async def test_a_stored_final_answer_is_not_asked_for_again(lab: Lab) -> None:
    await lab.ask()
    first = lab.process(["One."], batch_events=1)
    first.kill_at("after", "append", answering)
    await crash(lab, first)
    second = await finish(lab)
    assert second.model.requests == []
    assert (await lab.last())["content"] == "One."


async def test_an_end_whose_reply_was_lost_is_one_end(lab: Lab) -> None:
    await lab.ask()
    process = lab.process(["One."])
    lost = False

    async def lose_reply(arguments: tuple[Any, ...]) -> None:
        nonlocal lost
        if arguments[3] is not None and not lost:
            lost = True
            raise StoreUnavailable("the reply was lost")

    process.store.after["append"] = lose_reply
    report = await process.run()
    assert (lost, report.status) == (True, "completed")
    assert process.store.counted == ["claim", "append", "append"]
    assert await lab.names() == ["user_message", "ai_message", "answer_end"]
    await lab.check()


async def test_dead_right_after_the_end_there_is_nothing_left_to_do(lab: Lab) -> None:
    await lab.ask()
    process = lab.process(["One."])
    process.kill_at("after", "append", finishing)
    assert (await process.run()).status == "lost"
    claimed, _ = await lab.process().claim()
    assert isinstance(claimed, NotClaimed)
    assert claimed.reason == "idle"
    await lab.check()


async def test_an_approved_call_is_run_at_most_once(lab: Lab, tools: Tools) -> None:
    await lab.talk("Restart.", says(None, call("restart", name="web")))
    (pending,) = await lab.approvals()
    await lab.decide(approve(pending))
    first = lab.process(["never sent"])
    first.kill_at("before", "append", ending("c1"))
    await crash(lab, first)
    second = await finish(lab, "I cannot know.")
    assert tools.ran == ["restart web"]
    assert results_of(second.model.requests[0])[0].startswith(UNKNOWN)
    assert await lab.states() == ["unknown"]


async def test_an_approved_call_that_had_not_begun_runs(lab: Lab, tools: Tools) -> None:
    await lab.talk("Restart.", says(None, call("restart", name="web")))
    (pending,) = await lab.approvals()
    await lab.decide(approve(pending))
    first = lab.process()
    first.kill_at("before", "append", starting)
    await crash(lab, first)
    assert tools.ran == []
    await finish(lab, "Done.")
    assert tools.ran == ["restart web"]


async def test_a_claim_whose_reply_was_lost_is_the_same_claim(lab: Lab) -> None:
    await lab.ask()
    process = lab.process(["One."])
    lost = False

    async def lose_reply(_: tuple[Any, ...]) -> None:
        nonlocal lost
        if not lost:
            lost = True
            raise StoreUnavailable("the reply was lost")

    process.store.after["claim"] = lose_reply
    report = await process.run()
    assert (report.status, report.attempt) == ("completed", 1)
    assert process.store.counted.count("claim") == 2


async def test_too_many_crashes_end_in_a_visible_error(lab: Lab) -> None:
    await lab.ask()
    for _ in range(lab.settings.max_crashes):
        process = lab.process([Held()])
        running = asyncio.create_task(process.run())
        await soon(process.started)
        process.kill()
        await running
        lab.expire_lease()
    claimed, _ = await lab.process().claim()
    assert isinstance(claimed, NotClaimed)
    assert [row["event"] for row in claimed.ended] == ["error"]
    assert (await lab.turn(1))["status"] == "failed"
    await lab.check()


# Zombies


async def test_a_worker_whose_turn_was_taken_over_writes_nothing_more(lab: Lab, tools: Tools) -> None:
    begun, go_on = tools.hold("look")
    await lab.ask()
    zombie = lab.process(
        [says(None, call("look", pod="web")), says(None, call("notify", text="x"))], batch_age_seconds=0.0
    )
    running = asyncio.create_task(zombie.run())
    await soon(begun)
    tools.on.clear()
    lab.expire_lease()
    heir = lab.process(["Done."])
    assert (await heir.run()).status == "completed"
    before = await lab.events()
    go_on.set()
    assert (await running).status == "lost"
    assert await lab.events() == before
    assert "notify x" not in tools.ran
    await lab.check()


async def test_a_zombie_starts_no_side_effect(lab: Lab, tools: Tools) -> None:
    held = Held(reply=says(None, call("notify", text="x")))
    await lab.ask()
    zombie = lab.process([held])
    running = asyncio.create_task(zombie.run())
    await soon(held.started)
    lab.expire_lease()
    heir = lab.process([says(None, call("notify", text="y")), "Done."])
    assert (await heir.run()).status == "completed"
    held.go_on.set()
    assert (await running).status == "lost"
    assert tools.ran == ["notify y"]
    await lab.check()


async def test_a_lease_that_may_be_gone_by_our_own_clock_starts_no_side_effect(lab: Lab, tools: Tools) -> None:
    await lab.ask()
    process = lab.process([says(None, call("notify", text="x")), "never"])
    claimed, _ = await process.claim()
    report = await process.go_on(claimed, lease_clock() - 31)  # type: ignore[arg-type]
    assert report.status == "lost"
    assert tools.ran == []


async def test_an_expired_lease_that_nobody_took_still_writes(lab: Lab) -> None:
    held = Held(reply=says("Late, but mine."))
    await lab.ask()
    process = lab.process([held])
    running = asyncio.create_task(process.run())
    await soon(held.started)
    lab.expire_lease()
    held.go_on.set()
    assert (await running).status == "completed"
    await lab.check()

"""A worker that leaves: its turns go on elsewhere, and nobody sees an error."""

from __future__ import annotations

import asyncio

from tests.integration.turn.conftest import Tools
from tests.support.agent import Held, Lab, call, results_of, says, soon

QUICK = {"drain_seconds": 0.05, "hard_deadline_seconds": 0.1}


async def taken_over(lab: Lab, *replies: object) -> list[object]:
    """Another worker ends the turn; the tool results of its first model call."""
    process = lab.process(replies)  # type: ignore[arg-type]
    report = await process.run()
    assert (report.status, report.attempt) == ("completed", 2)
    resumed = [row["data"] for row in await lab.events() if row["event"] == "turn_resumed"]
    assert [(r["why"], r["attempt"], r["crashes"]) for r in resumed] == [("handed_back", 2, 0)]
    assert not {"error", "turn_stopped"} & set(await lab.names())
    await lab.check()
    return results_of(process.model.requests[0])


async def test_between_two_steps(lab: Lab, tools: Tools) -> None:
    begun, go_on = tools.hold("look")
    await lab.ask()
    process = lab.process([says(None, call("look", pod="web"))])
    running = asyncio.create_task(process.run())
    await soon(begun)
    leaving = asyncio.create_task(process.turns.leave())
    await asyncio.sleep(0)
    go_on.set()
    report = await running
    await leaving
    assert (report.status, report.finish_reason, report.next_queue) == ("pending", "handed_back", "interactive")
    assert (await lab.turn(1))["status"] == "pending"
    assert await taken_over(lab, "Fine.") == ["look web: ok"]
    assert tools.ran == ["look web"]


async def test_no_call_begins_any_more(lab: Lab, tools: Tools) -> None:
    held = Held(reply=says(None, call("look", "a", pod="web"), call("notify", "b", text="x")))
    await lab.ask()
    process = lab.process([held])
    running = asyncio.create_task(process.run())
    await soon(held.started)
    leaving = asyncio.create_task(process.turns.leave())
    await asyncio.sleep(0)
    held.go_on.set()
    assert (await running).status == "pending"
    await leaving
    assert tools.ran == []
    assert await taken_over(lab, "Fine.") == ["look web: ok", "notify x: ok"]


async def test_a_model_that_streams_past_the_drain_is_cut_off_and_asked_again(lab: Lab) -> None:
    held = Held("Once upon")
    await lab.ask()
    process = lab.process([held], **QUICK)
    running = asyncio.create_task(process.run())
    await soon(held.started)
    await process.turns.leave()
    assert (await running).status == "pending"
    assert await lab.names() == ["user_message"]
    assert await taken_over(lab, "A story.") == []


async def test_a_side_effect_is_waited_for(lab: Lab, tools: Tools) -> None:
    begun, go_on = tools.hold("notify")
    await lab.ask()
    process = lab.process([says(None, call("notify", text="x"))])
    running = asyncio.create_task(process.run())
    await soon(begun)
    assert process.attempt is not None
    process.attempt.hand_back(hard=False)
    await asyncio.sleep(0)
    assert not running.done()
    go_on.set()
    assert (await running).status == "pending"
    assert await lab.states() == ["done"]
    assert await taken_over(lab, "Told.") == ["notify x: ok"]
    assert tools.ran == ["notify x"]


async def test_at_the_hard_deadline_it_is_given_up_as_unknown(lab: Lab, tools: Tools) -> None:
    begun, _ = tools.hold("notify")
    await lab.ask()
    process = lab.process([says(None, call("notify", text="x"))], **QUICK)
    running = asyncio.create_task(process.run())
    await soon(begun)
    await process.turns.leave()
    assert (await running).status == "pending"
    (told,) = await taken_over(lab, "Who knows.")
    assert str(told).startswith("Outcome unknown")
    assert tools.ran == ["notify x"]


async def test_a_side_effect_whose_start_is_committed_late_does_not_cut_off_its_neighbour(
    lab: Lab, tools: Tools
) -> None:
    """The second start waits for a slow store while the first call runs; then the drain is over."""
    begun, go_on = tools.hold("notify")
    slow = asyncio.Event()
    await lab.ask()
    calls = call("notify", "a", text="x"), call("notify", "b", text="y")
    process = lab.process([says(None, *calls)], batch_events=1)

    async def hold_second(arguments: tuple[object, ...]) -> None:
        if any(e.data.get("tool_call_id") == "b" for e in arguments[2]):  # type: ignore[attr-defined]
            await slow.wait()

    process.store.before["append"] = hold_second
    running = asyncio.create_task(process.run())
    await soon(begun)
    assert process.attempt is not None
    process.attempt.hand_back(hard=False)
    begun.clear()
    slow.set()
    await soon(begun)
    assert not running.done()
    assert tools.ran == ["notify x", "notify y"]
    go_on.set()
    assert (await running).status == "pending"
    assert await lab.states() == ["done", "done"]
    assert await taken_over(lab, "Told.") == ["notify x: ok", "notify y: ok"]


async def test_a_turn_claimed_while_leaving_is_handed_back_untouched(lab: Lab) -> None:
    await lab.ask()
    process = lab.process()
    await process.turns.leave()
    assert (await process.run()).status == "pending"
    assert process.model.requests == []
    await taken_over(lab, "Here.")


async def test_an_answer_that_came_meanwhile_ends_the_turn(lab: Lab) -> None:
    held = Held(reply=says("Just in time."))
    await lab.ask()
    process = lab.process([held], batch_events=1)
    running = asyncio.create_task(process.run())
    await soon(held.started)
    leaving = asyncio.create_task(process.turns.leave())
    await asyncio.sleep(0)
    held.go_on.set()
    report = await running
    await leaving
    assert report.status == "completed"
    await lab.check()

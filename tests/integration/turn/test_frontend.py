"""Frontend tools: the asking client runs them, so the turn pauses and resumes with what they gave."""

from __future__ import annotations

from typing import Any

import pytest

from tests.integration.turn.conftest import Tools
from tests.support.agent import Lab, approve, call, raw_call, results_of, says

SHOW = {
    "name": "show_map",
    "description": "Show a map.",
    "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}},
}


async def test_the_turn_pauses_with_the_exact_arguments_and_offers_the_tool(lab: Lab) -> None:
    await lab.ask("Where?", frontend_tools=[SHOW])
    process = lab.process([says(None, call("show_map", x=1))])
    report = await process.run()
    assert (report.status, report.finish_reason) == ("awaiting_approval", "frontend_tool_calls")
    paused = await lab.last()
    assert paused["pending_approvals"] == []
    (pending,) = paused["pending_frontend_tool_calls"]
    assert (pending["tool_call_id"], pending["tool_name"], pending["params"]) == ("c1", "show_map", {"x": 1})
    assert "approval_token" not in pending
    assert "show_map" in [t["function"]["name"] for t in process.model.requests[0].tools]
    await lab.check()


@pytest.mark.parametrize(
    ("result", "told", "state"),
    [
        ({"content": "shown"}, "shown", "done"),
        ({"content": {"zoom": 3}}, '{"zoom":3}', "done"),
        ({"content": None}, "null", "done"),
        ({"content": "no screen", "is_error": True}, "no screen", "failed"),
    ],
)
async def test_the_result_goes_to_the_model(lab: Lab, result: dict[str, Any], told: str, state: str) -> None:
    await lab.talk("Where?", says(None, call("show_map", x=1)), frontend_tools=[SHOW])
    submitted = await lab.results({"tool_call_id": "c1", **result})
    assert submitted.decisions == {"c1": "result_recorded"}
    process = lab.process(["There."])
    assert (await process.run()).status == "completed"
    assert results_of(process.model.requests[0]) == [told]
    assert await lab.states() == [state]
    await lab.check()


async def test_the_resumed_turn_still_offers_the_tools_of_its_question(lab: Lab) -> None:
    await lab.talk("Where?", says(None, call("show_map", "c1", x=1)), frontend_tools=[SHOW])
    await lab.results({"tool_call_id": "c1", "content": "shown"})
    process = lab.process([says(None, call("show_map", "c2", x=2))])
    assert (await process.run()).status == "awaiting_approval"
    assert "show_map" in [t["function"]["name"] for t in process.model.requests[0].tools]
    await lab.results({"tool_call_id": "c2", "content": "shown again"})
    last = lab.process(["There."])
    assert (await last.run()).status == "completed"
    assert results_of(last.model.requests[0]) == ["shown", "shown again"]
    await lab.check()


async def test_an_unknown_result_leaves_the_pause_as_it_was(lab: Lab) -> None:
    await lab.talk("Where?", says(None, call("show_map", x=1)), frontend_tools=[SHOW])
    submitted = await lab.results({"tool_call_id": "zz", "content": "?"})
    assert submitted.decisions == {"zz": "unknown"}
    assert (await lab.process().run()).status == "awaiting_approval"
    assert [p["tool_call_id"] for p in (await lab.last())["pending_frontend_tool_calls"]] == ["c1"]


async def test_it_waits_beside_gated_calls_until_both_are_settled(lab: Lab, tools: Tools) -> None:
    both = says(None, call("show_map", "f", x=1), call("restart", "g", name="web"), call("look", "l", pod="web"))
    report = await lab.talk("Go.", both, frontend_tools=[SHOW])
    assert (report.status, report.finish_reason) == ("awaiting_approval", "approval_required")
    assert tools.ran == ["look web"]
    (pending,) = await lab.approvals()
    await lab.results({"tool_call_id": "f", "content": "shown"})
    assert (await lab.process().run()).status == "awaiting_approval"
    assert await lab.approvals() == [pending]
    assert (await lab.last())["pending_frontend_tool_calls"] == []
    await lab.decide(approve(pending))
    process = lab.process(["Done."])
    await process.run()
    assert results_of(process.model.requests[0]) == ["shown", "restart web: ok", "look web: ok"]
    await lab.check()


async def test_a_broken_call_is_not_sent_to_the_client(lab: Lab) -> None:
    await lab.ask("Where?", frontend_tools=[SHOW])
    process = lab.process([says(None, raw_call("show_map", '{"x": ')), "Sorry."])
    assert (await process.run()).status == "completed"
    assert results_of(process.model.requests[1])[0].startswith("Arguments incomplete")


async def test_the_askers_tool_stands_for_the_workers_of_the_same_name(lab: Lab, tools: Tools) -> None:
    await lab.ask("Look.", frontend_tools=[{"name": "look", "description": "Look out of the window."}])
    process = lab.process([says(None, call("look", pod="web"))])
    assert (await process.run()).status == "awaiting_approval"
    assert tools.ran == []
    names = [t["function"]["name"] for t in process.model.requests[0].tools]
    assert names.count("look") == 1


async def test_a_new_question_closes_it(lab: Lab) -> None:
    await lab.talk("Where?", says(None, call("show_map", x=1)), frontend_tools=[SHOW])
    await lab.ask("Never mind.")
    process = lab.process(["Fine."])
    await process.run()
    assert results_of(process.model.requests[0]) == ["Not executed: superseded by a new request."]
    assert "show_map" not in [t["function"]["name"] for t in process.model.requests[0].tools]
    await lab.check()

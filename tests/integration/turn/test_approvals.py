"""Gated calls: the pause, what each decision leads to, and what ends an approval without one."""

from __future__ import annotations

import asyncio

import pytest

from shared.errors import ApprovalsOpen
from tests.integration.turn.conftest import Tools
from tests.support.agent import Lab, approve, call, deny, results_of, says, soon
from worker.agent.tools import ToolRegistry

RESTART = says(None, call("restart", name="web"))
THREE = says(None, call("restart", "c1", name="a"), call("restart", "c2", name="b"), call("restart", "c3", name="c"))


async def test_a_pause_shows_exactly_what_would_run(lab: Lab, tools: Tools) -> None:
    report = await lab.talk("Restart.", says("I would restart it.", call("restart", name="we\u202eb")))
    assert (report.status, report.finish_reason) == ("awaiting_approval", "approval_required")
    assert tools.ran == []
    (pending,) = await lab.approvals()
    assert pending["tool_call_id"] == "c1"
    assert pending["tool_name"] == "restart"
    assert pending["params"] == {"name": "we\\u{202E}b"}
    assert pending["risk"] == "side_effect"
    assert len(pending["approval_token"]) >= 32
    assert (await lab.last())["messages"][-1]["tool_calls"][0]["function"]["arguments"] == '{"name": "we\\u202eb"}'
    (row,) = await lab.calls()
    assert row["state"] == "pending"
    assert pending["approval_token"] not in str(row)
    assert pending["expires_at"][:19] == row["expires_at"][:19]
    await lab.check()


async def test_an_approved_call_runs_once_and_the_turn_goes_on(lab: Lab, tools: Tools) -> None:
    await lab.talk("Restart.", RESTART)
    (pending,) = await lab.approvals()
    submitted = await lab.decide(approve(pending), user_id="ann")
    assert submitted.decisions == {"c1": "approved"}
    process = lab.process(["Restarted."])
    report = await process.run()
    assert report.status == "completed"
    assert tools.ran == ["restart web"]
    assert results_of(process.model.requests[0]) == ["restart web: ok"]
    assert [m["role"] for m in process.model.requests[0].messages] == ["system", "user", "assistant", "tool"]
    (row,) = await lab.calls()
    assert (row["state"], row["decided_by"]) == ("done", "ann")
    assert await lab.names(2) == ["user_message", "tool_call_started", "tool_call_result", "ai_message", "answer_end"]
    assert (await lab.turn(1))["status"] == "completed"
    await lab.check()


@pytest.mark.parametrize(
    ("feedback", "told"),
    [
        (None, "Tool execution was denied by the user."),
        ("Use staging.", "Tool execution was denied by the user. User feedback: Use staging."),
    ],
)
async def test_a_denial_is_the_result_in_the_words_of_the_person(
    lab: Lab, tools: Tools, feedback: str | None, told: str
) -> None:
    await lab.talk("Restart.", RESTART)
    (pending,) = await lab.approvals()
    await lab.decide(deny(pending, feedback))
    process = lab.process(["As you wish."])
    assert (await process.run()).status == "completed"
    assert tools.ran == []
    assert results_of(process.model.requests[0]) == [told]
    assert await lab.states() == ["denied"]
    await lab.check()


async def test_a_partial_decision_runs_its_part_and_pauses_again_with_the_same_tokens(lab: Lab, tools: Tools) -> None:
    await lab.talk("Restart all.", THREE)
    before = {a["tool_call_id"]: a for a in await lab.approvals()}
    assert list(before) == ["c1", "c2", "c3"]
    await lab.decide(approve(before["c2"]))
    report = await lab.process().run()
    assert report.status == "awaiting_approval"
    assert tools.ran == ["restart b"]
    after = await lab.approvals()
    assert after == [before["c1"], before["c3"]]
    assert await lab.states() == ["pending", "done", "pending"]

    await lab.decide(deny(before["c1"]), approve(before["c3"]))
    process = lab.process(["Two of three."])
    assert (await process.run()).status == "completed"
    assert tools.ran == ["restart b", "restart c"]
    assert results_of(process.model.requests[0]) == [
        "Tool execution was denied by the user.",
        "restart b: ok",
        "restart c: ok",
    ]
    await lab.check()


async def test_a_decision_on_nothing_known_leaves_the_pause_as_it_was(lab: Lab, tools: Tools) -> None:
    await lab.talk("Restart.", RESTART)
    (pending,) = await lab.approvals()
    submitted = await lab.decide({"tool_call_id": "zz", "approved": True, "approval_token": "nope"})
    assert submitted.decisions == {"zz": "unknown"}
    assert (await lab.process().run()).status == "awaiting_approval"
    assert await lab.approvals() == [pending]
    assert await lab.states() == ["pending"]
    assert tools.ran == []

    await lab.decide(approve(pending))
    assert (await lab.process(["Done."]).run()).status == "completed"
    assert tools.ran == ["restart web"]
    await lab.check()


async def test_the_bare_id_without_its_token_decides_nothing(lab: Lab, tools: Tools) -> None:
    await lab.talk("Restart.", RESTART)
    submitted = await lab.decide({"tool_call_id": "c1", "approved": True})
    assert submitted.decisions == {"c1": "unknown"}
    assert (await lab.process().run()).status == "awaiting_approval"
    assert tools.ran == []


async def test_an_expired_approval_is_told_and_the_turn_goes_on(lab: Lab, tools: Tools) -> None:
    await lab.talk("Restart.", RESTART)
    (pending,) = await lab.approvals()
    lab.sql("UPDATE tool_calls SET expires_at = '2020-01-01T00:00:00.000000+00:00'")
    submitted = await lab.decide(approve(pending))
    assert submitted.decisions == {"c1": "expired"}
    process = lab.process(["Shall I ask again?"])
    assert (await process.run()).status == "completed"
    assert tools.ran == []
    assert results_of(process.model.requests[0])[0].startswith("Not executed: the approval request expired")
    assert await lab.states() == ["expired"]
    await lab.check()


async def test_a_new_question_closes_what_waits_and_a_late_approval_is_stale(lab: Lab, tools: Tools) -> None:
    """Case 01."""
    await lab.talk("Restart.", RESTART)
    (pending,) = await lab.approvals()
    await lab.ask("Leave it, show me the pods.")
    process = lab.process(["Here."])
    await process.run()
    assert [m["role"] for m in process.model.requests[0].messages] == ["system", "user", "assistant", "tool", "user"]
    assert results_of(process.model.requests[0]) == ["Not executed: superseded by a new request."]
    assert await lab.states() == ["superseded"]

    submitted = await lab.decide(approve(pending))
    assert submitted.decisions == {"c1": "stale"}
    late = lab.process()
    report = await late.run()
    assert (report.status, report.finish_reason) == ("failed", "approval_stale")
    assert (await lab.last())["retryable"] is False
    assert late.model.requests == []
    assert tools.ran == []
    await lab.check()


async def test_an_approval_behind_a_queued_question_is_stale_and_kills_no_fresh_pause(lab: Lab, tools: Tools) -> None:
    await lab.talk("Restart web.", RESTART)
    (old,) = await lab.approvals()
    await lab.ask("Restart db instead.")
    submitted = await lab.decide(approve(old))
    assert submitted.decisions == {"c1": "stale"}
    assert (await lab.process([says(None, call("restart", "c1", name="db"))]).run()).status == "awaiting_approval"
    (fresh,) = await lab.approvals()
    assert (await lab.process().run()).status == "awaiting_approval"
    assert await lab.approvals() == [fresh]
    await lab.decide(approve(fresh))
    await lab.process(["Done."]).run()
    assert tools.ran == ["restart db"]
    await lab.check()


async def test_an_approval_of_a_stopped_pause_is_stale_without_a_model_call(lab: Lab, tools: Tools) -> None:
    await lab.talk("Restart.", RESTART)
    (pending,) = await lab.approvals()
    assert (await lab.store.stop(lab.conversation_id)).effect == "stopped"
    await lab.decide(approve(pending))
    report = await lab.process().run()
    assert (report.status, report.finish_reason) == ("failed", "approval_stale")
    assert tools.ran == []
    await lab.ask("And now?")
    process = lab.process(["Nothing ran."])
    assert (await process.run()).status == "completed"
    assert len(results_of(process.model.requests[0])) == 1
    await lab.check()


async def test_a_question_may_carry_decisions_which_act_first(lab: Lab, tools: Tools) -> None:
    await lab.talk("Restart all.", THREE)
    a, _, c = await lab.approvals()
    await lab.ask("And the rest?", tool_decisions=[approve(a), deny(c, "Not that.")])
    process = lab.process(["Done."])
    await process.run()
    assert tools.ran == ["restart a"]
    assert results_of(process.model.requests[0]) == [
        "restart a: ok",
        "Not executed: superseded by a new request.",
        "Tool execution was denied by the user. User feedback: Not that.",
    ]
    assert process.model.requests[0].messages[-1]["content"] == "And the rest?"
    await lab.check()


async def test_supersede_false_refuses_while_somebody_has_to_decide(lab: Lab) -> None:
    await lab.talk("Restart.", RESTART)
    with pytest.raises(ApprovalsOpen):
        await lab.ask("An alert.", supersede=False)
    assert await lab.states() == ["pending"]


async def test_an_approval_that_comes_during_a_run_belongs_to_its_own_turn(lab: Lab, tools: Tools) -> None:
    await lab.talk("Restart all.", THREE)
    a, b, c = await lab.approvals()
    await lab.decide(approve(a))
    process = lab.process()
    begun, go_on = tools.hold("restart")
    running = asyncio.create_task(process.run())
    await soon(begun)
    await lab.decide(approve(b))
    process.kill()
    assert (await running).status == "lost"
    del tools.on["restart"]
    lab.expire_lease()
    assert (await lab.process().run()).status == "awaiting_approval"
    assert tools.ran == ["restart a"]
    assert [p["tool_call_id"] for p in await lab.approvals()] == ["c3"]
    assert await lab.approvals() == [c]
    assert (await lab.process().run()).status == "awaiting_approval"
    assert tools.ran == ["restart a", "restart b"]
    assert go_on.is_set() is False
    await lab.check()


async def test_approval_mode_deny_asks_nobody(lab: Lab, tools: Tools) -> None:
    await lab.ask("Restart.", approval_mode="deny")
    process = lab.process([RESTART, "I may not."])
    assert (await process.run()).status == "completed"
    assert results_of(process.model.requests[1])[0].startswith("Tool execution was denied: approvals are switched off")
    assert tools.ran == []
    assert await lab.states() == ["denied"]
    await lab.check()


async def test_dont_ask_again_holds_for_the_next_call(lab: Lab, tools: Tools) -> None:
    await lab.talk("Drain.", says(None, call("drain", node="n1")))
    (pending,) = await lab.approvals()
    await lab.decide(approve(pending, remember={"scope": "conversation"}))
    report = await lab.process([says(None, call("drain", node="n2")), "Both."]).run()
    assert report.status == "completed"
    assert tools.ran == ["drain n1", "drain n2"]
    assert [row["decided_by"] for row in await lab.calls()][1].startswith("rule:")
    await lab.check()


async def test_a_rule_that_will_decide_nothing_is_reported_with_the_call(lab: Lab, tools: Tools) -> None:
    await lab.talk("Drain.", says(None, call("drain", node="n1")))
    (pending,) = await lab.approvals()
    assert (pending["can_remember"], pending["remember_needs_prefix"]) == (True, False)
    await lab.decide(approve(pending, remember={"scope": "conversation", "prefix": "n1"}))
    assert (await lab.process([says(None, call("drain", node="n2"))]).run()).status == "awaiting_approval"
    (result,) = [event for event in await lab.events() if event["event"] == "tool_call_result"]
    assert "takes no prefix" in result["data"]["rule_refused"]
    assert tools.ran == ["drain n1"]
    await lab.check()


async def test_arguments_that_changed_since_the_decision_are_not_run(lab: Lab, tools: Tools) -> None:
    await lab.talk("Restart.", RESTART)
    (pending,) = await lab.approvals()
    await lab.decide(approve(pending))
    lab.sql("UPDATE conversation_events SET data = replace(data, 'web', 'db') WHERE event = 'approval_required'")
    process = lab.process(["Odd."])
    assert (await process.run()).status == "completed"
    assert tools.ran == []
    assert results_of(process.model.requests[0]) == [
        "Not executed: the arguments are not the ones that were recorded for this call."
    ]


async def test_stored_arguments_that_changed_are_not_run_either(lab: Lab, tools: Tools) -> None:
    await lab.talk("Restart.", RESTART)
    (pending,) = await lab.approvals()
    await lab.decide(approve(pending))
    lab.sql("UPDATE tool_calls SET arguments = replace(arguments, 'web', 'db')")
    process = lab.process(["Odd."])
    assert (await process.run()).status == "completed"
    assert tools.ran == []


async def test_a_tool_that_is_gone_gives_an_error_result(lab: Lab) -> None:
    await lab.talk("Restart.", RESTART)
    (pending,) = await lab.approvals()
    await lab.decide(approve(pending))
    process = lab.process(["Then not."], toolbox=ToolRegistry([]))
    assert (await process.run()).status == "completed"
    assert results_of(process.model.requests[0]) == ["Not executed: the tool 'restart' is no longer available."]
    assert await lab.states() == ["failed"]


async def test_ungated_calls_of_a_step_run_before_the_turn_pauses(lab: Lab, tools: Tools) -> None:
    report = await lab.talk("Go.", says(None, call("restart", "c1", name="web"), call("look", "c2", pod="web")))
    assert report.status == "awaiting_approval"
    assert tools.ran == ["look web"]
    (pending,) = await lab.approvals()
    await lab.decide(approve(pending))
    process = lab.process(["Done."])
    await process.run()
    assert results_of(process.model.requests[0]) == ["restart web: ok", "look web: ok"]
    await lab.check()


async def test_a_resumed_turn_keeps_the_options_of_its_question(lab: Lab) -> None:
    options = {
        "model": "special",
        "additional_system_prompt": "Speak Latin.",
        "response_format": {"type": "json_object"},
    }
    await lab.talk("Restart.", "Fine.", model="plain")
    await lab.talk("Restart.", RESTART, **options)
    (pending,) = await lab.approvals()
    await lab.decide(approve(pending))
    process = lab.process(["Done."])
    await process.run()
    request = process.model.requests[0]
    assert request.model == "special"
    assert request.messages[0]["content"] == "Be brief.\n\nSpeak Latin."
    assert request.response_format == {"type": "json_object"}
    await lab.ask("Next?")
    following = lab.process(["Yes."])
    await following.run()
    assert following.model.requests[0].model == "plain"
    assert following.model.requests[0].messages[0]["content"] == "Be brief."

"""Decisions: on the call that was shown, once, by the first who decides; everything else is told apart."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from shared.errors import ApprovalsOpen, RequestInvalid
from shared.store.base import NotClaimed, Store
from tests.contract.driver import (
    ANSWERED,
    PAUSED,
    Talk,
    ai,
    answer,
    call,
    failed,
    history,
    no,
    pause,
    record,
    result,
    start,
    waits,
    yes,
)


async def test_an_approval_acts_when_it_is_recorded(talk: Talk) -> None:
    await talk.paused()
    submitted = await talk.decide(yes(), user_id="boss")
    assert (submitted.turn, submitted.decisions) == (2, {"c1": "approved"})
    row = (await talk.calls())["c1"]
    assert (row["state"], row["decided_turn"], row["decided_by"]) == ("approved", 2, "boss")
    assert row["decision"] == {"approved": True, "feedback": None}
    assert row["decided_at"] is not None
    assert (await talk.row())["status"] == "pending"


async def test_a_denial_keeps_its_feedback(talk: Talk) -> None:
    await talk.paused()
    assert (await talk.decide(no(feedback="not in production"))).decisions == {"c1": "denied"}
    row = (await talk.calls())["c1"]
    assert (row["state"], row["decision"]) == ("denied", {"approved": False, "feedback": "not in production"})


async def test_the_event_of_a_decision_shows_verdicts_and_no_token(talk: Talk) -> None:
    await talk.paused()
    await talk.decide(yes(feedback="go"))
    event = (await talk.events())[-1]
    assert (event["event"], event["turn"]) == ("user_message", 2)
    assert event["data"]["decisions"] == {"c1": "approved"}
    [decision] = event["data"]["tool_decisions"]
    assert (decision["tool_call_id"], decision["approved"], decision["feedback"]) == ("c1", True, "go")
    assert not any("token" in key for key in decision)
    assert "ask" not in event["data"]


async def test_a_decision_adds_no_message(talk: Talk) -> None:
    await talk.paused()
    await talk.decide(yes())
    assert [m["role"] for m in history(await talk.claim())] == ["user", "assistant"]


async def test_the_same_twice_is_once(talk: Talk) -> None:
    await talk.paused()
    assert (await talk.decide(yes(), yes())).decisions == {"c1": "approved"}


async def test_a_conflict_in_one_request_runs_nothing(talk: Talk) -> None:
    await talk.paused()
    with pytest.raises(RequestInvalid):
        await talk.decide(yes(), no())
    assert await talk.states() == {"c1": "pending"}
    assert (await talk.row())["last_turn"] == 1


async def test_undecided_calls_go_on_waiting(talk: Talk) -> None:
    await talk.paused("c1", "c2", "c3")
    await talk.decide(yes("c1", "t1"))
    assert await talk.states() == {"c1": "approved", "c2": "pending", "c3": "pending"}
    claim = await talk.claim()
    assert [c["state"] for c in claim.calls] == ["approved", "pending", "pending"]
    await talk.append(claim.lease, 1, start(1, 1, 0), result(1, 1, 0, "c1"))
    await talk.append(claim.lease, 2, pause(history(claim), waits(1, 1, 1, token="new")), finish=PAUSED)
    assert (await talk.decide(no("c2", "t2"))).decisions == {"c2": "denied"}


async def test_unknown_calls_are_reported_and_nothing_is_denied(talk: Talk) -> None:
    await talk.paused("c1", "c2")
    submitted = await talk.decide(yes("zz", "t1"), yes("c1", "forged"), yes("c2", None))
    assert submitted.decisions == {"zz": "unknown", "c1": "unknown", "c2": "unknown"}
    assert await talk.states() == {"c1": "pending", "c2": "pending"}
    assert submitted.turn == 2


async def test_a_call_of_its_own_kind_only(talk: Talk) -> None:
    await talk.ask()
    claim = await talk.claim()
    await talk.append(claim.lease, 1, ai(1, call(1, 0, "free", gated=False, risk="read_only")))
    assert (await talk.decide(yes("free", "t1"))).decisions == {"free": "unknown"}


async def test_what_was_decided_stays_decided(talk: Talk) -> None:
    await talk.paused()
    await talk.decide(no())
    assert (await talk.decide(yes())).decisions == {"c1": "already_resolved"}
    assert await talk.states() == {"c1": "denied"}
    row = (await talk.calls())["c1"]
    assert row["decided_turn"] == 2


async def test_one_of_two_racing_deciders_wins(store: Store, other_store: Store, talk: Talk) -> None:
    await talk.paused()
    twin = Talk(other_store, talk.id)
    verdicts = await asyncio.gather(talk.decide(yes()), twin.decide(no()), talk.decide(yes()), twin.decide(no()))
    told = sorted(v.decisions["c1"] for v in verdicts)
    assert told[1:] != told[:1]
    assert told.count("already_resolved") == 3
    [winner] = {"approved", "denied"} & set(told)
    assert await talk.states() == {"c1": winner}


async def test_a_question_closes_what_waits(talk: Talk) -> None:
    await talk.paused("c1", "c2")
    submitted = await talk.ask("leave it, just show me the pods")
    row = (await talk.calls())["c1"]
    assert (row["state"], row["decided_turn"], row["reason"]) == (
        "superseded",
        submitted.turn,
        "superseded by a new request",
    )
    assert (await talk.decide(yes("c1", "t1"))).decisions == {"c1": "stale"}
    claim = await talk.claim()
    assert [c["state"] for c in claim.calls] == ["superseded", "superseded"]
    assert [m["role"] for m in history(claim)] == ["user", "assistant", "user"]


async def test_a_question_may_carry_decisions_which_come_first(talk: Talk) -> None:
    await talk.paused("c1", "c2")
    submitted = await talk.ask("and then?", tool_decisions=[yes("c1", "t1")])
    assert submitted.decisions == {"c1": "approved"}
    assert await talk.states() == {"c1": "approved", "c2": "superseded"}
    claim = await talk.claim()
    assert [(c["tool_call_id"], c["state"]) for c in claim.calls] == [("c1", "approved"), ("c2", "superseded")]


async def test_a_question_leaves_an_approval_to_the_turn_that_has_it(talk: Talk) -> None:
    await talk.paused("c1", "c2")
    await talk.decide(yes("c1", "t1"))
    await talk.ask("something else")
    assert await talk.states() == {"c1": "approved", "c2": "superseded"}
    assert [(c["tool_call_id"], c["state"]) for c in (await talk.claim()).calls] == [
        ("c1", "approved"),
        ("c2", "superseded"),
    ]


async def test_a_question_that_runs_late_closes_what_was_paused_meanwhile(talk: Talk) -> None:
    await talk.ask("restart web")
    first = await talk.claim()
    await talk.ask("leave it")
    await talk.append(first.lease, 1, ai(1, call(1)), pause(history(first), waits(1, 1)), finish=PAUSED)
    assert await talk.states() == {"c1": "pending"}
    claim = await talk.claim()
    [row] = claim.calls
    assert (row["state"], row["reason"]) == ("superseded", "superseded by a new request")


async def test_a_decision_behind_a_queued_question_is_stale(talk: Talk) -> None:
    await talk.ask("restart web")
    first = await talk.claim()
    await talk.ask("leave it")
    await talk.append(first.lease, 1, ai(1, call(1)), pause(history(first), waits(1, 1)), finish=PAUSED)
    assert (await talk.decide(yes())).decisions == {"c1": "stale"}
    assert await talk.states() == {"c1": "pending"}


async def test_a_decision_behind_a_question_that_yields_is_taken(talk: Talk) -> None:
    await talk.ask("restart web")
    first = await talk.claim()
    await talk.ask("alert", supersede=False)
    await talk.append(first.lease, 1, ai(1, call(1)), pause(history(first), waits(1, 1)), finish=PAUSED)
    assert (await talk.decide(yes())).decisions == {"c1": "approved"}
    claim = await talk.claim()
    [ended] = claim.ended
    assert (claim.lease.turn, ended["data"]["code"], ended["data"]["retryable"]) == (3, "approvals_open", False)
    assert await talk.states() == {"c1": "approved"}


async def test_an_expired_approval_runs_nothing(talk: Talk) -> None:
    await talk.paused(seconds=-1)
    assert (await talk.decide(yes())).decisions == {"c1": "expired"}
    row = (await talk.calls())["c1"]
    assert (row["state"], row["decided_turn"], row["decided_by"]) == ("expired", 2, None)
    claim = await talk.claim()
    assert [c["state"] for c in claim.calls] == ["expired"]
    assert (await talk.decide(yes())).decisions == {"c1": "expired"}


async def test_a_claim_notices_an_expiry(talk: Talk) -> None:
    await talk.paused("c1", "c2", seconds=-1)
    await talk.decide(yes("zz", "x"))
    claim = await talk.claim()
    assert [(c["state"], c["decided_turn"]) for c in claim.calls] == [("expired", 2), ("expired", 2)]


async def test_expiry_bounds_the_decision_and_not_the_run(talk: Talk) -> None:
    await talk.paused(seconds=0.2)
    assert (await talk.decide(yes())).decisions == {"c1": "approved"}
    await asyncio.sleep(0.25)
    claim = await talk.claim()
    assert [c["state"] for c in claim.calls] == ["approved"]
    await talk.append(claim.lease, 1, start(1, 1))


async def test_a_token_is_worth_nothing_in_another_conversation(store: Store, talk: Talk) -> None:
    await talk.paused()
    other = Talk(store)
    await other.answered()
    assert (await other.decide(yes())).decisions == {"c1": "unknown"}
    assert await talk.states() == {"c1": "pending"}


async def test_a_token_picks_the_call_where_ids_repeat(talk: Talk) -> None:
    await talk.paused("bash:0")
    await talk.decide(no("bash:0", "t1"))
    claim = await talk.claim()
    said = ai(1, call(1, 0, "bash:0"))
    await talk.append(claim.lease, 1, result(1, 1, 0, "bash:0", state="denied"), said)
    await talk.append(claim.lease, 2, pause([], waits(2, 1, token="second")), finish=PAUSED)
    assert (await talk.decide(yes("bash:0", "t1"))).decisions == {"bash:0": "already_resolved"}
    submitted = await talk.decide(yes("bash:0", "t1"), yes("bash:0", "second"))
    assert submitted.decisions == {"bash:0": "approved"}
    first, second = await talk.store.calls(talk.id)
    assert (first["state"], second["state"]) == ("denied", "approved")


async def test_a_call_key_stands_in_for_the_token_only_by_setting(talk: Talk) -> None:
    await talk.paused("c1", "c2")
    key: dict[str, Any] = {"turn": 1, "step": 1, "call_index": 0}
    assert (await talk.decide(yes("c1", None, **key))).decisions == {"c1": "unknown"}
    assert (await talk.decide(yes("c1", None), keys=True)).decisions == {"c1": "unknown"}
    assert (await talk.decide(yes("c1", None, **key | {"call_index": 1}), keys=True)).decisions == {"c1": "unknown"}
    assert (await talk.decide(yes("c1", None, **key), keys=True)).decisions == {"c1": "approved"}


async def test_an_ask_that_must_not_supersede_is_refused_while_somebody_decides(talk: Talk) -> None:
    await talk.paused()
    with pytest.raises(ApprovalsOpen):
        await talk.ask("alert", supersede=False)
    with pytest.raises(ApprovalsOpen):
        await talk.try_claim(record=record("ask", ask="alert", supersede=False, conversation_id=talk.id))
    assert await talk.states() == {"c1": "pending"}
    assert (await talk.row())["last_turn"] == 1
    await talk.decide(no())
    assert (await talk.ask("alert", supersede=False)).turn == 3


async def test_an_ask_that_must_not_supersede_ends_when_its_claim_meets_approvals(talk: Talk) -> None:
    await talk.ask("restart web")
    first = await talk.claim()
    await talk.ask("alert", supersede=False)
    await talk.append(first.lease, 1, ai(1, call(1)), pause(history(first), waits(1, 1)), finish=PAUSED)
    idle = await talk.try_claim()
    assert isinstance(idle, NotClaimed)
    [ended] = idle.ended
    assert (ended["turn"], ended["data"]["code"], ended["data"]["retryable"]) == (2, "approvals_open", False)
    assert (await talk.turn(2))["status"] == "failed"
    assert await talk.states() == {"c1": "pending"}
    assert (await talk.row())["status"] == "awaiting_approval"
    assert (await talk.decide(yes())).decisions == {"c1": "approved"}


async def test_a_claimed_ask_that_yields_is_not_ended_by_approvals_of_its_own(talk: Talk) -> None:
    await talk.ask("alert", supersede=False)
    claim = await talk.claim_expired()
    await talk.append(claim.lease, 1, ai(1, call(1)))
    assert (await talk.claim()).lease.attempt == 2


async def test_approvals_are_decided_while_their_turn_still_runs(talk: Talk) -> None:
    """The token is out with the pause only, but the pause's batch may be on its way when the turn is taken over."""
    await talk.paused("c1", "c2")
    await talk.decide(yes("c1", "t1"))
    claim = await talk.claim()
    assert (await talk.decide(yes("c2", "t2"))).decisions == {"c2": "approved"}
    assert [(c["tool_call_id"], c["decided_turn"]) for c in claim.calls] == [("c1", 2), ("c2", None)]
    await talk.append(claim.lease, 1, start(1, 1), result(1, 1), pause(history(claim)), finish=PAUSED)
    assert [(c["tool_call_id"], c["state"]) for c in (await talk.claim()).calls] == [("c2", "approved")]


async def test_a_retry_closes_nothing(talk: Talk) -> None:
    await talk.paused("c1", "c2")
    await talk.decide(yes("c1", "t1"))
    claim = await talk.claim()
    await talk.append(claim.lease, 1, finish=failed())
    assert await talk.states() == {"c1": "superseded", "c2": "superseded"}
    await talk.retry()
    claim = await talk.claim()
    assert [m["role"] for m in history(claim)] == ["user", "assistant"]
    assert len(claim.calls) == 2


# Frontend tools


async def _frontend_pause(talk: Talk, *ids: str) -> None:
    await talk.ask("open the page")
    claim = await talk.claim()
    said = ai(1, *(call(1, i, name, kind="frontend") for i, name in enumerate(ids)))
    await talk.append(claim.lease, 1, said, pause([*history(claim), said.data["message"]]), finish=PAUSED)


async def test_a_frontend_result_resumes_the_turn(talk: Talk) -> None:
    await _frontend_pause(talk, "f1", "f2")
    assert (await talk.row())["status"] == "awaiting_approval"
    results = [
        {"tool_call_id": "f1", "content": {"title": "Home"}},
        {"tool_call_id": "f2", "content": "no tab", "is_error": True},
    ]
    submitted = await talk.decide(frontend_tool_results=results)
    assert submitted.decisions == {"f1": "result_recorded", "f2": "result_recorded"}
    rows = await talk.calls()
    assert (rows["f1"]["state"], rows["f1"]["decision"]) == ("done", {"content": {"title": "Home"}, "is_error": False})
    assert (rows["f2"]["state"], rows["f2"]["decided_turn"]) == ("failed", 2)
    claim = await talk.claim()
    assert [c["state"] for c in claim.calls] == ["done", "failed"]
    await talk.append(claim.lease, 1, result(1, 1, 0, "f1"), result(1, 1, 1, "f2", state="failed"))


async def test_a_frontend_result_nobody_waits_for(talk: Talk) -> None:
    await _frontend_pause(talk, "f1", "f2")
    await talk.decide(frontend_tool_results=[{"tool_call_id": "f1", "content": "first"}])
    results = [{"tool_call_id": name, "content": "x"} for name in ("f1", "zz")]
    assert (await talk.decide(frontend_tool_results=results)).decisions == {"f1": "already_resolved", "zz": "unknown"}
    assert (await talk.calls())["f1"]["decision"]["content"] == "first"
    await talk.ask("leave it")
    late = await talk.decide(frontend_tool_results=[{"tool_call_id": "f2", "content": "late"}])
    assert late.decisions == {"f2": "stale"}


async def test_frontend_calls_take_no_decisions_and_tools_no_frontend_results(talk: Talk) -> None:
    await _frontend_pause(talk, "f1")
    assert (await talk.decide(yes("f1", "t1"))).decisions == {"f1": "unknown"}
    by_key = await talk.decide(yes("f1", None, turn=1, step=1, call_index=0), keys=True)
    assert by_key.decisions == {"f1": "unknown"}
    await talk.ask("next")
    await talk.append((await talk.claim()).lease, 1, answer(), finish=failed())
    await talk.paused("c1")
    forged = await talk.decide(frontend_tool_results=[{"tool_call_id": "c1", "content": "I ran it"}])
    assert forged.decisions == {"c1": "unknown"}
    assert (await talk.states())["c1"] == "pending"


async def test_an_answer_leaves_the_conversation_completed(talk: Talk) -> None:
    await talk.paused()
    await talk.decide(yes())
    claim = await talk.claim()
    await talk.append(claim.lease, 1, start(1, 1), result(1, 1), ai(1, content="done"), answer(), finish=ANSWERED)
    assert await talk.statuses() == ["completed", "completed"]
    assert (await talk.row())["status"] == "completed"

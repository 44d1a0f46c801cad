"""Claiming: the lowest unfinished turn, one holder, and all that a worker needs to go on."""

from __future__ import annotations

import asyncio
import uuid

import pytest

from shared.errors import IdentityMismatch, LeaseLost
from shared.store.base import Claim, NotClaimed, Store
from tests.contract.driver import (
    ANSWERED,
    Talk,
    ai,
    answer,
    call,
    compacted,
    history,
    record,
    result,
    start,
    yes,
)


async def test_claims_go_in_order_whatever_was_rung(talk: Talk) -> None:
    for text in ("one", "two", "three"):
        await talk.ask(text)
    for number in (1, 2, 3):
        claim = await talk.claim()
        assert claim.lease.turn == number
        done = await talk.append(claim.lease, 1, answer(), finish=ANSWERED)
        assert done.next_queue == ("interactive" if number < 3 else None)
    idle = await talk.try_claim()
    assert isinstance(idle, NotClaimed)
    assert (idle.reason, idle.ended, idle.submitted) == ("idle", [], None)


async def test_a_held_turn_is_busy_and_holds_up_the_next(talk: Talk) -> None:
    await talk.ask("one")
    await talk.ask("two")
    await talk.claim()
    busy = await talk.try_claim()
    assert isinstance(busy, NotClaimed)
    assert busy.reason == "busy"


async def test_a_claim_carries_the_row_and_the_request(talk: Talk) -> None:
    await talk.ask("why?", user_id="u", response_format={"type": "json_object"})
    claim = await talk.claim()
    assert (claim.lease.conversation_id, claim.lease.turn, claim.lease.attempt) == (talk.id, 1, 1)
    assert claim.turn["request"]["response_format"] == {"type": "json_object"}
    assert claim.turn["lease_token"] == claim.lease.token
    assert claim.turn["status"] == "running"
    assert claim.conversation["user_id"] == "u"
    assert claim.conversation["status"] == "running"
    assert claim.snapshot is None
    assert [(t["turn"], t["kind"], t["request"]["ask"]) for t in claim.turns] == [(1, "ask", "why?")]
    assert history(claim) == [{"role": "user", "content": "why?"}]
    assert claim.now.tzinfo is not None
    assert (await talk.row())["status"] == "running"


async def test_the_same_claim_id_gets_the_same_lease(talk: Talk) -> None:
    await talk.ask()
    first = await talk.claim_expired(claim_id="k1")
    await talk.append(first.lease, 1, ai(1, content="hi"))
    again = await talk.claim(claim_id="k1")
    assert (again.lease.token, again.lease.attempt) == (first.lease.token, 1)
    assert again.turn["last_batch"] == 1
    assert again.turn["crashes"] == 0
    busy = await talk.try_claim(claim_id="k2")
    assert isinstance(busy, NotClaimed), "the repeated claim renewed the lease"


async def test_an_expired_lease_is_taken_over(talk: Talk) -> None:
    await talk.ask()
    dead = await talk.claim_expired()
    claim = await talk.claim()
    assert claim.lease.attempt == 2
    assert claim.lease.token != dead.lease.token
    assert (claim.turn["crashes"], claim.turn["last_batch"]) == (1, 0)
    with pytest.raises(LeaseLost):
        await talk.append(dead.lease, 1, ai(1))


async def test_a_claim_tells_why_there_was_an_attempt_before(store: Store, talk: Talk) -> None:
    await talk.ask()
    first = await talk.claim()
    assert first.taken_over is None
    await store.release(first.lease)
    assert (await talk.claim_expired(claim_id="k1")).taken_over == "release"
    assert (await talk.claim_expired(claim_id="k1")).taken_over == "release", "the same attempt"
    assert (await talk.claim()).taken_over == "crash"
    assert (await talk.turn(1))["taken_over"] == "crash"


async def test_a_claim_id_that_lost_its_turn_competes_like_any_other(talk: Talk) -> None:
    await talk.ask()
    await talk.claim_expired(claim_id="k1")
    await talk.claim(claim_id="k2")
    assert isinstance(await talk.try_claim(claim_id="k1"), NotClaimed)


async def test_a_claim_records_a_plain_job_once(talk: Talk) -> None:
    job = record("ask", ask="hello", conversation_id=talk.id, request_id="job-1")
    claim = await talk.claim(record=job)
    assert claim.submitted is not None
    assert (claim.submitted.turn, claim.submitted.created) == (1, True)
    again = await talk.try_claim(record=job)
    assert isinstance(again, NotClaimed)
    assert again.submitted is not None
    assert (again.reason, again.submitted.created) == ("busy", False)
    assert await talk.event_names() == ["user_message"]


async def test_a_job_that_is_delivered_again_after_its_turn_does_nothing(talk: Talk) -> None:
    job = record("ask", ask="hello", conversation_id=talk.id, request_id="job-1")
    claim = await talk.claim(record=job)
    await talk.append(claim.lease, 1, answer(), finish=ANSWERED)
    before = await talk.events()
    again = await talk.try_claim(record=job)
    assert isinstance(again, NotClaimed)
    assert again.reason == "idle"
    assert again.submitted is not None
    assert again.submitted.status == "completed"
    assert await talk.events() == before


async def test_a_refused_job_claims_nothing(talk: Talk) -> None:
    await talk.ask(account_id="a")
    job = record("ask", ask="x", conversation_id=talk.id, account_id="b")
    with pytest.raises(IdentityMismatch):
        await talk.try_claim(record=job)
    assert await talk.statuses() == ["pending"]


async def test_hydration_starts_from_the_latest_snapshot(talk: Talk) -> None:
    await talk.answered("one")
    await talk.answered("two")
    await talk.ask("three")
    claim = await talk.claim()
    assert claim.snapshot is not None
    assert (claim.snapshot["turn"], claim.snapshot["event"]) == (2, "answer_end")
    assert [t["turn"] for t in claim.turns] == [3]
    assert claim.events == []
    assert [m["content"] for m in history(claim)] == ["one", "re: one", "two", "re: two", "three"]


async def test_a_question_recorded_during_a_turn_comes_after_its_answer(talk: Talk) -> None:
    await talk.ask("one")
    first = await talk.claim()
    await talk.ask("two")
    said = ai(1, content="re: one")
    await talk.append(first.lease, 1, said, answer([*history(first), said.data["message"]]), finish=ANSWERED)
    assert [m["content"] for m in history(await talk.claim())] == ["one", "re: one", "two"]


async def test_a_failed_turn_keeps_what_it_did(talk: Talk) -> None:
    await talk.answered("one")
    await talk.ask("two")
    claim = await talk.claim_expired()
    await talk.append(claim.lease, 1, ai(1, call(1, gated=False, risk="read_only")), result(2, 1))
    claim = await talk.claim()
    assert [e["event"] for e in claim.events] == ["ai_message", "tool_call_result"]
    assert [m["role"] for m in history(claim)] == ["user", "assistant", "user", "assistant", "tool"]
    assert claim.turn["rounds"] == 1


async def test_a_compaction_is_where_a_killed_turn_goes_on(talk: Talk) -> None:
    await talk.answered("one")
    await talk.ask("two")
    claim = await talk.claim_expired()
    summary = [{"role": "user", "content": "summary"}, {"role": "user", "content": "two"}]
    await talk.append(claim.lease, 1, compacted(summary), ai(1, content="after"))
    claim = await talk.claim()
    assert claim.turns == []
    assert [m["content"] for m in history(claim)] == ["summary", "two", "after"]


async def test_a_claim_lists_calls_without_a_result(talk: Talk) -> None:
    await talk.ask()
    claim = await talk.claim_expired()
    calls = [call(1, i, name, gated=False) for i, name in enumerate(("a", "b", "c"))]
    await talk.append(claim.lease, 1, ai(1, *calls), start(1, 1, 0), result(1, 1, 0, "a"), start(1, 1, 2))
    claim = await talk.claim()
    assert [(c["tool_call_id"], c["state"]) for c in claim.calls] == [("b", "approved"), ("c", "executing")]


async def test_a_claim_completes_the_turn_that_waited(talk: Talk) -> None:
    await talk.paused()
    assert await talk.statuses() == ["awaiting_approval"]
    assert (await talk.row())["status"] == "awaiting_approval"
    await talk.decide(yes())
    claim = await talk.claim()
    assert claim.turn["decisions"] == {"c1": "approved"}
    assert [(c["tool_call_id"], c["state"], c["decided_turn"]) for c in claim.calls] == [("c1", "approved", 2)]
    assert await talk.statuses() == ["completed", "running"]


async def test_a_stopped_pending_turn_ends_at_its_claim_and_the_next_is_taken(store: Store, talk: Talk) -> None:
    await talk.ask("one")
    await talk.ask("two")
    await store.stop(talk.id, 1)
    claim = await talk.claim()
    assert claim.lease.turn == 2
    [ended] = claim.ended
    assert (ended["event"], ended["turn"], ended["conversation_id"]) == ("turn_stopped", 1, talk.id)
    assert await talk.statuses() == ["stopped", "running"]
    assert "one" in [m["content"] for m in history(claim)]


async def test_two_claims_at_once_get_one_lease(store: Store, other_store: Store, talk: Talk) -> None:
    await talk.ask()
    twin = Talk(other_store, talk.id)
    answers = await asyncio.gather(*(side.try_claim() for side in [talk, twin] * 4))
    assert sum(isinstance(a, Claim) for a in answers) == 1
    assert {a.reason for a in answers if isinstance(a, NotClaimed)} == {"busy"}


async def test_crashes_are_counted_until_progress(talk: Talk) -> None:
    await talk.ask()
    await talk.claim_expired()
    claim = await talk.claim_expired()
    assert claim.turn["crashes"] == 1
    await talk.append(claim.lease, 1, ai(1, content="progress"))
    claim = await talk.claim()
    assert (claim.turn["crashes"], claim.lease.attempt) == (1, 3)


async def test_the_crash_cap_ends_a_turn_visibly_and_the_next_goes_on(talk: Talk) -> None:
    await talk.ask("poison")
    await talk.ask("next")
    for _ in range(2):
        await talk.claim_expired(max_crashes=2)
    claim = await talk.claim(max_crashes=2)
    assert claim.lease.turn == 2
    [ended] = claim.ended
    assert (ended["event"], ended["data"]["code"], ended["data"]["retryable"]) == ("error", "crash_cap", True)
    turn = await talk.turn(1)
    assert (turn["status"], turn["retryable"], turn["error"]["code"]) == ("failed", True, "crash_cap")
    assert "error" in await talk.event_names()


async def test_the_crash_cap_closes_calls(talk: Talk) -> None:
    await talk.ask("poison")
    claim = await talk.claim_expired()
    await talk.append(
        claim.lease, 1, ai(1, call(1, 0, "a", gated=False), call(1, 1, "b", gated=False), call(1, 2, "c")), start(1, 1)
    )
    assert isinstance(await talk.try_claim(max_crashes=1), NotClaimed)
    assert await talk.states() == {"a": "unknown", "b": "superseded", "c": "superseded"}
    assert all(row["reason"] for row in (await talk.calls()).values())
    assert (await talk.row())["status"] == "failed"
    await talk.retry()
    claim = await talk.claim()
    assert [c["state"] for c in claim.calls] == ["unknown", "superseded", "superseded"]


async def test_a_question_closes_what_no_earlier_turn_came_to(talk: Talk) -> None:
    await talk.ask("one")
    lease = (await talk.claim()).lease
    await talk.append(lease, 1, ai(1, call(1, gated=False)), answer(), finish=ANSWERED)
    await talk.ask("two")
    [row] = (await talk.claim()).calls
    assert (row["state"], row["reason"]) == ("superseded", "superseded by a new request")


async def test_a_release_is_not_a_crash(store: Store, talk: Talk) -> None:
    await talk.ask()
    for _ in range(3):
        claim = await talk.claim(max_crashes=1)
        await store.release(claim.lease)
    assert (await talk.claim(max_crashes=1)).turn["crashes"] == 0


async def test_rules_of_the_conversation_its_user_and_its_account(store: Store) -> None:
    owner = {"account_id": "a", "user_id": "u"}
    for scope, name in (("conversation", "here"), ("user", "mine"), ("account", "all")):
        talk = Talk(store)
        await talk.ask("first", **owner)
        claim = await talk.claim()
        await talk.append(claim.lease, 1, answer(), finish=ANSWERED)
        await talk.paused()
        [verdict] = (
            await talk.decide(yes(remember={"scope": scope, "prefix": name}), user_id="boss")
        ).decisions.values()
        assert verdict == "approved"

    async def prefixes(**identity: str) -> list[str]:
        other = Talk(store)
        await other.ask(**identity)
        return [rule["prefix"] for rule in (await other.claim()).rules]

    assert await prefixes(**owner) == ["mine", "all"]
    assert await prefixes(account_id="a", user_id="v") == ["all"]
    assert await prefixes(account_id="b", user_id="u") == []
    assert await prefixes(account_id="a") == ["all"]
    rules = (await talk.claim()).rules
    assert [(r["prefix"], r["tool_name"], r["created_by"]) for r in rules][-1] == ("all", "shell", "boss")


async def test_a_denial_remembers_nothing(talk: Talk) -> None:
    await talk.paused()
    await talk.decide({**yes(remember={"scope": "account"}), "approved": False})
    assert (await talk.claim()).rules == []


async def test_an_imported_holmesgpt_snapshot_hydrates(talk: Talk) -> None:
    await talk.ask("one")
    claim = await talk.claim()
    old = answer([{"role": "user", "content": "one"}, {"role": "assistant", "content": "old"}])
    imported = type(old)("ai_answer_end", old.data)
    await talk.append(claim.lease, 1, imported, finish=ANSWERED)
    await talk.ask("two")
    claim = await talk.claim()
    assert [m["content"] for m in history(claim)] == ["one", "old", "two"]


async def test_a_conversation_that_is_not_a_uuid_is_refused(store: Store) -> None:
    with pytest.raises(Exception, match=r"(?i)uuid"):
        await store.claim("nonsense", worker="w", claim_id=str(uuid.uuid4()), lease_seconds=1, max_crashes=1)

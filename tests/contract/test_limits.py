"""Limits of an account: turns at once, and cost in a day."""

from __future__ import annotations

import asyncio
from datetime import datetime
from typing import Any

from shared.store.base import Claim, NotClaimed, Ring, Store
from tests.contract.conftest import Meddle
from tests.contract.driver import ANSWERED, PAUSED, Talk, ai, answer, call, failed, pause, waits, yes


async def asked(store: Store, count: int, account_id: str = "a") -> list[Talk]:
    talks = [Talk(store) for _ in range(count)]
    for talk in talks:
        await talk.ask(account_id=account_id)
    return talks


async def told_to_wait(talk: Talk, **limits: Any) -> None:
    answer = await talk.try_claim(**limits)
    assert isinstance(answer, NotClaimed), answer
    assert (answer.reason, answer.wait_reason) == ("busy", "account_limit")


async def test_a_turn_waits_while_its_account_has_enough_running(store: Store) -> None:
    running, waiting, free = await asked(store, 3)
    other = (await asked(store, 1, "b"))[0]
    lease = (await running.claim(account_turns=1)).lease
    await told_to_wait(waiting, account_turns=1)
    turn, row = await waiting.turn(1), await waiting.row()
    assert (turn["status"], turn["attempt"], turn["wait_reason"]) == ("pending", 0, "account_limit")
    assert (row["status"], row["ring_backoff_seconds"]) == ("pending", 10)
    assert datetime.fromisoformat(row["next_ring_at"]) > datetime.fromisoformat((await store.health())["now"])
    await told_to_wait(waiting, account_turns=1)
    assert await waiting.row() == row, "another ring does not put it off any more"

    await other.claim(account_turns=1)
    await free.claim(account_turns=2)
    assert await store.reap() == []
    await running.append(lease, 1, answer(), finish=ANSWERED)
    assert await store.reap() == [Ring(waiting.id, "interactive")], "the place is free"
    await told_to_wait(waiting, account_turns=1)
    claim = await waiting.claim()
    assert (claim.turn["wait_reason"], claim.lease.attempt, claim.taken_over) == (None, 1, None)


async def test_a_place_goes_to_whoever_has_waited_longest(store: Store) -> None:
    running = await asked(store, 3)
    line = await asked(store, 4)
    leases = [(await talk.claim(account_turns=3)).lease for talk in running]
    for talk in reversed(line):
        await told_to_wait(talk, account_turns=3)
    await running[0].append(leases[0], 1, answer(), finish=ANSWERED)
    await store.release(leases[1], 30)
    assert {ring.conversation_id for ring in await store.reap()} == {line[0].id, line[1].id}
    for talk in line[:2]:
        await talk.claim(account_turns=3)
    await store.stop(running[2].id)
    await store.renew([leases[2].token], 0)
    assert isinstance(await running[2].try_claim(account_turns=3), NotClaimed)
    assert [ring.conversation_id for ring in await store.reap()] == [line[2].id]


async def test_a_take_over_needs_no_place_and_a_released_turn_does(store: Store) -> None:
    dead, released = await asked(store, 2)
    await dead.claim_expired(account_turns=1)
    await told_to_wait(released, account_turns=1)
    assert (await dead.claim(account_turns=1)).taken_over == "crash"
    lease = (await released.claim()).lease
    await store.release(lease)
    await told_to_wait(released, account_turns=1)


async def test_claims_at_once_do_not_pass_the_limit(store: Store, other_store: Store) -> None:
    talks = await asked(store, 6)
    sides = talks + [Talk(other_store, talk.id) for talk in talks]
    answers = await asyncio.gather(*(side.try_claim(account_turns=2) for side in sides))
    assert sum(isinstance(a, Claim) for a in answers) == 2


async def test_everything_rings_for_those_who_wait_too(store: Store) -> None:
    running, waiting = await asked(store, 2)
    await running.claim(account_turns=1)
    await told_to_wait(waiting, account_turns=1)
    await store.reap(everything=True)
    assert await store.reap() == [Ring(waiting.id, "interactive")]


async def spend(talk: Talk, cost_usd: float) -> None:
    """The turn costs so much and fails."""
    lease = (await talk.claim()).lease
    await talk.append(lease, 1, ai(1, usage={"cost_usd": cost_usd}), finish=failed())


async def test_a_question_beyond_the_days_budget_fails_and_may_be_tried_again(store: Store, meddle: Meddle) -> None:
    spender, other = (await asked(store, 1))[0], (await asked(store, 1, "b"))[0]
    await spend(spender, 0.5)
    [poor] = await asked(store, 1)
    idle = await poor.try_claim(account_cost_usd=0.5)
    assert isinstance(idle, NotClaimed)
    [ended] = idle.ended
    assert (idle.reason, ended["event"], ended["data"]["code"]) == ("idle", "error", "account_budget")
    turn = await poor.turn(1)
    assert (turn["status"], turn["error"]["code"], turn["retryable"]) == ("failed", "account_budget", True)
    assert (await other.claim(account_cost_usd=0.5)).lease.turn == 1
    await poor.retry()
    assert isinstance(await poor.try_claim(account_cost_usd=0.5), NotClaimed)
    assert await poor.statuses() == ["failed", "failed"]
    await poor.retry()
    meddle("UPDATE conversation_turns SET started_at = '2026-01-01T00:00:00.000000+00:00' WHERE started_at IS NOT NULL")
    assert (await poor.claim(account_cost_usd=0.5)).lease.turn == 3, "a new day"


async def test_what_has_begun_goes_on_beyond_the_budget(store: Store, talk: Talk) -> None:
    await talk.ask()
    claim = await talk.claim(account_cost_usd=0.5)
    said = ai(1, call(1), usage={"cost_usd": 1.0})
    await store.release((await talk.claim_expired(claim_id=claim.turn["claim_id"])).lease)
    claim = await talk.claim(account_cost_usd=0.5)
    await talk.append(claim.lease, 1, said, pause([], waits(1, 1)), finish=PAUSED)
    await talk.decide(yes())
    claim = await talk.claim_expired(account_cost_usd=0.5)
    assert claim.turn["kind"] == "tool_decisions"
    await talk.claim(account_cost_usd=0.5)

"""Leases, rings and stops."""

from __future__ import annotations

import asyncio
import uuid
from collections import Counter
from dataclasses import replace
from datetime import datetime, timedelta

import pytest

from shared.errors import LeaseLost
from shared.store.base import NotClaimed, Renewed, Ring, Store
from tests.contract.driver import ANSWERED, PAUSED, Talk, ai, answer, call, failed, pause, waits, yes


async def test_renewing_extends_the_lease(store: Store, talk: Talk) -> None:
    await talk.ask()
    lease = (await talk.claim_expired()).lease
    assert await store.renew([lease.token], 60) == Renewed(frozenset(), frozenset())
    busy = await talk.try_claim()
    assert isinstance(busy, NotClaimed)
    row, turn = await talk.row(), await talk.turn(1)
    assert row["next_ring_at"] == turn["lease_expires_at"]


async def test_renewing_tells_who_lost_and_who_shall_stop(store: Store) -> None:
    talks = {name: Talk(store) for name in ("kept", "stopped", "taken", "released", "ended")}
    tokens = {}
    for name, talk in talks.items():
        await talk.ask()
        claim = await talk.claim(lease_seconds=0 if name == "taken" else 60)
        tokens[name] = claim.lease.token
        if name == "released":
            await store.release(claim.lease)
        elif name == "ended":
            await talk.append(claim.lease, 1, answer(), finish=ANSWERED)
    await talks["taken"].claim()
    await store.stop(talks["stopped"].id)
    renewed = await store.renew([*tokens.values(), "no-such-token"], 60)
    assert renewed.lost == {tokens["taken"], tokens["released"], "no-such-token"}
    assert renewed.stopped == {tokens["stopped"]}
    assert await store.renew([], 60) == Renewed(frozenset(), frozenset())


async def test_an_append_renews_the_lease_by_the_way(store: Store, talk: Talk) -> None:
    await talk.ask()
    lease = replace((await talk.claim_expired()).lease, seconds=60)
    await talk.append(lease, 1, ai(1))
    assert isinstance(await talk.try_claim(), NotClaimed), "nobody takes it over"
    assert await store.reap() == [], "nor is anybody rung for it"
    row, turn = await talk.row(), await talk.turn(1)
    assert row["next_ring_at"] == turn["lease_expires_at"]
    await store.renew([lease.token], 120)
    renewed = (await talk.turn(1))["lease_expires_at"]
    await talk.append(lease, 2, ai(2))
    assert (await talk.turn(1))["lease_expires_at"] == renewed, "a longer lease is not cut short"


async def test_renewing_an_ended_turn_rings_nobody(store: Store, talk: Talk) -> None:
    await talk.ask()
    lease = (await talk.claim()).lease
    await talk.append(lease, 1, answer(), finish=ANSWERED)
    before = await talk.turn(1)
    assert await store.renew([lease.token], 0) == Renewed(frozenset(), frozenset())
    assert await talk.turn(1) == before
    assert await store.reap() == []


async def test_a_zombie_whose_turn_was_given_up_writes_nothing_more(store: Store, talk: Talk) -> None:
    await talk.ask()
    zombie = (await talk.claim_expired()).lease
    landed = await talk.append(zombie, 1)
    assert isinstance(await talk.try_claim(max_crashes=1), NotClaimed)
    assert await store.renew([zombie.token], 60) == Renewed(frozenset(), frozenset())
    assert await talk.append(zombie, 1) == landed
    with pytest.raises(LeaseLost):
        await talk.append(zombie, 2)
    with pytest.raises(LeaseLost):
        await store.release(zombie)


async def test_a_release_hands_the_turn_back_at_once(store: Store, talk: Talk) -> None:
    await talk.ask(queue="background")
    lease = (await talk.claim()).lease
    await talk.append(lease, 1, ai(1))
    assert await store.release(lease) == Ring(talk.id, "background")
    turn = await talk.turn(1)
    assert (turn["status"], turn["lease_token"], turn["claim_id"], turn["lease_expires_at"]) == (
        "pending",
        None,
        None,
        None,
    )
    assert (await talk.row())["status"] == "pending"
    assert await store.reap() == [Ring(talk.id, "background")]
    assert (await talk.claim()).lease.attempt == 2
    with pytest.raises(LeaseLost):
        await store.release(lease)


async def test_a_delayed_release_rings_later(store: Store, talk: Talk) -> None:
    await talk.ask()
    await store.release((await talk.claim()).lease, 30)
    assert await store.reap() == []
    row = await talk.row()
    wait = datetime.fromisoformat(row["next_ring_at"]) - datetime.fromisoformat(row["updated_at"])
    assert timedelta(seconds=29) < wait <= timedelta(seconds=30)
    turn = await talk.turn(1)
    assert (turn["wait_reason"], turn["wait_until"]) == ("delayed", row["next_ring_at"])
    claim = await talk.claim()
    assert claim.lease.attempt == 2, "a ring that comes anyway is welcome"
    assert (claim.turn["wait_reason"], claim.turn["wait_until"]) == (None, None)
    await store.release(claim.lease)
    assert (await talk.turn(1))["wait_reason"] is None


async def test_nothing_can_be_released_after_the_end(store: Store, talk: Talk) -> None:
    await talk.ask()
    lease = (await talk.claim()).lease
    await talk.append(lease, 1, answer(), finish=ANSWERED)
    with pytest.raises(LeaseLost):
        await store.release(lease)


async def test_a_reaped_conversation_is_put_off_longer_each_time(store: Store, talk: Talk) -> None:
    await talk.ask()
    before = datetime.fromisoformat((await store.health())["now"])
    assert len(await store.reap()) == 1
    assert await store.reap() == [], "it was rung just now"
    row = await talk.row()
    wait = datetime.fromisoformat(row["next_ring_at"]) - before
    assert timedelta(seconds=5) <= wait < timedelta(seconds=8)
    assert row["ring_backoff_seconds"] == 10
    for expected in (20, 40, 60, 60):
        await store.reap(everything=True)
        assert len(await store.reap()) == 1
        assert (await talk.row())["ring_backoff_seconds"] == expected
    await talk.claim()
    assert (await talk.row())["ring_backoff_seconds"] == 5


async def test_live_leases_and_delays_are_never_due(store: Store, talk: Talk) -> None:
    delayed = Talk(store)
    for each in (talk, delayed):
        await each.ask()
        lease = (await each.claim()).lease
    await store.release(lease, 30)
    before = await talk.row(), await delayed.row()
    assert await store.reap() == []
    await store.reap(everything=True)
    assert await store.reap() == []
    assert (await talk.row(), await delayed.row()) == before


async def test_everything_that_only_its_back_off_holds_up_is_rung_once(store: Store) -> None:
    limit = 10
    talks = [Talk(store) for _ in range(limit + 50)]
    await asyncio.gather(*(talk.ask() for talk in talks))
    await talks[0].claim_expired()
    await store.release((await talks[1].claim()).lease)

    async def pages() -> Counter[str]:
        rung: list[Ring] = []
        while len(page := await store.reap(limit=limit)) == limit:
            rung += page
        return Counter(ring.conversation_id for ring in rung + page)

    once = Counter(talk.id for talk in talks)
    assert await pages() == once
    assert await pages() == {}
    await store.reap(everything=True)
    assert await pages() == once
    assert await pages() == {}


async def test_an_expired_lease_is_due_at_once(store: Store, talk: Talk) -> None:
    await talk.ask(queue="background")
    await talk.claim_expired()
    assert await store.reap() == [Ring(talk.id, "background")]


async def test_reaping_rings_and_changes_nothing_else(store: Store, talk: Talk) -> None:
    await talk.ask()
    await talk.claim_expired()
    before = await talk.turn(1)
    await store.reap()
    assert await talk.turn(1) == before


async def test_a_conversation_without_work_is_never_due(store: Store, talk: Talk) -> None:
    await talk.answered()
    await Talk(store).paused()
    await store.reap(everything=True)
    assert await store.reap() == []
    assert (await talk.row())["next_ring_at"] is None


async def test_the_end_of_a_turn_makes_the_next_due_on_its_queue(store: Store, talk: Talk) -> None:
    await talk.ask("one")
    await talk.ask("two", queue="background")
    lease = (await talk.claim()).lease
    await talk.append(lease, 1, answer(), finish=ANSWERED)
    assert await store.reap() == [Ring(talk.id, "background")]


async def test_a_reaper_takes_no_more_than_it_is_asked_to(store: Store) -> None:
    for _ in range(5):
        await Talk(store).ask()
    assert len(await store.reap(limit=2)) == 2
    assert len(await store.reap(limit=10)) == 3


async def test_two_reapers_ring_each_conversation_once(store: Store, other_store: Store) -> None:
    ids = {(await Talk(store).ask()).conversation_id for _ in range(12)}
    rung = [
        ring.conversation_id
        for part in await asyncio.gather(*(s.reap() for s in [store, other_store] * 2))
        for ring in part
    ]
    assert sorted(rung) == sorted(ids)


# Stop


async def test_stopping_a_pending_turn_flags_it_and_makes_it_due(store: Store, talk: Talk) -> None:
    await talk.ask()
    await store.reap()
    stopped = await store.stop(talk.id, 1)
    assert (stopped.turn, stopped.effect, stopped.queue) == (1, "flagged", "interactive")
    assert len(await store.reap()) == 1
    idle = await talk.try_claim()
    assert isinstance(idle, NotClaimed)
    assert [e["event"] for e in idle.ended] == ["turn_stopped"]
    assert await talk.statuses() == ["stopped"]


async def test_stopping_a_running_turn_flags_it(store: Store, talk: Talk) -> None:
    await talk.ask()
    await talk.ask("next")
    lease = (await talk.claim()).lease
    stopped = await store.stop(talk.id)
    assert (stopped.turn, stopped.effect) == (1, "flagged")
    assert await talk.statuses() == ["running", "pending"]
    assert (await store.renew([lease.token], 60)).stopped == {lease.token}
    await store.reap(everything=True)
    assert await store.reap() == []


async def test_a_stop_survives_the_worker(store: Store, talk: Talk) -> None:
    await talk.ask()
    await talk.claim_expired()
    await store.stop(talk.id, 1)
    idle = await talk.try_claim()
    assert isinstance(idle, NotClaimed)
    assert (await talk.turn(1))["status"] == "stopped"


async def test_stopping_a_waiting_turn_ends_it_at_once_without_an_event(store: Store, talk: Talk) -> None:
    await talk.paused("c1", "c2")
    before = await talk.events()
    stopped = await store.stop(talk.id)
    assert (stopped.turn, stopped.effect) == (1, "stopped")
    assert await talk.statuses() == ["stopped"]
    assert await talk.states() == {"c1": "superseded", "c2": "superseded"}
    assert await talk.events() == before
    assert (await talk.row())["status"] == "stopped"
    assert (await talk.decide(yes())).decisions == {"c1": "stale"}


async def test_a_waiting_turn_that_is_not_the_last_is_not_stopped(store: Store, talk: Talk) -> None:
    await talk.paused()
    await talk.decide(yes())
    assert (await store.stop(talk.id, 1)).effect == "none"
    assert (await store.stop(talk.id)).turn == 2
    assert await talk.states() == {"c1": "approved"}


async def test_a_stop_of_an_ended_or_other_turn_changes_nothing(store: Store, talk: Talk) -> None:
    await talk.answered()
    await talk.ask()
    await talk.claim()
    assert (await store.stop(talk.id, 1)).effect == "none"
    assert (await store.stop(talk.id, 9)).effect == "none"
    assert (await talk.turn(2))["stop_requested_at"] is None
    assert (await store.stop(str(uuid.uuid4()))).effect == "none"


async def test_nothing_runs_nothing_waits_nothing_to_stop(store: Store, talk: Talk) -> None:
    await talk.answered()
    assert (await store.stop(talk.id)).effect == "none"
    await talk.ask()
    claim = await talk.claim()
    await talk.append(claim.lease, 1, finish=failed())
    assert (await store.stop(talk.id)).effect == "none"


async def test_a_late_pending_turn_can_be_stopped_alone(store: Store, talk: Talk) -> None:
    await talk.ask("one")
    await talk.ask("two")
    lease = (await talk.claim()).lease
    assert (await store.stop(talk.id, 2)).effect == "flagged"
    assert not (await talk.append(lease, 1, ai(1))).stop_requested
    await talk.append(lease, 2, answer(), finish=ANSWERED)
    idle = await talk.try_claim()
    assert isinstance(idle, NotClaimed)
    assert await talk.statuses() == ["completed", "stopped"]


async def test_a_second_stop_keeps_the_first_time(store: Store, talk: Talk) -> None:
    await talk.ask()
    await store.stop(talk.id, 1)
    first = (await talk.turn(1))["stop_requested_at"]
    assert (await store.stop(talk.id, 1)).effect == "flagged"
    assert (await talk.turn(1))["stop_requested_at"] == first


async def test_a_stop_of_a_decision_turn_spares_nothing_of_it(store: Store, talk: Talk) -> None:
    await talk.paused("c1", "c2")
    await talk.decide(yes("c1", "t1"))
    await store.stop(talk.id, 2)
    assert isinstance(await talk.try_claim(), NotClaimed)
    assert await talk.states() == {"c1": "superseded", "c2": "superseded"}


async def test_a_stop_that_meets_a_pause_leaves_nothing_waiting(store: Store, talk: Talk) -> None:
    await talk.ask()
    lease = (await talk.claim()).lease
    await store.stop(talk.id, 1)
    await talk.append(lease, 1, ai(1, call(1)), pause([], waits(1, 1)), finish=PAUSED)
    assert await store.approvals() == []
    assert (await store.stop(talk.id)).effect == "none"

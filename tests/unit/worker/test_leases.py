"""The keeper of leases: on its own thread, against stores that answer, fail, hang, or say that a lease is lost."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from shared.errors import StoreUnavailable
from shared.store.base import Lease, Renewed
from worker.leases import RENEWALS_PER_LEASE, HeldLease, LeaseKeeper, lease_clock

NOTHING = Renewed(frozenset(), frozenset())
SECONDS = 0.15  # of a lease
PATIENCE_SECONDS = 5


class Leases:
    """The part of a store that the keeper uses; ``answer`` makes what ``renew`` answers of its tokens."""

    def __init__(self, answer: Callable[[Sequence[str]], Renewed] = lambda _: NOTHING, *, hangs: bool = False) -> None:
        self._answer, self._hangs = answer, hangs
        self.renewed: list[tuple[str, ...]] = []
        self.threads: set[int] = set()
        self.opened = self.closed = 0

    async def open(self) -> Any:
        self.opened += 1
        return self

    async def close(self) -> None:
        self.closed += 1

    async def renew(self, tokens: Sequence[str], lease_seconds: float) -> Renewed:
        assert lease_seconds == SECONDS
        self.threads.add(threading.get_ident())
        self.renewed.append(tuple(tokens))
        if self._hangs:
            await asyncio.Event().wait()
        return self._answer(tokens)


class Holder:
    """A held lease, and what its callbacks said."""

    def __init__(self, token: str = "t1", *, renewed_at: float | None = None) -> None:
        self.lost, self.stopped = asyncio.Event(), asyncio.Event()
        self.threads: set[int] = set()
        lease = Lease("c", 1, 1, token, SECONDS)
        at = lease_clock() if renewed_at is None else renewed_at
        self.held = HeldLease(lease, at, lambda: self._hear(self.lost), lambda: self._hear(self.stopped))

    def _hear(self, event: asyncio.Event) -> None:
        self.threads.add(threading.get_ident())
        event.set()


async def until(met: Callable[[], bool]) -> None:
    """Other threads tell nobody, so this looks."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not met():
            await asyncio.sleep(0.005)


async def wait(event: asyncio.Event) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        await event.wait()


def keeper_of(store: Leases, **options: Any) -> LeaseKeeper:
    return LeaseKeeper(lambda: store, SECONDS, **options)  # type: ignore[arg-type, return-value]


async def test_it_renews_what_is_held_on_a_thread_of_its_own_and_nothing_else() -> None:
    store, kept, dropped = Leases(), Holder("t1"), Holder("t2")
    keeper = keeper_of(store)
    keeper.hold(kept.held)
    keeper.hold(dropped.held)
    keeper.start()
    await until(lambda: ("t1", "t2") in store.renewed)
    keeper.drop(dropped.held)
    await until(lambda: ("t1",) in store.renewed)
    began = lease_clock()
    await until(lambda: kept.held.renewed_at >= began)
    await keeper.close()
    assert threading.get_ident() not in store.threads
    assert not kept.lost.is_set()
    assert (store.opened, store.closed) == (1, 1)


async def test_nothing_held_is_no_call() -> None:
    store = Leases()
    keeper = keeper_of(store)
    keeper.start()
    await asyncio.sleep(SECONDS)
    await keeper.close()
    assert store.renewed == []


async def test_what_the_store_could_not_look_at_is_not_renewed_and_tried_again_soon() -> None:
    skipped, fine = Holder("skipped"), Holder("fine")
    at = skipped.held.renewed_at
    store = Leases(lambda _: Renewed(frozenset(), frozenset(), frozenset({"skipped"})))
    keeper = keeper_of(store)
    for holder in (skipped, fine):
        keeper.hold(holder.held)
    keeper.start()
    await wait(skipped.lost)  # by its own clock
    renewals = len(store.renewed)
    await keeper.close()
    assert skipped.held.renewed_at == at
    assert fine.held.renewed_at > at
    assert not fine.lost.is_set()
    assert renewals > RENEWALS_PER_LEASE, "more often than what is renewed"


async def test_the_lost_and_the_stopped_hear_of_it_on_the_loop() -> None:
    lost, stopped, fine = Holder("lost"), Holder("stopped"), Holder("fine")
    keeper = keeper_of(Leases(lambda _: Renewed(frozenset({"lost"}), frozenset({"stopped"}))))
    before = lost.held.renewed_at
    for holder in (lost, stopped, fine):
        keeper.hold(holder.held)
    keeper.start()
    await wait(lost.lost)
    await wait(stopped.stopped)
    await keeper.close()
    assert lost.threads | stopped.threads == {threading.get_ident()}
    assert not stopped.lost.is_set()
    assert not fine.lost.is_set()
    assert not fine.stopped.is_set()
    assert lost.held.renewed_at == before


def _away(_: Sequence[str]) -> Renewed:
    raise StoreUnavailable("it is away")


def _bug(_: Sequence[str]) -> Renewed:
    raise KeyError("a bug")


@pytest.mark.parametrize("store", [Leases(_away), Leases(_bug), Leases(hangs=True)], ids=["away", "bug", "hangs"])
async def test_a_lease_that_nobody_could_renew_is_given_up_by_our_own_clock(store: Leases) -> None:
    holder = Holder()
    keeper = keeper_of(store)
    keeper.hold(holder.held)
    keeper.start()
    await wait(holder.lost)
    assert holder.held.expired()
    calls = len(store.renewed)
    await until(lambda: len(store.renewed) > calls)  # and it goes on trying for the others
    await keeper.close()


async def test_an_outage_shorter_than_the_lease_loses_nothing() -> None:
    failures = 2

    def answer(_: Sequence[str]) -> Renewed:
        nonlocal failures
        failures -= 1
        if failures >= 0:
            raise StoreUnavailable("for a moment")
        return NOTHING

    holder = Holder(renewed_at=lease_clock() + 10)  # the clock is not what is tested here
    keeper = keeper_of(Leases(answer))
    keeper.hold(holder.held)
    keeper.start()
    await until(lambda: holder.held.renewed_at <= lease_clock())
    await keeper.close()
    assert not holder.lost.is_set()


async def test_it_goes_silent_while_the_loop_stands_still_and_comes_back() -> None:
    store, holder = Leases(), Holder()
    keeper = keeper_of(store, stalled_seconds=0.2)
    keeper.hold(holder.held)
    keeper.start()
    await asyncio.sleep(0.4)
    before = len(store.renewed)
    await until(lambda: len(store.renewed) > before)  # a loop that lives is not taken for a hung one
    time.sleep(0.4)  # noqa: ASYNC251 - the loop stalls
    during = len(store.renewed)
    time.sleep(0.3)  # noqa: ASYNC251
    assert len(store.renewed) == during
    await until(lambda: len(store.renewed) > during)
    await keeper.close()


async def test_closing_joins_the_thread() -> None:
    keeper = keeper_of(Leases())
    keeper.start()
    await keeper.close()
    assert "lease-keeper" not in {thread.name for thread in threading.enumerate()}


async def test_closing_one_that_never_started_is_nothing() -> None:
    await keeper_of(Leases()).close()


def test_a_lease_expires_by_our_own_clock_and_its_length() -> None:
    lease = Lease("c", 1, 1, "t", 10)
    assert not HeldLease(lease, lease_clock() - 9, lambda: None, lambda: None).expired()
    assert HeldLease(lease, lease_clock() - 10, lambda: None, lambda: None).expired()

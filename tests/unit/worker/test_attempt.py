"""An attempt's guard: what cuts a run off, when, and which of two reasons is told."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from shared.errors import LeaseLost, TurnTimeout
from shared.store.base import Lease
from worker.agent.run import Answered, Outcome
from worker.attempt import Attempt, Cut, HandBack, TurnStopped
from worker.leases import HeldLease, lease_clock

LEASE = Lease("c", 1, 1, "token", 10)
DONE = Answered("done")


def attempt_of(*, age_seconds: float = 0) -> Attempt:
    return Attempt(HeldLease(LEASE, lease_clock() - age_seconds, lambda: None, lambda: None))


async def for_ever() -> Outcome:
    await asyncio.Event().wait()
    return DONE


async def test_a_run_that_ends_is_its_outcome() -> None:
    async def run() -> Outcome:
        return DONE

    assert await attempt_of().supervise(run(), timeout_seconds=10) == DONE


async def test_what_a_run_raises_is_raised() -> None:
    async def run() -> Outcome:
        raise KeyError("x")

    with pytest.raises(KeyError):
        await attempt_of().supervise(run(), timeout_seconds=10)


@pytest.mark.parametrize(
    ("cut", "raised"),
    [
        (Attempt.lose, LeaseLost),
        (Attempt.stop, TurnStopped),
        (lambda a: a.cut(Cut.TIMEOUT), TurnTimeout),
        (lambda a: a.hand_back(hard=False), HandBack),
        (lambda a: a.hand_back(hard=True), HandBack),
    ],
)
@pytest.mark.parametrize("early", [True, False])
async def test_a_cut_run_raises_why(cut: Callable[[Attempt], None], raised: type[Exception], early: bool) -> None:
    attempt = attempt_of()
    if early:
        cut(attempt)
    else:
        asyncio.get_running_loop().call_soon(cut, attempt)
    with pytest.raises(raised):
        await attempt.supervise(for_ever(), timeout_seconds=10)
    with pytest.raises(raised):
        attempt.checkpoint()


async def test_a_run_without_time_does_not_begin() -> None:
    begun = False

    async def run() -> Outcome:
        nonlocal begun
        begun = True
        return DONE

    with pytest.raises(TurnTimeout):
        await attempt_of().supervise(run(), timeout_seconds=0)
    assert not begun


async def test_the_time_is_over() -> None:
    with pytest.raises(TurnTimeout):
        await attempt_of().supervise(for_ever(), timeout_seconds=0.01)


async def test_the_stronger_reason_stays() -> None:
    attempt = attempt_of()
    attempt.stop()
    attempt.cut(Cut.TIMEOUT)
    attempt.hand_back(hard=True)
    with pytest.raises(TurnStopped):
        attempt.checkpoint()
    attempt.lose()
    with pytest.raises(LeaseLost):
        attempt.checkpoint()


async def test_draining_ends_at_the_next_safe_point_and_not_before() -> None:
    attempt = attempt_of()
    went_on = False

    async def run() -> Outcome:
        nonlocal went_on
        attempt.checkpoint()
        attempt.drain()
        await asyncio.sleep(0)
        went_on = True
        attempt.checkpoint()
        return DONE

    with pytest.raises(HandBack):
        await attempt.supervise(run(), timeout_seconds=10)
    assert went_on


async def test_a_side_effect_is_not_cut_off_by_a_soft_hand_back_but_by_a_hard_one() -> None:
    attempt = attempt_of()
    inside = asyncio.Event()

    async def run() -> Outcome:
        with attempt.side_effect():
            inside.set()
            await asyncio.Event().wait()
        return DONE

    running = asyncio.create_task(attempt.supervise(run(), timeout_seconds=10))
    await inside.wait()
    attempt.hand_back(hard=False)
    await asyncio.sleep(0.01)
    assert not running.done()
    attempt.hand_back(hard=True)
    with pytest.raises(HandBack):
        await running


async def test_the_end_of_the_last_side_effect_is_a_safe_point() -> None:
    attempt = attempt_of()
    inside, go_on = asyncio.Event(), asyncio.Event()

    async def run() -> Outcome:
        with attempt.side_effect():
            inside.set()
            await go_on.wait()
        await asyncio.Event().wait()
        return DONE

    running = asyncio.create_task(attempt.supervise(run(), timeout_seconds=10))
    await inside.wait()
    attempt.hand_back(hard=False)
    go_on.set()
    with pytest.raises(HandBack):
        await running


@pytest.mark.parametrize("cut", [Attempt.stop, lambda a: a.cut(Cut.TIMEOUT)])
async def test_stop_and_timeout_go_on_without_a_running_side_effect(cut: Callable[[Attempt], None]) -> None:
    attempt = attempt_of()
    inside = asyncio.Event()

    async def run() -> Outcome:
        with attempt.side_effect():
            inside.set()
            await asyncio.Event().wait()
        return DONE

    running = asyncio.create_task(attempt.supervise(run(), timeout_seconds=10))
    await inside.wait()
    cut(attempt)
    with pytest.raises((TurnStopped, TurnTimeout)):
        await running


async def test_a_lease_that_may_be_gone_starts_no_side_effect() -> None:
    attempt = attempt_of(age_seconds=10)
    told: list[str] = []
    attempt.on_lost = lambda: told.append("lost")
    with pytest.raises(LeaseLost), attempt.side_effect():
        pytest.fail("it was started")
    assert told == ["lost"]
    with pytest.raises(LeaseLost):
        attempt.checkpoint()


async def test_cancelling_the_supervisor_cancels_the_run() -> None:
    attempt = attempt_of()
    ended = asyncio.Event()
    begun = asyncio.Event()

    async def run() -> Outcome:
        try:
            begun.set()
            await asyncio.Event().wait()
        finally:
            ended.set()
        return DONE

    running = asyncio.create_task(attempt.supervise(run(), timeout_seconds=10))
    await begun.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert ended.is_set()

"""An attempt: one claimed turn while it runs, and everything that can cut it short.

Four things end a run from outside: the lease is lost, somebody asks to stop, the time is over, the worker leaves. The
loop meets them at its safe points; what does not reach one in time is cut off there and then. A side effect that has
begun is waited for, as far as the time allows.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Any

from shared.errors import LeaseLost, TurnTimeout
from worker.agent.run import Outcome
from worker.leases import HeldLease


class Cut(Enum):
    """Why a run was cut off, the strongest last."""

    HAND_BACK = 1
    TIMEOUT = 2
    STOP = 3
    LOST = 4


class TurnStopped(Exception):
    """Somebody asked to stop this turn."""


class HandBack(Exception):
    """The worker is leaving: the turn goes on elsewhere."""


class Attempt:
    """The agent's ``Guard``, and the handle by which the worker reaches a running turn."""

    def __init__(self, held: HeldLease) -> None:
        self.held = held
        self._cut: Cut | None = None
        self._draining = False
        self._effects = 0
        self._task: asyncio.Task[Outcome] | None = None
        self.on_lost: Callable[[], None] | None = None
        """Called when the lease is lost, so that nothing more is written."""

    # What the agent sees

    def checkpoint(self) -> None:
        if self._cut is not None:
            raise _reason(self._cut)
        if self._draining:
            raise HandBack

    @contextmanager
    def side_effect(self) -> Iterator[None]:
        # Leaving does not count: the start is committed, so a call that did not begin would end as unknown, and an
        # exception here would cut off the side effects beside it.
        if self._cut is not None and self._cut is not Cut.HAND_BACK:
            raise _reason(self._cut)
        if self.held.expired():
            self.lose()
            raise LeaseLost("The lease may be gone by our own clock; the side effect was not started.")
        self._effects += 1
        try:
            yield
        finally:
            self._effects -= 1
            if self._effects == 0 and self._cut is Cut.HAND_BACK:
                self._cancel()

    # What the worker does

    async def supervise(self, run: Coroutine[Any, Any, Outcome], *, timeout_seconds: float) -> Outcome:
        """Run the agent. Raises ``LeaseLost``, ``TurnStopped``, ``TurnTimeout``, ``HandBack`` when it was cut, and
        what the run raises."""
        self._task = asyncio.ensure_future(run)
        if timeout_seconds <= 0:
            self.cut(Cut.TIMEOUT)
        if self._cut is not None:
            self._cancel()  # before its first step
        timer = asyncio.get_running_loop().call_later(max(0.0, timeout_seconds), self.cut, Cut.TIMEOUT)
        try:
            return await self._task
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if self._cut is None or (current is not None and current.cancelling()):
                raise  # we are being cancelled ourselves
            raise _reason(self._cut) from None
        finally:
            timer.cancel()
            self._task = None

    def lose(self) -> None:
        self.cut(Cut.LOST)
        if self.on_lost is not None:
            self.on_lost()

    def stop(self) -> None:
        self.cut(Cut.STOP)

    def drain(self) -> None:
        """End at the next safe point."""
        self._draining = True

    def hand_back(self, *, hard: bool) -> None:
        """The time to reach a safe point is over: cut off unless a side effect runs; ``hard``: even then."""
        if self._cut not in (None, Cut.HAND_BACK):
            return
        self._cut = Cut.HAND_BACK
        if self._effects == 0 or hard:
            self._cancel()

    def cut(self, why: Cut) -> None:
        if self._cut is not None and self._cut.value >= why.value:
            return
        self._cut = why
        self._cancel()

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()


def _reason(cut: Cut) -> Exception:
    match cut:
        case Cut.LOST:
            return LeaseLost("Another attempt owns the turn; nothing more was written.")
        case Cut.STOP:
            return TurnStopped()
        case Cut.TIMEOUT:
            return TurnTimeout(
                "The time of the turn is over; what was running was cut off.",
                hint="Retry the turn to go on from here, or raise TURNKEEPER_TURN_DEADLINE_SECONDS.",
            )
        case Cut.HAND_BACK:
            return HandBack()

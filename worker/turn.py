"""A turn, from its claim to its end: hydrate, run the agent, finish with exactly one terminal event.

Whatever goes wrong in a turn ends in the log, where people see it; whatever goes wrong with the lease ends quietly,
since somebody else is writing now.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

import structlog
from structlog.contextvars import bound_contextvars

from publisher import EventPublisher, LiveSink, PublisherLimits
from shared import faults
from shared.errors import LeaseLost, RateLimited, StoreError, StoreUnavailable, TurnkeeperError
from shared.events import EventDraft, Finish
from shared.live import LiveEntry
from shared.redaction import Redactor
from shared.requests import RequestRecord
from shared.settings import Settings
from shared.store.base import Appended, Claim, Lease, NotClaimed, Ring, Store
from worker import endings
from worker.agent.base import ChatModel, Toolbox
from worker.agent.loop import AgentLoop
from worker.agent.run import Run, run_of
from worker.attempt import Attempt, HandBack, TurnStopped
from worker.leases import RENEWALS_PER_LEASE, HeldLease, LeaseKeeper, lease_clock
from worker.patience import Answer, StoreArtifacts, patiently

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class TurnReport:
    """How one attempt ended. ``status``: the turn's, or ``lost`` / ``pending`` (handed back)."""

    conversation_id: str
    turn: int
    attempt: int
    status: str
    finish_reason: str
    error: dict[str, Any] | None = None
    next_queue: str | None = None

    @property
    def ended(self) -> bool:
        return self.status not in ("lost", "pending")

    def as_dict(self) -> dict[str, Any]:
        out: dict[str, Any] = {
            "conversation_id": self.conversation_id,
            "turn": self.turn,
            "attempt": self.attempt,
            "status": self.status,
            "finish_reason": self.finish_reason,
        }
        if self.error:
            out["error"] = self.error
        return out


@dataclass(frozen=True, slots=True)
class Parts:
    """What turns are run with; one per process."""

    settings: Settings
    store: Store
    model: ChatModel
    toolbox: Toolbox
    keeper: LeaseKeeper
    live: LiveSink | None
    worker: str


@dataclass(frozen=True, slots=True)
class Holding:
    """A lease that is kept alive; ``drop`` ends that, and may be called twice."""

    drop: Callable[[], None]


class TurnRunner:
    """Runs claimed turns; knows which are running."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._limits = PublisherLimits.from_settings(parts.settings)
        self._redactor = Redactor.from_settings(parts.settings)
        self._running: set[Attempt] = set()
        self._leaving = False
        self._nothing_runs = asyncio.Event()
        self._nothing_runs.set()

    async def leave(self) -> None:
        """Hand back every turn: at its next safe point, at the latest after ``drain_seconds``; a side effect that
        runs then has until ``hard_deadline_seconds``."""
        settings = self._parts.settings
        self._leaving = True
        for attempt in self._running:
            attempt.drain()
        if await self._quiet(settings.drain_seconds):
            return
        for attempt in self._running:
            attempt.hand_back(hard=False)
        if await self._quiet(max(1.0, settings.hard_deadline_seconds - settings.drain_seconds)):
            return
        for attempt in self._running:
            attempt.hand_back(hard=True)
        if not await self._quiet(settings.lease_seconds):
            log.error("turns_still_run", turns=len(self._running))

    async def _quiet(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                await self._nothing_runs.wait()
        except TimeoutError:
            return False
        return True

    async def patiently(self, call: Callable[[], Awaitable[Answer]]) -> Answer:
        """Repeat a call until the store is back or the worker leaves. Raises ``StoreUnavailable``."""
        return await patiently(call, give_up=lambda: self._leaving)

    async def release(self, lease: Lease) -> Ring:
        """Give a claimed turn back before it ran. Raises ``LeaseLost``, ``StoreUnavailable``."""
        return await self.patiently(lambda: self._parts.store.release(lease))

    @contextmanager
    def holding(self, lease: Lease, sent_at: float) -> Iterator[Holding]:
        """Keep a lease alive that is not used here, until ``drop``."""
        held = HeldLease(lease, sent_at, lambda: None, lambda: None)
        self._parts.keeper.hold(held)
        try:
            yield Holding(lambda: self._parts.keeper.drop(held))
        finally:
            self._parts.keeper.drop(held)

    async def claim(
        self, conversation_id: str, record: RequestRecord | None, *, claim_id: str | None = None
    ) -> tuple[Claim | NotClaimed, float]:
        """Claim the lowest unfinished turn, and the lease clock at the send of the claim that succeeded. A lost reply
        is asked for again under the same claim id, so it cannot leave a turn that nobody runs."""
        settings = self._parts.settings
        claim_id = claim_id or uuid.uuid4().hex
        give_up_at = time.monotonic() + settings.lease_seconds
        sent_at = lease_clock()

        async def claim_once() -> Claim | NotClaimed:
            nonlocal sent_at
            sent_at = lease_clock()
            claimed = await self._parts.store.claim(
                conversation_id,
                worker=self._parts.worker,
                claim_id=claim_id,
                lease_seconds=settings.lease_seconds,
                max_crashes=settings.max_crashes,
                record=record,
                account_turns=settings.account_turns,
                account_cost_usd=settings.account_cost_usd,
            )
            if isinstance(claimed, Claim):
                faults.reach("after_claim")
            return claimed

        async def claim() -> Claim | NotClaimed:
            """Asked again, a lease begins anew: one that waited long for a connection may have no time left by our
            own clock, and then its first side effect would not be started."""
            claimed = await claim_once()
            late = isinstance(claimed, Claim) and lease_clock() - sent_at > settings.lease_seconds / RENEWALS_PER_LEASE
            return await claim_once() if late else claimed

        def give_up() -> bool:  # what is recorded is rung again by the reaper; what is not is only in our hands
            return self._leaving or (record is None and time.monotonic() > give_up_at)

        claimed = await patiently(claim, give_up=give_up)
        if claimed.ended and self._parts.live is not None:
            self._parts.live.push([LiveEntry.of_row(row) for row in claimed.ended])
        return claimed, sent_at

    async def run(
        self,
        claim: Claim,
        sent_at: float,
        *,
        on_attempt: Callable[[Attempt], None],
        timeout_seconds: float | None = None,
    ) -> TurnReport:
        """Run a claimed turn to its end, or until it is lost or handed back."""
        lease = claim.lease
        with bound_contextvars(conversation=lease.conversation_id, turn=lease.turn, attempt=lease.attempt):
            attempt: Attempt
            held = HeldLease(lease, sent_at, lambda: attempt.lose(), lambda: attempt.stop())
            attempt = Attempt(held)
            self._parts.keeper.hold(held)
            self._running.add(attempt)
            self._nothing_runs.clear()
            if self._leaving:
                attempt.drain()
            on_attempt(attempt)
            started = time.monotonic()
            try:
                report = await self._attempt(claim, attempt, timeout_seconds)
            finally:
                self._running.discard(attempt)
                if not self._running:
                    self._nothing_runs.set()
                self._parts.keeper.drop(held)
            log.info(
                "turn_ended" if report.ended else "turn_left",
                status=report.status,
                finish_reason=report.finish_reason,
                seconds=round(time.monotonic() - started, 3),
            )
            return report

    async def _attempt(self, claim: Claim, attempt: Attempt, timeout_seconds: float | None) -> TurnReport:
        settings, lease, loop = self._parts.settings, claim.lease, asyncio.get_running_loop()
        remaining = _remaining_seconds(claim, settings.turn_deadline_seconds)
        if timeout_seconds is not None:
            remaining = min(remaining, timeout_seconds)
        run = run_of(claim, settings, claimed_at=loop.time(), deadline=loop.time() + remaining)
        run.artifacts = StoreArtifacts(self._parts.store, lease)
        publisher = EventPublisher(
            self._parts.store,
            lease,
            limits=self._limits,
            live=self._parts.live,
            on_stop=attempt.stop,
            on_lost=attempt.lose,
        )
        attempt.on_lost = publisher.abandon
        try:
            async with publisher:
                try:
                    if lease.attempt > 1:
                        publisher.emit(endings.resumed(claim))
                    agent = AgentLoop(
                        run,
                        model=self._parts.model,
                        toolbox=self._parts.toolbox,
                        events=publisher,
                        guard=attempt,
                        settings=settings,
                        redactor=self._redactor,
                    )
                    outcome = await attempt.supervise(agent.run(), timeout_seconds=remaining)
                except HandBack:
                    return await self._hand_back(publisher, lease, 0, "handed_back")
                except LeaseLost:
                    attempt.lose()
                    raise
                except RateLimited as error:
                    wait = endings.wait_for(error, lease.attempt)
                    if wait is not None and wait < run.deadline - loop.time():
                        return await self._hand_back(publisher, lease, wait, "rate_limited")
                    draft, finish = self._failed(run, error)
                except TurnStopped:
                    if (shown := endings.partial(run)) is not None:
                        publisher.emit(shown)
                    draft, finish = endings.stopped(run)
                except TurnkeeperError as error:
                    draft, finish = self._failed(run, error)
                except Exception as error:
                    log.exception("turn_failed_by_a_bug")
                    draft, finish = self._failed(run, endings.internal(error))
                else:
                    draft, finish = endings.ended(run, outcome)
                appended = await publisher.finish(draft, finish)
                return _report(lease, finish, appended)
        except LeaseLost:
            log.warning("lease_lost")
            return TurnReport(lease.conversation_id, lease.turn, lease.attempt, "lost", LeaseLost.code)
        except StoreError as error:  # for good, or the publisher would still be trying: the lease is left to expire
            log.error("events_not_stored", error=error.code)
            return TurnReport(lease.conversation_id, lease.turn, lease.attempt, "lost", error.code)

    def _failed(self, run: Run, error: TurnkeeperError) -> tuple[EventDraft, Finish]:
        """A failed turn's end. What a provider or a tool said in its error may hold secrets."""
        draft, finish = endings.failed(run, error)
        hidden = self._redactor.value
        return replace(draft, data=hidden(draft.data)), replace(finish, error=hidden(finish.error))

    async def _hand_back(self, publisher: EventPublisher, lease: Lease, delay: float, why: str) -> TurnReport:
        """Flush and release. While the store is away this goes on until the lease is lost or the process ends."""
        await publisher.barrier()

        async def release() -> Ring:
            faults.reach("before_release")
            ring = await self._parts.store.release(lease, delay)
            faults.reach("after_release")
            return ring

        try:
            ring = await patiently(release, give_up=lambda: publisher.lost)
        except StoreUnavailable:
            raise LeaseLost("The store was away until the lease was gone; the turn is taken over.") from None
        queue = ring.queue if delay == 0 else None
        return TurnReport(lease.conversation_id, lease.turn, lease.attempt, "pending", why, next_queue=queue)


def _remaining_seconds(claim: Claim, deadline_seconds: float) -> float:
    started_at = datetime.fromisoformat(claim.turn["started_at"])
    return max(0.0, deadline_seconds - (claim.now - started_at).total_seconds())


def _report(lease: Lease, finish: Finish, appended: Appended) -> TurnReport:
    return TurnReport(
        lease.conversation_id,
        lease.turn,
        lease.attempt,
        appended.status,
        finish.finish_reason if appended.status == finish.status else appended.status,
        finish.error,
        appended.next_queue,
    )

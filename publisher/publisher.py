"""One writer for one attempt: events in order, in numbered batches, each stored once.

``emit`` puts an event into the queue; one task, the flusher, cuts batches from its head and appends them. A batch is
sealed at its first send: a retry sends the same list under the same number, so that a reply lost on the way is
answered from what is stored. Events that come meanwhile wait for the next batch.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, Self

import structlog

from publisher.harden import clean_finish, measured
from publisher.live import LiveSink
from publisher.writer import BatchWriter
from shared.errors import LeaseLost, StoreError
from shared.events import AI_MESSAGE_DELTA, APPROVAL_REQUIRED, SNAPSHOTS, TERMINALS, TURN_STOPPED, EventDraft, Finish
from shared.live import LiveEntry
from shared.settings import Settings
from shared.store.base import Appended, Lease, Store

SOON_SECONDS = 0.005

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class PublisherLimits:
    """When a batch goes out, and how long leaving may take.

    ``exit_seconds``: time to store, on leaving, what was emitted; the lease's length when None.
    """

    batch_events: int = 64
    batch_bytes: int = 256_000
    batch_age_seconds: float = 0.25
    snapshots_kept: int = 1
    exit_seconds: float | None = None

    @classmethod
    def from_settings(cls, settings: Settings) -> Self:
        return cls(
            batch_events=settings.batch_events,
            batch_bytes=settings.batch_bytes,
            batch_age_seconds=settings.batch_age_seconds,
            snapshots_kept=settings.snapshots_kept,
        )


class EventPublisher:
    """The events of one attempt. Use as a context manager, inside the job.

    ``emit`` never blocks: ``barrier`` is the back-pressure, ``backlog`` shows how much waits. ``on_stop`` is called
    once, when the store first says that somebody asked to stop; ``on_lost`` once, when writing ended by itself
    (the lease is gone, or the store failed for good), not after ``abandon``.
    """

    def __init__(
        self,
        store: Store,
        lease: Lease,
        *,
        limits: PublisherLimits,
        live: LiveSink | None = None,
        on_stop: Callable[[], None] | None = None,
        on_lost: Callable[[], None] | None = None,
    ) -> None:
        self._lease, self._limits, self._live = lease, limits, live
        self._writer = BatchWriter(store, lease, limits.snapshots_kept, self._committed)
        self._on_stop, self._on_lost = on_stop, on_lost
        self._queue: deque[tuple[EventDraft, int]] = deque()  # with their bytes
        self._queued_bytes = 0
        self._emitted = self._stored = 0  # events
        self._flush_to = 0  # events up to this one go out without waiting
        self._finish: Finish | None = None
        self._finished: Appended | None = None
        self._failure: Exception | None = None
        self._stop_requested = self._leaving = False
        self._wake = asyncio.Event()
        self._timer: asyncio.Handle | None = None
        self._flush_at = 0.0  # when the timer is due; uvloop's for no delay cannot tell
        self._waiters: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._flusher: asyncio.Task[None] | None = None
        self._delta_step = self._delta_count = 0

    @property
    def lost(self) -> bool:
        """Nothing can be written any more."""
        return self._failure is not None

    @property
    def stop_requested(self) -> bool:
        return self._stop_requested

    @property
    def backlog(self) -> int:
        """Events that were emitted and are not stored yet."""
        return self._emitted - self._stored

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._flusher = self._loop.create_task(self._flush())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Store what was emitted, within ``exit_seconds``, and join the flusher.

        Raises ``LeaseLost`` when that fails here and no other exception is on its way."""
        assert self._flusher is not None
        was_lost = self.lost
        self._leaving = True
        self._flush_now()
        seconds = self._limits.exit_seconds
        try:
            await asyncio.wait([self._flusher], timeout=self._lease.seconds if seconds is None else seconds)
        finally:
            if not self._flusher.done():
                self.abandon()
            await asyncio.wait([self._flusher])
            if self._timer is not None:
                self._timer.cancel()
        if self.backlog and not was_lost:
            _log.warning("events_not_stored", backlog=self.backlog, turn=self._lease.turn)
            if error is None:
                self._check()

    def emit(self, draft: EventDraft, *, soon: bool = False) -> None:
        """Queue an event; ``soon`` sends it within ``SOON_SECONDS`` instead of at batch age: what a fast tool answers
        meanwhile saves a round trip by going along. Terminal events go through ``finish``.

        Raises ``LeaseLost``; ``StoreError`` after the store failed for good; ``RuntimeError`` outside the context or
        after the terminal event."""
        if draft.event in TERMINALS:
            raise ValueError(f"{draft.event} ends the turn: it goes through finish()")
        self._put(draft, SOON_SECONDS if soon else self._limits.batch_age_seconds)

    def delta(self, *, step: int, text: str = "", reasoning: str = "") -> None:
        """A piece of the answer as it streams: for live readers only, dropped when there is nobody to carry it."""
        if self._live is None or self.lost or self._finish is not None:
            return
        if step != self._delta_step:
            self._delta_step, self._delta_count = step, 0
        self._delta_count += 1
        data = {"step": step, "n": self._delta_count, "last": self._delta_count, "text": text, "reasoning": reasoning}
        self._live.push([self._entry(AI_MESSAGE_DELTA, data, None)])

    async def barrier(self) -> None:
        """Return when everything emitted so far is stored. Raises what ``emit`` raises."""
        self._check()
        if self._stored < self._emitted:
            self._flush_now()
            await self._reached(self._emitted)

    async def finish(self, draft: EventDraft, finish: Finish) -> Appended:
        """Store the terminal event with the turn's end in one transaction; nothing follows. Raises as ``emit`` does."""
        self._check()
        self._put(draft, 0.0, clean_finish(finish))
        await self._reached(self._emitted)
        assert self._finished is not None
        return self._finished

    def abandon(self) -> None:
        """Stop writing for good, for instance because the lease is gone by our own clock. Waiters get ``LeaseLost``."""
        if self._finished is None:
            self._end(LeaseLost("The attempt gave up its lease; what was not stored yet is not written."), told=True)
        if self._flusher is not None:
            self._flusher.cancel()

    def _check(self) -> None:
        if isinstance(self._failure, LeaseLost):
            raise LeaseLost(self._failure.description)
        if self._failure is not None:
            raise StoreError("The store failed for good; nothing more is written.") from self._failure
        if self._flusher is None:
            raise RuntimeError("the publisher is not open")

    def _put(self, draft: EventDraft, wait_seconds: float, finish: Finish | None = None) -> None:
        self._check()
        if self._finish is not None or self._leaving:
            raise RuntimeError(f"{draft.event} comes after the end of the turn")
        at_once = finish is not None or draft.event in SNAPSHOTS
        size = 0  # a snapshot ends its batch and has no limit, so its length is not worth knowing
        if draft.event not in SNAPSHOTS:
            draft, size = measured(draft)
        self._finish = finish
        self._queue.append((draft, size))
        self._queued_bytes += size
        self._emitted += 1
        if at_once or len(self._queue) >= self._limits.batch_events or self._queued_bytes >= self._limits.batch_bytes:
            self._flush_now()
        elif self._timer is None or self._flush_at > self._loop.time() + wait_seconds:
            if self._timer is not None:
                self._timer.cancel()
            self._flush_at = self._loop.time() + wait_seconds
            self._timer = self._loop.call_later(wait_seconds, self._flush_now)

    def _flush_now(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._flush_to = self._emitted
        self._wake.set()

    async def _reached(self, event: int) -> None:
        reached: asyncio.Future[None] = self._loop.create_future()
        self._waiters.append((event, reached))
        await reached
        if self._stored < event:
            self._check()

    async def _flush(self) -> None:
        """The flusher: one batch after the other until the terminal one is stored or writing has to end."""
        try:
            while not (self._finished or self._failure):
                await self._wake.wait()
                self._wake.clear()
                while self._stored < self._flush_to:
                    await self._writer.write(*self._cut())
                if self._leaving:
                    return
        except LeaseLost as error:
            self._end(error)
        except Exception as error:
            _log.exception("publisher_failed", conversation_id=self._lease.conversation_id, turn=self._lease.turn)
            self._end(error)

    def _cut(self) -> tuple[list[EventDraft], Finish | None]:
        """The next batch: as many events as the limits allow, at least one, none behind a snapshot."""
        batch: list[EventDraft] = []
        total = 0
        while self._queue and len(batch) < self._limits.batch_events:
            draft, size = self._queue[0]
            if batch and total + size > self._limits.batch_bytes:
                break
            self._queue.popleft()
            batch.append(draft)
            total += size
            if draft.is_snapshot:
                break
        self._queued_bytes -= total
        return batch, self._finish if not self._queue else None

    def _committed(self, batch: Sequence[EventDraft], finish: Finish | None, answer: Appended) -> None:
        self._stored += len(batch)
        if finish is not None:
            self._finished = answer
        if self._live is not None:
            self._live.push([self._stored_entry(d, answer.first_seq + i, answer) for i, d in enumerate(batch)])
        while self._waiters and self._waiters[0][0] <= self._stored:
            _release(self._waiters.popleft()[1])
        if answer.stop_requested and not self._stop_requested:
            self._stop_requested = True
            if self._on_stop is not None:
                self._on_stop()

    def _stored_entry(self, draft: EventDraft, seq: int, answer: Appended) -> LiveEntry:
        if draft.event == APPROVAL_REQUIRED and answer.status == "stopped":  # it met a stop request in the store
            return self._entry(TURN_STOPPED, {}, seq)
        return self._entry(draft.event, draft.data, seq)

    def _entry(self, event: str, data: dict[str, Any], seq: int | None) -> LiveEntry:
        lease = self._lease
        now = datetime.now(UTC).isoformat()
        return LiveEntry(lease.conversation_id, seq, lease.turn, lease.attempt, event, data, now)

    def _end(self, error: Exception, *, told: bool = False) -> None:
        if self._failure is not None:
            return
        self._failure = error
        while self._waiters:
            _release(self._waiters.popleft()[1])
        if self._on_lost is not None and not told:
            self._on_lost()


def _release(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)

"""Leases: one renewal for all turns of a process, on a thread and a connection of its own.

The thread keeps leases alive while the event loop is busy, but not for ever: once the loop has not ticked for
``STALLED_SECONDS`` it goes silent, so that the turns of a hung process are taken over. A lease counts as lost when
the database says so, or when our own clock says that nobody has renewed it for its whole length.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import structlog

from shared.errors import StoreError
from shared.store.base import Lease, Renewed, Store

STALLED_SECONDS: Final = 60.0
TICKS_PER_STALL: Final = 60
RENEWALS_PER_LEASE: Final = 3
RETRIES_PER_LEASE: Final = 10  # after a renewal that failed

log = structlog.get_logger(__name__)


def lease_clock() -> float:
    """Seconds on a clock that also counts while the machine sleeps, where there is one."""
    boot = getattr(time, "CLOCK_BOOTTIME", None)
    return time.clock_gettime(boot) if boot is not None else time.monotonic()


@dataclass(slots=True, eq=False)
class HeldLease:
    """A lease in use. ``renewed_at``: when the last claim or renewal that succeeded was sent."""

    lease: Lease
    renewed_at: float
    on_lost: Callable[[], None] = field(repr=False)
    on_stopped: Callable[[], None] = field(repr=False)

    def expired(self) -> bool:
        """By our own clock another worker may have taken the turn over."""
        return lease_clock() - self.renewed_at >= self.lease.seconds


class LeaseKeeper:
    """Renews what is held, from ``start`` to ``close``. Callbacks run on the loop that called ``start``."""

    def __init__(
        self, new_store: Callable[[], Store], lease_seconds: float, *, stalled_seconds: float = STALLED_SECONDS
    ) -> None:
        self._new_store = new_store
        self._lease_seconds = lease_seconds
        self._stalled_seconds = stalled_seconds
        self._held: dict[str, HeldLease] = {}
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._ticked_at = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="lease-keeper", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ticker: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._ticker = self._loop.create_task(self._tick())
        self._thread.start()

    async def close(self) -> None:
        self._closing.set()
        if self._ticker is not None:
            self._ticker.cancel()
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join)

    def hold(self, held: HeldLease) -> None:
        with self._lock:
            self._held[held.lease.token] = held

    def drop(self, held: HeldLease) -> None:
        with self._lock:
            self._held.pop(held.lease.token, None)

    async def _tick(self) -> None:
        """Show that the loop lives, and give up what has expired: here, since a renewal may hang."""
        while True:
            self._ticked_at = time.monotonic()
            with self._lock:
                expired = [held for held in self._held.values() if held.expired()]
            for held in expired:
                held.on_lost()
            await asyncio.sleep(min(self._stalled_seconds / TICKS_PER_STALL, self._lease_seconds / RETRIES_PER_LEASE))

    def _run(self) -> None:
        asyncio.run(self._renew_until_closed())

    async def _renew_until_closed(self) -> None:
        store = self._new_store()
        opened, tries = False, RENEWALS_PER_LEASE
        try:
            while not await self._closed_within(self._lease_seconds / tries):
                if time.monotonic() - self._ticked_at > self._stalled_seconds:
                    log.error("leases_left_to_expire", held=len(self._held))
                    continue
                with self._lock:
                    held = list(self._held.values())
                if not held:
                    continue
                tries = RETRIES_PER_LEASE
                try:
                    async with asyncio.timeout(self._lease_seconds):
                        if not opened:
                            await store.open()
                            opened = True
                        renewed = await self._renew(store, held)
                    if not renewed.skipped:  # else again soon
                        tries = RENEWALS_PER_LEASE
                except (StoreError, TimeoutError) as error:
                    log.warning("leases_not_renewed", error=type(error).__name__, held=len(held))
                except Exception:  # a bug must not end the thread: nothing would be renewed any more
                    log.exception("leases_not_renewed")
        finally:
            if opened:
                await store.close()

    async def _closed_within(self, seconds: float) -> bool:
        """Wait without holding up this thread's loop, on which a store's connection pool has tasks of its own."""
        return await asyncio.to_thread(self._closing.wait, seconds)

    async def _renew(self, store: Store, held: list[HeldLease]) -> Renewed:
        sent_at = lease_clock()
        renewed = await store.renew([h.lease.token for h in held], self._lease_seconds)
        for lease in held:
            if lease.lease.token in renewed.lost:
                self._call(lease.on_lost)
                continue
            if lease.lease.token not in renewed.skipped:
                lease.renewed_at = sent_at
            if lease.lease.token in renewed.stopped:
                self._call(lease.on_stopped)
        return renewed

    def _call(self, callback: Callable[[], None]) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(callback)

"""The reaper: rings for conversations whose turn is due. It only rings; claims end turns and take them over."""

from __future__ import annotations

import asyncio

import structlog

from shared.errors import QueueUnavailable, StoreError
from shared.queues import Ringer
from shared.store.base import Store

log = structlog.get_logger(__name__)

LIMIT = 100  # conversations a round; a full round is followed by the next at once


class Reaper:
    """One a process. When Redis has lost the epoch key it was emptied: then everything unfinished is rung at once."""

    def __init__(self, store: Store, ringer: Ringer, interval_seconds: float) -> None:
        self._store = store
        self._ringer = ringer
        self._interval_seconds = interval_seconds
        self._trouble: str | None = None

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            try:
                more = await self.once()
                if self._trouble is not None:
                    log.info("reaping_again")
                self._trouble = None
            except (StoreError, QueueUnavailable) as error:
                more = False
                if self._trouble != error.code:
                    log.warning("not_reaping", error=error.code)
                self._trouble = error.code
            if not more:
                await asyncio.sleep(self._interval_seconds)

    async def once(self) -> bool:
        """One round; True when there may be more to ring for."""
        lost_memory = await self._ringer.epoch_missing()
        rings = await self._store.reap(limit=LIMIT, everything=lost_memory)
        if rings:
            await self._ringer.ring(rings)
        if len(rings) == LIMIT:
            return True
        if lost_memory:
            await self._ringer.set_epoch()
        return False

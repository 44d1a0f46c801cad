"""The reaper: rings for conversations whose turn is due. It only rings; claims end turns and take them over."""

from __future__ import annotations

import asyncio

import structlog

from shared.errors import QueueUnavailable, StoreError
from shared.queues import Ringer
from shared.store.base import Ring, Store

log = structlog.get_logger(__name__)

LIMIT = 100  # conversations a round; a full round is followed by the next at once


class Reaper:
    """One a process. When Redis has lost the epoch key it was emptied: then everything unfinished is rung at once."""

    def __init__(self, store: Store, ringer: Ringer, interval_seconds: float) -> None:
        self._store = store
        self._ringer = ringer
        self._interval_seconds = interval_seconds
        self._trouble: str | None = None
        self._owed: list[Ring] = []

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
            except Exception:  # a bug must not end the reaping: nobody would notice until a ring is missed
                more = False
                log.exception("not_reaping")
            if not more:
                await asyncio.sleep(self._interval_seconds)

    async def once(self) -> bool:
        """One round; True when there may be more to ring for. What Redis did not take (a full one refuses) is owed: the
        store counts it as rung, and would tell of it again only after its back-off."""
        if await self._ringer.epoch_missing():
            await self._store.reap(everything=True)  # is due now, and comes page by page
            await self._ringer.set_epoch()
        self._owed = self._owed or await self._store.reap(limit=LIMIT)
        rings = self._owed
        if rings:
            await self._ringer.ring(rings)
        self._owed = []
        return len(rings) == LIMIT

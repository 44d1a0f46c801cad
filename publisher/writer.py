"""Batches on their way to the store: numbered, repeated until they are stored, split where their content is refused."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence

import orjson
import structlog

from publisher.harden import versions
from shared import faults
from shared.errors import ContentRefused, StoreUnavailable
from shared.events import EventDraft, Finish
from shared.store.base import Appended, Lease, Store

RETRY_SECONDS = 0.05  # first wait after a failed append; doubles
RETRY_SECONDS_MAX = 2.0

Committed = Callable[[Sequence[EventDraft], Finish | None, Appended], None]

_log = structlog.get_logger(__name__)


class BatchWriter:
    """Appends one batch at a time under the next number of the lease; ``committed`` hears of each stored part."""

    def __init__(self, store: Store, lease: Lease, snapshots_kept: int, committed: Committed) -> None:
        self._store, self._lease, self._snapshots_kept, self._committed = store, lease, snapshots_kept, committed
        self._batch = 0  # number of the last batch that was stored

    async def write(self, batch: Sequence[EventDraft], finish: Finish | None) -> None:
        """Store a batch, however long it takes. Raises ``LeaseLost``.

        While its content is refused it goes in halves, ``finish`` with the last, until a single event is found; that
        one is stored in a weaker version. A refused number is not consumed: the store undid all of it. Raises
        ``ContentRefused`` when even the weakest version is refused."""
        try:
            await self._append(batch, finish)
        except ContentRefused as refusal:
            if len(batch) == 1:
                await self._write_weaker(batch[0], finish, refusal)
                return
            middle = len(batch) // 2
            await self.write(batch[:middle], None)
            await self.write(batch[middle:], finish)

    async def _write_weaker(self, draft: EventDraft, finish: Finish | None, refusal: ContentRefused) -> None:
        _log.warning("event_refused", refused=draft.event, turn=self._lease.turn, reason=refusal.description)
        for weaker, weaker_finish in versions(draft, finish, refusal):
            try:
                await self._append([weaker], weaker_finish)
            except ContentRefused as again:
                refusal = again
            else:
                return
        raise refusal

    async def _append(self, batch: Sequence[EventDraft], finish: Finish | None) -> None:
        """One sealed batch: a retry sends the same list under the same number, so it is stored once."""
        wait = RETRY_SECONDS
        while True:
            try:
                faults.reach("before_flush" if finish is None else "before_end")
                answer = await self._store.append(
                    self._lease, self._batch + 1, batch, finish, snapshots_kept=self._snapshots_kept
                )
                faults.reach("after_flush" if finish is None else "after_end")
                break
            except (orjson.JSONEncodeError, RecursionError) as error:  # found by the encoder, before the database did
                raise ContentRefused(f"Not JSON: {error}; nothing was written.") from None
            except StoreUnavailable as error:
                _log.warning("append_retried", batch=self._batch + 1, turn=self._lease.turn, reason=error.description)
            await asyncio.sleep(wait * random.uniform(0.5, 1.0))  # noqa: S311 - jitter, not a secret
            wait = min(2 * wait, RETRY_SECONDS_MAX)
        self._batch += 1
        self._committed(batch, finish, answer)

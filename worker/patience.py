"""Patience: what to do while the store is away. A call that may be repeated is repeated."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

from shared.errors import StoreUnavailable
from shared.requests import Artifact
from shared.store.base import Lease, Store

FIRST_WAIT_SECONDS: Final = 0.05  # before the first repetition; doubled each time
LONGEST_WAIT_SECONDS: Final = 2.0

Answer = TypeVar("Answer")


async def patiently(call: Callable[[], Awaitable[Answer]], *, give_up: Callable[[], bool] = lambda: False) -> Answer:
    """Repeat a call that may be repeated for as long as the store is away. Raises the last ``StoreUnavailable`` once
    ``give_up`` says so."""
    delay = FIRST_WAIT_SECONDS
    while True:
        try:
            return await call()
        except StoreUnavailable:
            if give_up():
                raise
            await asyncio.sleep(delay)
            delay = min(delay * 2, LONGEST_WAIT_SECONDS)


class StoreArtifacts:
    """A tool's access to the artifacts of the turn's conversation. While the store is away a call waits; losing the
    lease ends the wait by cancelling the run."""

    def __init__(self, store: Store, lease: Lease) -> None:
        self._store = store
        self._lease = lease

    async def put(self, name: str, media_type: str, content: bytes) -> str:
        artifact = Artifact.of(self._lease.conversation_id, name, media_type, content)
        await patiently(lambda: self._store.put_artifact(self._lease, artifact))
        return artifact.artifact_id

    async def get(self, artifact_id: str) -> bytes | None:
        artifact = await patiently(lambda: self._store.get_artifact(self._lease.conversation_id, artifact_id))
        return artifact.content if artifact else None

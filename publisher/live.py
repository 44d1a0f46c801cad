"""Live fan-out: stored events after their commit, and deltas as they come, to a capped Redis Stream per conversation.

A convenience: the store has the truth. So nothing here blocks a turn or fails it; what Redis does not take is dropped
and counted, and readers fill the gap from the store (``shared/live.py`` has the format and the reader).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, Self

import orjson
import structlog

from shared.clean import clean_text
from shared.live import LiveEntry, public_data
from shared.queues import connect_async, live_key
from shared.redaction import Redactor
from shared.settings import Settings

if TYPE_CHECKING:  # importing redis is slow
    from redis.asyncio import Redis

JOIN_SECONDS = 0.04  # pieces of a streaming answer that come within this time travel together
ENTRY_BYTES = 64_000  # a larger row goes without its data: the reader takes it from the store
BUFFER_ENTRIES = 10_000  # of all conversations of the process
BUFFER_BYTES = 16_000_000
SEND_SECONDS = 2.0  # Redis answers within this time, or is away
OUTAGE_SECONDS = 1.0  # between tries while it is

_log = structlog.get_logger(__name__)


class LiveSink(Protocol):
    """Where the publisher shows what happens, in order. ``push`` never blocks and never raises."""

    def push(self, entries: Sequence[LiveEntry]) -> None: ...

    async def close(self) -> None: ...


@dataclass(slots=True)
class _Delta:
    """Joined pieces of one step's text."""

    entry: LiveEntry
    last: int
    text: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)

    def add(self, entry: LiveEntry) -> None:
        self.last = entry.data["last"]
        self.text.append(entry.data["text"])
        self.reasoning.append(entry.data["reasoning"])

    def goes_on_with(self, entry: LiveEntry) -> bool:
        mine = self.entry
        return (mine.turn, mine.attempt, mine.data["step"]) == (entry.turn, entry.attempt, entry.data["step"])

    def encoded(self) -> bytes:
        joined = {"text": clean_text("".join(self.text)), "reasoning": clean_text("".join(self.reasoning))}
        return orjson.dumps({**self.entry.as_row(), "data": {**self.entry.data, "last": self.last, **joined}})


class RedisLive:
    """The one live sink of a process: a bounded buffer, and one task that empties it in pipelines."""

    def __init__(
        self, redis: Redis, *, entries: int = 2_000, seconds: float = 3_600, redactor: Redactor | None = None
    ) -> None:
        """``entries``: cap of a stream; ``seconds``: its life after its last entry; ``redactor``: masks what calls
        have in their arguments. ``close`` closes ``redis``."""
        self._redis, self._entries, self._seconds = redis, entries, seconds
        self._redactor = redactor or Redactor.for_process()
        self._buffer: deque[tuple[str, bytes | _Delta]] = deque()
        self._bytes = 0
        self._open: dict[str, _Delta] = {}  # conversation → its delta in the buffer that may still grow
        self._wake, self._hurry = asyncio.Event(), asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._closing = asyncio.Event()
        self._down = False
        self.dropped = 0

    @classmethod
    def from_settings(cls, settings: Settings) -> Self:
        redis = connect_async(settings.effective_redis_url, max_connections=1)
        redactor = Redactor.from_settings(settings)
        return cls(redis, entries=settings.live_entries, seconds=settings.live_seconds, redactor=redactor)

    def push(self, entries: Sequence[LiveEntry]) -> None:
        for entry in entries:
            if len(self._buffer) >= BUFFER_ENTRIES or self._bytes >= BUFFER_BYTES or self._closing.is_set():
                self.dropped += 1
            elif entry.seq is None:
                self._add_delta(entry)
            else:
                self._add_stored(entry)
        if self._buffer and self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run())

    async def close(self) -> None:
        """Send what is there, once, and close the client."""
        self._closing.set()
        self._wake.set()
        self._hurry.set()
        if self._task is not None:
            await self._task
        await self._redis.aclose()

    def _add_delta(self, entry: LiveEntry) -> None:
        delta = self._open.get(entry.conversation_id)
        if delta is None or not delta.goes_on_with(entry):
            delta = self._open[entry.conversation_id] = _Delta(entry, entry.data["last"])
            self._buffer.append((entry.conversation_id, delta))
        delta.add(entry)
        self._wake.set()

    def _add_stored(self, entry: LiveEntry) -> None:
        self._open.pop(entry.conversation_id, None)
        encoded = _encoded(entry, self._redactor)
        self._bytes += len(encoded)
        self._buffer.append((entry.conversation_id, encoded))
        self._wake.set()
        self._hurry.set()

    async def _run(self) -> None:
        while self._buffer or not self._closing.is_set():
            await self._wake.wait()
            self._wake.clear()
            self._hurry.clear()
            batch, self._buffer, self._bytes = self._buffer, deque(), 0
            self._open.clear()
            if batch and await self._send(batch):
                await _pause(self._hurry, JOIN_SECONDS)
            elif batch:
                await _pause(self._closing, OUTAGE_SECONDS)

    async def _send(self, batch: deque[tuple[str, bytes | _Delta]]) -> bool:
        from redis.exceptions import RedisError

        pipe = self._redis.pipeline(transaction=False)
        for conversation_id, entry in batch:
            encoded = entry if isinstance(entry, bytes) else entry.encoded()
            pipe.xadd(live_key(conversation_id), {"entry": encoded}, maxlen=self._entries, approximate=True)
        for conversation_id in {conversation_id for conversation_id, _ in batch}:
            pipe.pexpire(live_key(conversation_id), int(self._seconds * 1000))
        try:
            async with asyncio.timeout(SEND_SECONDS):
                await pipe.execute()
        except (RedisError, OSError) as error:
            self.dropped += len(batch)
            if not self._down:
                _log.warning("live_unavailable", reason=str(error) or type(error).__name__)
            self._down = True
            return False
        if self._down:
            _log.info("live_back", dropped=self.dropped)
        self._down = False
        return True


async def _pause(unless: asyncio.Event, seconds: float) -> None:
    """Let entries gather, unless ``unless`` is set."""
    try:
        async with asyncio.timeout(seconds):
            await unless.wait()
    except TimeoutError:
        return


def _encoded(entry: LiveEntry, redactor: Redactor) -> bytes:
    row = redactor.shown(entry.as_row())
    row["data"] = public_data(entry.event, row["data"])
    try:
        encoded = orjson.dumps(row)
    except TypeError:  # the store found a form for it, so readers take it from there
        encoded = b""
    if encoded and len(encoded) <= ENTRY_BYTES:
        return encoded
    return orjson.dumps({**row, "data": None})

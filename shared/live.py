"""Following a conversation: what was stored, in order and exactly once, and deltas in between as they stream.

The store has the truth. A capped Redis Stream per conversation (``shared.queues.live_key``) only makes it quick: each
entry's field ``entry`` is a row as JSON, with ``seq`` null for a delta and ``data`` null where the row is too large for
the stream. Gaps, and silence of over two seconds, are filled from the store, since a worker may die between commit and
stream, and Redis may be empty or away.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import orjson
import structlog

from shared.errors import StoreUnavailable
from shared.events import AI_MESSAGE, AI_MESSAGE_DELTA, APPROVAL_REQUIRED, HOLMES_NAMES, SNAPSHOTS, TERMINALS
from shared.queues import live_key
from shared.store.base import Row, Store

if TYPE_CHECKING:  # importing redis is slow, and a follower without Redis does not need it
    from redis.asyncio import Redis

Until = int | Callable[[Row], bool] | None

SILENCE_SECONDS = 2.0  # without a stored event: look into the store
POLL_SECONDS = 0.1  # between looks into the store while there is no stream; doubles up to SILENCE_SECONDS
OUTAGE_SECONDS = 0.5  # between reads while the store is away
PAGE = 1_000  # events of one read
UNFINISHED = frozenset({"pending", "running"})

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class LiveEntry:
    """A row on its way to live readers; ``seq`` is None for a delta. ``created_at`` is the sender's clock."""

    conversation_id: str
    seq: int | None
    turn: int
    attempt: int
    event: str
    data: dict[str, Any]
    created_at: str

    def as_row(self) -> Row:
        return {
            "conversation_id": self.conversation_id,
            "seq": self.seq,
            "turn": self.turn,
            "attempt": self.attempt,
            "event": self.event,
            "data": self.data,
            "created_at": self.created_at,
        }

    @classmethod
    def of_row(cls, row: Row) -> LiveEntry:
        """An event that an operation answered, such as those in ``Claim.ended``."""
        return cls(**{name: row[name] for name in cls.__slots__})


def public_data(event: str, data: dict[str, Any]) -> dict[str, Any]:
    """An event's data as live readers get it: without approval tokens, and a snapshot without its messages."""
    name = HOLMES_NAMES.get(event, event)
    if name in SNAPSHOTS and "messages" in data:
        data = {"message_count": len(data["messages"] or ()), **{k: v for k, v in data.items() if k != "messages"}}
    if name == APPROVAL_REQUIRED:
        lists = {k: _without_tokens(v) for k, v in data.items() if k.startswith("pending_") and isinstance(v, list)}
        data = data | lists
    return data


def _without_tokens(pending: list[Any]) -> list[Any]:
    return [{k: v for k, v in p.items() if k != "approval_token"} if isinstance(p, dict) else p for p in pending]


async def follow(
    store: Store, redis: Redis | None, conversation_id: str, *, after: int = 0, until: Until = None
) -> AsyncIterator[Row]:
    """Event rows with ``seq > after``, and ``ai_message_delta`` rows (``seq`` None) as they stream.

    ``until``: a turn's number, to end with that turn; or a predicate, to end behind the first row that it accepts;
    or None, to go on for ever. Never a delta of a step whose ``ai_message`` came before. A delta row with
    ``data.reset`` says: discard the unfinished text, another attempt begins anew; ``data.gap`` says that text before
    it was missed (``ai_message`` will have it whole). While the store is away it waits.
    """
    turn = until if isinstance(until, int) else None
    async with aclosing(_rows(store, _Stream(redis, conversation_id), View(after), turn)) as rows:
        async for row in rows:
            yield row
            if until(row) if callable(until) else row["turn"] == turn and _name(row) in TERMINALS:
                return


async def _rows(store: Store, stream: _Stream, view: View, turn: int | None) -> AsyncGenerator[Row, None]:
    """All rows; ends when the store says that ``turn`` has ended, which it may do without an event."""
    resumed = quiet = view.seq > 0
    pause = look_at = 0.0
    while True:
        if time.monotonic() >= look_at:
            ended = quiet and turn is not None and await _has_ended(store, stream.conversation_id, turn)
            known = view.seq
            async for row in _stored(store, stream.conversation_id, view):
                yield row
            if ended:
                return
            quiet = resumed or view.seq == known
            resumed = False
            pause = min(2 * pause, SILENCE_SECONDS) if quiet and pause else POLL_SECONDS
            look_at = time.monotonic() + (SILENCE_SECONDS if stream.up else pause)
        for entry in view.foreseen(await stream.read(look_at - time.monotonic())):
            if view.misses(entry):
                async for row in _stored(store, stream.conversation_id, view):
                    yield row
            for row in view.take(entry):
                yield row
            if entry["seq"] is not None:
                look_at = time.monotonic() + SILENCE_SECONDS


async def _stored(store: Store, conversation_id: str, view: View) -> AsyncGenerator[Row, None]:
    while True:
        page = await _read(lambda: store.events(conversation_id, after=view.seq, limit=PAGE))
        for row in page:
            for shown in view.take({**row, "data": public_data(row["event"], row["data"])}, known=True):
                yield shown
        if len(page) < PAGE:
            return


async def _has_ended(store: Store, conversation_id: str, turn: int) -> bool:
    """Also when there is no such turn any more."""
    turns = await _read(lambda: store.turns(conversation_id))
    return not any(t["turn"] == turn and t["status"] in UNFINISHED for t in turns)


async def _read(read: Callable[[], Awaitable[list[Row]]]) -> list[Row]:
    """What the store says, once it can be reached: whoever follows would only have to begin again."""
    told = False
    while True:
        try:
            return await read()
        except StoreUnavailable as error:
            if not told:
                _log.warning("store_unavailable", reason=error.description)
            told = True
        await asyncio.sleep(OUTAGE_SECONDS)


class View:
    """What a follower has shown so far, and what that says about the next row."""

    def __init__(self, after: int = 0) -> None:
        self.seq = after
        self._done: dict[int, float] = {}  # turn → its last step whose message is stored; infinity when it has ended
        self._open: tuple[int, int, int] | None = None  # turn, attempt, step of the unfinished text
        self._piece = 0  # the last piece of it

    def foreseen(self, rows: list[Row]) -> list[Row]:
        """Notes which steps a whole read completes, so that their deltas are not shown any more."""
        for row in rows:
            if row["seq"] is not None:
                self._note(row)
        return rows

    def misses(self, row: Row) -> bool:
        """Whether the store has to be asked before this row of the stream can be shown."""
        if row["seq"] is None or row["seq"] <= self.seq:
            return False
        return bool(row["seq"] > self.seq + 1 or row["data"] is None)

    def take(self, row: Row, *, known: bool = False) -> Iterator[Row]:
        """The rows to show for this one: none, itself, or itself behind a reset. ``known``: it is the store's."""
        if row["seq"] is None:
            yield from self._take_delta(row)
        elif row["seq"] > self.seq and (known or not self.misses(row)):
            self.seq = row["seq"]
            self._note(row)
            if self._open is not None and row["turn"] == self._open[0] and row["attempt"] > self._open[1]:
                yield _reset(row, self._open)
                self._open = None
            elif self._open is not None and self._open[2] <= self._done.get(self._open[0], 0):
                self._open = None
            yield row

    def _note(self, row: Row) -> None:
        turn = row["turn"]
        if _name(row) in TERMINALS:
            self._done[turn] = math.inf
        elif row["event"] == AI_MESSAGE and row["data"] is not None:
            self._done[turn] = max(self._done.get(turn, 0), row["data"].get("step") or 0)

    def _take_delta(self, row: Row) -> Iterator[Row]:
        data = row["data"]
        text = (row["turn"], row["attempt"], data["step"])
        if data["step"] <= self._done.get(row["turn"], 0) or (self._open is not None and text < self._open):
            return
        if text != self._open:
            if self._open is not None:
                yield _reset(row, self._open)
            self._open, self._piece = text, 0
        if data["last"] <= self._piece:
            return
        gap = data["n"] > self._piece + 1
        self._piece = data["last"]
        yield {**row, "data": {**data, "gap": True}} if gap else row


def _name(row: Row) -> str:
    return str(HOLMES_NAMES.get(row["event"], row["event"]))


def _reset(row: Row, text: tuple[int, int, int]) -> Row:
    """A marker: the unfinished text of this turn and step is to be discarded."""
    data = {"step": text[2], "n": 0, "last": 0, "text": "", "reasoning": "", "reset": True}
    return {**row, "seq": None, "turn": text[0], "attempt": row["attempt"], "event": AI_MESSAGE_DELTA, "data": data}


class _Stream:
    """The conversation's Redis Stream from its oldest entry on; silent while Redis is away or there is none."""

    def __init__(self, redis: Redis | None, conversation_id: str) -> None:
        self.conversation_id = conversation_id
        self.up = redis is not None
        self._redis, self._key, self._last = redis, live_key(conversation_id), "0"

    async def read(self, seconds: float) -> list[Row]:
        """The entries since the last read; waits up to ``seconds`` for the first."""
        if self._redis is None:
            await asyncio.sleep(seconds)
            return []
        from redis.exceptions import RedisError

        started = time.monotonic()
        try:
            async with asyncio.timeout(seconds + 1):
                reply: Any = await self._redis.xread({self._key: self._last}, block=max(1, int(seconds * 1000)))
        except (RedisError, OSError) as error:
            if self.up:
                _log.warning("live_stream_unavailable", conversation_id=self.conversation_id, reason=str(error))
            self.up = False
            await asyncio.sleep(seconds - (time.monotonic() - started))
            return []
        self.up = True
        rows = []
        for identifier, fields in _entries(reply):
            self._last = identifier
            rows.append(orjson.loads(fields[b"entry"] if b"entry" in fields else fields["entry"]))
        return rows


def _entries(reply: Any) -> Iterable[tuple[Any, Mapping[Any, Any]]]:
    """The entries in a reply to XREAD, in the shapes of both protocol versions."""
    if isinstance(reply, dict):
        return [entry for chunks in reply.values() for chunk in chunks for entry in chunk]
    return [entry for _, entries in reply for entry in entries]

"""The Python client: ask, decide, retry, stop, and follow what happens, from any asyncio program.

::

    async with Client.connect(load_settings()) as client:
        asked = await client.ask("Why does checkout-api return 500?", user_id="mai")
        async for event in client.follow(asked.conversation_id, until=asked.turn):
            ...

Every request is recorded in the store first, and then the queue is rung. What is refused was not recorded and rings
nothing; a ring that fails is late, not lost: ``Receipt.rung`` is False, and the reaper rings. A request that is sent
again under its ``request_id`` is answered as the first time.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Self, cast

import structlog

from shared.errors import QueueUnavailable, RequestInvalid, StoreUnavailable
from shared.events import APPROVAL_REQUIRED
from shared.live import Until, follow
from shared.queues import Ringer, connect_async, live_key, redis_errors
from shared.redaction import Redactor
from shared.requests import parse_request, record_of
from shared.settings import Settings
from shared.store import open_store
from shared.store.base import Ring, Row, Stopped, Store, Submitted

if TYPE_CHECKING:  # importing redis is slow
    from redis.asyncio import Redis

SUBMIT_TRIES = 3  # a request whose reply was lost is repeated: recording it twice records it once
SUBMIT_PAUSE_SECONDS = 0.2  # before the second try; doubles
PAGE = 500  # events of one read

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Receipt(Submitted):
    """A recorded request, the id to refer to it by, and whether the queue was rung."""

    request_id: str
    rung: bool


class Client:
    """What a producer can do. Make it with ``connect``, or from parts that are open already."""

    def __init__(self, settings: Settings, store: Store, ringer: Ringer, redis: Redis | None = None) -> None:
        """``redis``: for live text while following; without it, stored events alone are followed."""
        self.settings, self.store = settings, store
        self.redactor = Redactor.from_settings(settings)
        self._ringer, self._redis = ringer, redis

    @classmethod
    @asynccontextmanager
    async def connect(cls, settings: Settings) -> AsyncIterator[Self]:
        """A client of its own connections. Raises ``StoreUnavailable`` and ``SchemaOutdated``; Redis may be away."""
        async with AsyncExitStack() as stack:
            redis = connect_async(settings.effective_redis_url)
            stack.push_async_callback(redis.aclose)
            store = open_store(settings)
            stack.push_async_callback(store.close)
            yield cls(settings, await store.open(), Ringer(redis), redis)

    async def ask(self, text: str, **fields: Any) -> Receipt:
        """Ask a question; ``fields`` are those of ``shared.requests.Ask``. Without ``conversation_id`` a conversation
        begins. Raises the ``RequestRefused`` tree."""
        return await self._submit("ask", {**fields, "ask": text})

    async def decide(
        self,
        conversation_id: str,
        decisions: Iterable[Mapping[str, Any]] = (),
        *,
        results: Iterable[Mapping[str, Any]] = (),
        **fields: Any,
    ) -> Receipt:
        """Decide about waiting calls: ``{"tool_call_id", "approved", "feedback"?}`` each, and ``results`` of frontend
        tools: ``{"tool_call_id", "content", "is_error"?}``. Tokens that are missing are looked up.

        Name yourself by ``user_id``. The verdicts are in ``Receipt.decisions``. Raises ``RequestInvalid`` when an id
        is waiting more than once: then name the call by its ``approval_token``."""
        decided = [dict(decision) for decision in decisions]
        if any("approval_token" not in decision for decision in decided):
            waiting = await self.approvals(conversation_id)
            decided = [_with_token(decision, waiting) for decision in decided]
        answered = {"tool_decisions": decided, "frontend_tool_results": [dict(result) for result in results]}
        return await self._submit("tool_decisions", {**fields, **answered, "conversation_id": conversation_id})

    async def retry(self, conversation_id: str, **fields: Any) -> Receipt:
        """A new turn for the last one, if it failed and may be tried again. Raises ``NotRetryable``."""
        return await self._submit("retry", {**fields, "conversation_id": conversation_id})

    async def stop(self, conversation_id: str, turn: int | None = None) -> Stopped:
        """Stop the running or waiting turn; with ``turn``, that one and no other."""
        stopped = await self.store.stop(conversation_id, turn)
        if stopped.queue is not None:
            await self._ring(conversation_id, stopped.queue)
        return stopped

    async def follow(self, conversation_id: str, *, after: int = 0, until: Until = None) -> AsyncIterator[Row]:
        """Events in order, and text as it streams; see ``shared.live.follow``. Secrets in the arguments of calls are
        masked."""
        rows = follow(self.store, self._redis, conversation_id, after=after, until=until)
        async with aclosing(cast("AsyncGenerator[Row, None]", rows)):
            async for row in rows:
                yield self.redactor.shown(row)

    async def approvals(self, conversation_id: str) -> list[Row]:
        """The calls that wait for a decision, as the latest approval event shows them: with their tokens."""
        waiting = {_key(row) for row in await self.store.approvals(conversation_id=conversation_id)}
        conversation = await self.store.conversation(conversation_id) if waiting else None
        before = conversation["last_seq"] if conversation else 0
        while before > 0:
            first = max(0, before - PAGE)
            for event in reversed(await self.store.events(conversation_id, after=first, limit=before - first)):
                if event["event"] == APPROVAL_REQUIRED:
                    return [entry for entry in event["data"]["pending_approvals"] if _key(entry) in waiting]
            before = first
        return []

    async def pending_tokens(self, conversation_id: str) -> dict[str, list[str]]:
        """The approval tokens of each waiting ``tool_call_id``; more than one where an id was used again."""
        tokens: dict[str, list[str]] = {}
        for entry in await self.approvals(conversation_id):
            tokens.setdefault(entry["tool_call_id"], []).append(entry["approval_token"])
        return tokens

    async def feedback(
        self,
        request_id: str,
        rating: Literal["up", "down"],
        *,
        category: str | None = None,
        comment: str | None = None,
        account_id: str | None = None,
    ) -> Row:
        """Product feedback on an answer; the model never sees it."""
        return await self.store.record_feedback(
            request_id,
            rating,
            category=category,
            comment=self.redactor.text(comment) if comment else comment,
            account_id=account_id,
        )

    async def delete(self, conversation_id: str) -> bool:
        """Remove a conversation with all that belongs to it, its live stream too; False if there is none."""
        found = await self.store.delete(conversation_id)
        if found and self._redis is not None:
            try:
                with redis_errors("removing the live stream, which goes by itself"):
                    await self._redis.delete(live_key(conversation_id))
            except QueueUnavailable as error:
                _log.warning("live_stream_not_removed", conversation_id=conversation_id, reason=error.description)
        return found

    async def _submit(self, kind: str, fields: dict[str, Any]) -> Receipt:
        settings = self.settings
        record = record_of(
            parse_request(kind, fields),
            default_account=settings.default_account,
            max_bytes=settings.request_bytes,
            accept_call_keys=settings.accept_call_keys,
            redactor=self.redactor,
        )
        pause = SUBMIT_PAUSE_SECONDS
        for tries_left in reversed(range(SUBMIT_TRIES)):
            try:
                submitted = await self.store.submit(record)
                break
            except StoreUnavailable as error:
                if not tries_left:
                    error.details["request_id"] = record.request_id
                    raise
            await asyncio.sleep(pause)
            pause *= 2
        rung = await self._ring(submitted.conversation_id, submitted.queue)
        return Receipt(
            submitted.conversation_id,
            submitted.turn,
            submitted.created,
            submitted.status,
            submitted.queue,
            submitted.decisions,
            record.request_id,
            rung,
        )

    async def _ring(self, conversation_id: str, queue: str) -> bool:
        try:
            await self._ringer.ring([Ring(conversation_id, queue)])
        except QueueUnavailable as error:
            _log.warning("not_rung", conversation_id=conversation_id, queue=queue, reason=error.description)
            return False
        return True


def _key(row: Row) -> tuple[Any, Any, Any]:
    return row.get("turn"), row.get("step"), row.get("call_index")


def _with_token(decision: dict[str, Any], waiting: Sequence[Row]) -> dict[str, Any]:
    """The decision with its call's token. A call that does not wait stays without: the store gives the verdict."""
    if "approval_token" in decision:
        return decision
    key = {name: decision[name] for name in ("turn", "step", "call_index") if decision.get(name) is not None}
    tokens = [
        entry["approval_token"]
        for entry in waiting
        if entry["tool_call_id"] == decision.get("tool_call_id") and key.items() <= entry.items()
    ]
    if len(tokens) > 1:
        raise RequestInvalid(
            f"{len(tokens)} calls wait under the id {decision['tool_call_id']!r}; nothing was decided.",
            hint="Name each by its approval_token, or by turn, step and call_index.",
        )
    return decision | {"approval_token": tokens[0]} if tokens else decision

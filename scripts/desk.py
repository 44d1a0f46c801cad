"""The desk of a command: settings, the open store, the client, the output; and the way a command ends.

``at_desk`` runs a command's coroutine and turns what the error tree says into one or two lines on stderr and an exit
status.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import typer

from scripts.render import Output
from shared.errors import (
    ConfigurationError,
    ConversationUnknown,
    QueueUnavailable,
    RequestRefused,
    StoreUnavailable,
    TurnkeeperError,
)
from shared.live import Until, follow
from shared.queues import Ringer, connect_async
from shared.requests import Request, record_of
from shared.settings import Settings, load_settings
from shared.store import open_store
from shared.store.base import Ring, Store, Submitted

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from redis.asyncio import Redis

FAILED = 1
USAGE = 2
UNREACHABLE = 3
INTERRUPTED = 130

Row = dict[str, Any]
Work = Callable[["Desk"], Awaitable[int | None]]


@dataclass(frozen=True, slots=True)
class Desk:
    """What a command works with. Redis is connected on first use, so inspection needs the store only."""

    settings: Settings
    store: Store
    redis: Redis
    out: Output

    async def submit(self, request: Request) -> Submitted:
        """Record a request, then ring for it. A ring that fails is only late: the reaper rings again."""
        settings = self.settings
        record = record_of(
            request,
            default_account=settings.default_account,
            max_bytes=settings.request_bytes,
            accept_call_keys=settings.accept_call_keys,
        )
        submitted = await self.store.submit(record)
        await self._ring(submitted.conversation_id, submitted.queue)
        return submitted

    async def _ring(self, conversation_id: str, queue: str) -> None:
        try:
            await Ringer(self.redis).ring([Ring(conversation_id, queue)])
        except QueueUnavailable as error:
            print(f"turnkeeper: {error.description}", file=sys.stderr)

    def follow(self, conversation_id: str, *, after: int, until: Until = None) -> AsyncGenerator[Row, None]:
        rows = follow(self.store, self.redis, conversation_id, after=after, until=until)
        return cast("AsyncGenerator[Row, None]", rows)


def at_desk(work: Work, as_json: bool) -> None:
    """Run a command's work and leave with its exit status."""
    raise typer.Exit(guarded(lambda: asyncio.run(_at_desk(work, as_json)), as_json))


async def _at_desk(work: Work, as_json: bool) -> int:
    async with open_desk(load_settings(), Output(as_json)) as desk:
        return await work(desk) or 0


@asynccontextmanager
async def open_desk(settings: Settings, out: Output) -> AsyncIterator[Desk]:
    """A desk with its store open. Raises ``StoreUnavailable``, ``SchemaOutdated``."""
    redis = connect_async(settings.effective_redis_url)
    store = open_store(settings)
    try:
        await store.open()
        yield Desk(settings, store, redis, out)
    finally:
        await store.close()
        await redis.aclose()


def guarded(run: Callable[[], int | None], as_json: bool = False) -> int:
    """The exit status of ``run``; an error of the tree becomes its lines on stderr."""
    try:
        return run() or 0
    except TurnkeeperError as error:
        report(error, as_json)
        return exit_status(error)
    except KeyboardInterrupt:
        return INTERRUPTED


def report(error: TurnkeeperError, as_json: bool = False) -> None:
    if as_json:
        print(json.dumps({"error": error.as_dict()}, ensure_ascii=False, default=str), file=sys.stderr)
        return
    print(f"turnkeeper: {error.description}", file=sys.stderr)
    if error.hint:
        print(error.hint, file=sys.stderr)


def exit_status(error: TurnkeeperError) -> int:
    if isinstance(error, StoreUnavailable | QueueUnavailable):
        return UNREACHABLE
    return USAGE if isinstance(error, RequestRefused | ConfigurationError) else FAILED


def unknown_conversation(conversation_id: str) -> ConversationUnknown:
    return ConversationUnknown(
        f"There is no conversation {conversation_id}.", hint="turnkeeper conversations lists those there are."
    )

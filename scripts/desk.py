"""The desk of a command: settings, the open store, the client, the output; and the way a command ends.

``at_desk`` runs a command's coroutine and turns what the error tree says into one or two lines on stderr and an exit
status.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import typer

from scripts.render import Output
from shared.client import Client
from shared.errors import (
    ConfigurationError,
    ConversationUnknown,
    QueueUnavailable,
    RequestRefused,
    StoreUnavailable,
    TurnkeeperError,
)
from shared.log import configure_logging
from shared.settings import Settings, load_settings
from shared.store.base import Store

FAILED = 1
USAGE = 2
UNREACHABLE = 3
INTERRUPTED = 130
PIPE_CLOSED = 141

Row = dict[str, Any]
Work = Callable[["Desk"], Awaitable[int | None]]


@dataclass(frozen=True, slots=True)
class Desk:
    """What a command works with. Redis may be away, so that inspection needs the store only."""

    settings: Settings
    client: Client
    out: Output

    @property
    def store(self) -> Store:
        return self.client.store


def at_desk(work: Work, as_json: bool) -> None:
    """Run a command's work and leave with its exit status."""
    raise typer.Exit(guarded(lambda: asyncio.run(_at_desk(work, as_json)), as_json))


async def _at_desk(work: Work, as_json: bool) -> int:
    configure_logging("error")  # what a person has to know is said in words
    async with open_desk(load_settings(), Output(as_json)) as desk:
        return await work(desk) or 0


@asynccontextmanager
async def open_desk(settings: Settings, out: Output) -> AsyncIterator[Desk]:
    """A desk with its store open. Raises ``StoreUnavailable``, ``SchemaOutdated``."""
    async with Client.connect(settings) as client:
        yield Desk(settings, client, out)


def guarded(run: Callable[[], int | None], as_json: bool = False) -> int:
    """The exit status of ``run``; an error of the tree becomes its lines on stderr."""
    try:
        return run() or 0
    except TurnkeeperError as error:
        if isinstance(error, QueueUnavailable) and not os.environ.get("REDIS_URL"):
            error.hint = "The embedded Redis runs as long as turnkeeper up (or a worker) does: start that first."
        report(error, as_json)
        return exit_status(error)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # head, less and the like have seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is still to be flushed
        return PIPE_CLOSED


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


async def require_conversation(desk: Desk, conversation_id: str) -> Row:
    """The conversation's row. Raises ``ConversationUnknown``."""
    row = await desk.store.conversation(conversation_id)
    if row is None:
        raise unknown_conversation(conversation_id)
    return row


def unknown_conversation(conversation_id: str) -> ConversationUnknown:
    return ConversationUnknown(
        f"There is no conversation {conversation_id}.", hint="turnkeeper conversations lists those there are."
    )

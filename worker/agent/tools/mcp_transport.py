"""Two things that the MCP SDK's transports leave open: noticing that a session's input has ended, and what a server
process writes to stderr."""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from types import TracebackType
from typing import Any, Final, Self, TextIO

_LINE_CHARACTERS: Final = 300


class _Noticing:
    """A read stream that sets ``ended`` when there is no more to read."""

    def __init__(self, stream: Any, ended: asyncio.Event) -> None:
        self._stream = stream
        self._ended = ended

    @property
    def last_context(self) -> Any:
        return getattr(self._stream, "last_context", None)

    async def receive(self) -> Any:
        return await self._stream.receive()

    async def aclose(self) -> None:
        await self._stream.aclose()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        try:
            return await self._stream.__anext__()
        except BaseException:
            self._ended.set()
            raise

    async def __aenter__(self) -> Self:
        await self._stream.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        left: bool | None = await self._stream.__aexit__(kind, error, trace)
        return left


@asynccontextmanager
async def noticing_end(
    transport: AbstractAsyncContextManager[tuple[Any, Any]], ended: asyncio.Event
) -> AsyncIterator[tuple[Any, Any]]:
    """``transport``, setting ``ended`` when its input ends: the process exited or the connection is gone."""
    async with transport as (read, write):
        yield _Noticing(read, ended), write


@asynccontextmanager
async def captured_stderr(last_words: deque[str]) -> AsyncIterator[TextIO]:
    """A file to hand to a child as stderr; ``last_words`` gets its newest lines. Nothing of it reaches our own stderr,
    which is a log of JSON lines."""
    ours, theirs = os.pipe()
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=2**20)
    transport, _ = await loop.connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(ours, "rb", buffering=0)
    )
    collecting = asyncio.create_task(_collect(reader, last_words))
    try:
        with os.fdopen(theirs, "w") as errors:
            yield errors
    finally:
        collecting.cancel()
        transport.close()


async def _collect(reader: asyncio.StreamReader, last_words: deque[str]) -> None:
    while data := await reader.read(65_536):
        for line in data.decode("utf-8", "replace").splitlines():
            if line.strip():
                last_words.append(line.strip()[:_LINE_CHARACTERS])

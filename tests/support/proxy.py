"""A TCP proxy with faults, between a program and its server: connections cut, refused, silent, slow, or cut between
the server's work and its reply.

Works on bytes and knows no protocol; a rule names the request whose reply is lost by a pattern of its bytes.
"""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

SECONDS = 20.0  # for a lost reply to happen
REQUEST_TAIL = 4_000_000  # bytes of a request that are kept to look for a pattern

T = TypeVar("T")


@dataclass(eq=False)
class _Rule:
    """The next request that matches is answered by the server, and its client never hears of it."""

    pattern: re.Pattern[bytes]
    happened: threading.Event = field(default_factory=threading.Event)


@dataclass(eq=False)
class _Pair:
    """A client's connection and its connection to the server."""

    client: asyncio.StreamWriter
    server: asyncio.StreamWriter
    request: bytes = b""  # since the server last spoke
    lost: _Rule | None = None  # the reply to ``request`` does not arrive

    def abort(self) -> None:
        self.client.transport.abort()
        self.server.transport.abort()


class FaultyProxy:
    """Listens on a loopback port that stays the same. ``target``: a TCP port of this machine, or a unix socket's path.

    ``reply_end``: the last bytes of every reply of the protocol, where a reply may come in parts; by default its
    first part stands for the whole.
    """

    def __init__(self, target: int | str, *, reply_end: bytes = b"") -> None:
        self._target = target
        self._reply_end = reply_end
        self._pairs: set[_Pair] = set()
        self._rules: list[_Rule] = []
        self._delay_seconds = 0.0
        self._loop = asyncio.new_event_loop()
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._server: asyncio.Server | None = None
        self.port = 0
        self._thread = threading.Thread(target=self._loop.run_forever, name="faulty-proxy", daemon=True)
        self._thread.start()
        self.accept()

    # Faults; each has happened when the method returns

    def cut(self) -> None:
        """Break every connection; new ones are served."""
        self._run(self._cut())

    def refuse(self) -> None:
        """Break every connection and accept no other, until ``accept``."""
        self._run(self._refuse())

    def accept(self) -> None:
        self._run(self._accept())

    def silence(self) -> None:
        """Swallow everything in both directions, on old and new connections, until ``heal``."""
        self._loop.call_soon_threadsafe(self._flowing.clear)

    def heal(self) -> None:
        """The end of ``silence`` and ``slow``. What was connected meanwhile is broken."""
        self._run(self._heal())

    def slow(self, seconds: float) -> None:
        """Every piece of a reply arrives so much later."""
        self._delay_seconds = seconds

    def lose_reply(self, pattern: bytes) -> threading.Event:
        """Break the connection of the next request that matches (a regular expression; ``.`` is any byte) when the
        server has answered it. The event is set when it has happened."""
        rule = _Rule(re.compile(pattern, re.DOTALL))
        self._rules.append(rule)
        return rule.happened

    def stop(self) -> None:
        self._run(self._shut())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    # The loop's side

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(SECONDS)

    async def _accept(self) -> None:
        if self._server is not None:
            return
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def _refuse(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        await self._cut()

    async def _shut(self) -> None:
        await self._refuse()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    async def _cut(self) -> None:
        for pair in list(self._pairs):
            pair.abort()

    async def _heal(self) -> None:
        self._delay_seconds = 0.0
        if not self._flowing.is_set():
            await self._cut()
            self._flowing.set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            if isinstance(self._target, int):
                there, here = await asyncio.open_connection("127.0.0.1", self._target)
            else:
                there, here = await asyncio.open_unix_connection(self._target)
        except OSError:  # the server is down, and the client shall see it
            writer.transport.abort()
            return
        pair = _Pair(writer, here)
        self._pairs.add(pair)
        ways = [asyncio.create_task(self._ask(reader, pair)), asyncio.create_task(self._answer(there, pair))]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:  # the proxy stops; asyncio would complain of a cancelled handler
            pass
        finally:
            self._pairs.discard(pair)
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
            pair.client.close()
            pair.server.close()

    async def _ask(self, reader: asyncio.StreamReader, pair: _Pair) -> None:
        while data := await reader.read(65_536):
            await self._flowing.wait()
            pair.request = (pair.request + data)[-REQUEST_TAIL:]
            for rule in self._rules:
                if pair.lost is None and rule.pattern.search(pair.request):
                    pair.lost = rule
            if pair.lost in self._rules:
                self._rules.remove(pair.lost)
            pair.server.write(data)
            await pair.server.drain()

    async def _answer(self, reader: asyncio.StreamReader, pair: _Pair) -> None:
        while data := await reader.read(65_536):
            await self._flowing.wait()
            if pair.lost is not None:
                if data.endswith(self._reply_end):
                    pair.lost.happened.set()
                    pair.abort()
                    return
                continue
            pair.request = b""
            await asyncio.sleep(self._delay_seconds)
            pair.client.write(data)
            await pair.client.drain()

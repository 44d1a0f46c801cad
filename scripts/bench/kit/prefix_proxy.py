"""Serves PostgREST where Supabase does: requests for ``/rest/v1/…`` go to ``/…`` of a bare server.

Request heads are rewritten, all other bytes pass as they are. Clients must send ``Content-Length``.
"""

from __future__ import annotations

import asyncio
import re
import threading

_PREFIX = re.compile(rb"^([A-Z]+) /rest/v1")
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)


class PrefixProxy:
    """Listens on a loopback port of its own, on a thread of its own."""

    def __init__(self, upstream_port: int) -> None:
        self._upstream_port = upstream_port
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._server = asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result()
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def stop(self) -> None:
        asyncio.run_coroutine_threadsafe(self._shut(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _listen(self) -> asyncio.Server:
        return await asyncio.start_server(self._serve, "127.0.0.1", 0)

    async def _shut(self) -> None:
        self._server.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there, here = await asyncio.open_connection("127.0.0.1", self._upstream_port)
        except OSError:  # the server is down, and the client shall see it
            writer.transport.abort()
            return
        answers = asyncio.create_task(_copy(there, writer))
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = _LENGTH.search(head)
                body = await reader.readexactly(int(length[1])) if length else b""
                here.write(_PREFIX.sub(rb"\1 ", head, count=1) + body)
                await here.drain()
        except (asyncio.IncompleteReadError, ConnectionError):  # the client has closed
            pass
        finally:
            answers.cancel()
            here.close()
            writer.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(65_536):
            writer.write(data)
            await writer.drain()
    except ConnectionError:  # one of the two was killed
        pass
    finally:
        writer.close()

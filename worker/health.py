"""Health: two questions that an orchestrator asks over HTTP, answered on the worker's own event loop.

``GET /live`` answers 200 as long as the loop runs at all: a hung loop does not answer, and is then restarted. It says
nothing about Redis or the database, since restarting workers does not mend those. ``GET /ready`` answers 200 from the
moment that jobs are taken until the worker was told to leave, else 503.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from http import HTTPStatus

from shared.errors import ConfigurationError

REQUEST_SECONDS = 5.0
REQUEST_BYTES = 8_192


class HealthServer:
    """Serves ``/live`` and ``/ready`` until ``close``. ``ready`` is asked each time."""

    def __init__(self, ready: Callable[[], bool]) -> None:
        self._ready = ready
        self._server: asyncio.Server | None = None

    @property
    def port(self) -> int:
        assert self._server is not None
        return int(self._server.sockets[0].getsockname()[1])

    async def start(self, host: str, port: int) -> None:
        """Raises ``ConfigurationError`` when the port cannot be had."""
        try:
            self._server = await asyncio.start_server(self._answer, host, port, limit=REQUEST_BYTES)
        except OSError as error:
            raise ConfigurationError(
                f"TURNKEEPER_HEALTH_PORT: {host}:{port} cannot be served: {error.strerror or error}."
            ) from None

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(REQUEST_SECONDS):
                head = await reader.readuntil(b"\r\n\r\n")
            status = self._status(head.split(b" ", 2)[:2])
            body = f"{status.phrase.lower()}\n"
            headers = f"Content-Type: text/plain\r\nContent-Length: {len(body)}\r\nConnection: close"
            writer.write(f"HTTP/1.1 {status.value} {status.phrase}\r\n{headers}\r\n\r\n{body}".encode())
            await writer.drain()
        except (TimeoutError, ConnectionError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # whoever asked did not ask properly, or has gone
        finally:
            writer.close()

    def _status(self, request: list[bytes]) -> HTTPStatus:
        match request:
            case [b"GET" | b"HEAD", b"/live"]:
                return HTTPStatus.OK
            case [b"GET" | b"HEAD", b"/ready"]:
                return HTTPStatus.OK if self._ready() else HTTPStatus.SERVICE_UNAVAILABLE
            case _:
                return HTTPStatus.NOT_FOUND

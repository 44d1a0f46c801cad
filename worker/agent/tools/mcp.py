"""MCP servers: one session each, kept by a task of its own that reconnects for as long as the worker runs.

A call is sent once. If the session dies under it, nobody knows whether the server ran it: a side effect is then
"unknown", anything else is sent once more on the next session. Sessions end in several ways, and each must be noticed:
a process exits (its output ends), a server restarts (error -32600 "Session terminated"), a connection breaks (-32000).
"""

from __future__ import annotations

import asyncio
import errno
import shutil
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Final

import anyio
import httpx2
import structlog
from mcp.client.client import Client
from mcp.client.stdio import StdioServerParameters, stdio_client
from mcp.client.streamable_http import streamable_http_client
from mcp.client.subscriptions import ListenNotSupportedError, SubscriptionLost
from mcp.shared.exceptions import MCPError
from mcp.types import (
    CONNECTION_CLOSED,
    INTERNAL_ERROR,
    INVALID_REQUEST,
    PARSE_ERROR,
    REQUEST_TIMEOUT,
    Tool,
    ToolListChangedNotification,
)

from shared.errors import ToolDefinitionError
from worker.agent.base import ToolContext, ToolResult, ToolSpec
from worker.agent.tools.config import McpServerOptions
from worker.agent.tools.mcp_results import result_of_answer, spec_of
from worker.agent.tools.mcp_transport import captured_stderr, noticing_end
from worker.agent.tools.outcome import failed, given_up, interrupted
from worker.agent.tools.process import clean_environment, limited

_FIRST_DELAY_SECONDS: Final = 0.2
_LONGEST_DELAY_SECONDS: Final = 30.0
_CONNECT_SECONDS: Final = 30.0
_LIST_SECONDS: Final = 30.0
_CLOSE_SECONDS: Final = 10.0  # the SDK ends a process in at most 2 s of patience, 2 of SIGTERM, 2 of SIGKILL
_PATIENCE_SECONDS: Final = 15.0  # of a call, for a session that is being opened
_RELISTEN_SECONDS: Final = 1.0
_LAST_WORDS: Final = 5  # lines of a server's stderr that explain why it is down
_PAGES: Final = 100  # of a tool list

_DEAD: Final = frozenset({CONNECTION_CLOSED, INVALID_REQUEST})
"""Errors after which the session is of no use. The SDK's own requests are well-formed, so -32600 means the session."""

_UNSEEN: Final = _DEAD | {INTERNAL_ERROR, PARSE_ERROR, REQUEST_TIMEOUT}
"""Errors that leave open whether the call ran: a gateway's 502 and an unreadable answer are among them."""

log = structlog.get_logger(__name__)


class McpTool:
    """A tool of a server, under its public name."""

    def __init__(self, server: McpServer, tool: Tool, spec: ToolSpec) -> None:
        self._server = server
        self._name = tool.name
        self.spec = spec

    async def run(self, arguments: dict[str, Any], context: ToolContext, seconds: float) -> ToolResult:
        """Call the server; see ``Runner``."""
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        for attempt in range(1 if self.spec.risk == "side_effect" else 2):
            session = await self._server.session(min(_PATIENCE_SECONDS, end - loop.time()))
            if session is None and attempt == 0:
                return failed(f"Not executed: the MCP server {self._server.name!r} is not connected.")
            if session is None:
                break
            try:
                async with asyncio.timeout_at(end):
                    result = await self._send(session, arguments, context)
            except TimeoutError:
                return given_up(self.spec, seconds)
            if result is not None:
                return result
        return interrupted(self.spec, f"the session with the MCP server {self._server.name!r} ended during the call")

    async def _send(self, session: Session, arguments: dict[str, Any], context: ToolContext) -> ToolResult | None:
        """The result, or None if the session died under the call."""
        try:
            answer = await session.client.call_tool(self._name, arguments)
        except MCPError as error:
            if error.code in _DEAD:
                session.end()
                return None
            if error.code in _UNSEEN:
                return interrupted(self.spec, f"the MCP server answered with error {error.code}: {error.message}")
            return failed(f"The MCP server refused the call: {error.message} ({error.code})")
        except (RuntimeError, ValueError) as error:  # the answer came, but does not fit its schema
            return interrupted(self.spec, f"the MCP server's answer cannot be read: {error}")
        return await result_of_answer(answer, context.artifacts)


class Session:
    """A connected client, until it is found dead."""

    def __init__(self, client: Client, ended: asyncio.Event) -> None:
        self.client = client
        self._ended = ended

    @property
    def alive(self) -> bool:
        return not self._ended.is_set()

    def end(self) -> None:
        """Say that the session is dead; its task then opens the next."""
        self._ended.set()

    async def wait(self) -> None:
        await self._ended.wait()


class McpServer:
    """A configured server and its tools. Tools of a lost session stay known while it is being reopened."""

    def __init__(self, name: str, options: McpServerOptions, folder: Path) -> None:
        self.name = name
        self._options = options
        self._folder = folder
        self._tools: tuple[McpTool, ...] = ()
        self._refused: list[str] = []
        self._down: str | None = "not connected yet"
        self._session: Session | None = None
        self._connected = asyncio.Condition()
        self._answered = asyncio.Event()  # the first attempt to connect has ended, either way
        self._stale = asyncio.Event()  # the server says that its list changed
        self._last_words: deque[str] = deque(maxlen=_LAST_WORDS)
        self._on_change: Callable[[], None] = lambda: None
        self._task: asyncio.Task[None] | None = None
        self._closing = False

    def start(self, on_change: Callable[[], None]) -> None:
        """Begin to connect; ``on_change`` is called whenever ``tools()`` has."""
        self._on_change = on_change
        self._task = asyncio.create_task(self._keep_connected(), name=f"mcp-{self.name}")

    async def first_answer(self, wait_seconds: float) -> None:
        """Until the first attempt to connect has ended, or the time has."""
        with suppress(TimeoutError):
            async with asyncio.timeout(wait_seconds):
                await self._answered.wait()

    async def close(self) -> None:
        """End the session and the server's process. Raises nothing."""
        if self._task is None:
            return
        self._closing = True
        self._task.cancel()
        _, late = await asyncio.wait({self._task}, timeout=_CLOSE_SECONDS)
        if late:
            log.warning("mcp_server_not_closed", server=self.name)

    def tools(self) -> tuple[McpTool, ...]:
        return self._tools

    def problems(self) -> list[str]:
        down = [f"mcp:{self.name}: {self._down}"] if self._down else []
        return down + self._refused

    async def session(self, seconds: float) -> Session | None:
        """A live session; one that is being opened is waited for, for ``seconds``."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds), self._connected:
                await self._connected.wait_for(lambda: self._session is not None and self._session.alive)
        return self._session if self._session is not None and self._session.alive else None

    async def _keep_connected(self) -> None:
        delay = _FIRST_DELAY_SECONDS
        while not self._closing:
            self._last_words.clear()
            try:
                async with self._open() as session:
                    delay = _FIRST_DELAY_SECONDS
                    await self._serve(session)
                self._down = "the session ended"
            except Exception as error:
                self._down = _cause(error)
            finally:
                self._session = None
            if self._last_words:
                self._down += f"; it said: {' / '.join(self._last_words)}"
            self._answered.set()
            log.info("mcp_session_ended", server=self.name, retry_seconds=delay)
            await asyncio.sleep(delay)
            delay = min(2 * delay, _LONGEST_DELAY_SECONDS)

    @asynccontextmanager
    async def _open(self) -> AsyncIterator[Session]:
        ended = asyncio.Event()
        async with AsyncExitStack() as stack:
            transport = await self._transport(stack)
            client = Client(noticing_end(transport, ended), message_handler=self._notice, cache=None)
            async with asyncio.timeout(_CONNECT_SECONDS):
                await stack.enter_async_context(client)
            yield Session(client, ended)

    async def _transport(self, stack: AsyncExitStack) -> Any:
        options = self._options
        if options.url is not None:
            # No read timeout: the calls have their own, and an open stream may be silent for long.
            timeout = httpx2.Timeout(_CONNECT_SECONDS, read=None)
            http = await stack.enter_async_context(httpx2.AsyncClient(headers=dict(options.headers), timeout=timeout))
            return streamable_http_client(options.url, http_client=http)
        errors = await stack.enter_async_context(captured_stderr(self._last_words))
        program = options.command or ""
        if shutil.which(program) is None:  # the shell that sets the limit would say so less clearly
            raise FileNotFoundError(errno.ENOENT, "no such program", program)
        command, *arguments = limited([program, *options.args], options.memory_mb)
        parameters = StdioServerParameters(
            command=command,
            args=arguments,
            env=clean_environment(options.env),
            cwd=self._folder / (options.cwd or Path()),
        )
        return stdio_client(parameters, errlog=errors)

    async def _serve(self, session: Session) -> None:
        """Offer the session until it is dead, and keep the list of tools fresh meanwhile."""
        self._stale.clear()
        await self._list_tools(session)
        self._down = None
        async with self._connected:
            self._session = session
            self._connected.notify_all()
        self._answered.set()
        async with anyio.create_task_group() as group:
            group.start_soon(self._listen, session)
            group.start_soon(self._relist, session)
            await session.wait()
            group.cancel_scope.cancel()

    async def _notice(self, message: object) -> None:
        if isinstance(message, ToolListChangedNotification):
            self._stale.set()

    async def _listen(self, session: Session) -> None:
        """Ask for changes of the list, on protocol versions where that needs asking (2026-07-28 and later)."""
        while True:
            try:
                async with session.client.listen(tools_list_changed=True) as changes:
                    async for _ in changes:
                        self._stale.set()
            except SubscriptionLost:
                pass  # as after an orderly end: ask again, and see what was missed
            except (ListenNotSupportedError, MCPError):
                return
            await asyncio.sleep(_RELISTEN_SECONDS)
            self._stale.set()

    async def _relist(self, session: Session) -> None:
        while True:
            await self._stale.wait()
            self._stale.clear()
            try:
                await self._list_tools(session)
            except (MCPError, TimeoutError) as error:
                log.warning("mcp_list_failed", server=self.name, error=type(error).__name__)
                if not isinstance(error, MCPError) or error.code in _DEAD:
                    session.end()

    async def _list_tools(self, session: Session) -> None:
        listed: list[Tool] = []
        cursor: str | None = None
        async with asyncio.timeout(_LIST_SECONDS):
            for _ in range(_PAGES):
                page = await session.client.list_tools(cursor=cursor)
                listed += page.tools
                cursor = page.next_cursor
                if cursor is None:
                    break
        tools: dict[str, McpTool] = {}
        refused: list[str] = []
        for tool in sorted(listed, key=lambda t: t.name):
            if not self._options.offers(tool.name):
                continue
            try:
                spec = spec_of(self.name, tool, self._options)
            except ToolDefinitionError as error:
                refused.append(f"mcp:{self.name}: {error.description}")
            else:
                tools[spec.name] = McpTool(self, tool, spec)
        self._tools, self._refused = tuple(tools.values()), refused
        self._on_change()


def _cause(error: BaseException) -> str:
    """The first real error in a group of them, in a line."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__

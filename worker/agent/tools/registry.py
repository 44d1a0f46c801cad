"""The worker's tools: loaded and checked once, then looked up, checked against and run by name."""

from __future__ import annotations

import asyncio
import importlib
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

import structlog

from shared.clean import clean
from shared.errors import ConfigurationError, ToolDefinitionError
from shared.settings import Settings
from worker.agent.base import ToolContext, ToolResult, ToolSpec
from worker.agent.tools import rules as approval_rules
from worker.agent.tools.config import ToolsFile, read_tools_file
from worker.agent.tools.declare import FunctionTool, collect
from worker.agent.tools.files import read_artifact_tool, read_file_tool
from worker.agent.tools.outcome import Runner, failed, raised
from worker.agent.tools.results import bounded
from worker.agent.tools.schema import invalid_arguments
from worker.agent.tools.shell import ShellTool
from worker.agent.tools.threads import ToolThreads

if TYPE_CHECKING:
    from worker.agent.tools.mcp import McpServer

_PAGE_SHARE: Final = 0.9  # of a result's limit that a page of text may take, so that it is never cut itself
_NAMES_TOLD: Final = 60

log = structlog.get_logger(__name__)


class ToolRegistry:
    """A ``Toolbox``. Local tools never change; those of MCP servers come and go with their servers.

    ``open`` starts the servers; a server that is down costs its tools and nothing else. ``problems`` says what is
    missing and why.
    """

    def __init__(
        self, tools: Iterable[Runner], servers: Sequence[McpServer] = (), *, tool_timeout_seconds: float = 60
    ) -> None:
        self._timeout_seconds = tool_timeout_seconds
        self._servers = tuple(servers)
        self._local: dict[str, Runner] = {}
        for tool in tools:
            if tool.spec.name in self._local:
                raise ToolDefinitionError(f"There are two tools named {tool.spec.name!r}.", tool=tool.spec.name)
            self._local[tool.spec.name] = tool
        self._clashes: list[str] = []
        self._tools: dict[str, Runner] = dict(self._local)
        self._specs: tuple[ToolSpec, ...] = ()
        self._gather()

    async def open(self, wait_seconds: float = 10) -> Self:
        """Connect to the MCP servers, all at once; those that are not there in time are tried on in the background."""
        for server in self._servers:
            server.start(self._gather)
        if self._servers:
            await asyncio.gather(*(server.first_answer(wait_seconds) for server in self._servers))
        for server in self._servers:
            if missing := server.problems():
                log.warning("mcp_tools_missing", server=server.name, problems=len(missing))
        return self

    async def close(self) -> None:
        """End the MCP sessions and their processes."""
        await asyncio.gather(*(server.close() for server in self._servers))

    def problems(self) -> list[str]:
        """One line for each server that is down and each tool that had to be left out."""
        return [line for server in self._servers for line in server.problems()] + self._clashes

    def specs(self) -> Sequence[ToolSpec]:
        return self._specs

    def get(self, name: str) -> ToolSpec | None:
        tool = self._tools.get(name)
        return tool.spec if tool else None

    def invalid(self, name: str, arguments: dict[str, Any]) -> str | None:
        spec = self.get(name)
        return invalid_arguments(spec.parameters, arguments) if spec else self._unknown(name)

    def decided_by_policy(self, name: str, arguments: dict[str, Any], rules: Sequence[Mapping[str, Any]]) -> str | None:
        spec = self.get(name)
        return approval_rules.decided_by_policy(spec, arguments, rules) if spec else None

    def validate_rule(self, name: str, prefix: str | None) -> str | None:
        """Why "don't ask again" is refused for this tool and prefix, or None."""
        spec = self.get(name)
        return approval_rules.validate_rule(spec, prefix) if spec else self._unknown(name)

    async def call(self, name: str, arguments: dict[str, Any], context: ToolContext) -> ToolResult:
        tool = self._tools.get(name)
        if tool is None:
            return failed(self._unknown(name))
        left = context.deadline - asyncio.get_running_loop().time()
        seconds = min(tool.spec.timeout_seconds or self._timeout_seconds, left)
        if seconds <= 0:
            return failed("Not executed: the time of this request is used up.")
        try:
            result = bounded(await tool.run(arguments, context, seconds))
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():  # ours: the turn was stopped or handed over
                raise
            result = failed("The tool cancelled its own work.")
        except GeneratorExit:  # this coroutine is closed
            raise
        except BaseException as error:
            log.info("tool_raised", tool=name, error=type(error).__name__)
            result = raised(error)
        return ToolResult(result.status, clean(result.content), clean(result.data), result.images)

    def _unknown(self, name: str) -> str:
        names = [spec.name for spec in self._specs]
        more = f" and {len(names) - _NAMES_TOLD} more" if len(names) > _NAMES_TOLD else ""
        return f"Not executed: there is no tool {name!r}. The tools are: {', '.join(names[:_NAMES_TOLD])}{more}."

    def _gather(self) -> None:
        """Put the servers' tools beside the local ones, in a stable order, since prompt caches depend on it."""
        tools = dict(self._local)
        clashes = []
        for server in self._servers:
            for tool in server.tools():
                if tool.spec.name in tools:
                    clashes.append(f"{tool.spec.source}: {tool.spec.name!r} is the name of another tool: left out")
                else:
                    tools[tool.spec.name] = tool
        self._tools, self._clashes = tools, clashes
        self._specs = tuple(tool.spec for tool in tools.values())


def load_toolbox(settings: Settings) -> ToolRegistry:
    """The tools that the settings name, checked; ``open()`` then starts MCP servers.

    Raises ``ConfigurationError`` naming file and key, and ``ToolDefinitionError`` naming the tool.
    """
    file = read_tools_file(settings.tools)
    threads = ToolThreads(settings.tool_threads)
    budget = int(settings.tool_result_tokens * _PAGE_SHARE)
    tools: list[Runner] = []
    if file.shell.enabled:
        tools.append(_shell(settings.tools, file))
    if file.read_file.enabled:
        roots = [_folder(settings.tools, file, "read_file.roots", root) for root in file.read_file.roots]
        tools.append(FunctionTool(read_file_tool(roots, budget), threads, "builtin"))
    tools.append(FunctionTool(read_artifact_tool(budget), threads, "builtin"))
    declared: dict[int, Any] = {}  # by identity: a module may import another one's tools
    for module in file.python:
        declared.update((id(function), function) for function in _functions_of(settings.tools, file, module))
    tools += [FunctionTool(function, threads) for function in declared.values()]
    servers: list[McpServer] = []
    if file.mcp_servers:
        from worker.agent.tools.mcp import McpServer  # 0.8 s to import, and not everybody has a server

        servers = [McpServer(name, options, file.folder) for name, options in file.mcp_servers.items()]
    return ToolRegistry(tools, servers, tool_timeout_seconds=settings.tool_timeout_seconds)


def _shell(path: Path | None, file: ToolsFile) -> ShellTool:
    options = file.shell
    cwd = _folder(path, file, "shell.cwd", options.cwd)
    return ShellTool(
        cwd=cwd,
        timeout_seconds=options.timeout_seconds,
        environment=options.env,
        memory_mb=options.memory_mb,
    )


def _folder(path: Path | None, file: ToolsFile, key: str, folder: Path) -> Path:
    place = (file.folder / folder.expanduser()).resolve()
    if not place.is_dir():
        raise ConfigurationError(f"{path}: {key}: there is no folder {place}.")
    return place


def _functions_of(path: Path | None, file: ToolsFile, module: str) -> list[Any]:
    """The tools of a module, found as Python finds it and then beside the tools file."""
    if str(file.folder) not in sys.path:
        sys.path.append(str(file.folder))
    try:
        functions = collect(importlib.import_module(module))
    except Exception as error:
        raise ConfigurationError(
            f"{path}: python: importing {module} failed: {type(error).__name__}: {error}."
        ) from error
    if not functions:
        raise ConfigurationError(f"{path}: python: {module} declares no tool; mark its functions with @tool.")
    return functions

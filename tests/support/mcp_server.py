"""A real MCP server for tests, on the SDK's server side: ``mcp_server.py stdio`` or ``http PORT [legacy]``.

``legacy`` answers only the protocol versions with sessions. State is in the folder of ``MCP_TEST_FOLDER``: each run of
``record`` and ``lookup`` adds a line to ``runs``.
"""

from __future__ import annotations

import asyncio
import base64
import os
import sys
from pathlib import Path
from typing import Any

from mcp.server.mcpserver import Context, Image, MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.types import ToolAnnotations

FOLDER = Path(os.environ["MCP_TEST_FOLDER"])
PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
server = MCPServer("test", log_level="ERROR")


def _ran(name: str) -> None:
    with (FOLDER / "runs").open("a") as file:
        file.write(f"{name}\n")


@server.tool(annotations=ToolAnnotations(read_only_hint=True))
def environment() -> dict[str, Any]:
    """The environment of the server's process."""
    return {"environment": dict(os.environ), "pid": os.getpid()}


@server.tool(annotations=ToolAnnotations(idempotent_hint=True, destructive_hint=False))
def label(name: str) -> str:
    """Set a label."""
    return f"labelled {name}"


@server.tool(annotations=ToolAnnotations(idempotent_hint=True))
def remove(name: str) -> str:
    """Remove a thing."""
    return f"removed {name}"


@server.tool()
async def record(exit_first: bool = False, seconds: float = 0.0) -> str:
    """Do something once; ``exit_first`` crashes the server in the middle."""
    _ran("record")
    if exit_first:
        os._exit(7)
    await asyncio.sleep(seconds)
    return "recorded"


@server.tool(annotations=ToolAnnotations(read_only_hint=True))
async def lookup(exit_once: bool = False) -> str:
    """Look something up; ``exit_once`` crashes the server the first time."""
    before = (FOLDER / "runs").read_text().count("lookup") if (FOLDER / "runs").exists() else 0
    _ran("lookup")
    if exit_once and not before:
        os._exit(7)
    return f"looked up {before + 1}"


@server.tool(annotations=ToolAnnotations(read_only_hint=True), structured_output=False)
def picture() -> list[Any]:
    """A picture with a caption."""
    return ["one pixel", Image(data=PNG, format="png")]


@server.tool(annotations=ToolAnnotations(read_only_hint=True))
def broken() -> str:
    """Always fails."""
    raise ToolError("the disk is full")


@server.tool(annotations=ToolAnnotations(read_only_hint=True))
async def grow(context: Context) -> str:
    """Add a tool to the list."""

    def grown() -> str:
        """Appeared later."""
        return "grown"

    server.add_tool(grown, annotations=ToolAnnotations(read_only_hint=True))
    if "legacy" in sys.argv:
        await context.session.send_tool_list_changed()
    else:
        await context.notify_tools_changed()
    return "grown"


def main() -> None:
    if sys.argv[1] == "stdio":
        print("starting up", file=sys.stderr, flush=True)
        server.run("stdio")
        return
    import uvicorn

    app = server.streamable_http_app()
    if "legacy" in sys.argv:
        app = _without_discover(app)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[2]), log_level="error")


def _without_discover(app: Any) -> Any:
    """As a server from before 2026-07-28 answers: it does not know ``server/discover``."""

    async def wrapped(scope: Any, receive: Any, send: Any) -> None:
        if dict(scope.get("headers") or ()).get(b"mcp-method") == b"server/discover":
            await send({"type": "http.response.start", "status": 400, "headers": []})
            await send({"type": "http.response.body", "body": b"unknown method"})
            return
        await app(scope, receive, send)

    return wrapped


if __name__ == "__main__":
    main()

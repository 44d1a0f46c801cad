"""``read_file`` and ``read_artifact``: text, page by page."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Sequence
from io import TextIOWrapper
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import Field

from shared.errors import ToolError
from worker.agent.base import ToolContext
from worker.agent.tools import pages
from worker.agent.tools.declare import tool

_PROBE_BYTES: Final = 8_192
_LINE_BYTES_READ: Final = 1_000_000  # a "line" of a file without line ends is read in pieces of this size
_ENTRIES_SHOWN: Final = 200

Offset = Annotated[int, Field(ge=1, description="First line, counted from 1")]
Limit = Annotated[int, Field(ge=1, le=10_000, description="Number of lines")]


def read_file_tool(roots: Sequence[Path], budget_tokens: int) -> Callable[..., Any]:
    """``read_file`` for the files below ``roots``; relative paths are below the first."""
    allowed = [root.resolve() for root in roots]

    @tool(risk="read_only")
    def read_file(path: str, offset: Offset = 1, limit: Limit = pages.DEFAULT_LINES) -> str:
        """Read a text file by lines, or list a folder. Say where to continue with offset."""
        place = _inside(allowed, path)
        if place.is_dir():
            return _listing(place)
        with _open_regular(place, path) as file:
            return pages.page(_lines(file), offset, limit, budget_tokens)

    return read_file


def read_artifact_tool(budget_tokens: int) -> Callable[..., Any]:
    """``read_artifact`` for the artifacts of the call's own conversation."""

    @tool(risk="read_only", name="read_artifact")
    async def read_artifact(
        artifact_id: str,
        context: ToolContext,
        offset: Offset = 1,
        limit: Limit = pages.DEFAULT_LINES,
        search: Annotated[str | None, Field(description="Show only lines that hold this text")] = None,
    ) -> str:
        """Read a stored result by lines, such as one that was too long for the conversation."""
        content = await context.artifacts.get(artifact_id) if context.artifacts else None
        if content is None:
            raise ToolError(f"There is no artifact {artifact_id!r} in this conversation; nothing was read.")
        if b"\0" in content[:_PROBE_BYTES]:
            raise ToolError(f"Artifact {artifact_id!r} is not text ({len(content):,} bytes); nothing was read.")
        lines = content.decode("utf-8", "replace").split("\n")
        if search:
            return pages.search(lines, search, offset, budget_tokens)
        return pages.page(lines, offset, limit, budget_tokens)

    return read_artifact


def _inside(roots: Sequence[Path], path: str) -> Path:
    """The real path, links and ``..`` resolved, if it is below a root."""
    if "\0" in path:
        raise ToolError("A path cannot hold a NUL character; nothing was read.")
    try:
        real = (roots[0] / path).resolve(strict=True)
    except (OSError, RuntimeError):  # RuntimeError: a loop of links
        real = None
    # One answer for what is missing and what lies outside, so that the tool tells nothing about the latter.
    if real is None or not any(real.is_relative_to(root) for root in roots):
        readable = ", ".join(map(str, roots))
        raise ToolError(f"There is no file {path!r} below {readable}; nothing was read.")
    return real


def _open_regular(place: Path, path: str) -> Any:
    """The open file. No link is followed any more, and a pipe or device is not waited for."""
    descriptor = os.open(place, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    file = os.fdopen(descriptor, "rb")
    status = os.fstat(descriptor)
    regular = stat.S_ISREG(status.st_mode)
    if not regular or b"\0" in file.peek(_PROBE_BYTES)[:_PROBE_BYTES]:
        file.close()
        what = f"is not text ({status.st_size:,} bytes)" if regular else "is not a regular file"
        raise ToolError(f"{path!r} {what}; nothing was read.")
    return TextIOWrapper(file, encoding="utf-8", errors="replace", newline="\n")


def _lines(file: TextIOWrapper) -> Any:
    return iter(lambda: file.readline(_LINE_BYTES_READ), "")


def _listing(folder: Path) -> str:
    with os.scandir(folder) as entries:
        names = sorted(islice((e.name + ("/" if e.is_dir(follow_symlinks=False) else "") for e in entries), 10_000))
    shown = names[:_ENTRIES_SHOWN]
    more = f"\n[{len(names) - len(shown):,} more]" if len(names) > len(shown) else ""
    return "\n".join(shown) + more if names else "[the folder is empty]"

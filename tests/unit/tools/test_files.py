"""read_file and read_artifact: pages, and no way out of the roots."""

from __future__ import annotations

import asyncio
import os
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.tools import MemoryArtifacts, tool_context
from worker.agent.base import ToolResult
from worker.agent.tools import ToolRegistry
from worker.agent.tools.declare import FunctionTool
from worker.agent.tools.files import read_artifact_tool, read_file_tool
from worker.agent.tools.pages import LINE_CHARACTERS, page, search
from worker.agent.tools.results import estimate_tokens
from worker.agent.tools.threads import ToolThreads


async def read(roots: list[Path], budget: int = 7_000, **arguments: Any) -> ToolResult:
    tools = ToolRegistry([FunctionTool(read_file_tool(roots, budget), ToolThreads(2))])
    wrong = tools.invalid("read_file", arguments)
    assert wrong is None
    return await tools.call("read_file", arguments, tool_context())


async def artifact(stored: dict[str, bytes], budget: int = 7_000, **arguments: Any) -> ToolResult:
    tools = ToolRegistry([FunctionTool(read_artifact_tool(budget), ToolThreads(2))])
    assert tools.invalid("read_artifact", arguments) is None
    return await tools.call("read_artifact", arguments, tool_context(artifacts=MemoryArtifacts(**stored)))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "root"
    folder.mkdir()
    (folder / "log.txt").write_text("".join(f"line {n}\n" for n in range(1, 501)))
    (tmp_path / "secret.txt").write_text("top secret")
    return folder


async def test_pages(root: Path) -> None:
    first = await read([root], path="log.txt", limit=2)
    assert (first.status, first.content) == (
        "done",
        "line 1\nline 2\n[lines 1 to 2; there is more: continue with offset=3]",
    )
    last = await read([root], path="log.txt", offset=499)
    assert last.content == "line 499\nline 500\n[lines 499 to 500, the end]"
    beyond = await read([root], path="log.txt", offset=600)
    assert "no line 600" in beyond.content


async def test_a_page_stays_within_its_budget(root: Path) -> None:
    result = await read([root], budget=100, path="log.txt", limit=500)
    assert estimate_tokens(result.content) < 150
    assert "continue with offset=" in result.content


@pytest.mark.parametrize(
    "path",
    ["../secret.txt", "link", "folder_link/secret.txt", "a/../../secret.txt", "/etc/passwd", "missing", "loop", ""],
)
async def test_nothing_outside_the_roots_is_read(root: Path, path: str) -> None:
    (root / "a").mkdir()
    (root / "link").symlink_to(root.parent / "secret.txt")
    (root / "folder_link").symlink_to(root.parent)
    (root / "loop").symlink_to("loop")
    result = await read([root], path=path)
    assert "secret" not in result.content.replace("secret.txt", "") or path == ""
    assert result.status == ("done" if path == "" else "failed")  # "" is the root itself: a listing
    assert "top secret" not in result.content


async def test_missing_and_forbidden_look_alike(root: Path) -> None:
    texts = {
        re.sub(r"'.*?'", "", (await read([root], path=p)).content) for p in ("missing", "../secret.txt", "/etc/passwd")
    }
    assert len(texts) == 1


async def test_links_inside_and_several_roots(root: Path, tmp_path: Path) -> None:
    (root / "inner").symlink_to("log.txt")
    other = tmp_path / "other"
    other.mkdir()
    (other / "b.txt").write_text("b")
    assert (await read([root, other], path="inner", limit=1)).content.startswith("line 1\n")
    assert (await read([root, other], path=str(other / "b.txt"))).content.startswith("b\n")


async def test_pipes_and_binaries_are_refused_at_once(root: Path) -> None:
    os.mkfifo(root / "pipe")
    (root / "binary").write_bytes(b"\x7fELF\0\0")
    for name in ("pipe", "binary", "nul\0"):
        result = await asyncio.wait_for(read([root], path=name), 5)
        assert result.status == "failed"
        assert "nothing was read" in result.content


async def test_a_folder_is_listed(root: Path) -> None:
    (root / "sub").mkdir()
    assert (await read([root], path=".")).content == "log.txt\nsub/"
    assert (await read([root], path="sub")).content == "[the folder is empty]"


async def test_a_line_without_end_can_be_read_to_its_end(root: Path) -> None:
    text = "".join(chr(97 + n % 26) for n in range(5 * LINE_CHARACTERS))
    (root / "one_line.json").write_text(text)
    seen, offset = "", 1
    while True:
        result = await read([root], budget=1_500, path="one_line.json", offset=offset)
        *lines, note = result.content.split("\n")
        seen += "".join(lines)
        more = re.search(r"offset=(\d+)", note)
        if not more:
            break
        offset = int(more[1])
    assert seen == text


async def test_artifacts() -> None:
    stored = {"a": b"one\ntwo\nThree two\n", "bin": b"\0\1"}
    assert (await artifact(stored, artifact_id="a", limit=1)).content.startswith("one\n[lines 1 to 1")
    found = await artifact(stored, artifact_id="a", search="TWO")
    assert found.content == "2: two\n3: Three two\n[the end]"
    none = await artifact(stored, artifact_id="a", search="four")
    assert "holds 'four'" in none.content
    for identifier in ("bin", "of another conversation"):
        refused = await artifact(stored, artifact_id=identifier)
        assert refused.status == "failed"
        assert "nothing was read" in refused.content


@given(
    st.lists(st.text(st.characters(exclude_characters="\n\r"), max_size=30), min_size=1, max_size=40),
    st.integers(1, 10),
)
def test_pages_follow_each_other_without_gap(lines: list[str], limit: int) -> None:
    seen: list[str] = []
    offset: int | None = 1
    while offset is not None:
        *shown, note = page(lines, offset, limit, 10_000).split("\n")
        seen += shown
        more = re.search(r"offset=(\d+)\]$", note)
        offset = int(more[1]) if more else None
    assert seen == lines


def test_a_search_says_where_to_go_on() -> None:
    lines = [f"match {n}" for n in range(1, 151)]
    first = search(lines, "match", 1, 100_000)
    assert first.endswith("[there are more: continue with offset=101]")
    assert search(lines, "match", 101, 100_000).startswith("101: match 101")

"""shell: real processes, and none left behind."""

from __future__ import annotations

import asyncio
import os
import shlex
import sys
import time
from pathlib import Path

import pytest

from tests.support.tools import tool_context, until
from worker.agent.base import ToolResult
from worker.agent.tools import ToolRegistry
from worker.agent.tools.process import HeadAndTail, clean_environment
from worker.agent.tools.shell import OUTPUT_BYTES, ShellTool


def registry(cwd: Path, *, timeout_seconds: float | None = 20, **environment: str) -> ToolRegistry:
    return ToolRegistry([ShellTool(cwd=cwd, timeout_seconds=timeout_seconds, environment=environment)])


async def run(cwd: Path, command: str, *, timeout_seconds: float = 20, **environment: str) -> ToolResult:
    tools = registry(cwd, timeout_seconds=timeout_seconds, **environment)
    return await tools.call("shell", {"command": command}, tool_context(60))


def alive(pid: int) -> bool:
    """Whether the process runs; one that has ended but is not reaped yet does not."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{pid}/stat")
    return not (stat.exists() and stat.read_text().rpartition(")")[2].split()[0] == "Z")


async def test_output_and_exit_status(tmp_path: Path) -> None:
    done = await run(tmp_path, "pwd; echo error >&2")
    assert done == ToolResult(
        "done", f"exit status 0\n{tmp_path}\nerror", {"status": "exit status 0", "exit_status": 0}
    )
    failed = await run(tmp_path, "echo x; exit 3")
    assert (failed.status, failed.content) == ("failed", "exit status 3\nx")
    silent = await run(tmp_path, "true")
    assert silent.content == "exit status 0, no output"
    killed = await run(tmp_path, "kill -9 $$")
    assert (killed.status, killed.content) == ("failed", "killed by signal 9, no output")
    assert (await run(tmp_path, "cat")).content == "exit status 0, no output"  # there is no input to wait for


async def test_environment_is_clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        "OPENAI_API_KEY",
        "DATABASE_URL",
        "SUPABASE_KEY",
        "TURNKEEPER_MODEL",
        "BASH_ENV",
        "ENV",
        "LD_PRELOAD_X",
    ):
        monkeypatch.setenv(name, "must-not-leak")
    result = await run(tmp_path, "env", KUBECONFIG="/k")
    assert "must-not-leak" not in result.content
    names = {line.partition("=")[0] for line in result.content.splitlines()[1:]}
    assert names <= {"PATH", "HOME", "LANG", "TMPDIR", "KUBECONFIG", "PWD", "SHLVL", "_", "OLDPWD"}
    assert {"PATH", "KUBECONFIG"} <= names
    assert clean_environment({"PATH": "/x"})["PATH"] == "/x"


async def test_timeout_kills_the_whole_group(tmp_path: Path) -> None:
    command = "echo begun; sh -c 'sleep 60 & echo $! > grandchild; wait' & echo $! > child; trap '' TERM; sleep 60"
    started = time.monotonic()
    result = await run(tmp_path, command, timeout_seconds=0.7)
    assert time.monotonic() - started < 8
    assert result.status == "unknown"
    assert "begun" in result.content
    assert "may or may not" in result.content
    pids = [int((tmp_path / name).read_text()) for name in ("child", "grandchild")]
    await until(lambda: not any(alive(pid) for pid in pids))


async def test_cancellation_kills_the_whole_group(tmp_path: Path) -> None:
    call = asyncio.ensure_future(run(tmp_path, "sleep 60 & echo $! > new; mv new child; wait"))
    await until((tmp_path / "child").exists)
    pid = int((tmp_path / "child").read_text())
    assert alive(pid)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await until(lambda: not alive(pid))


async def test_what_outlives_the_command_is_killed_and_not_waited_for(tmp_path: Path) -> None:
    started = time.monotonic()
    result = await run(tmp_path, "sleep 60 & echo $!")
    assert time.monotonic() - started < 5
    pid = int(result.content.splitlines()[1])
    await until(lambda: not alive(pid))


async def test_a_process_that_left_the_group_does_not_hold_up_the_call(tmp_path: Path) -> None:
    started = time.monotonic()
    result = await run(tmp_path, "setsid sh -c 'echo $$ > new; mv new escaped; exec sleep 30' & sleep 0.5; echo done")
    assert time.monotonic() - started < 8
    assert result.content == "exit status 0\ndone"
    escaped = int((tmp_path / "escaped").read_text())
    assert alive(escaped)
    os.kill(escaped, 9)


async def test_much_output_keeps_head_and_tail(tmp_path: Path) -> None:
    result = await run(tmp_path, "echo first; head -c 5000000 /dev/zero | tr '\\0' x; echo; echo last")
    assert result.content.startswith("exit status 0\nfirst\n")
    assert result.content.endswith("last")
    assert "bytes of output left out" in result.content
    assert len(result.content) < OUTPUT_BYTES + 200


async def test_odd_bytes_become_text(tmp_path: Path) -> None:
    result = await run(tmp_path, r"printf 'a\000b\377c'")
    assert result.content == "exit status 0\nab\ufffdc"


async def test_a_folder_that_is_gone_is_a_failure(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    result = await run(gone, "true")
    assert result.status == "failed"
    assert "FileNotFoundError" in result.content


async def test_no_descriptor_is_left_open(tmp_path: Path) -> None:
    descriptors = "/dev/fd"
    await run(tmp_path, "true")
    before = len(os.listdir(descriptors))
    for _ in range(5):
        await run(tmp_path, "echo x")
    assert len(os.listdir(descriptors)) <= before


def test_head_and_tail() -> None:
    for sizes in ((1,) * 30, (30,), (7, 23), (4, 6, 20)):
        kept = HeadAndTail(10)
        data = bytes(range(65, 95))
        start = 0
        for size in sizes:
            kept.write(data[start : start + size])
            start += size
        assert kept.left_out == 20
        assert kept.text() == "ABCDE\n[… 20 bytes of output left out …]\nZ[\\]^"
    small = HeadAndTail(10)
    small.write(b"abc")
    small.write(b"defgh")
    assert (small.text(), small.left_out) == ("abcdefgh", 0)


async def test_a_command_that_wants_too_much_memory_does_not_get_it(tmp_path: Path) -> None:
    hungry = f"{shlex.quote(sys.executable)} -c 'x = bytearray(512 * 1024 * 1024); print(len(x))'"
    free = ShellTool(cwd=tmp_path, timeout_seconds=None, environment={}, memory_mb=None)
    bound = ShellTool(cwd=tmp_path, timeout_seconds=None, environment={}, memory_mb=256)
    assert (await free.run({"command": hungry}, tool_context(), 20)).status == "done"
    refused = await bound.run({"command": hungry}, tool_context(), 20)
    assert refused.status == "failed"
    assert "MemoryError" in refused.content

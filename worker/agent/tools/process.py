"""Commands in a process group of their own, which can be ended as a whole.

A group holds the command and all that it started, except what left it on purpose (``setsid``). What outlives the
command is ended with it: a tool call leaves nothing behind.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

INHERITED: Final = ("PATH", "HOME", "LANG", "TMPDIR")
"""All that a child gets of the worker's environment: no database, queue or provider key is among them."""

_READ_BYTES: Final = 65_536
_TERMINATION_SECONDS: Final = 2.0  # between SIGTERM and SIGKILL
_SETTLE_SECONDS: Final = 1.0  # for the end of killed processes and of their output


def clean_environment(extra: Mapping[str, str]) -> dict[str, str]:
    """``INHERITED`` of our own environment, and ``extra`` over it."""
    return {name: os.environ[name] for name in INHERITED if name in os.environ} | dict(extra)


def limited(argv: Sequence[str], memory_mb: int | None) -> list[str]:
    """The command under a limit on the memory of each of its processes (``RLIMIT_DATA``: what they write to, not what
    they map). The limit is set by a shell in the child, since code between fork and exec is not safe with threads."""
    if memory_mb is None:
        return list(argv)
    return ["/bin/sh", "-c", f'ulimit -d {memory_mb * 1024} && exec "$@"', "sh", *argv]


@dataclass(frozen=True, slots=True)
class Ended:
    """``status``: the exit status, negative for a signal; None when time ran out. ``output``: stdout and stderr as
    they came, of which ``left_out`` bytes in the middle are missing."""

    status: int | None
    output: str
    left_out: int


class HeadAndTail:
    """The first and the last half of ``limit`` bytes of a stream, and how many went between."""

    def __init__(self, limit: int) -> None:
        self._half = max(1, limit // 2)
        self._head = bytearray()
        self._tail = bytearray()
        self.left_out = 0

    def write(self, data: bytes) -> None:
        room = self._half - len(self._head)
        self._head += data[:room]
        self._tail += data[room:] if room > 0 else data
        excess = len(self._tail) - self._half
        if excess > 0:
            del self._tail[:excess]
            self.left_out += excess

    def text(self) -> str:
        if not self.left_out:
            return (self._head + self._tail).decode("utf-8", "replace")
        head, tail = (part.decode("utf-8", "replace") for part in (self._head, self._tail))
        return f"{head}\n[… {self.left_out:,} bytes of output left out …]\n{tail}"


async def run_group(
    argv: Sequence[str], *, environment: Mapping[str, str], cwd: Path, seconds: float, output_bytes: int
) -> Ended:
    """Run to the end or for ``seconds``; the group is gone when this returns or is cancelled. Raises ``OSError`` where
    the command cannot be started."""
    ours, theirs = os.pipe()
    try:
        # The pipe is ours, not asyncio's: its wait() would also wait for every process that inherited the pipe.
        process = await asyncio.create_subprocess_exec(
            *argv,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=theirs,
            stderr=theirs,
            cwd=cwd,
            env=dict(environment),
            start_new_session=True,
        )
    except BaseException:
        os.close(ours)
        raise
    finally:
        os.close(theirs)
    output = HeadAndTail(output_bytes)
    reading = asyncio.create_task(_read(ours, output))
    try:
        status = await _wait(process, seconds)
    finally:
        _signal_group(process.pid, signal.SIGKILL)  # also what a finished or cancelled command left running
        await _settle(process, reading)
    return Ended(status, output.text(), output.left_out)


async def _settle(process: asyncio.subprocess.Process, reading: asyncio.Task[None]) -> None:
    """See the killed process off, and read what is still in the pipe; one that left the group may hold it open."""
    reaping = asyncio.create_task(process.wait())
    await asyncio.wait((reading, reaping), timeout=_SETTLE_SECONDS)
    reaping.cancel()
    if not reading.cancel():
        reading.result()


async def _wait(process: asyncio.subprocess.Process, seconds: float) -> int | None:
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            return await process.wait()
    _signal_group(process.pid, signal.SIGTERM)
    with suppress(TimeoutError):
        async with asyncio.timeout(_TERMINATION_SECONDS):
            await process.wait()
    return None


def _signal_group(group: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):  # gone already; macOS refuses for zombies
        os.killpg(group, number)


async def _read(descriptor: int, output: HeadAndTail) -> None:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    transport, _ = await loop.connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(descriptor, "rb", buffering=0)
    )
    try:
        while data := await reader.read(_READ_BYTES):
            output.write(data)
    finally:
        transport.close()

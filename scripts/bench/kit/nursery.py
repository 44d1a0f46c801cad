"""Worker processes by the dozen: forked from one that has imported everything, each ready in a tenth of a second.

A campaign of crashes needs thousands of processes, and importing a worker takes seconds. A worker from here is a
process like any other, with its own memory, connections and signals: what is shared are pages that nobody writes.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.context import ForkServerContext
from pathlib import Path

from scripts.bench.kit.processes import die_with_parent

PRELOAD = ("worker.main", "worker.bootstrap", "worker.rq_worker", "worker.agent.tools.mcp", "scripts.bench.kit.preload")
READY_SECONDS = 60.0
END_SECONDS = 90.0  # the hard deadline of a worker that leaves, and more
LOOK_SECONDS = 0.01


def nursery() -> ForkServerContext:
    """The process that workers are forked from; it starts with the first one and ends with this process."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOAD))
    return context


class Nursling:
    """A worker process. Its log is a file of JSON lines; ``arguments`` are those of ``python -m worker``."""

    def __init__(
        self, context: ForkServerContext, environment: Mapping[str, str], log: Path, arguments: Sequence[str] = ()
    ) -> None:
        self.log = log
        self._process = context.Process(target=_work, args=(dict(environment), str(log), list(arguments)))
        self._process.start()
        self._told_to_leave = False

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def ended(self) -> int | None:
        """The exit status, negative for a signal; None while it lives."""
        return self._process.exitcode

    def entries(self) -> Iterator[dict[str, object]]:
        """What it has logged."""
        if self.log.exists():
            for line in self.log.read_text().splitlines():
                with contextlib.suppress(ValueError):
                    yield json.loads(line)

    def said(self, event: str) -> dict[str, object] | None:
        """Its first log entry of that name."""
        return next((entry for entry in self.entries() if entry.get("event") == event), None)

    def wait_for(self, event: str, seconds: float = READY_SECONDS) -> dict[str, object]:
        """Raises ``RuntimeError`` with the log when it does not come, or the process ends without it."""
        deadline = time.monotonic() + seconds
        while (entry := self.said(event)) is None:
            if time.monotonic() > deadline or (self.ended is not None and self.said(event) is None):
                raise RuntimeError(f"{event} was not logged by {self.pid} ({self.ended}):\n{self.log.read_text()}")
            time.sleep(LOOK_SECONDS)
        return entry

    def wait(self, seconds: float | None = END_SECONDS) -> int:
        """Its exit status, once it has ended; None: however long that takes."""
        self._process.join(seconds)
        if self.ended is None:
            raise RuntimeError(f"{self.pid} did not end:\n{self.log.read_text()}")
        return self.ended

    @property
    def frozen(self) -> bool:
        """It stands still by SIGSTOP."""
        return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"

    def signal(self, number: int) -> None:
        if self.ended is None:
            os.kill(self.pid, number)

    def leave(self) -> None:
        """Tell it once to leave in order, whatever state it is in; a second signal would end it at once."""
        if not self._told_to_leave:
            self._told_to_leave = True
            self.signal(signal.SIGCONT)
            self.signal(signal.SIGTERM)

    def stop(self) -> None:
        """``leave``, and wait for the end."""
        self.leave()
        self.wait()


def _work(environment: dict[str, str], log: str, arguments: list[str]) -> None:
    """In the child."""
    die_with_parent()
    os.environ.clear()
    os.environ.update(environment)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(descriptor, sys.stderr.fileno())
    os.dup2(descriptor, sys.stdout.fileno())
    os.close(descriptor)
    from worker.main import main

    sys.exit(main(arguments))

"""Servers as children of the test run: started when a test asks, known to be ready by what they log, stopped after."""

from __future__ import annotations

import ctypes
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import Any

START_SECONDS = 30.0
STOP_SECONDS = 10.0


_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """In the child: the kernel stops it when its parent is killed, which no fixture outlives. Linux only."""
    if sys.platform == "linux":
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGINT)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


class Server:
    """A child process that is ready once a line of its output matches ``ready``."""

    def __init__(self, argv: Sequence[str], ready: str, *, stop_signal: int = signal.SIGTERM, **popen: Any) -> None:
        self._ready = re.compile(ready)
        self._stop_signal = stop_signal
        self._lines: list[str] = []
        self._event = threading.Event()
        self._process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            preexec_fn=die_with_parent,
            **popen,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        if not (self._event.wait(START_SECONDS) and self._is_ready):
            self.stop()
            raise RuntimeError(f"{argv[0]} did not start:\n{self.log}")

    @property
    def log(self) -> str:
        return "".join(self._lines)

    @property
    def pid(self) -> int:
        return self._process.pid

    def stop(self, stop_signal: int | None = None) -> None:
        """Stop it; ``stop_signal`` in place of its usual one. Twice is once."""
        self._process.send_signal(stop_signal or self._stop_signal)
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join()
        assert self._process.stdout is not None
        self._process.stdout.close()

    _is_ready = False

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.append(line)
            if self._ready.search(line):
                self._is_ready = True
                self._event.set()
        self._event.set()  # it has ended, ready or not

"""A tether: processes that are to end with this one, however it ends; SIGKILL and a closed terminal included.

A shell holds the reading end of a pipe whose writing end only this process has. Once the pipe closes, it sends SIGTERM
to the processes that it was told of. (``PR_SET_PDEATHSIG`` does the same on Linux only.)
"""

from __future__ import annotations

import subprocess
from typing import Self

_SCRIPT = 'while read -r pid; do pids="$pids $pid"; done; [ -z "$pids" ] || kill -TERM $pids'


class Tether:
    """Use as a context manager: leaving it in order ends nobody."""

    def __enter__(self) -> Self:
        self._shell = subprocess.Popen(
            ["/bin/sh", "-c", _SCRIPT],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # what ends our process group must not end it first
            text=True,
        )
        return self

    def tie(self, pid: int) -> None:
        """From now on the process ``pid`` gets a SIGTERM when this one is gone."""
        assert self._shell.stdin is not None
        self._shell.stdin.write(f"{pid}\n")
        self._shell.stdin.flush()

    def __exit__(self, *_: object) -> None:
        assert self._shell.stdin is not None
        self._shell.kill()
        self._shell.wait()
        self._shell.stdin.close()

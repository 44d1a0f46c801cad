"""Journals: append-only files of JSON lines that outlive the process that writes them, whenever it is killed."""

from __future__ import annotations

import json
import os
import time
from functools import cache
from pathlib import Path
from typing import Any

PATH_VARIABLE = "CHAOS_JOURNAL"  # tells workers where their journal is
Record = dict[str, Any]


class Journal:
    """One file, written by any number of processes at once: a line is one ``write`` to ``O_APPEND``, then ``fsync``.
    Every record gets the time (``at``, seconds since 1970) and the writer's ``pid``."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)

    def append(self, kind: str, **fields: Any) -> None:
        line = json.dumps({"kind": kind, "at": time.time(), "pid": os.getpid(), **fields}).encode() + b"\n"
        if os.write(self._descriptor, line) != len(line):
            raise OSError("a journal line was cut off")
        os.fsync(self._descriptor)

    def close(self) -> None:
        os.close(self._descriptor)


@cache
def own_journal() -> Journal:
    """The journal of a worker's process, which its environment names."""
    return Journal(Path(os.environ[PATH_VARIABLE]))


def read_journal(path: Path) -> list[Record]:
    """All records, in the order in which they were written."""
    return [json.loads(line) for line in path.read_bytes().splitlines()] if path.exists() else []

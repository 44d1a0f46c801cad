"""Watching what becomes of interrupted turns: how long after a kill somebody else has claimed them.

A thread looks at the table of unfinished turns every ``LOOK_SECONDS``; that is how exact the figures are.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Literal

from scripts.bench.kit.chaos.rows import AWAY, Query

LOOK_SECONDS = 0.1
Why = Literal["SIGKILL", "SIGTERM", "SIGSTOP"]
_UNFINISHED = "SELECT conversation_id, turn, attempt, status, worker FROM conversation_turns"
_UNFINISHED += " WHERE status IN ('pending', 'running')"


@dataclass(slots=True)
class Interruption:
    """A turn that a signalled worker was running. ``released_at``: it was seen handed back; ``resumed_at``: it was seen
    with a higher attempt, or ended without one (``resumed`` is False then). Times are ``time.time()``."""

    why: Why
    at: float
    conversation_id: str
    turn: int
    attempt: int
    released_at: float | None = None
    resumed_at: float | None = None
    resumed: bool = False

    @property
    def seconds(self) -> float | None:
        return None if self.resumed_at is None else self.resumed_at - self.at


class Watch:
    """``signalled`` after each signal; ``close`` gives everything that was interrupted."""

    def __init__(self, query: Query) -> None:
        self._query = query
        self._signals: SimpleQueue[tuple[Why, float, str]] = SimpleQueue()
        self._unresolved: list[Interruption] = []
        self._all: list[Interruption] = []
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._look_on, name="watch", daemon=True)
        self._thread.start()
        self.unfinished: int | None = None

    def signalled(self, why: Why, worker: str) -> None:
        """``worker`` got its signal just now; for SIGKILL it is dead."""
        self._signals.put((why, time.time(), worker))

    def close(self) -> list[Interruption]:
        self._closing.set()
        self._thread.join()
        return self._all

    def _look_on(self) -> None:
        pending: list[tuple[Why, float, str]] = []
        while not self._closing.wait(LOOK_SECONDS):
            try:
                while True:
                    pending.append(self._signals.get_nowait())
            except Empty:
                pass
            looked_at = time.time()
            try:
                rows = {(row["conversation_id"], row["turn"]): row for row in self._query(_UNFINISHED)}
            except AWAY:
                self.unfinished = None
                continue
            self.unfinished = len(rows)
            self._resolve({key: (row["attempt"], row["status"]) for key, row in rows.items()}, looked_at)
            for why, at, worker in pending:
                for (conversation_id, turn), row in rows.items():
                    if row["worker"] == worker and row["status"] == "running":
                        self._unresolved.append(Interruption(why, at, conversation_id, turn, row["attempt"]))
            pending.clear()

    def _resolve(self, rows: dict[tuple[str, int], tuple[int, str]], looked_at: float) -> None:
        still: list[Interruption] = []
        for found in self._unresolved:
            attempt, status = rows.get((found.conversation_id, found.turn), (None, ""))
            if status == "pending" and attempt == found.attempt and found.released_at is None:
                found.released_at = looked_at
            if attempt == found.attempt:
                still.append(found)
                continue
            found.resumed = attempt is not None
            found.resumed_at = looked_at
            self._all.append(found)
        self._unresolved = still

"""The storm: signals to random workers, one emptied Redis, one database that goes away and comes back."""

from __future__ import annotations

import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from scripts.bench.kit.chaos.fleet import Fleet, Seat
from scripts.bench.kit.chaos.installation import Installation
from scripts.bench.kit.chaos.pickup import Watch, Why

SIGNALS: dict[Why, int] = {"SIGKILL": 70, "SIGTERM": 15, "SIGSTOP": 15}
"""Shares in percent."""

PAUSE_LEASES = (0.3, 1.6)  # how long a paused worker stands still, in leases: some wake up before, some after the end
FLUSH_SHARE = (0.3, 0.45)  # when Redis is emptied, as a share of the storm's time
DATABASE_SHARE = (0.55, 0.75)
LOOK_AGAIN_SECONDS = 0.1  # before another try to take the database away
DEATH_SECONDS = 0.02  # between a SIGKILL and the look at what the process had claimed


@dataclass(slots=True)
class Record:
    """What was done. ``flushed_at``, ``absences`` of the database (from, to): ``time.time()``. ``paused_with_lock``:
    how many of the absences were those of a worker that was paused within a transaction of SQLite."""

    signals: Counter[str] = field(default_factory=Counter)
    flushed_at: float | None = None
    absences: list[tuple[float, float]] = field(default_factory=list)
    paused_with_lock: int = 0


class Storm:
    """One storm over a fleet. It runs in the calling thread: servers end with the thread that started them."""

    def __init__(
        self, installation: Installation, fleet: Fleet, watch: Watch, *, seed: int, kill_every: float, seconds: float
    ) -> None:
        self._installation, self._fleet, self._watch = installation, fleet, watch
        self._chance = random.Random(seed)  # noqa: S311  (reproducible, not secret)
        self._kill_every, self._seconds = kill_every, seconds
        self._draining: set[str] = set()
        self._due: list[tuple[float, Callable[[], None]]] = []
        self._away = False
        self.record = Record()

    def rage(self) -> None:
        """Until the time is over and everything that was paused or away is back."""
        started = time.monotonic()
        away_at = started + self._share(DATABASE_SHARE)
        self._due = [
            (started + self._share(FLUSH_SHARE), self._flush),
            (away_at, self._database_goes),
            (started + self._gap(), self._strike),
        ]
        self._end = started + self._seconds
        while self._due:
            self._due.sort(key=lambda entry: entry[0])
            at, act = self._due.pop(0)
            time.sleep(max(0.0, at - time.monotonic()))
            act()

    def _share(self, bounds: tuple[float, float]) -> float:
        return self._seconds * self._chance.uniform(*bounds)

    def _gap(self) -> float:
        return self._kill_every * self._chance.uniform(0.5, 1.5)

    def _strike(self) -> None:
        """One signal to one worker; the next is due soon."""
        following = time.monotonic() + self._gap()
        if following < self._end:
            self._due.append((following, self._strike))
        [why] = self._chance.choices(list(SIGNALS), list(SIGNALS.values()))
        for seat in self._chance.sample(self._fleet.seats, len(self._fleet.seats)):
            if why == "SIGTERM" and seat.name in self._draining:
                continue  # a second one would end it at once
            if self._signal(seat, why):
                return

    def _signal(self, seat: Seat, why: Why) -> bool:
        hit = seat.send(getattr(signal, why))
        if hit is None:
            return False
        self.record.signals[why] += 1
        if why == "SIGTERM":
            self._draining.add(hit)
        elif why == "SIGSTOP":
            self._pause(seat, hit)
        else:
            time.sleep(DEATH_SECONDS)
        self._watch.signalled(why, hit)
        return True

    def _pause(self, seat: Seat, name: str) -> None:
        seconds = self._installation.settings.lease_seconds * self._chance.uniform(*PAUSE_LEASES)
        self._due.append((time.monotonic() + seconds, lambda: self._wake(seat, name)))
        if not self._away and self._installation.held_by_a_paused_worker():
            self.record.absences.append((time.time(), time.time() + seconds))
            self.record.paused_with_lock += 1

    def _wake(self, seat: Seat, name: str) -> None:
        if seat.name == name:
            seat.send(signal.SIGCONT)

    def _flush(self) -> None:
        self.record.flushed_at = time.time()
        self._installation.flush_redis()

    def _database_goes(self) -> None:
        self._went_at = time.time()
        self._away = self._installation.take_database_away()
        act, seconds = self._database_goes, LOOK_AGAIN_SECONDS
        if self._away:
            act, seconds = self._database_returns, self._installation.away_seconds
        self._due.append((time.monotonic() + seconds, act))

    def _database_returns(self) -> None:
        self._installation.bring_database_back()
        self._away = False
        self.record.absences.append((self._went_at, time.time()))

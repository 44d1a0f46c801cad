"""The fleet: as many workers as were asked for; one that ends is replaced at once, as an orchestrator would."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from scripts.bench.kit.nursery import Nursling, nursery

READY_WITHIN_SECONDS = 90.0
Start = Callable[[str], Nursling]


class Service:
    """How many workers can work, over time: started, not stopped, not told to leave."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._working: set[str] = set()
        self._nobody_since: float | None = None
        self.gaps: list[tuple[float, float]] = []
        """When nobody could (from, to), ``time.time()``."""

    def begins(self, name: str) -> None:
        with self._lock:
            self._working.add(name)
            if self._nobody_since is not None:
                self.gaps.append((self._nobody_since, time.time()))
                self._nobody_since = None

    def ends(self, name: str) -> None:
        with self._lock:
            self._working.discard(name)
            if not self._working and self._nobody_since is None:
                self._nobody_since = time.time()


class Seat:
    """A place in the fleet, with one worker process after another. ``name`` is the present one's, in RQ and in the
    table of turns; ``started`` counts them; ``seconds_to_ready`` is how long each took to come up."""

    def __init__(self, number: int, start: Start, service: Service) -> None:
        self._number, self._start, self._service = number, start, service
        self._closing = False
        self._worker: Nursling | None = None
        self._lock = threading.Lock()
        self.started = 0
        self.failures: list[str] = []
        self.stuck: list[str] = []
        self.seconds_to_ready: list[float] = []
        self.ready = threading.Event()
        self._thread = threading.Thread(target=self._keep, name=f"seat-{number}", daemon=True)
        self._thread.start()

    @property
    def name(self) -> str:
        return f"chaos-{self._number}-{self.started}"

    def send(self, number: int) -> str | None:
        """Signal the worker if it is at work; its name."""
        with self._lock:
            if self._worker is None or self._worker.ended is not None:
                return None
            try:
                self._worker.signal(number)
            except ProcessLookupError:  # it has ended just now
                return None
            if number == signal.SIGCONT:
                self._service.begins(self.name)
            else:
                self._service.ends(self.name)
            return self.name

    def close(self) -> None:
        """Drain the worker and end."""
        self._closing = True
        self.send(signal.SIGCONT)
        self.send(signal.SIGTERM)

    def join(self, seconds: float) -> None:
        self._thread.join(seconds)
        if self._thread.is_alive():
            self.stuck.append(f"{self.name} did not end within {seconds:.0f} s after SIGTERM")
            self.send(signal.SIGKILL)
            self._thread.join()

    def _keep(self) -> None:
        while not self._closing:
            self.started += 1
            began = time.monotonic()
            worker = self._start(self.name)
            try:
                worker.wait_for("worker_ready")
            except RuntimeError as error:  # the database or Redis is away: an orchestrator would try again
                self.failures.append(str(error))
                worker.signal(signal.SIGKILL)
                worker.wait(None)
                continue
            with self._lock:
                self._worker = worker
                self._service.begins(self.name)
            self.seconds_to_ready.append(time.monotonic() - began)
            self.ready.set()
            if self._closing:
                self.send(signal.SIGTERM)
            worker.wait(None)
            with self._lock:
                self._worker = None
                self._service.ends(self.name)


class Fleet:
    """All seats. ``starts`` is how many workers there have been."""

    def __init__(self, count: int, environment: Mapping[str, str], logs: Path) -> None:
        context = nursery()

        def start(name: str) -> Nursling:
            return Nursling(context, environment, logs / f"{name}.log", ["--name", name])

        self.service = Service()
        self.seats = [Seat(number, start, self.service) for number in range(count)]
        for seat in self.seats:
            if not seat.ready.wait(READY_WITHIN_SECONDS):
                raise RuntimeError(f"no worker was ready within {READY_WITHIN_SECONDS:.0f} s: {seat.failures}")

    @property
    def starts(self) -> int:
        return sum(seat.started for seat in self.seats)

    @property
    def seconds_to_ready(self) -> list[float]:
        return [seconds for seat in self.seats for seconds in seat.seconds_to_ready]

    @property
    def stuck(self) -> list[str]:
        """Workers that had to be killed at the end."""
        return [line for seat in self.seats for line in seat.stuck]

    def close(self, seconds: float) -> None:
        for seat in self.seats:
            seat.close()
        for seat in self.seats:
            seat.join(seconds)

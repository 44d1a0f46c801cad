"""The fleet: as many workers as were asked for; one that ends is replaced at once, as an orchestrator would."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Mapping
from pathlib import Path

from scripts.bench.kit.parts import WorkerProcess

MODULE = "scripts.bench.kit.chaos.worker"
READY_WITHIN_SECONDS = 90.0


class Seat:
    """A place in the fleet, with one worker process after another. ``name`` is the present one's, in RQ and in the
    table of turns; ``started`` counts them."""

    def __init__(self, number: int, environment: Mapping[str, str], logs: Path) -> None:
        self._number, self._environment, self._logs = number, environment, logs
        self._closing = False
        self._worker: WorkerProcess | None = None
        self._lock = threading.Lock()
        self.started = 0
        self.failures: list[str] = []
        self.stuck: list[str] = []
        self.ready = threading.Event()
        self._thread = threading.Thread(target=self._keep, name=f"seat-{number}", daemon=True)
        self._thread.start()

    @property
    def name(self) -> str:
        return f"chaos-{self._number}-{self.started}"

    def send(self, number: int) -> str | None:
        """Signal the worker if it is at work; its name."""
        with self._lock:
            if self._worker is None or self._worker.process.poll() is not None:
                return None
            os.kill(self._worker.process.pid, number)
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
            try:
                worker = WorkerProcess(MODULE, self._environment, ["--name", self.name])
            except RuntimeError as error:  # the database or Redis is away: an orchestrator would try again
                self.failures.append(str(error))
                continue
            with self._lock:
                self._worker = worker
            self.ready.set()
            if self._closing:
                self.send(signal.SIGTERM)
            worker.process.wait()
            with self._lock:
                self._worker = None
            worker.stop()  # it has ended; this collects its log
            (self._logs / f"{self.name}.log").write_text(worker.log)


class Fleet:
    """All seats. ``starts`` is how many workers there have been."""

    def __init__(self, count: int, environment: Mapping[str, str], logs: Path) -> None:
        self.seats = [Seat(number, environment, logs) for number in range(count)]
        for seat in self.seats:
            if not seat.ready.wait(READY_WITHIN_SECONDS):
                raise RuntimeError(f"no worker was ready within {READY_WITHIN_SECONDS:.0f} s: {seat.failures}")

    @property
    def starts(self) -> int:
        return sum(seat.started for seat in self.seats)

    @property
    def stuck(self) -> list[str]:
        """Workers that had to be killed at the end."""
        return [line for seat in self.seats for line in seat.stuck]

    def close(self, seconds: float) -> None:
        for seat in self.seats:
            seat.close()
        for seat in self.seats:
            seat.join(seconds)

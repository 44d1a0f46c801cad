"""The parts of a measurement: a Redis and a store for the run, worker processes, and a client that waits for turns."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from shared.embedded import EmbeddedRedis
from shared.settings import Settings, load_settings
from shared.store.migrate import migrate

READY_SECONDS = 60.0
STOP_SECONDS = 70.0  # the hard deadline of a draining worker, and a little


@contextlib.contextmanager
def measured_settings(*, postgres: bool, **overrides: Any) -> Iterator[Settings]:
    """Settings of a run on parts of its own. ``postgres``: ``DATABASE_URL`` where set, else a cluster of the run with
    durable defaults; otherwise SQLite. Redis is ``REDIS_URL`` where set, else embedded."""
    with contextlib.ExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="turnkeeper-bench-")))
        if postgres and not os.environ.get("DATABASE_URL"):
            from scripts.bench.kit.postgres import LocalPostgres, own_folder

            folder = home / "postgres"
            folder.mkdir()
            home.chmod(0o755)
            server = stack.enter_context(LocalPostgres(own_folder(folder)))
            overrides["database_url"] = server.create("turnkeeper_bench")
        elif not postgres:
            overrides["database_url"] = None
        settings = load_settings(home=home, **overrides)
        if settings.embedded_redis:
            redis = EmbeddedRedis.start(settings)
            stack.callback(redis.stop)
        migrate(settings)
        yield settings


def environment_of(settings: Settings, **extra: str) -> dict[str, str]:
    """The environment that gives a process the same settings."""
    environment = {**os.environ, "TURNKEEPER_HOME": str(settings.home), "REDIS_URL": settings.effective_redis_url}
    for name in ("DATABASE_URL", "SUPABASE_URL", "SUPABASE_KEY"):
        environment.pop(name, None)
    if settings.database_url is not None:
        environment["DATABASE_URL"] = settings.database_url.get_secret_value()
    return environment | extra


class WorkerProcess:
    """A worker in a process of its own. ``seconds_to_ready``: from its start to its first readiness."""

    def __init__(self, module: str, environment: Mapping[str, str], arguments: Sequence[str] = ()) -> None:
        started = time.monotonic()
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stderr is not None
        for line in self.process.stderr:
            with contextlib.suppress(ValueError):
                if json.loads(line).get("event") == "worker_ready":
                    break
            if time.monotonic() - started > READY_SECONDS:
                break
        else:
            raise RuntimeError(f"{module} ended with status {self.process.wait()} before it was ready")
        self.seconds_to_ready = time.monotonic() - started
        self._lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def log(self) -> str:
        """What it has logged since it was ready."""
        return "".join(self._lines)

    def _read(self) -> None:
        assert self.process.stderr is not None
        with self.process.stderr as lines:
            self._lines.extend(lines)

    def resident_megabytes(self) -> float:
        for line in Path(f"/proc/{self.process.pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) / 1024
        raise RuntimeError("no VmRSS in /proc")

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(STOP_SECONDS)
        self._reader.join()


@contextlib.asynccontextmanager
async def connected(settings: Settings) -> AsyncIterator[Any]:
    """A client on the measured parts."""
    from shared.client import Client

    async with Client.connect(settings) as client:
        yield client


async def ended(client: Any, conversation_id: str, turn: int, seconds: float = 60) -> str:
    """Wait for the end of a turn as a live reader sees it; the terminal event's name."""
    async with asyncio.timeout(seconds):
        name = ""
        async for row in client.follow(conversation_id, until=turn):
            name = row["event"]
        return name


def median(values: Sequence[float]) -> float:
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def show(title: str, rows: Sequence[Mapping[str, Any]], *, as_json: bool) -> None:
    """One table, or one JSON object a line."""
    if as_json:
        for row in rows:
            print(json.dumps({"bench": title, **row}))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title)
    for column in rows[0]:
        table.add_column(column)
    for row in rows:
        table.add_row(*(f"{value:,.2f}" if isinstance(value, float) else str(value) for value in row.values()))
    Console().print(table)

"""A worker on the test's own loop, or in a process of its own."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import pytest
from redis import Redis
from rq import Queue
from rq.serializers import JSONSerializer

from shared.queues import connect
from shared.settings import Settings
from tests.integration.worker.fake import FakeRunner, FakeWorker
from worker.rq_intake import Limits

ROOT = Path(__file__).parents[3]
PATIENCE_SECONDS = 15.0

WorkerHere = Callable[..., AbstractAsyncContextManager[FakeWorker]]
WorkerProcess = Callable[..., "subprocess.Popen[str]"]


async def until(condition: Callable[[], object], seconds: float = PATIENCE_SECONDS) -> None:
    """Wait for something that another process or thread does."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        await asyncio.sleep(0.01)


@pytest.fixture
def queue(redis_client: Redis) -> Queue:
    return Queue("interactive", connection=redis_client, serializer=JSONSerializer)


@pytest.fixture
def worker_here(redis_url: str) -> WorkerHere:
    """``async with worker_here(interactive=50, background=1, max_jobs=3) as worker``: a running worker on this loop;
    it drains at the end of the block, or has ended by itself."""

    @asynccontextmanager
    async def running(
        url: str | None = None, burst: bool = False, max_jobs: int | None = None, max_idle: float | None = None,
        **slots: int,
    ) -> AsyncIterator[FakeWorker]:  # fmt: skip
        slots = slots or {"interactive": 8}
        with connect(url or redis_url) as connection:
            worker = FakeWorker(list(slots), connection=connection)
            limits = Limits(slots, burst, max_jobs, max_idle)
            life = asyncio.create_task(worker.run(FakeRunner(Settings(redis_url=url or redis_url)), limits))
            try:
                yield worker
                if not (burst or max_jobs or max_idle):
                    worker.request_stop(signal.SIGTERM, None)
                await asyncio.wait_for(life, PATIENCE_SECONDS)
            finally:
                life.cancel()
                await asyncio.gather(life, return_exceptions=True)

    return running


@pytest.fixture
def no_exit_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that was told to leave ends its process in the end; the test's process has to stay."""
    monkeypatch.setattr("worker.rq_worker._leave_within", lambda seconds: None)


@pytest.fixture
def start_process(redis_url: str, tmp_path: Path) -> Iterator[WorkerProcess]:
    """``start_process("-m", "worker", REDIS_URL=…)``: a Python process in the repository's root, killed in the end."""
    processes: list[subprocess.Popen[str]] = []

    def start(*arguments: str, **environment: str) -> subprocess.Popen[str]:
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("TURNKEEPER_", "REDIS_URL", "DATABASE_URL"))}
        env = {**clean, "TURNKEEPER_HOME": str(tmp_path / "home"), "REDIS_URL": redis_url, **environment}
        process = subprocess.Popen(
            [sys.executable, *arguments], cwd=ROOT, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        processes.append(process)
        return process

    yield start
    for process in processes:
        process.kill()
        process.communicate()

"""Worker processes: the ways to start one, signals, exit statuses."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import time
from pathlib import Path

import pytest
from redis import Redis
from rq import Queue
from rq.job import JobStatus

from tests.integration.worker.conftest import WorkerProcess, until

TURN = "worker.jobs.turn"
FAKE = "tests.integration.worker.fake"


def rq_worker(start: WorkerProcess, url: str, *arguments: str, cls: str = "FakeWorker") -> subprocess.Popen[str]:
    return start("-m", "rq.cli", "worker", "-w", f"{FAKE}.{cls}", "-u", url, *arguments)


async def test_sigterm_drains_and_leaves_with_0(
    start_process: WorkerProcess, redis_url: str, redis_client: Redis, queue: Queue
) -> None:
    process = rq_worker(start_process, redis_url, "interactive", "background")
    job = queue.enqueue(TURN, hold=True)
    await until(lambda: job.is_started)
    process.send_signal(signal.SIGTERM)
    _, log = await asyncio.to_thread(process.communicate, timeout=10)
    assert process.returncode == 0, log
    assert (job.get_status(), job.return_value()) == (JobStatus.FINISHED, {"status": "released"})
    assert redis_client.smembers("rq:workers") == set()


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
async def test_the_second_signal_leaves_at_once(
    start_process: WorkerProcess, redis_url: str, queue: Queue, number: signal.Signals, status: int
) -> None:
    process = rq_worker(start_process, redis_url, "interactive", cls="StubbornWorker")
    job = queue.enqueue(TURN, sleep=60)
    await until(lambda: job.is_started)
    process.send_signal(number)
    await asyncio.sleep(0.7)
    assert process.poll() is None
    process.send_signal(number)
    sent = time.monotonic()
    await asyncio.to_thread(process.communicate, timeout=5)
    assert process.returncode == status
    assert time.monotonic() - sent < 1


async def test_threads_do_not_hold_up_the_exit(start_process: WorkerProcess, redis_url: str, queue: Queue) -> None:
    process = rq_worker(start_process, redis_url, "interactive", cls="ThreadedWorker")
    job = queue.enqueue(TURN)
    await until(lambda: job.is_finished)
    process.send_signal(signal.SIGTERM)
    await asyncio.to_thread(process.communicate, timeout=10)
    assert process.returncode == 0


async def test_rq_worker_takes_the_usual_options(
    start_process: WorkerProcess, redis_url: str, redis_client: Redis, queue: Queue
) -> None:
    for _ in range(3):
        queue.enqueue(TURN)
    process = rq_worker(
        start_process, redis_url, "--burst", "--max-jobs", "2", "--name", "w", "--verbose", "interactive"
    )
    _, log = await asyncio.to_thread(process.communicate, timeout=15)
    assert process.returncode == 0, log
    assert len(redis_client.lrange("marks", 0, -1)) == 2


async def test_the_scheduler_is_refused(start_process: WorkerProcess, redis_url: str) -> None:
    process = rq_worker(start_process, redis_url, "--with-scheduler", "interactive")
    _, errors = await asyncio.to_thread(process.communicate, timeout=15)
    assert process.returncode == 2
    assert errors.splitlines() == ["turnkeeper: This worker does not run RQ's scheduler. Leave out --with-scheduler."]


async def test_a_name_that_is_taken_is_refused(
    start_process: WorkerProcess, redis_url: str, redis_client: Redis
) -> None:
    redis_client.hset("rq:worker:w", "birth", "2026-01-01T00:00:00.000000Z")
    process = rq_worker(start_process, redis_url, "--name", "w", "interactive")
    _, errors = await asyncio.to_thread(process.communicate, timeout=15)
    assert process.returncode == 2
    assert errors.splitlines()[-1].startswith("turnkeeper: There exists an active worker named 'w' already.")


async def test_a_wrong_setting_ends_the_start(start_process: WorkerProcess) -> None:
    process = start_process("-m", "worker", "--queue", "interactive=none")
    _, errors = await asyncio.to_thread(process.communicate, timeout=15)
    assert process.returncode == 2
    [line] = errors.splitlines()
    assert "TURNKEEPER_SLOTS" in line


async def test_an_unreachable_redis_ends_the_start(start_process: WorkerProcess, tmp_path: Path) -> None:
    process = start_process("-m", "worker", REDIS_URL=f"unix://{tmp_path / 'nobody.sock'}")
    _, errors = await asyncio.to_thread(process.communicate, timeout=15)
    assert process.returncode == 3
    [line] = errors.splitlines()
    assert line.startswith("turnkeeper: Redis did not answer while connecting")


async def test_a_stock_worker_says_which_worker_to_use(
    start_process: WorkerProcess, redis_url: str, queue: Queue
) -> None:
    job = queue.enqueue("worker.jobs.ask", ask="?")
    process = start_process("-m", "rq.cli", "worker", "--burst", "-S", "json", "-u", redis_url, "interactive")
    await asyncio.to_thread(process.communicate, timeout=20)
    result = job.latest_result()
    assert job.get_status() == JobStatus.FAILED
    assert result is not None
    assert "rq worker -w worker.rq_worker.ConversationWorker" in str(result.exc_string)

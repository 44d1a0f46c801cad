"""Jobs go from their queue to a stored end: slots, results, limits, RQ's commands."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from typing import Any

import pytest
from redis import Redis
from rq import Queue
from rq.command import send_stop_execution_command, send_stop_job_command
from rq.job import JobStatus
from rq.results import Result
from rq.serializers import JSONSerializer
from rq.suspension import resume, suspend
from rq.worker import Worker

from tests.integration.worker.conftest import ROOT, WorkerHere, until

pytestmark = pytest.mark.usefixtures("no_exit_timer")

TURN = "worker.jobs.turn"


def marks(redis_client: Redis) -> list[dict[str, Any]]:
    return [json.loads(mark) for mark in redis_client.lrange("marks", 0, -1)]


async def test_a_hundred_jobs_run_fifty_at_a_time(worker_here: WorkerHere, queue: Queue, redis_client: Redis) -> None:
    jobs = [queue.enqueue(TURN, sleep=0.2) for _ in range(100)]
    started = time.monotonic()
    async with worker_here(burst=True, interactive=50):
        pass
    assert time.monotonic() - started < 2
    assert max(mark["active"] for mark in marks(redis_client)) == 50
    assert sorted(mark["job_id"] for mark in marks(redis_client)) == sorted(job.id for job in jobs)
    assert {job.get_status() for job in jobs} == {JobStatus.FINISHED}


async def test_one_queue_does_not_take_the_slots_of_another(
    worker_here: WorkerHere, queue: Queue, redis_client: Redis
) -> None:
    background = Queue("background", connection=redis_client, serializer=JSONSerializer)
    for _ in range(3):
        background.enqueue(TURN, hold=True)
    async with worker_here(interactive=2, background=1):
        await until(lambda: len(marks(redis_client)) == 1)
        jobs = [queue.enqueue(TURN, hold=True) for _ in range(3)]
        await until(lambda: len(marks(redis_client)) == 3)
        await asyncio.sleep(0.2)
        assert [mark["queue"] for mark in marks(redis_client)] == ["background", "interactive", "interactive"]
        assert (queue.count, background.count) == (1, 2)
        send_stop_job_command(redis_client, jobs[0].id, serializer=JSONSerializer)
        await until(lambda: len(marks(redis_client)) == 4)
        assert marks(redis_client)[-1]["job_id"] == jobs[2].id


async def test_the_result_says_how_the_turn_ended(worker_here: WorkerHere, queue: Queue) -> None:
    job = queue.enqueue("worker.jobs.ask", conversation_id="c", result_ttl=77)
    async with worker_here(burst=True):
        pass
    assert job.get_status() == JobStatus.FINISHED
    assert job.return_value() == {"status": "completed", "conversation_id": "c"}
    assert job.connection.ttl(job.key) in range(70, 78)
    assert queue.finished_job_registry.get_job_ids() == [job.id]
    assert queue.started_job_registry.get_job_ids() == []
    assert queue.intermediate_queue.get_job_ids() == []
    assert job.get_executions() == []


async def test_a_job_without_a_result_is_deleted(worker_here: WorkerHere, queue: Queue, redis_client: Redis) -> None:
    job = queue.enqueue(TURN, result_ttl=0)
    async with worker_here(burst=True):
        pass
    assert len(marks(redis_client)) == 1
    assert not redis_client.exists(job.key)


async def test_a_bug_fails_the_job_and_not_the_worker(worker_here: WorkerHere, queue: Queue) -> None:
    broken, whole = queue.enqueue(TURN, fail=True), queue.enqueue(TURN)
    async with worker_here(burst=True):
        pass
    assert (broken.get_status(), whole.get_status()) == (JobStatus.FAILED, JobStatus.FINISHED)
    result = broken.latest_result()
    assert result is not None
    assert "a bug in the runner" in str(result.exc_string)
    assert queue.failed_job_registry.get_job_ids() == [broken.id]


async def test_only_an_explicit_timeout_counts(worker_here: WorkerHere, queue: Queue, redis_client: Redis) -> None:
    for timeout in (None, 180, -1, 7, "2m"):
        queue.enqueue(TURN, job_timeout=timeout)
    async with worker_here(burst=True, interactive=1):
        pass
    assert [mark["timeout_seconds"] for mark in marks(redis_client)] == [None, None, None, 7, 120]


async def test_stop_commands_reach_one_job_only(worker_here: WorkerHere, queue: Queue, redis_client: Redis) -> None:
    jobs = [queue.enqueue(TURN, hold=True) for _ in range(3)]
    async with worker_here() as worker:
        await until(lambda: len(worker.get_current_executions(refresh=True)) == 3)
        send_stop_job_command(redis_client, jobs[1].id, serializer=JSONSerializer)
        await until(lambda: jobs[1].is_stopped)
        assert (jobs[0].get_status(), jobs[2].get_status()) == (JobStatus.STARTED, JobStatus.STARTED)
        [execution] = jobs[2].get_executions()
        send_stop_execution_command(redis_client, jobs[2].id, execution.id)
        await until(lambda: jobs[2].is_stopped)
        assert jobs[0].get_status() == JobStatus.STARTED
    stopped = jobs[1].latest_result()
    assert stopped is not None
    assert (stopped.type, stopped.return_value) == (Result.Type.STOPPED, {"status": "stopped"})
    assert jobs[0].return_value() == {"status": "released"}


async def test_commands_that_make_no_sense_are_ignored(
    worker_here: WorkerHere, queue: Queue, redis_client: Redis
) -> None:
    async with worker_here() as worker:
        await until(lambda: redis_client.pubsub_numsub(worker.pubsub_channel_name)[0][1])
        for data in ("not json", "[1]", "null", '{"command": "dance"}', '{"command": "stop-job"}', b"\xff"):
            redis_client.publish(worker.pubsub_channel_name, data)
        job = queue.enqueue(TURN)
        await until(lambda: job.is_finished)


async def test_suspended_workers_take_nothing(worker_here: WorkerHere, queue: Queue, redis_client: Redis) -> None:
    async with worker_here():
        first = queue.enqueue(TURN)
        await until(lambda: first.is_finished)
        suspend(redis_client)
        jobs = [queue.enqueue(TURN) for _ in range(3)]
        await asyncio.sleep(0.3)
        assert len(marks(redis_client)) == 1
        assert set(queue.job_ids) == {job.id for job in jobs}
        resume(redis_client)
        await until(lambda: len(marks(redis_client)) == 4)


async def test_max_jobs_ends_the_work(worker_here: WorkerHere, queue: Queue, redis_client: Redis) -> None:
    for _ in range(5):
        queue.enqueue(TURN, sleep=0.05)
    async with worker_here(max_jobs=3):
        pass
    assert len(marks(redis_client)) == 3
    assert (queue.count, len(queue.finished_job_registry.get_job_ids())) == (2, 3)


async def test_max_idle_time_ends_the_work(worker_here: WorkerHere, queue: Queue, redis_client: Redis) -> None:
    queue.enqueue(TURN, sleep=1.5)
    async with worker_here(max_idle=1):
        pass
    assert len(queue.finished_job_registry.get_job_ids()) == 1


async def test_rq_info_shows_the_worker_and_its_jobs(worker_here: WorkerHere, queue: Queue, redis_url: str) -> None:
    queue.enqueue(TURN, hold=True)
    queue.enqueue(TURN, hold=True)
    async with worker_here(interactive=4, background=1) as worker:
        await until(lambda: len(worker.get_current_executions(refresh=True)) == 2)
        command = [sys.executable, "-m", "rq.cli", "info", "--raw", "-u", redis_url]
        info = await asyncio.to_thread(subprocess.run, command, cwd=ROOT, capture_output=True, text=True)
        lines = info.stdout.splitlines()
        assert any(line.startswith("queue interactive 0, 2 executing") for line in lines), info
        assert any(worker.name in line and "busy interactive, background" in line for line in lines), info
        [seen] = Worker.all(connection=queue.connection)
        assert len(seen.get_current_executions()) == 2
    assert Worker.all(connection=queue.connection) == []


async def test_a_dependent_job_follows(worker_here: WorkerHere, queue: Queue, redis_client: Redis) -> None:
    first = queue.enqueue(TURN)
    second = queue.enqueue(TURN, depends_on=first)
    async with worker_here():
        await until(lambda: second.is_finished)
    assert [mark["job_id"] for mark in marks(redis_client)] == [first.id, second.id]


async def test_a_job_that_is_gone_is_forgotten(worker_here: WorkerHere, queue: Queue, redis_client: Redis) -> None:
    queue.push_job_id("gone")
    job = queue.enqueue(TURN)
    async with worker_here(burst=True):
        pass
    assert job.is_finished
    assert queue.intermediate_queue.get_job_ids() == []

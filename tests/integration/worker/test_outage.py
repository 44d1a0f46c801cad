"""Redis goes away, or a worker dies: no job is lost, and none runs again because its end could not be stored."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest
from redis import Redis
from rq import Queue
from rq.command import send_stop_job_command
from rq.serializers import JSONSerializer

from shared.queues import connect
from tests.integration.worker.conftest import WorkerHere, until
from tests.support.valkey import Valkey

pytestmark = pytest.mark.usefixtures("no_exit_timer")

TURN = "worker.jobs.turn"


@pytest.fixture
def client(valkey: Valkey) -> Iterator[Redis]:
    with connect(valkey.url) as client:
        yield client


def marks(client: Redis) -> list[Any]:
    return client.lrange("marks", 0, -1)


@pytest.fixture
def quick_beats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.rq_worker.BEAT_SECONDS", 0.1)


async def test_an_end_in_an_outage_is_stored_later(
    worker_here: WorkerHere, valkey: Valkey, client: Redis, quick_beats: None
) -> None:
    queue = Queue("interactive", connection=client, serializer=JSONSerializer)
    job = queue.enqueue(TURN, sleep=0.3)
    async with worker_here(url=valkey.url):
        await until(lambda: job.is_started)
        await asyncio.to_thread(valkey.stop)
        await asyncio.sleep(0.5)  # the job ends meanwhile
        await asyncio.to_thread(valkey.start)
        await until(lambda: job.is_finished)
        await asyncio.sleep(0.5)  # several looks for abandoned jobs
    assert job.return_value() == {"status": "completed", "conversation_id": None}
    assert len(marks(client)) == 1
    assert (queue.count, queue.intermediate_queue.get_job_ids()) == (0, [])


async def test_the_worker_outlives_a_restart_of_redis(
    worker_here: WorkerHere, valkey: Valkey, client: Redis, quick_beats: None
) -> None:
    queue = Queue("interactive", connection=client, serializer=JSONSerializer)
    held = queue.enqueue(TURN, hold=True)
    async with worker_here(url=valkey.url) as worker:
        await until(lambda: held.is_started)
        await asyncio.to_thread(valkey.stop)
        await asyncio.sleep(0.2)
        await asyncio.to_thread(valkey.start)
        late = queue.enqueue(TURN)
        await until(lambda: late.is_finished)
        await until(lambda: client.pubsub_numsub(worker.pubsub_channel_name)[0][1])
        send_stop_job_command(client, held.id, serializer=JSONSerializer)
        await until(lambda: held.is_stopped)


async def test_an_emptied_redis_learns_of_the_worker_again(
    worker_here: WorkerHere, valkey: Valkey, client: Redis, quick_beats: None
) -> None:
    async with worker_here(url=valkey.url) as worker:
        await until(lambda: client.sismember("rq:workers", worker.key))
        client.flushall()
        await until(lambda: client.hget(worker.key, "queues") == b"interactive")
        assert client.sismember("rq:workers", worker.key)
        assert 0 < client.ttl(worker.key) <= 60


async def test_what_a_dead_worker_took_is_put_back(
    worker_here: WorkerHere, queue: Queue, redis_client: Redis, quick_beats: None
) -> None:
    """One job was popped and no more, one had been started; and one is started by a worker that lives."""
    jobs = [queue.enqueue(TURN, number=number) for number in range(3)]
    for _ in jobs:
        redis_client.lmove(queue.key, queue.intermediate_queue_key)
    redis_client.hset(jobs[1].key, "status", "started")
    redis_client.zadd(queue.started_job_registry.key, {f"{jobs[1].id}:dead": 1_000, f"{jobs[2].id}:live": 2**40})
    async with worker_here():
        await until(lambda: len(marks(redis_client)) == 2)
        await asyncio.sleep(0.5)
    assert sorted(json.loads(m)["arguments"]["number"] for m in marks(redis_client)) == [0, 1]
    assert jobs[0].is_finished
    assert jobs[1].is_finished
    assert queue.intermediate_queue.get_job_ids() == [jobs[2].id]
    assert queue.started_job_registry.get_job_and_execution_ids(cleanup=False) == [(jobs[2].id, "live")]


async def test_long_jobs_stay_known(
    worker_here: WorkerHere, queue: Queue, redis_client: Redis, quick_beats: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.rq_records.EXECUTION_SECONDS", 1)
    job = queue.enqueue(TURN, hold=True)
    async with worker_here():
        await until(lambda: job.is_started)
        await asyncio.sleep(2.5)
        [execution] = job.get_executions()
        assert execution.worker_name
        assert queue.started_job_registry.count == 1  # RQ's own cleanup finds nothing abandoned
    assert len(marks(redis_client)) == 1
    assert job.is_finished

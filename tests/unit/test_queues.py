"""Ringing and connecting, on a real Valkey."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from redis import Redis
from redis.asyncio import Redis as AsyncRedis
from rq import Queue
from rq.serializers import JSONSerializer

from shared.errors import ConfigurationError, QueueUnavailable
from shared.queues import Ringer, connect, connect_async, live_key, queue_depths, url_of
from shared.store.base import Ring
from tests.support.valkey import Valkey


@pytest.fixture
async def client(redis_url: str) -> AsyncIterator[AsyncRedis]:
    client = connect_async(redis_url)
    yield client
    await client.aclose()


async def test_a_ring_is_a_job_that_rq_reads(client: AsyncRedis, redis_client: Redis) -> None:
    ringer = Ringer(client)
    await ringer.ring([Ring("c1", "interactive"), Ring("c2", "background"), Ring("c1", "interactive")])
    queues = {q.name: q for q in Queue.all(connection=redis_client, serializer=JSONSerializer)}
    assert {name: queue.count for name, queue in queues.items()} == {"interactive": 2, "background": 1}
    [job] = queues["background"].jobs
    assert (job.func_name, job.args, job.kwargs) == ("worker.jobs.turn", [], {"conversation_id": "c2"})
    assert (job.timeout, job.result_ttl, job.failure_ttl, job.origin) == (-1, 60, 3_600, "background")
    assert job.is_queued
    assert job.created_at is not None
    assert job.enqueued_at is not None
    assert len(set(queues["interactive"].job_ids)) == 2


async def test_all_rings_are_one_round_trip(client: AsyncRedis, redis_client: Redis) -> None:
    await client.ping()
    redis_client.config_resetstat()
    before = redis_client.info("stats")["total_reads_processed"]
    await Ringer(client).ring(Ring(f"c{i}", "interactive") for i in range(20))
    after = redis_client.info("stats")["total_reads_processed"]
    assert after - before <= 2  # the rings, and the question how many reads there were
    assert redis_client.info("commandstats")["cmdstat_sadd"]["calls"] == 1


async def test_nothing_to_ring_sends_nothing(tmp_path: Path) -> None:
    ringer = Ringer(f"unix://{tmp_path / 'nobody.sock'}")
    await ringer.ring([])
    await ringer.close()


async def test_an_unreachable_redis_is_an_error_of_ours(tmp_path: Path) -> None:
    ringer = Ringer(f"unix://{tmp_path / 'nobody.sock'}")
    with pytest.raises(QueueUnavailable, match="what was recorded is rung later") as caught:
        await ringer.ring([Ring("c", "interactive")])
    assert caught.value.retryable
    await ringer.close()


async def test_a_ringer_outlives_a_restart(valkey: Valkey) -> None:
    ringer = Ringer(valkey.url)
    await ringer.ring([Ring("c1", "interactive")])
    await asyncio.to_thread(valkey.stop)
    await asyncio.to_thread(valkey.start)
    await ringer.ring([Ring("c2", "interactive")])
    await ringer.close()
    with connect(valkey.url) as client:
        assert Queue("interactive", connection=client).count == 2


async def test_depths(client: AsyncRedis) -> None:
    await Ringer(client).ring([Ring("c1", "interactive"), Ring("c2", "interactive")])
    assert await queue_depths(client, ["interactive", "background"]) == {"interactive": 2, "background": 0}
    assert await queue_depths(client, []) == {}


async def test_more_callers_than_connections_wait(redis_url: str) -> None:
    client = connect_async(redis_url, max_connections=2)
    assert sorted(await asyncio.gather(*(client.incr("n") for _ in range(50)))) == list(range(1, 51))
    await client.aclose()


async def test_a_task_that_waits_for_redis_can_be_cancelled(client: AsyncRedis) -> None:
    async def work() -> None:
        while True:
            await client.get("key")

    for step in range(40):
        task = asyncio.create_task(work())
        await asyncio.sleep(0.001 + step * 0.0001)
        task.cancel()
        done, _ = await asyncio.wait([task], timeout=2)
        assert done, "the cancellation was forgotten"


@pytest.mark.parametrize(
    "url",
    [
        "redis://localhost:6379/0",
        "redis://:p%40ss%2F@127.0.0.1:7000/3",
        "redis://user:secret@[::1]:6379/1",
        "rediss://host:6380/0?ssl_cert_reqs=none&ssl_ca_certs=/etc/ca.pem",
        "unix:///tmp/some%20where/valkey.sock?db=2",
    ],
)
def test_the_url_of_a_client_leads_to_the_same_place(url: str) -> None:
    from redis.connection import parse_url

    given = connect(url)
    again = connect(url_of(given))
    assert parse_url(url_of(given)).items() >= {k: v for k, v in parse_url(url).items() if k != "db"}.items()
    for key in ("host", "port", "path", "db", "username", "password", "ssl_cert_reqs", "ssl_ca_certs"):
        theirs, ours = (c.connection_pool.connection_kwargs.get(key) for c in (given, again))
        assert theirs == ours or (key == "db" and not theirs and not ours)


def test_a_url_of_another_kind_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="REDIS_URL"):
        connect("http://localhost")


def test_keys() -> None:
    assert live_key("c") == "turnkeeper:live:c"


def test_importing_is_light() -> None:
    code = "import sys, shared.queues; print([m for m in ('redis', 'rq', 'pydantic', 'structlog') if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"

"""Ringing for what is due, with a real Redis and a real store."""

from __future__ import annotations

import asyncio
import uuid
from collections import Counter
from pathlib import Path

from redis import Redis
from rq import Queue
from rq.job import Job
from rq.serializers import JSONSerializer

from shared.queues import Ringer
from shared.requests import parse_request, record_of
from shared.settings import Settings
from shared.store import open_store
from shared.store.migrate import migrate
from worker.reaper import LIMIT, Reaper

CONVERSATIONS = LIMIT * 2 + 10
SECONDS = 20.0  # far more than it takes


async def test_an_emptied_redis_is_rung_full_once(tmp_path: Path, redis_url: str, redis_client: Redis) -> None:
    settings = Settings(home=tmp_path, redis_url=redis_url)
    migrate(settings)
    store, ringer = await open_store(settings).open(), Ringer(redis_url)
    try:
        asked = [str(uuid.uuid4()) for _ in range(CONVERSATIONS)]
        for conversation_id in asked:
            await store.submit(record_of(parse_request("ask", {"ask": "How?", "conversation_id": conversation_id})))
        reaper = Reaper(store, ringer, interval_seconds=60)
        async with asyncio.timeout(SECONDS):
            while await reaper.once():
                pass
        assert _rung(redis_client) == Counter(asked)
        redis_client.flushall()
        async with asyncio.timeout(SECONDS):
            while await reaper.once():
                pass
        assert _rung(redis_client) == Counter(asked)
        assert not await reaper.once()
        assert _rung(redis_client) == Counter(asked)
    finally:
        await ringer.close()
        await store.close()


def _rung(redis: Redis) -> Counter[str]:
    """The conversations in the queue, and how often."""
    queue = Queue("interactive", connection=redis, serializer=JSONSerializer)
    jobs = Job.fetch_many(queue.job_ids, connection=redis, serializer=JSONSerializer)
    return Counter(job.kwargs["conversation_id"] for job in jobs if job is not None)

"""A full Redis refuses rings that the store counts as rung already."""

from __future__ import annotations

from pathlib import Path

import pytest
from rq import Queue
from rq.serializers import JSONSerializer

from shared.errors import QueueUnavailable
from shared.queues import Ringer, connect
from shared.requests import parse_request, record_of
from shared.settings import Settings
from shared.store import open_store
from shared.store.migrate import migrate
from tests.support.valkey import Valkey
from worker.reaper import Reaper


async def test_rings_that_were_refused_are_rung_in_the_next_round(tmp_path: Path, valkey: Valkey) -> None:
    settings = Settings(home=tmp_path, redis_url=valkey.url)
    migrate(settings)
    store, ringer = await open_store(settings).open(), Ringer(valkey.url)
    try:
        reaper = Reaper(store, ringer, interval_seconds=60)
        await reaper.once()  # sets the epoch
        await store.submit(record_of(parse_request("ask", {"ask": "How?"})))
        with connect(valkey.url) as redis:
            redis.config_set("maxmemory", 1)
            with pytest.raises(QueueUnavailable):
                await reaper.once()
            redis.config_set("maxmemory", 0)
            await reaper.once()
            assert Queue("interactive", connection=redis, serializer=JSONSerializer).count == 1
            await reaper.once()
            assert Queue("interactive", connection=redis, serializer=JSONSerializer).count == 1, "not due yet"
    finally:
        await ringer.close()
        await store.close()

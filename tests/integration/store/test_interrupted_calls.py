"""Calls that run out of time at any moment cost the pool nothing."""

from __future__ import annotations

import asyncio
import random
import time
import uuid
from pathlib import Path

from shared.errors import StoreUnavailable
from shared.settings import Settings
from shared.store.postgres import PostgresStore

CALLERS, CALL_SECONDS, STORM_SECONDS = 64, 0.05, 4.0
PATIENCE_SECONDS = 10.0


async def test_no_connection_is_lost_when_a_busy_loop_makes_calls_late(postgres_url: str, tmp_path: Path) -> None:
    settings = Settings(home=tmp_path, database_url=postgres_url)
    store = PostgresStore(settings, call_timeout_seconds=CALL_SECONDS)
    chance, end, late = random.Random(1), time.monotonic() + STORM_SECONDS, 0
    stall = time.sleep  # the loop stands still, and everybody's time runs out

    async def call_on() -> None:
        nonlocal late
        while time.monotonic() < end:
            try:
                await store.conversation(str(uuid.uuid4()))
            except StoreUnavailable:
                late += 1

    await _until_open(store)
    try:
        callers = [asyncio.create_task(call_on()) for _ in range(CALLERS)]
        while time.monotonic() < end:
            await asyncio.sleep(chance.uniform(0, CALL_SECONDS))
            stall(chance.uniform(0, 2 * CALL_SECONDS))
        await asyncio.gather(*callers)
        assert late > CALLERS
        await _until_all_are_back(store)
    finally:
        await store.close()


async def _until_all_are_back(store: PostgresStore) -> None:
    """Nobody calls: every connection that the pool counts is there to be given."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while (stats := store._pool.get_stats())["pool_available"] != stats["pool_size"]:
            await asyncio.sleep(0.05)


async def _until_open(store: PostgresStore) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            try:
                await store.open()
                return
            except StoreUnavailable:
                pass

"""Random lives of a conversation: whatever happens between two batches, the promises hold."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator

import pytest

from shared.settings import Settings
from shared.store import open_store
from shared.store.base import Store
from tests.contract.simulation import World

LIVES = {"sqlite": 80, "postgres": 20, "supabase": 8}
STEPS = 60


@pytest.fixture
def opened(settings: Settings) -> Iterator[tuple[asyncio.Runner, Store]]:
    with asyncio.Runner() as run:
        store = run.run(open_store(settings).open())
        yield run, store
        run.run(store.close())


def test_promises_hold_whatever_happens(settings: Settings, opened: tuple[asyncio.Runner, Store]) -> None:
    for seed in range(LIVES[settings.store_kind]):
        world = World(*opened, random.Random(seed))
        try:
            world.ask(supersede=True, decisions={})
            for _ in range(STEPS):
                world.live()
                world.check()
            world.settle()
        except AssertionError as error:
            error.add_note(f"seed {seed} after {len(world.trace)} steps: {' '.join(world.trace)}")
            raise

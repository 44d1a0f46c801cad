"""Every test of this folder that asks for ``store`` or ``talk`` runs over all implementations of the store."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator, Callable
from contextlib import closing
from pathlib import Path

import psycopg
import pytest

from shared.settings import Settings
from shared.store import open_store
from shared.store.base import Store
from tests.contract.driver import Talk

Meddle = Callable[[str], None]
KINDS = ("sqlite", "postgres", "supabase")


@pytest.fixture
def sqlite_settings(tmp_path: Path) -> Settings:
    return Settings(home=tmp_path)


@pytest.fixture(params=KINDS)
def settings(request: pytest.FixtureRequest) -> Settings:
    """Settings of a fresh database; its server is started only for the tests that need it."""
    settings: Settings = request.getfixturevalue(f"{request.param}_settings")
    return settings


@pytest.fixture
async def store(settings: Settings) -> AsyncIterator[Store]:
    store = await open_store(settings).open()
    yield store
    await store.close()


@pytest.fixture
async def other_store(settings: Settings, store: Store) -> AsyncIterator[Store]:
    """A second store on the same database, as another process has."""
    other = await open_store(settings).open()
    yield other
    await other.close()


@pytest.fixture
def meddle(settings: Settings, request: pytest.FixtureRequest) -> Meddle:
    """Runs a statement on the database itself, for what no operation can bring about in the time of a test."""

    def sqlite(sql: str) -> None:
        with closing(sqlite3.connect(settings.sqlite_path)) as db, db:
            db.execute(sql)

    def postgres(sql: str) -> None:
        with psycopg.connect(request.getfixturevalue("postgres_url")) as connection:
            connection.execute("SET search_path = turnkeeper")
            connection.execute(sql.encode())

    return sqlite if settings.store_kind == "sqlite" else postgres


@pytest.fixture
def talk(store: Store) -> Talk:
    return Talk(store)

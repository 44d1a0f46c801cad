"""Schema: applying the migrations, once, at once, under another name; and what a worker does with what it finds."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psycopg
import pytest

from scripts.bench.kit.postgres import LocalPostgres
from scripts.bench.kit.processes import free_port
from shared.errors import ConfigurationError, SchemaOutdated, StoreUnavailable
from shared.settings import Settings
from shared.store import open_store
from shared.store.migrate import MIGRATIONS, migrate
from shared.store.migrate_postgres import migrate_postgres
from shared.store.server import SCHEMA_VERSION
from tests.contract.driver import Talk

NAMES = [path.stem for path in sorted(MIGRATIONS.glob("*.sql"))]


def test_migrating_twice_is_once(empty_postgres_url: str, tmp_path: Path) -> None:
    settings = Settings(home=tmp_path, database_url=empty_postgres_url)
    assert migrate(settings) == NAMES
    assert migrate(settings) == []


def test_migrating_at_once_is_once(empty_postgres_url: str) -> None:
    with ThreadPoolExecutor(4) as pool:
        applied = list(pool.map(migrate_postgres, [empty_postgres_url] * 4))
    assert sorted(name for names in applied for name in names) == NAMES


def test_the_files_number_themselves(empty_postgres_url: str) -> None:
    """Whoever applies a file, our command or another tool, its number is recorded by the file."""
    for path in sorted(MIGRATIONS.glob("*.sql")):
        with psycopg.connect(empty_postgres_url) as connection:
            connection.execute(path.read_text())
            newest = connection.execute("SELECT max(version) FROM turnkeeper.schema_migrations").fetchone()
        assert newest == (int(path.name[:4]),)
    assert newest == (SCHEMA_VERSION,)
    assert migrate_postgres(empty_postgres_url) == []


def test_a_later_file_is_applied_to_an_older_schema(empty_postgres_url: str, tmp_path: Path) -> None:
    for path in MIGRATIONS.glob("000[1-5]_*.sql"):
        (tmp_path / path.name).write_text(path.read_text())
    assert migrate_postgres(empty_postgres_url, folder=tmp_path) == NAMES[:5]
    assert migrate_postgres(empty_postgres_url) == NAMES[5:]


def test_a_broken_file_leaves_nothing_behind(empty_postgres_url: str, tmp_path: Path) -> None:
    (tmp_path / "0001_tables.sql").write_text((MIGRATIONS / "0001_tables.sql").read_text())
    (tmp_path / "0002_broken.sql").write_text("CREATE TABLE turnkeeper.half (); SELECT 1 FROM turnkeeper.missing;")
    with pytest.raises(ConfigurationError, match="0002_broken cannot be applied"):
        migrate_postgres(empty_postgres_url, folder=tmp_path)
    with psycopg.connect(empty_postgres_url) as connection:
        assert connection.execute("SELECT version FROM turnkeeper.schema_migrations").fetchall() == [(1,)]
        assert connection.execute("SELECT to_regclass('turnkeeper.half')").fetchone() == (None,)


@pytest.mark.parametrize("name", ["agents_7", "order"])  # the second is a word of SQL
async def test_another_schema_name(name: str, empty_postgres_url: str, tmp_path: Path) -> None:
    settings = Settings(home=tmp_path, database_url=empty_postgres_url, schema_name=name)
    migrate(settings)
    store = await open_store(settings).open()
    talk = Talk(store)
    await talk.answered("hello")
    assert await talk.statuses() == ["completed"]
    await store.close()
    with psycopg.connect(empty_postgres_url) as connection:
        assert connection.execute("SELECT to_regnamespace('turnkeeper')").fetchone() == (None,)
        assert connection.execute(f'SELECT status FROM "{name}".sessions'.encode()).fetchall() == [("done",)]
        connection.execute("SET ROLE service_role")
        assert connection.execute(f'SELECT "{name}".health()'.encode()).fetchone() is not None


def test_snapshots_are_packed_fast_or_not_at_all(postgres_url: str) -> None:
    with psycopg.connect(postgres_url) as connection:
        found = connection.execute(
            "SELECT attname, attcompression = 'l' OR attstorage = 'e' FROM pg_attribute "
            "WHERE attrelid IN ('turnkeeper.conversation_events'::regclass, 'turnkeeper.conversation_turns'::regclass) "
            "AND attname IN ('data', 'request')"
        ).fetchall()
    assert sorted(found) == [("data", True), ("request", True)]


@pytest.fixture
def no_supabase_roles(postgres_server: LocalPostgres) -> Iterator[None]:
    """As on a plain Postgres. Roles belong to the cluster, so they are renamed for a while."""
    names = ("anon", "authenticated", "service_role")
    with psycopg.connect(postgres_server.url("postgres"), autocommit=True) as connection:
        for name in names:
            connection.execute(f"ALTER ROLE {name} RENAME TO {name}_away")
        yield
        for name in names:
            connection.execute(f"ALTER ROLE {name}_away RENAME TO {name}")


@pytest.mark.usefixtures("no_supabase_roles")
async def test_roles_that_do_not_exist_are_passed_over(empty_postgres_url: str, tmp_path: Path) -> None:
    settings = Settings(home=tmp_path, database_url=empty_postgres_url)
    assert migrate(settings) == NAMES
    store = await open_store(settings).open()
    await Talk(store).answered("hello")
    await store.close()
    with psycopg.connect(empty_postgres_url) as connection:
        connection.execute("CREATE ROLE service_role NOLOGIN")
        connection.execute("SELECT turnkeeper.apply_access()")
        query = "SELECT has_function_privilege('service_role', 'turnkeeper.health()', 'EXECUTE')"
        assert connection.execute(query).fetchone() == (True,)
        connection.rollback()


def test_supabase_runs_no_sql(tmp_path: Path) -> None:
    settings = Settings(home=tmp_path, supabase_url="https://project.example", supabase_key="key")
    with pytest.raises(ConfigurationError, match="DATABASE_URL"):
        migrate(settings)


def test_an_unreachable_database(tmp_path: Path) -> None:
    url = f"postgresql://postgres@127.0.0.1:{free_port()}/postgres"
    with pytest.raises(StoreUnavailable):
        migrate(Settings(home=tmp_path, database_url=url))


@pytest.fixture(params=["postgres", "supabase"])
def settings(request: pytest.FixtureRequest) -> Settings:
    settings: Settings = request.getfixturevalue(f"{request.param}_settings")
    return settings


@pytest.fixture
async def versions(postgres_url: str, settings: Settings) -> AsyncIterator[psycopg.AsyncConnection]:
    """A connection to change ``schema_migrations`` with; it is put back afterwards."""
    connection = await psycopg.AsyncConnection.connect(postgres_url, autocommit=True)
    await connection.execute("CREATE TEMPORARY TABLE kept AS TABLE turnkeeper.schema_migrations")
    yield connection
    await connection.execute("DELETE FROM turnkeeper.schema_migrations")
    await connection.execute("INSERT INTO turnkeeper.schema_migrations TABLE kept")
    await connection.close()


async def test_an_outdated_schema_stops_the_start(settings: Settings, versions: psycopg.AsyncConnection) -> None:
    await versions.execute("DELETE FROM turnkeeper.schema_migrations WHERE version = %s", [SCHEMA_VERSION])
    with pytest.raises(SchemaOutdated, match=re.escape("`turnkeeper migrate`")) as caught:
        await open_store(settings).open()
    assert "\n" not in str(caught.value)


async def test_a_newer_compatible_schema_does_not(settings: Settings, versions: psycopg.AsyncConnection) -> None:
    insert = "INSERT INTO turnkeeper.schema_migrations (version, min_compatible, name) VALUES (%s, %s, 'future')"
    await versions.execute(insert, [SCHEMA_VERSION + 1, SCHEMA_VERSION])
    store = await open_store(settings).open()
    health = await store.health()
    assert (health["schema_version"], health["min_compatible"]) == (SCHEMA_VERSION + 1, SCHEMA_VERSION)
    await store.close()

    await versions.execute(insert, [SCHEMA_VERSION + 2, SCHEMA_VERSION + 1])
    with pytest.raises(ConfigurationError, match="Upgrade turnkeeper") as caught:
        await open_store(settings).open()
    assert not isinstance(caught.value, SchemaOutdated)


async def test_no_schema_at_all(empty_postgres_url: str, tmp_path: Path) -> None:
    with pytest.raises(SchemaOutdated, match="turnkeeper migrate"):
        await open_store(Settings(home=tmp_path, database_url=empty_postgres_url)).open()


async def test_a_schema_that_is_not_exposed(supabase_settings: Settings) -> None:
    settings = supabase_settings.model_copy(update={"schema_name": "elsewhere"})
    with pytest.raises(ConfigurationError, match="exposed"):
        await open_store(settings).open()

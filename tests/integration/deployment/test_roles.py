"""``docs/docker/roles.sh`` on a new cluster: the workers' role is no superuser, and the migrations find theirs."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import psycopg
import pytest

from scripts.bench.kit.postgres import LocalPostgres, own_folder, programs_folder
from shared.requests import Ask, record_of
from shared.settings import Settings
from shared.store import open_store
from shared.store.migrate import migrate
from tests.support.postgres import FAST

SCRIPT = Path(__file__).parents[3] / "docs" / "docker" / "roles.sh"
PASSWORD = "it's 100% \\secret"


@pytest.fixture(scope="module")
def port(server_folder: Path) -> Iterator[int]:
    """A cluster as the image makes it on its first start, after the script has run."""
    folder = server_folder / "roles"
    folder.mkdir()
    hba = "local all all trust\nhost all postgres 127.0.0.1/32 trust\nhost all all 127.0.0.1/32 scram-sha-256\n"
    with LocalPostgres(own_folder(folder), FAST, hba=hba, roles="") as server:
        server.create("turnkeeper")
        image = {"POSTGRES_DB": "turnkeeper", "WORKER_PASSWORD": PASSWORD, "AUTHENTICATOR_PASSWORD": "other"}
        path = f"{programs_folder()}:{os.environ['PATH']}"
        here = {"PATH": path, "PGHOST": "127.0.0.1", "PGPORT": str(server.port)}
        subprocess.run(["sh", str(SCRIPT)], check=True, env=image | here, capture_output=True)
        yield server.port


@pytest.fixture(scope="module")
def url(port: int) -> str:
    where = {"host": "127.0.0.1", "port": port, "dbname": "turnkeeper", "user": "turnkeeper", "password": PASSWORD}
    return psycopg.conninfo.make_conninfo("", **where)


async def test_migrate_and_work_as_the_workers_role(url: str, tmp_path: Path) -> None:
    settings = Settings(home=tmp_path, database_url=url)
    assert migrate(settings)
    store = await open_store(settings).open()
    try:
        record = record_of(Ask(conversation_id=uuid4(), ask="Why?"))
        assert (await store.submit(record)).created
        assert (await store.health())["pending"] == 1
    finally:
        await store.close()
    with psycopg.connect(url) as connection:
        rows = connection.execute(
            "SELECT rolname, rolsuper, rolbypassrls, rolinherit FROM pg_roles WHERE rolname !~ '^pg_'"
        )
        roles = {name: flags for name, *flags in rows}
        assert roles["turnkeeper"] == [False, False, True]
        assert roles["authenticator"] == [False, False, False]
        assert roles["service_role"][1] is True
        reads = "SELECT has_table_privilege(%s, 'turnkeeper.conversations', 'select')"
        allowed = {
            role: connection.execute(reads, [role]).fetchone() for role in ("anon", "authenticated", "service_role")
        }
    assert allowed == {"anon": (False,), "authenticated": (True,), "service_role": (True,)}


def test_the_password_is_needed(port: int) -> None:
    with pytest.raises(psycopg.OperationalError, match="password"):
        psycopg.connect(f"postgresql://turnkeeper:wrong@127.0.0.1:{port}/turnkeeper")

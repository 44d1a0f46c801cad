"""Bringing a Postgres schema up to date: the numbered SQL files, in order, each in one transaction.

The files are plain SQL and record themselves, so that the supabase command line may apply them just as well. The
word ``turnkeeper`` in them is the schema's name.
"""

from __future__ import annotations

import re
from pathlib import Path

import psycopg

from shared.errors import ConfigurationError, StoreUnavailable
from shared.store.migrate import MIGRATIONS

CONNECT_SECONDS = 10
_LOCK = 0x7475726E  # of pg_advisory_xact_lock: one migration at a time in a database


def migrate_postgres(url: str, schema: str = "turnkeeper", folder: Path = MIGRATIONS) -> list[str]:
    """Apply the files of ``folder`` that the schema has not recorded; their names."""
    try:
        with psycopg.connect(url, autocommit=True, connect_timeout=CONNECT_SECONDS) as connection:
            connection.prepare_threshold = None  # a prepared statement lives in one session, which PgBouncer shares
            applied = [path.stem for path in sorted(folder.glob("[0-9]*.sql")) if _apply(connection, path, schema)]
            connection.execute("NOTIFY pgrst, 'reload schema'")
    except psycopg.OperationalError as error:
        raise StoreUnavailable(f"The database cannot be reached: {_line(error)}.") from error
    return applied


def _apply(connection: psycopg.Connection, path: Path, schema: str) -> bool:
    """Apply one file unless it was, under a lock that ends with the transaction (PgBouncer keeps no session)."""
    with connection.transaction():
        connection.execute("SELECT pg_advisory_xact_lock(%s)", [_LOCK])
        if _is_applied(connection, int(path.name.split("_")[0]), schema):
            return False
        try:
            connection.execute(sql_for(path, schema))
        except psycopg.ProgrammingError as error:  # such as: the user may not create a schema
            raise ConfigurationError(f"{path.stem} cannot be applied: {_line(error)}. Nothing of it was.") from error
    return True


def _is_applied(connection: psycopg.Connection, version: int, schema: str) -> bool:
    known = connection.execute("SELECT to_regclass(%s)", [f'"{schema}".schema_migrations']).fetchone()
    if known is None or known[0] is None:
        return False
    query = f'SELECT 1 FROM "{schema}".schema_migrations WHERE version = %s'  # noqa: S608
    return connection.execute(query, [version]).fetchone() is not None


def sql_for(path: Path, schema: str) -> str:
    """A file's SQL for another schema name than the default, which may be a word of SQL."""
    return re.sub(r"\bturnkeeper\b", f'"{schema}"', path.read_text(encoding="utf-8"))


def _line(error: psycopg.Error) -> str:
    return " ".join(str(error).split())

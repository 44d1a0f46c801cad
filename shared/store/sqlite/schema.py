"""The schema of the embedded database: numbered SQL files, applied in order, each in one transaction."""

from __future__ import annotations

import re
import sqlite3
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from shared.errors import SchemaOutdated, StoreUnavailable
from shared.home import usable_folder
from shared.store.sqlite.connection import BUSY_TIMEOUT_SECONDS, Transaction, connect, reading, translated, writing

MIGRATIONS = Path(__file__).parent.parent / "sql" / "sqlite"
_POLL_SECONDS = 0.01

_CREATE_TABLE = """
CREATE TABLE IF NOT EXISTS schema_migrations (
    version INTEGER PRIMARY KEY, min_compatible INTEGER NOT NULL, name TEXT NOT NULL, applied_at TEXT NOT NULL
) STRICT
"""


@dataclass(frozen=True, slots=True)
class Migration:
    """A numbered file. ``min_compatible`` (from its first line) is the lowest version that a worker must know to
    work on the schema as it is afterwards."""

    version: int
    min_compatible: int
    name: str
    sql: str

    def statements(self) -> Iterator[str]:
        """The file's statements one by one; ``executescript`` would commit in between."""
        statement = ""
        for line in self.sql.splitlines(keepends=True):
            statement += line
            if sqlite3.complete_statement(statement):
                yield statement
                statement = ""


def migrations(folder: Path = MIGRATIONS) -> list[Migration]:
    return [_migration(path) for path in sorted(folder.glob("[0-9]*.sql"))]


def _migration(path: Path) -> Migration:
    sql = path.read_text(encoding="utf-8")
    compatible = re.match(r"-- min_compatible: (\d+)\n", sql)
    if compatible is None:
        raise SchemaOutdated(f"{path.name} does not begin with `-- min_compatible: N`; nothing was applied.")
    return Migration(int(path.name[:4]), int(compatible[1]), path.stem, sql)


def migrate_sqlite(path: Path, known: list[Migration] | None = None) -> list[str]:
    """Bring the database at ``path`` up to date, creating it if need be; the names of what was applied.

    Two processes may do so at once: the second finds the work done. Raises ``SchemaOutdated`` if the database is of
    a newer version that this program cannot work with, ``ConfigurationError`` if its folder cannot be used.
    """
    known = migrations() if known is None else known
    usable_folder(path.parent)
    db = connect(path)
    try:
        _use_wal(db)
        if _is_current(db, known):
            return []
        with writing(db) as tx:
            tx.run(_CREATE_TABLE)
            return [_apply(tx, migration) for migration in known if migration.version > _version(tx)]
    finally:
        db.close()


def _use_wal(db: sqlite3.Connection) -> None:
    """Switch the file to WAL, for good. SQLite does not wait while another process switches, so this polls."""
    deadline = time.monotonic() + BUSY_TIMEOUT_SECONDS
    while True:
        try:
            with translated():
                db.execute("PRAGMA journal_mode = WAL")
            return
        except StoreUnavailable:
            if time.monotonic() > deadline:
                raise
            time.sleep(_POLL_SECONDS)


def _apply(tx: Transaction, migration: Migration) -> str:
    for statement in migration.statements():
        tx.run(statement)
    tx.insert(
        "schema_migrations",
        version=migration.version,
        min_compatible=migration.min_compatible,
        name=migration.name,
        applied_at=tx.now,
    )
    return migration.name


def _version(tx: Transaction) -> int:
    return int(tx.value("SELECT max(version) FROM schema_migrations") or 0)


def _is_current(db: sqlite3.Connection, known: list[Migration]) -> bool:
    with reading(db) as tx:
        if tx.row("SELECT 1 FROM sqlite_schema WHERE name = 'schema_migrations'") is None:
            return False
        newest, needed = _version(tx), int(tx.value("SELECT max(min_compatible) FROM schema_migrations") or 0)
    ours = known[-1].version
    if needed > ours:
        raise SchemaOutdated(
            f"The database has schema version {newest}, which needs a program that knows version {needed}; "
            f"this one knows {ours}. Nothing was started.",
            hint="Upgrade turnkeeper.",
        )
    return newest >= ours

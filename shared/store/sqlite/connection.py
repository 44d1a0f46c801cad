"""Connections, transactions and the translation between rows and JSON."""

from __future__ import annotations

import re
import sqlite3
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from functools import cached_property
from pathlib import Path
from typing import Any

import orjson

from shared.errors import ContentRefused, StoreError, StoreUnavailable, TurnkeeperError
from shared.store.base import Row

BUSY_TIMEOUT_SECONDS = 5.0  # how long a writer waits for another process's transaction
STATEMENTS_CACHED = 256
CACHE_KIB = 16_000

_JSON_COLUMNS = frozenset(
    {"target", "metadata", "request", "decisions", "error", "last_batch_result", "decision", "payload", "data"}
)
_BOOLEAN_COLUMNS = frozenset({"gated", "retryable"})
_NOT_TRANSIENT = frozenset({sqlite3.SQLITE_ERROR, sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_MISUSE})
_NUL = re.compile(rb"(?<!\\)(?:\\\\)*\\u0000")


def connect(path: Path) -> sqlite3.Connection:
    """A connection in autocommit mode (transactions are begun by ``Transaction``). Raises ``StoreUnavailable``."""
    with translated():
        db = sqlite3.connect(
            path,
            timeout=BUSY_TIMEOUT_SECONDS,
            isolation_level=None,
            cached_statements=STATEMENTS_CACHED,
            check_same_thread=False,  # opened and closed by one thread, used by another; never by two at once
        )
        db.row_factory = _row
        db.execute("PRAGMA synchronous = FULL")
        db.execute("PRAGMA foreign_keys = ON")
        db.execute(f"PRAGMA cache_size = -{CACHE_KIB}")
    return db


class Transaction:
    """One transaction on a connection: its time, and statements that answer rows as JSON."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db

    @cached_property
    def time(self) -> datetime:
        """The machine's clock, read once."""
        return datetime.now(UTC)

    @cached_property
    def now(self) -> str:
        return timestamp(self.time)

    def later(self, seconds: float) -> str:
        return timestamp(self.time + timedelta(seconds=seconds))

    def row(self, sql: str, *parameters: Any) -> Row | None:
        row: Row | None = self._db.execute(sql, parameters).fetchone()
        return row

    def one(self, sql: str, *parameters: Any) -> Row:
        """The first row of a query that has one."""
        row: Row = next(self._db.execute(sql, parameters))
        return row

    def rows(self, sql: str, *parameters: Any) -> list[Row]:
        return self._db.execute(sql, parameters).fetchall()

    def each(self, sql: str, *parameters: Any) -> Iterator[Row]:
        """The rows one by one, for readers that stop early."""
        return iter(self._db.execute(sql, parameters))

    def value(self, sql: str, *parameters: Any) -> Any:
        """The first column of the first row, or None."""
        row = self.row(sql, *parameters)
        return None if row is None else next(iter(row.values()))

    def run(self, sql: str, *parameters: Any) -> int:
        """Execute; how many rows changed."""
        return self._db.execute(sql, parameters).rowcount

    def insert(self, table: str, **values: Any) -> int:
        """Insert a row; its rowid. Table and columns are names from this package, never input."""
        marks = ", ".join("?" * len(values))
        sql = f"INSERT INTO {table} ({', '.join(values)}) VALUES ({marks})"  # noqa: S608
        return self._db.execute(sql, tuple(values.values())).lastrowid or 0


@contextmanager
def writing(db: sqlite3.Connection) -> Iterator[Transaction]:
    """A write transaction, begun at once, so that what is read stays true until it commits."""
    with translated():
        db.execute("BEGIN IMMEDIATE")
        try:
            yield Transaction(db)
            db.execute("COMMIT")
        except BaseException:
            if db.in_transaction:
                db.execute("ROLLBACK")
            raise


@contextmanager
def reading(db: sqlite3.Connection) -> Iterator[Transaction]:
    with translated():
        yield Transaction(db)


@contextmanager
def translated() -> Iterator[None]:
    """SQLite's errors as ours."""
    try:
        yield
    except sqlite3.IntegrityError as error:
        raise TurnkeeperError(f"The database's constraints forbid this: {error}; nothing was written.") from error
    except (sqlite3.DataError, sqlite3.InterfaceError, UnicodeEncodeError, OverflowError) as error:
        raise ContentRefused(f"SQLite refuses a value: {error}; nothing was written.") from error
    except sqlite3.DatabaseError as error:
        name = getattr(error, "sqlite_errorname", "closed")
        if getattr(error, "sqlite_errorcode", 0) & 0xFF in _NOT_TRANSIENT:
            raise StoreError(f"SQLite failed: {error} ({name}); nothing was written.") from error
        raise StoreUnavailable(
            f"SQLite failed: {error} ({name}); the call may be repeated.",
            hint="Check the disk, its free space and who else holds the file under TURNKEEPER_HOME.",
        ) from error


def timestamp(time: datetime) -> str:
    """RFC 3339 in UTC with microseconds, so that texts sort as times do."""
    return time.astimezone(UTC).isoformat(timespec="microseconds")


def parsed_timestamp(text: str) -> str:
    try:
        return timestamp(datetime.fromisoformat(text))
    except ValueError:
        raise ContentRefused(f"{text!r} is not a time; nothing was written.") from None


def parsed_uuid(text: str) -> str:
    try:
        return str(uuid.UUID(text))
    except ValueError:
        raise ContentRefused(f"{text!r} is not a UUID; nothing was written.") from None


def encode(value: Any) -> str:
    """JSON text. Refuses what Postgres' ``jsonb`` refuses too: NUL and lone surrogates."""
    try:
        encoded = orjson.dumps(value)
    except orjson.JSONEncodeError as error:
        raise ContentRefused(f"Not JSON: {error}; nothing was written.") from None
    if b"\\u0000" in encoded and _NUL.search(encoded):
        raise ContentRefused("A text holds a NUL character; nothing was written.")
    return encoded.decode()


def encode_optional(value: Any) -> str | None:
    return None if value is None else encode(value)


def _row(cursor: sqlite3.Cursor, values: tuple[Any, ...]) -> Row:
    row = {}
    for (name, *_), value in zip(cursor.description, values, strict=True):
        if value is not None:
            if name in _JSON_COLUMNS:
                value = orjson.loads(value)
            elif name in _BOOLEAN_COLUMNS:
                value = bool(value)
        row[name] = value
    return row

"""``SqliteStore``: the embedded store. One thread writes, a few read, the event loop waits for neither."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self

from shared.errors import StoreUnavailable
from shared.settings import Settings
from shared.store.json_store import JsonStore
from shared.store.sqlite import beside, leases, reads
from shared.store.sqlite.append import append
from shared.store.sqlite.claim import claim
from shared.store.sqlite.connection import connect, reading, writing
from shared.store.sqlite.schema import migrate_sqlite
from shared.store.sqlite.submit import submit

READER_THREADS = 2

_WRITES: dict[str, Callable[..., Any]] = {
    operation.__name__: operation
    for operation in (
        submit,
        claim,
        append,
        leases.renew,
        leases.release,
        leases.reap,
        leases.stop,
        beside.record_feedback,
        beside.record_dead_letter,
        beside.take_dead_letter,
        beside.put_artifact,
        beside.rename,
        beside.delete_conversation,
    )
}
_READS: dict[str, Callable[..., Any]] = {
    read.__name__: read
    for read in (
        reads.get_conversation,
        reads.list_conversations,
        reads.list_turns,
        reads.get_turn_of,
        reads.list_events,
        reads.list_calls,
        reads.list_approvals,
        reads.list_dead_letters,
        reads.get_artifact,
        reads.usage_by,
        reads.health,
    )
}


class SqliteStore(JsonStore):
    """The store in the file ``settings.sqlite_path``, which several processes may share.

    May be used from several event loops. Cancelling a call does not undo it: a write that had begun lands.
    """

    def __init__(self, settings: Settings) -> None:
        self._path = settings.sqlite_path
        self._writer = ThreadPoolExecutor(1, "sqlite-writer")
        self._readers = ThreadPoolExecutor(READER_THREADS, "sqlite-reader")
        self._local = threading.local()
        self._connections: list[sqlite3.Connection] = []

    async def open(self) -> Self:
        """Create or migrate the database. Raises ``SchemaOutdated`` if it is newer than this program can work with."""
        await asyncio.get_running_loop().run_in_executor(self._writer, migrate_sqlite, self._path)
        return self

    async def close(self) -> None:
        """Wait for what runs, then close the file."""
        await asyncio.to_thread(self._shut)

    def _shut(self) -> None:
        self._readers.shutdown()
        self._writer.shutdown()
        while self._connections:
            self._connections.pop().close()

    async def _call(self, function: str, arguments: dict[str, Any]) -> Any:
        executor, run = (self._writer, self._write) if function in _WRITES else (self._readers, self._read)
        try:
            future = asyncio.get_running_loop().run_in_executor(executor, run, function, arguments)
        except RuntimeError as error:
            raise StoreUnavailable(f"The store is closed; {function} did nothing.") from error
        return await future

    def _write(self, function: str, arguments: dict[str, Any]) -> Any:
        with writing(self._connection()) as tx:
            return _WRITES[function](tx, **arguments)

    def _read(self, function: str, arguments: dict[str, Any]) -> Any:
        with reading(self._connection()) as tx:
            return _READS[function](tx, **arguments)

    def _connection(self) -> sqlite3.Connection:
        """This thread's own connection."""
        db: sqlite3.Connection | None = getattr(self._local, "db", None)
        if db is None:
            db = self._local.db = connect(self._path)
            self._connections.append(db)
        return db

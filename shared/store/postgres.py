"""``PostgresStore``: the SQL functions over a pool of psycopg connections.

A call is one statement in autocommit, so one transaction and one round trip, and it leaves no state in the session:
PgBouncer in transaction mode may stand in between.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Self, cast

import orjson
import psycopg
from psycopg import errors as sqlstates
from psycopg.types.json import Jsonb, set_json_loads
from psycopg_pool import AsyncConnectionPool

from shared.errors import ConfigurationError
from shared.settings import Settings
from shared.store.json_store import JsonStore
from shared.store.server import CALL_TIMEOUT_SECONDS, check_schema, error_of, late, schema_outdated

IDLE_SECONDS = 300.0  # an unused connection beyond the first is closed after so long
CANCEL_SECONDS = 1.0  # for cancelling a late statement on the server; then the connection is dropped

_SESSION: dict[str, Any] = {
    "autocommit": True,
    "prepare_threshold": None,  # a prepared statement lives in one session, which PgBouncer shares
    "application_name": "turnkeeper",
}
_NO_SCHEMA = (sqlstates.InvalidSchemaName, sqlstates.UndefinedFunction, sqlstates.UndefinedTable)


class PostgresStore(JsonStore):
    """The store in ``settings.database_url``, schema ``settings.schema_name``. Belongs to the loop that opened it."""

    def __init__(self, settings: Settings, *, call_timeout_seconds: float = CALL_TIMEOUT_SECONDS) -> None:
        if settings.database_url is None:
            raise ConfigurationError("DATABASE_URL is not set.")
        self._url = settings.database_url.get_secret_value()
        self._schema = settings.schema_name
        self._timeout = call_timeout_seconds
        self._returning: set[asyncio.Future[None]] = set()
        self._pool = AsyncConnectionPool(
            self._url,
            min_size=1,
            max_size=settings.database_pool_size,
            timeout=call_timeout_seconds,
            max_idle=IDLE_SECONDS,
            # The pool's pauses between its own tries double without end; once it gives up, the next call tries anew.
            reconnect_timeout=call_timeout_seconds,
            configure=_decode_with_orjson,
            kwargs={**_SESSION, "connect_timeout": max(1, round(call_timeout_seconds))},
            open=False,
        )

    async def open(self) -> Self:
        """Connect and check the schema. Raises ``SchemaOutdated``, ``StoreUnavailable``."""
        try:
            await self._probe()
            await self._pool.open()
            check_schema(await self._health())
        except BaseException:
            await self._pool.close()
            raise
        return self

    async def close(self) -> None:
        await self._pool.close()

    async def _probe(self) -> None:
        """Connect once: the error says why it cannot, where the pool would only be late."""
        try:
            async with asyncio.timeout(self._timeout):
                connection = await psycopg.AsyncConnection.connect(self._url, **_SESSION)
        except TimeoutError:
            raise late(self._timeout) from None
        except psycopg.Error as error:
            raise error_of(None, " ".join(str(error).split()), None) from error
        await connection.close()

    async def _health(self) -> dict[str, Any]:
        try:
            return cast(dict[str, Any], await self._run("health", {}))
        except _NO_SCHEMA:
            raise schema_outdated(f"The database has no schema {self._schema!r} of this program") from None
        except psycopg.Error as error:
            raise _translated(error) from error

    async def _call(self, function: str, arguments: dict[str, Any]) -> Any:
        try:
            return await self._run(function, arguments)
        except psycopg.Error as error:
            raise _translated(error) from error

    async def _run(self, function: str, arguments: dict[str, Any]) -> Any:
        names = ", ".join(f"{name} => %s" for name in arguments)
        statement = f'SELECT "{self._schema}".{function}({names})'
        values = [_json(value) if isinstance(value, dict | list) else value for value in arguments.values()]
        try:
            async with self._in_time(), self._connection() as connection:
                cursor = await connection.execute(statement, values)
                row = await cursor.fetchone()
        except TimeoutError:
            raise late(self._timeout) from None
        except UnicodeEncodeError as error:  # a lone surrogate in a plain argument
            raise error_of("22021", str(error), None) from error
        return row[0] if row is not None else None

    @asynccontextmanager
    async def _in_time(self) -> AsyncIterator[None]:
        """Raises ``TimeoutError``. psycopg cancels a late statement on the server, which may be out of reach too: a
        second interruption ends that."""
        async with asyncio.timeout(self._timeout + CANCEL_SECONDS), asyncio.timeout(self._timeout):
            yield

    @asynccontextmanager
    async def _connection(self) -> AsyncIterator[psycopg.AsyncConnection[Any]]:
        """A connection that the server has not closed meanwhile. After a restart all idle ones are dead, and a call
        that met them one by one would fail as often."""
        while True:
            connection = await self._pool.getconn()
            try:
                if await _is_open(connection):
                    yield connection
                    return
            finally:
                await self._give_back(connection)

    async def _give_back(self, connection: psycopg.AsyncConnection[Any]) -> None:
        """To the pool, whatever happens to the caller: interrupted half-way the pool would count a connection that
        nobody has, and after ``database_pool_size`` of them it would have none to give."""
        returning = asyncio.ensure_future(self._pool.putconn(connection))
        self._returning.add(returning)
        returning.add_done_callback(self._returning.discard)
        await asyncio.shield(returning)


async def _is_open(connection: psycopg.AsyncConnection[Any]) -> bool:
    """Looks only at what the server has sent already, so it costs no round trip; what is dead is closed."""
    try:
        connection.pgconn.consume_input()  # its last words
        connection.pgconn.consume_input()  # and the end behind them
    except psycopg.OperationalError:
        await connection.close()
        return False
    return True


def _json(value: Any) -> Jsonb:
    """Encoded here, so that what JSON cannot hold is told apart from other errors."""
    try:
        return Jsonb(orjson.dumps(value), dumps=bytes)
    except orjson.JSONEncodeError as error:
        raise error_of("22021", str(error), None) from error


async def _decode_with_orjson(connection: psycopg.AsyncConnection[Any]) -> None:
    set_json_loads(orjson.loads, connection)


def _translated(error: psycopg.Error) -> Exception:
    detail = error.diag.message_detail
    if error.sqlstate is None and not isinstance(error, psycopg.OperationalError):
        return error_of("22000", str(error), None)  # psycopg itself could not encode a value
    return error_of(error.sqlstate, error.diag.message_primary or str(error), detail)

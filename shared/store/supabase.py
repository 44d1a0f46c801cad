"""``SupabaseStore``: the same SQL functions through PostgREST, called with the ``supabase`` client. Only here."""

from __future__ import annotations

import asyncio
from typing import Any, Self, cast

import httpx
from postgrest import APIError
from supabase import AsyncClient, AsyncClientOptions, acreate_client

from shared.errors import ConfigurationError
from shared.settings import Settings
from shared.store.base import Row
from shared.store.json_store import JsonStore
from shared.store.server import CALL_TIMEOUT_SECONDS, check_schema, error_of, late, schema_outdated

_SCHEMA_NOT_EXPOSED = "PGRST106"
_NOT_OUR_KEY = frozenset({"PGRST301", "PGRST302", "42501", "401", "403"})
_NO_FUNCTION = frozenset({"PGRST202", "42883", "3F000"})


class SupabaseStore(JsonStore):
    """The store behind ``settings.supabase_url``, with the service_role key. Belongs to the loop that opened it."""

    def __init__(self, settings: Settings, *, call_timeout_seconds: float = CALL_TIMEOUT_SECONDS) -> None:
        if settings.supabase_url is None or settings.supabase_key is None:
            raise ConfigurationError("SUPABASE_URL or SUPABASE_KEY is not set.")
        self._url = settings.supabase_url
        self._key = settings.supabase_key.get_secret_value()
        self._schema = settings.schema_name
        self._timeout = call_timeout_seconds
        self._limits = httpx.Limits(max_connections=settings.database_pool_size)
        self._http: httpx.AsyncClient | None = None
        self._client: AsyncClient | None = None

    async def open(self) -> Self:
        """Connect and check the schema. Raises ``SchemaOutdated``, ``ConfigurationError``, ``StoreUnavailable``."""
        self._http = httpx.AsyncClient(timeout=self._timeout, limits=self._limits, follow_redirects=True)
        try:
            self._client = await acreate_client(
                self._url,
                self._key,
                AsyncClientOptions(
                    schema=self._schema, auto_refresh_token=False, persist_session=False, httpx_client=self._http
                ),
            )
            check_schema(await self._open_health())
        except BaseException:
            await self.close()
            raise
        return self

    async def close(self) -> None:
        if self._http is not None:
            await self._http.aclose()
        self._client = self._http = None

    async def health(self) -> Row:
        return await super().health() | {"kind": "supabase"}

    async def _open_health(self) -> Row:
        try:
            return cast(Row, await self._run("health", {}))
        except APIError as error:
            if error.code == _SCHEMA_NOT_EXPOSED:
                raise ConfigurationError(
                    f"The schema {self._schema!r} is not exposed by SUPABASE_URL. Nothing was started.",
                    hint="Run the migrations, then add it to the exposed schemas in the project's API settings.",
                ) from None
            if error.code in _NOT_OUR_KEY:
                raise ConfigurationError(
                    f"SUPABASE_KEY may not run the functions: {error.message}. Nothing was started.",
                    hint="Set it to the project's service_role key.",
                ) from None
            if error.code in _NO_FUNCTION:
                raise schema_outdated(
                    f"The schema {self._schema!r} has no functions of this program, or PostgREST has not seen them yet"
                ) from None
            raise _translated(error) from error

    async def _call(self, function: str, arguments: dict[str, Any]) -> Any:
        try:
            return await self._run(function, arguments)
        except APIError as error:
            raise _translated(error) from error

    async def _run(self, function: str, arguments: dict[str, Any]) -> Any:
        if self._client is None:
            raise error_of(None, "it is not open", None)
        try:
            async with asyncio.timeout(self._timeout):
                answer = await self._client.rpc(function, arguments).execute()
        except (TimeoutError, httpx.TimeoutException):
            raise late(self._timeout) from None
        except httpx.TransportError as error:
            raise error_of(None, f"{type(error).__name__}: {error}", None) from error
        except UnicodeEncodeError as error:  # a lone surrogate
            raise error_of("22021", str(error), None) from error
        return answer.data


def _translated(error: APIError) -> Exception:
    details = error.details if isinstance(error.details, str) else None
    return error_of(error.code or "500", error.message or "no message", details)

"""What both ways of reaching Postgres share: the schema that this program needs, and what a SQLSTATE means."""

from __future__ import annotations

import re
from typing import Any

from shared.errors import (
    ConfigurationError,
    ContentRefused,
    SchemaOutdated,
    StoreError,
    StoreUnavailable,
    TurnkeeperError,
    from_code,
)

SCHEMA_VERSION = 9
"""The newest migration that this program knows; it needs all of them."""

CALL_TIMEOUT_SECONDS = 5.0  # of one call, waiting for a connection included

_OUT_OF_TIME_OR_REACH = re.compile(
    r"08\w{3}|25006"  # connection; read-only, as the old primary is during a failover
    r"|40001|40P01"  # serialization, deadlock
    r"|53\w{3}"  # too many connections, disk or memory full
    r"|55P03|57014|57P0\d"  # lock timeout, cancelled, shutting down
    r"|PGRST00[0-3]|PGRST202"  # PostgREST without a database, without a schema cache, or with an old one
    r"|50[0234]|429"  # a proxy's page
)
_CONTENT = re.compile(r"21000|22\w{3}|54\w{3}")  # data exceptions, program limits


def error_of(sqlstate: str | None, message: str, detail: str | None) -> TurnkeeperError:
    """The error of our tree for a SQLSTATE (or PostgREST's own code).

    Refusals of the SQL functions are ``PTnnn`` with the stable code as ``message`` and the description as ``detail``.
    """
    if sqlstate and sqlstate.startswith("PT"):
        return from_code(message, detail or message)
    said = f"{message} ({sqlstate})" if sqlstate else message
    if sqlstate is None or _OUT_OF_TIME_OR_REACH.fullmatch(sqlstate):
        return StoreUnavailable(f"The store did not answer: {said}. The call may or may not have landed.")
    if _CONTENT.fullmatch(sqlstate):
        return ContentRefused(f"The store refuses a value: {said}. Nothing was written.")
    if sqlstate.startswith("23"):  # a row that cannot be: a fault of the program, not of its input
        return TurnkeeperError(f"The store found a contradiction: {said}. Nothing was written.")
    return StoreError(f"The store refuses the call: {said}. Nothing was written.")


def late(seconds: float) -> StoreUnavailable:
    return StoreUnavailable(f"The store did not answer within {seconds:g} s. The call may or may not have landed.")


def check_schema(health: dict[str, Any]) -> None:
    """Raises ``SchemaOutdated`` below what this program needs, ``ConfigurationError`` if it is too old itself."""
    version, needed = health["schema_version"] or 0, health["min_compatible"] or 0
    if version < SCHEMA_VERSION:
        raise schema_outdated(f"The database schema has version {version}, this program needs {SCHEMA_VERSION}")
    if needed > SCHEMA_VERSION:
        raise ConfigurationError(
            f"The database schema has version {version}, which needs a program that knows version {needed}; this one "
            f"knows {SCHEMA_VERSION}. Nothing was started.",
            hint="Upgrade turnkeeper.",
        )


def schema_outdated(what: str) -> SchemaOutdated:
    return SchemaOutdated(f"{what}. Nothing was started.", hint="Run `turnkeeper migrate`.")

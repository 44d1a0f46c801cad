"""The database as plain SQL sees it. Nothing of the product's store is used here, so that its faults are not shared."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import psycopg
from psycopg.rows import dict_row

Row = dict[str, Any]
Query = Callable[[str], list[Row]]
AWAY = (sqlite3.OperationalError, psycopg.OperationalError)
"""What a query raises while the database is away."""


@dataclass(frozen=True, slots=True)
class Tables:
    """Everything that a run left behind; times in seconds since 1970, JSON as objects, turns and events in order."""

    turns: list[Row]
    events: list[Row]
    calls: list[Row]
    conversations: list[Row]
    dead_letters: list[Row]

    @classmethod
    def read(cls, query: Query) -> Tables:
        return cls(
            query("SELECT * FROM conversation_turns ORDER BY conversation_id, turn"),
            query("SELECT * FROM conversation_events ORDER BY conversation_id, seq"),
            query("SELECT * FROM tool_calls ORDER BY conversation_id, turn, step, call_index"),
            query("SELECT * FROM conversations"),
            query("SELECT * FROM dead_letters"),
        )


def sqlite_query(path: Path) -> Query:
    """Rows of the file at ``path``; each query on a connection of its own."""

    def query(sql: str) -> list[Row]:
        database = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
        try:
            database.row_factory = sqlite3.Row
            return [{name: _of_text(name, row[name]) for name in row.keys()} for row in database.execute(sql)]  # noqa: SIM118
        finally:
            database.close()

    return query


def postgres_query(url: str, schema: str) -> Query:
    """Rows of a schema; on one connection for as long as it holds."""
    kept: list[psycopg.Connection[Row]] = []

    def query(sql: str) -> list[Row]:
        if not kept or kept[0].closed:
            options = f"-c search_path={schema}"
            kept[:] = [psycopg.connect(url, options=options, autocommit=True, row_factory=dict_row)]
        rows = kept[0].execute(sql.encode()).fetchall()
        return [{name: _plain(value) for name, value in row.items()} for row in rows]

    return query


_JSON = {"request", "data", "decisions", "error"}


def _of_text(name: str, value: Any) -> Any:
    if isinstance(value, str) and name in _JSON:
        return json.loads(value)
    if isinstance(value, str) and name.endswith("_at"):
        return datetime.fromisoformat(value).timestamp()
    return value


def _plain(value: Any) -> Any:
    if isinstance(value, datetime):
        return value.timestamp()
    return str(value) if type(value).__name__ == "UUID" else value

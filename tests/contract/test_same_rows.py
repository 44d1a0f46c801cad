"""The same life on SQLite and on Postgres leaves the same rows: every column of every table."""

from __future__ import annotations

import asyncio
import random
import re
import sqlite3
from contextlib import closing
from typing import Any

import orjson
import psycopg
import pytest
from psycopg.rows import dict_row

from shared.requests import Artifact
from shared.settings import Settings
from shared.store import open_store
from shared.store.base import NotClaimed, Store
from shared.store.sqlite.connection import _row
from tests.contract.driver import PAUSED, Talk, ai, call, failed, no, pause, start, waits, yes
from tests.contract.simulation import World

STEPS = 120
KEYS = {
    "conversations": "conversation_id",
    "conversation_turns": "conversation_id, turn",
    "conversation_events": "conversation_id, seq",
    "tool_calls": "conversation_id, turn, step, call_index",
    "approval_rules": "rule_id",
    "dead_letters": "letter_id",
    "feedback": "request_id",
    "artifacts": "artifact_id",
    "sessions": "session_id",
    "session_messages": "session_id, seq",
}
VIEWS = ("sessions", "session_messages")
_UUID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_NULL_OR_NOT = re.compile(r".*_(at|until|ms|sha256|digest)|digest|duration")
"""Columns (and keys in JSON) of times, spans, and hashes of what is random."""

Tables = dict[str, list[dict[str, Any]]]


def of_sqlite(settings: Settings) -> Tables:
    found: Tables = {}
    with closing(sqlite3.connect(settings.sqlite_path)) as db:
        for name, key in KEYS.items():
            cursor = db.execute(f"SELECT * FROM {name} ORDER BY {key}")
            columns = [column for column, *_ in cursor.description]
            read = (
                _row
                if name not in VIEWS
                else lambda _, values, columns=columns: dict(zip(columns, values, strict=True))
            )
            found[name] = [read(cursor, values) for values in cursor]
    return found


def of_postgres(url: str) -> Tables:
    with psycopg.connect(url, row_factory=dict_row) as connection:
        connection.execute("SET search_path = turnkeeper")
        return {
            name: [
                row["row"]
                for row in connection.execute(f"SELECT to_jsonb(x) AS row FROM {name} AS x ORDER BY {key}".encode())
            ]
            for name, key in KEYS.items()
        }


def comparable(tables: Tables) -> Tables:
    """Random ids by the order of their appearance, the conversations in the order of their birth."""
    born = {row["conversation_id"]: row["created_at"] for row in tables["conversations"]}
    sorted_rows = {
        name: sorted(rows, key=lambda row: born.get(row.get("conversation_id", row.get("session_id")), ""))
        for name, rows in tables.items()
    }
    names: dict[str, str] = {}
    text = orjson.dumps(_without_chance(sorted_rows), option=orjson.OPT_SORT_KEYS).decode()
    loaded: Tables = orjson.loads(_UUID.sub(lambda m: names.setdefault(m[0], f"id {len(names) + 1}"), text))
    return loaded


def _without_chance(value: Any, key: str = "") -> Any:
    if isinstance(value, dict):
        return {name: _without_chance(item, name) for name, item in value.items()}
    if isinstance(value, list):
        return [_without_chance(item) for item in value]
    if _NULL_OR_NOT.fullmatch(key):
        return value is not None
    if isinstance(value, bytes):
        return value.decode()
    if isinstance(value, str) and value.startswith("\\x"):  # bytea as JSON
        return bytes.fromhex(value[2:]).decode()
    if isinstance(value, int) and key in ("success", "gated", "retryable"):
        return bool(value)
    return value


def same(one: Tables, two: Tables) -> None:
    for name in KEYS:
        assert len(one[name]) == len(two[name]), name
        for first, second in zip(one[name], two[name], strict=True):
            assert first == second, name


def live(run: asyncio.Runner, store: Store, seed: int) -> None:
    world = World(run, store, random.Random(seed))
    world.ask(supersede=True, decisions={})
    for _ in range(STEPS):
        world.live()
    world.settle()


async def what_is_rare(store: Store) -> None:
    """What the random lives do not do: each way in which a call or a turn ends, rules, and what lies beside."""
    owner = {"account_id": "a", "user_id": "u"}
    rules = Talk(store)
    await rules.ask("first", **owner)
    claim = await rules.claim()
    said = ai(1, *(call(1, i, f"c{i}") for i in range(4)), call(1, 4, "f", kind="frontend"))
    awaits = [waits(1, 1, i, token=f"t{i}", seconds=-1 if i == 3 else 600) for i in range(4)]
    await rules.append(claim.lease, 1, said, pause([], *awaits), finish=PAUSED)
    scopes = [yes(f"c{i}", f"t{i}", remember={"scope": s}) for i, s in enumerate(("conversation", "user", "account"))]
    await rules.decide(
        *scopes, no("c3", "t3"), user_id="boss", frontend_tool_results=[{"tool_call_id": "f", "content": "it is here"}]
    )
    claim = await rules.claim(max_crashes=1, lease_seconds=0)
    await rules.append(claim.lease, 1, start(1, 1, 0))
    await rules.try_claim(max_crashes=1)
    await rules.ask("again", request_id="r1", **owner)

    late = Talk(store)
    await late.ask()
    claim = await late.claim()
    awaits = [waits(1, 1, i, token=f"t{i}", seconds=-1) for i in range(2)]
    said = ai(1, call(1, 0, "c0"), call(1, 1, "c1"), call(1, 2, "f", kind="frontend"))
    await late.append(claim.lease, 1, said, pause([], *awaits), finish=PAUSED)
    await late.decide(
        yes("zz", "forged"), frontend_tool_results=[{"tool_call_id": "f", "content": "", "is_error": True}]
    )
    claim = await late.claim()  # expires what nobody decided
    await late.append(claim.lease, 1, ai(2, call(2), call(2, 1, "c2", gated=False)), finish=failed())

    stopped = Talk(store)
    await stopped.paused("c1", "c2")
    await store.stop(stopped.id)
    await stopped.ask("next")
    await store.reap()
    await store.release((await stopped.claim()).lease, 600)
    await store.stop(stopped.id)
    await stopped.try_claim()
    denied = Talk(store)
    await denied.paused("c1", "c2")
    await denied.decide(no("c1", "t1", feedback="not now"))
    await store.stop(denied.id, 2)
    await denied.try_claim()
    yielding = Talk(store)
    await yielding.ask()
    claim = await yielding.claim()
    await yielding.ask("if nobody is asked", supersede=False)
    await yielding.append(claim.lease, 1, ai(1, call(1)), pause([], waits(1, 1)), finish=PAUSED)
    await yielding.try_claim()

    limited = [Talk(store), Talk(store), Talk(store)]
    for talk in limited:
        await talk.ask(account_id="tight", target={"mode": "host", "server_name": "web"}, metadata={"from": "test"})
    await limited[0].claim(account_turns=1)
    assert isinstance(await limited[1].try_claim(account_turns=1), NotClaimed)
    assert isinstance(await limited[2].try_claim(account_cost_usd=0), NotClaimed)

    lease = (await rules.claim()).lease
    await store.put_artifact(lease, Artifact.of(rules.id, "log", "text/plain", b"bytes"))
    await store.record_feedback("r1", "down", category="wrong", comment="no")
    await store.rename(rules.id, "renamed")
    await store.record_dead_letter({"code": "request_invalid", "description": "No.", "payload": {"a": [1]}})


@pytest.mark.parametrize("seed", [7, 11])
def test_the_same_life(seed: int, sqlite_settings: Settings, postgres_settings: Settings, postgres_url: str) -> None:
    for settings in (sqlite_settings, postgres_settings):
        with asyncio.Runner() as run:
            store = run.run(open_store(settings).open())
            live(run, store, seed)
            if seed == 7:
                run.run(what_is_rare(store))
            run.run(store.close())
    one, two = comparable(of_sqlite(sqlite_settings)), comparable(of_postgres(postgres_url))
    assert all(one[name] for name in KEYS) == (seed == 7)
    same(one, two)

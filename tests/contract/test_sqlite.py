"""What only the embedded store promises: its file, its schema, several processes, and its views."""

from __future__ import annotations

import asyncio
import multiprocessing
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from shared.errors import SchemaOutdated, StoreError, StoreUnavailable
from shared.events import ERROR, EventDraft
from shared.settings import Settings
from shared.store.base import NotClaimed
from shared.store.sqlite import SqliteStore, connection, migrate_sqlite
from shared.store.sqlite.schema import Migration, migrations
from tests.contract.driver import ANSWERED, Talk, ai, answer, call, failed, result, start

PROCESSES = 4


def query(path: Path, sql: str) -> list[dict[str, Any]]:
    with closing(sqlite3.connect(path)) as db:
        db.row_factory = sqlite3.Row
        return [dict(row) for row in db.execute(sql)]


@pytest.fixture
def path(sqlite_settings: Settings) -> Path:
    return sqlite_settings.sqlite_path


async def test_opening_creates_the_file_in_wal_mode(tmp_path: Path) -> None:
    settings = Settings(home=tmp_path / "new" / "home")
    store = await SqliteStore(settings).open()
    health = await store.health()
    assert (health["kind"], health["schema_version"]) == ("sqlite", migrations()[-1].version)
    await store.close()
    assert query(settings.sqlite_path, "PRAGMA journal_mode") == [{"journal_mode": "wal"}]
    assert not list(settings.home.glob("*-wal")), "a clean close leaves one file"


def test_migrating_again_applies_nothing(path: Path) -> None:
    assert migrate_sqlite(path) == [m.name for m in migrations()]
    assert migrate_sqlite(path) == []


async def test_an_older_database_is_brought_up_to_date(path: Path) -> None:
    now = migrations()
    migrate_sqlite(path)
    newer = Migration(now[-1].version + 1, 1, "0099_more", "-- min_compatible: 1\nCREATE TABLE more (a) STRICT;\n")
    with pytest.raises(StoreError):
        migrate_sqlite(path, [*now, newer])
    assert query(path, "SELECT max(version) AS v FROM schema_migrations") == [{"v": now[-1].version}]
    good = Migration(newer.version, 1, newer.name, "CREATE TABLE more (a TEXT) STRICT;\nCREATE INDEX i ON more (a);\n")
    assert migrate_sqlite(path, [*now, good]) == ["0099_more"]
    assert query(path, "SELECT count(*) AS n FROM more") == [{"n": 0}]


@pytest.mark.parametrize(("min_compatible", "fits"), [(1, True), (99, False)])
async def test_a_newer_database_is_used_while_it_is_compatible(
    sqlite_settings: Settings, path: Path, min_compatible: int, fits: bool
) -> None:
    migrate_sqlite(path)
    migrate_sqlite(path, [*migrations(), Migration(99, min_compatible, "0099_next", "CREATE TABLE next (a TEXT);")])
    store = SqliteStore(sqlite_settings)
    if fits:
        await store.open()
        assert (await store.health())["schema_version"] == 99
    else:
        with pytest.raises(SchemaOutdated, match="99"):
            await store.open()
    await store.close()


def _migrate(path: Path, barrier: Any, answers: Any) -> None:
    barrier.wait()
    answers.put(migrate_sqlite(path))


def _in_processes(target: Any, *arguments: Any) -> list[Any]:
    context = multiprocessing.get_context("spawn")
    barrier, answers = context.Barrier(PROCESSES), context.Queue()
    processes = [context.Process(target=target, args=(*arguments, barrier, answers)) for _ in range(PROCESSES)]
    for process in processes:
        process.start()
    collected = [answers.get(timeout=30) for _ in processes]
    for process in processes:
        process.join(30)
        assert process.exitcode == 0
    return collected


def test_processes_that_start_at_once_migrate_once(path: Path) -> None:
    applied = _in_processes(_migrate, path)
    assert sorted(applied, key=len)[-1] == [m.name for m in migrations()]
    assert sum(map(len, applied)) == len(migrations())


def _work(settings: Settings, ids: Sequence[str], barrier: Any, answers: Any) -> None:
    async def main() -> int:
        store = await SqliteStore(settings).open()
        turns = 0
        for talk in (Talk(store, i) for i in ids):
            while not (isinstance(claim := await talk.try_claim(), NotClaimed) and claim.reason == "idle"):
                if not isinstance(claim, NotClaimed):
                    await talk.append(claim.lease, 1, ai(1, content="x"), answer(), finish=ANSWERED)
                    turns += 1
        await store.close()
        return turns

    barrier.wait()
    answers.put(asyncio.run(main()))


async def test_processes_share_the_file_and_each_turn_runs_once(sqlite_settings: Settings) -> None:
    store = await SqliteStore(sqlite_settings).open()
    talks = [Talk(store) for _ in range(4)]
    for talk in talks * 5:
        await talk.ask()
    answered = await asyncio.to_thread(_in_processes, _work, sqlite_settings, [t.id for t in talks])
    assert sum(answered) == 20
    for talk in talks:
        assert (await talk.event_names()).count("answer_end") == 5
        assert await talk.statuses() == ["completed"] * 5
    await store.close()


async def test_a_locked_database_is_unavailable_and_nothing_is_written(
    sqlite_settings: Settings, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "BUSY_TIMEOUT_SECONDS", 0.05)
    store = await SqliteStore(sqlite_settings).open()
    talk = Talk(store)
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreUnavailable):
            await talk.ask()
        assert await store.conversations() == [], "readers do not wait for writers"
        other.execute("ROLLBACK")
    assert (await talk.ask()).turn == 1
    await store.close()


async def test_a_file_that_is_no_database_is_refused(sqlite_settings: Settings, path: Path) -> None:
    await asyncio.to_thread(path.write_bytes, b"this is not a database at all" * 100)
    store = SqliteStore(sqlite_settings)
    with pytest.raises(StoreError) as caught:
        await store.open()
    assert not isinstance(caught.value, StoreUnavailable)
    await store.close()


async def test_a_closed_store_says_so(sqlite_settings: Settings) -> None:
    store = await SqliteStore(sqlite_settings).open()
    await store.close()
    await store.close()
    with pytest.raises(StoreUnavailable, match="closed"):
        await store.health()


async def test_a_store_serves_several_event_loops(sqlite_settings: Settings) -> None:
    store = await SqliteStore(sqlite_settings).open()
    talk = Talk(store)
    await talk.ask()
    lease = (await talk.claim()).lease
    renewed = await asyncio.to_thread(asyncio.run, store.renew([lease.token, "gone"], 60))
    assert renewed.lost == {"gone"}
    await store.close()


async def test_the_sessions_view(sqlite_settings: Settings, path: Path) -> None:
    store = await SqliteStore(sqlite_settings).open()
    talks = {name: Talk(store) for name in ("done", "error", "aborted", "running")}
    for name, talk in talks.items():
        target = {"mode": "host", "server_id": "s1", "server_name": "db", "server_host": "10.0.0.1"}
        await talk.ask(f"is it {name}?", user_id="u", target=target)
        claim = await talk.claim()
        if name == "done":
            usage = {"prompt_tokens": 7, "completion_tokens": 3}
            await talk.append(claim.lease, 1, ai(1, content="x", usage=usage), answer(), finish=ANSWERED)
        elif name == "error":
            await talk.append(claim.lease, 1, EventDraft(ERROR, {"code": "x"}), finish=failed())
        elif name == "aborted":
            await store.stop(talk.id)
            await store.release(claim.lease)
            await talk.try_claim()
    await store.close()
    rows = {row["title"]: row for row in query(path, "SELECT * FROM sessions")}
    assert {title: row["status"] for title, row in rows.items()} == {f"is it {name}?": name for name in talks}
    done = rows["is it done?"]
    assert (done["mode"], done["server_id"], done["server_host"], done["user_id"]) == ("host", "s1", "10.0.0.1", "u")
    assert (done["provider"], done["model"], done["rounds"], done["total_tokens"]) == (
        "scripted",
        "scripted/one",
        1,
        10,
    )
    assert rows["is it error?"]["error"] == "It failed."


async def test_the_session_messages_view(sqlite_settings: Settings, path: Path) -> None:
    store = await SqliteStore(sqlite_settings).open()
    talk = Talk(store)
    await talk.ask("what is there?")
    lease = (await talk.claim()).lease
    said = ai(1, call(1, gated=False), content="let me see", usage={"prompt_tokens": 7, "completion_tokens": 3})
    shown = start(1, 1)
    shown.data.update(tool_name="shell", step=1, risk="side_effect", params={"command": "ls"})
    await talk.append(lease, 1, said, shown, result(1, 1, content="a b c"), answer(content="three"), finish=ANSWERED)
    await store.close()
    rows = query(path, "SELECT * FROM session_messages ORDER BY seq")
    assert [(r["type"], r["role"], r["round"]) for r in rows] == [
        ("session", "user", None),
        ("thought", "assistant", 1),
        ("tool_call", "assistant", 1),
        ("tool_result", "tool", 1),
        ("done", "assistant", None),
    ]
    session, thought, made, came, done = rows
    assert (session["content"], thought["content"], done["content"]) == ("what is there?", "let me see", "three")
    assert (thought["tokens"], done["tokens"]) == (10, None)
    assert (made["tool_name"], made["tool_args"], made["risk"]) == ("shell", '{"command":"ls"}', "side_effect")
    assert (came["tool_name"], came["tool_output"], came["success"], came["duration"]) == ("shell", "a b c", 1, 5)

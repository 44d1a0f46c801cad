"""What is particular to a server: PgBouncer, locks, outages, refused values, and which libraries are imported."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import psycopg
import pytest
from pydantic import SecretStr

from scripts.bench.kit.postgres import LocalPostgres
from scripts.bench.kit.processes import free_port
from shared.errors import ConfigurationError, ContentRefused, LeaseLost, StoreUnavailable
from shared.events import EventDraft
from shared.settings import Settings
from shared.store import open_store
from shared.store.base import Claim, NotClaimed, Renewed, Store
from shared.store.migrate_postgres import migrate_postgres
from shared.store.postgres import CANCEL_SECONDS, PostgresStore
from shared.store.server import error_of
from shared.store.supabase import SupabaseStore
from tests.contract.driver import ANSWERED, Talk, ai, answer
from tests.support.postgres import Token
from tests.support.proxy import FaultyProxy


@pytest.fixture(params=["postgres", "supabase"])
def settings(request: pytest.FixtureRequest) -> Settings:
    settings: Settings = request.getfixturevalue(f"{request.param}_settings")
    return settings


@pytest.fixture
async def store(settings: Settings) -> AsyncIterator[Store]:
    store = await open_store(settings).open()
    yield store
    await store.close()


@pytest.fixture
async def other(postgres_url: str) -> AsyncIterator[psycopg.AsyncConnection]:
    """A connection of somebody else, in a transaction."""
    async with await psycopg.AsyncConnection.connect(postgres_url) as connection:
        yield connection
        await connection.rollback()


async def test_many_turns_through_pgbouncer(pgbouncer_url: str, tmp_path: Path) -> None:
    """Ten connections of ours share four of PgBouncer's, so a session changes hands between any two calls."""
    store = await open_store(Settings(home=tmp_path, database_url=pgbouncer_url)).open()
    talks = [Talk(store) for _ in range(20)]
    for text in ("one", "two"):
        await asyncio.gather(*(talk.answered(text) for talk in talks))
    for talk in talks:
        assert await talk.statuses() == ["completed", "completed"]
        events = await talk.events()
        assert [event["seq"] for event in events] == [1, 2, 3, 4, 5, 6]
    await store.close()


def test_migrating_through_pgbouncer(empty_postgres_url: str, pgbouncer_url: str) -> None:
    name = psycopg.conninfo.conninfo_to_dict(empty_postgres_url)["dbname"]
    through = pgbouncer_url.rpartition("/")[0] + f"/{name}"
    assert migrate_postgres(through)
    assert migrate_postgres(through) == []


async def _until_blocked(connection: psycopg.AsyncConnection) -> None:
    """Until somebody waits for a lock of this connection."""
    query = "SELECT 1 FROM pg_stat_activity WHERE pg_backend_pid() = ANY (pg_blocking_pids(pid))"
    async with asyncio.timeout(5):
        while await (await connection.execute(query)).fetchone() is None:
            await asyncio.sleep(0.01)


async def test_an_append_that_waited_sees_the_take_over(store: Store, other: psycopg.AsyncConnection) -> None:
    talk = Talk(store)
    await talk.ask()
    lease = (await talk.claim()).lease
    await other.execute("SELECT FROM turnkeeper.conversations WHERE conversation_id = %s FOR UPDATE", [talk.id])
    waiting = asyncio.create_task(talk.append(lease, 1, ai(1)))
    await _until_blocked(other)
    # The waiting append holds nothing yet: it takes the conversation first, like everybody.
    await other.execute(
        "SELECT FROM turnkeeper.conversation_turns WHERE conversation_id = %s FOR UPDATE NOWAIT", [talk.id]
    )
    await other.execute(
        "UPDATE turnkeeper.conversation_turns SET lease_token = 'new' WHERE conversation_id = %s", [talk.id]
    )
    await other.commit()
    with pytest.raises(LeaseLost):
        await waiting
    assert await talk.event_names() == ["user_message"]


async def test_an_append_that_waited_numbers_its_events_behind_what_came(
    store: Store, other: psycopg.AsyncConnection
) -> None:
    talk = Talk(store)
    await talk.ask()
    lease = (await talk.claim()).lease
    await other.execute("UPDATE turnkeeper.conversations SET last_seq = 7 WHERE conversation_id = %s", [talk.id])
    waiting = asyncio.create_task(talk.append(lease, 1, ai(1)))
    await _until_blocked(other)
    await other.commit()
    assert (await waiting).first_seq == 8


async def test_reaping_passes_by_what_is_locked(store: Store, other: psycopg.AsyncConnection) -> None:
    one, two = Talk(store), Talk(store)
    await one.ask()
    await two.ask()
    await other.execute("SELECT FROM turnkeeper.conversations WHERE conversation_id = %s FOR UPDATE", [one.id])
    assert [ring.conversation_id for ring in await store.reap()] == [two.id]
    await other.rollback()
    assert [ring.conversation_id for ring in await store.reap()] == [one.id]


async def test_one_locked_conversation_does_not_cost_the_others_their_leases(
    store: Store, other: psycopg.AsyncConnection
) -> None:
    talks = [Talk(store) for _ in range(3)]
    tokens = []
    for talk in talks:
        await talk.ask()
        tokens.append((await talk.claim_expired()).lease.token)
    await store.stop(talks[1].id)
    await other.execute("SELECT FROM turnkeeper.conversations WHERE conversation_id = %s FOR UPDATE", [talks[0].id])
    renewed = await store.renew([*tokens, "no-such-token"], 60)
    assert renewed == Renewed(frozenset({"no-such-token"}), frozenset({tokens[1]}), frozenset({tokens[0]}))
    await other.rollback()
    assert isinstance(await talks[0].try_claim(), Claim), "it was not renewed"
    assert isinstance(await talks[1].try_claim(), NotClaimed)
    assert (await store.renew(tokens, 60)).skipped == frozenset()


async def test_a_server_that_is_silent_costs_no_more_than_the_time_of_a_call(
    postgres_settings: Settings, postgres_server: LocalPostgres
) -> None:
    proxy = FaultyProxy(postgres_server.port)
    url = f"postgresql://postgres@127.0.0.1:{proxy.port}/turnkeeper_test"
    settings = postgres_settings.model_copy(update={"database_url": SecretStr(url)})
    store = await PostgresStore(settings, call_timeout_seconds=0.5).open()
    proxy.silence()
    for _ in range(2):  # on the open connection, then where none can be had
        began = time.monotonic()
        with pytest.raises(StoreUnavailable):
            await store.health()
        assert time.monotonic() - began < 0.5 + CANCEL_SECONDS + 0.5
    began = time.monotonic()
    await store.close()
    assert time.monotonic() - began < 3, "nor does closing wait for it"
    proxy.stop()


@pytest.mark.parametrize("kind", [PostgresStore, SupabaseStore])
async def test_a_late_answer_is_an_outage_and_the_store_goes_on(
    kind: type[PostgresStore] | type[SupabaseStore],
    request: pytest.FixtureRequest,
    other: psycopg.AsyncConnection,
) -> None:
    settings = request.getfixturevalue("postgres_settings" if kind is PostgresStore else "supabase_settings")
    store = await kind(settings, call_timeout_seconds=0.3).open()
    talk = Talk(store)
    await talk.ask()
    await other.execute("SELECT FROM turnkeeper.conversations WHERE conversation_id = %s FOR UPDATE", [talk.id])
    with pytest.raises(StoreUnavailable, match=r"0\.3 s"):
        await talk.claim(claim_id="k1")
    await other.rollback()
    assert (await talk.claim(claim_id="k1")).lease.attempt == 1, "late or not, the same claim is one attempt"
    await store.close()


async def test_connections_that_died_while_nobody_looked_are_replaced(
    postgres_settings: Settings, postgres_url: str
) -> None:
    store = await open_store(postgres_settings.model_copy(update={"database_pool_size": 5})).open()
    await asyncio.gather(*(store.health() for _ in range(20)))
    with psycopg.connect(postgres_url, autocommit=True) as admin:
        admin.execute(
            "SELECT pg_terminate_backend(pid, 1000) FROM pg_stat_activity "
            "WHERE application_name = 'turnkeeper' AND datname = current_database()"
        )
    assert (await store.health())["kind"] == "postgres"
    await store.close()


async def test_nobody_listens(tmp_path: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    with pytest.raises(StoreUnavailable):
        await PostgresStore(
            Settings(home=tmp_path, database_url=f"postgresql://postgres@{address}/postgres"), call_timeout_seconds=0.5
        ).open()
    with pytest.raises(StoreUnavailable):
        await SupabaseStore(Settings(home=tmp_path, supabase_url=f"http://{address}", supabase_key="k")).open()


@pytest.mark.parametrize("role", ["nonsense", "anon", "authenticated"])
async def test_a_wrong_key(role: str, supabase_settings: Settings, signed_token: Token) -> None:
    key = "a.b.c" if role == "nonsense" else signed_token(role)
    settings = Settings(home=supabase_settings.home, supabase_url=supabase_settings.supabase_url, supabase_key=key)
    with pytest.raises(ConfigurationError, match="SUPABASE_KEY"):
        await open_store(settings).open()


async def test_a_wrong_database(postgres_settings: Settings, postgres_url: str) -> None:
    settings = Settings(home=postgres_settings.home, database_url=postgres_url.rpartition("/")[0] + "/nowhere")
    with pytest.raises(StoreUnavailable, match="nowhere"):
        await PostgresStore(settings, call_timeout_seconds=1).open()


@pytest.mark.parametrize(
    "data", [{"text": "a\x00b"}, {"text": "smile \ud83d end"}, {"usage": {"prompt_tokens": "many"}}], ids=str
)
async def test_refused_values_are_told_apart_and_nothing_lands(store: Store, data: dict[str, object]) -> None:
    talk = Talk(store)
    await talk.ask()
    lease = (await talk.claim()).lease
    with pytest.raises(ContentRefused):
        await talk.append(lease, 1, ai(1), EventDraft("ai_message", {"step": 2, **data}))
    await talk.append(lease, 1, ai(1), answer(), finish=ANSWERED)
    assert await talk.event_names() == ["user_message", "ai_message", "answer_end"]


@pytest.mark.parametrize(
    ("sqlstate", "kind"),
    [
        ("PT409", LeaseLost),
        ("57014", StoreUnavailable),
        ("57P01", StoreUnavailable),
        ("40P01", StoreUnavailable),
        ("40001", StoreUnavailable),
        ("08006", StoreUnavailable),
        ("53300", StoreUnavailable),
        ("PGRST002", StoreUnavailable),
        ("PGRST202", StoreUnavailable),
        ("503", StoreUnavailable),
        (None, StoreUnavailable),
        ("22P05", ContentRefused),
        ("22021", ContentRefused),
        ("22P02", ContentRefused),
        ("54000", ContentRefused),
    ],
)
def test_what_a_sqlstate_means(sqlstate: str | None, kind: type[Exception]) -> None:
    error = error_of(sqlstate, "lease_lost", "Nothing was written.")
    assert type(error) is kind
    assert "othing was" in str(error) or "may or may not have landed" in str(error)


def test_a_user_of_sqlite_waits_for_no_client_library(tmp_path: Path) -> None:
    code = (
        "import sys; from shared.settings import Settings; from shared.store import open_store; "
        "from shared.store.migrate import migrate; migrate(Settings()); open_store(Settings());"
        "print([m for m in ('psycopg', 'supabase', 'httpx') if m in sys.modules])"
    )
    environment = {"PYTHONPATH": str(Path(__file__).parents[3]), "TURNKEEPER_HOME": str(tmp_path)}
    out = subprocess.run([sys.executable, "-c", code], env=environment, check=True, capture_output=True, text=True)
    assert out.stdout.strip() == "[]"

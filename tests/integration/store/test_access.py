"""Who may do what, asked of a real PostgREST with signed tokens: every table, every verb, every function, each role."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator
from typing import Any

import httpx
import psycopg
import pytest

from shared.requests import Artifact
from shared.settings import Settings
from shared.store import open_store
from shared.store.base import Store
from tests.contract.driver import ANSWERED, Talk, ai, answer, call, result
from tests.support.postgres import Token

ROLES = ("anon", "authenticated", "service_role")
READABLE = {
    "conversations",
    "conversation_turns",
    "conversation_events",
    "tool_calls",
    "feedback",
    "artifacts",
    "sessions",
    "session_messages",
}
OWNED = {name: "session_id" if name.startswith("session") else "conversation_id" for name in READABLE}
"""Each with the column that says whose a row is."""
HIDDEN = {
    "conversation_turns": {"request", "digest", "worker", "lease_token", "claim_id", "last_batch_result"},
    "tool_calls": {"approval_token_sha256"},
}
"""Columns that workers alone need to know."""
CALLABLE = {"identity", "record_feedback", "refuse"}


@pytest.fixture
async def rest(postgrest_url: str, signed_token: Token) -> AsyncIterator[httpx.AsyncClient]:
    headers = {"Accept-Profile": "turnkeeper", "Content-Profile": "turnkeeper"}
    async with httpx.AsyncClient(base_url=f"{postgrest_url}/rest/v1", headers=headers) as client:
        yield client


@pytest.fixture
async def store(postgres_settings: Settings) -> AsyncIterator[Store]:
    store = await open_store(postgres_settings).open()
    yield store
    await store.close()


def rows(url: str, query: str) -> list[Any]:
    with psycopg.connect(url) as connection:
        return connection.execute(query).fetchall()


def relations(url: str) -> dict[str, str]:
    """Tables and views of the schema, each with its first column that may be written."""
    return dict(
        rows(
            url,
            "SELECT DISTINCT ON (c.relname) c.relname, a.attname FROM pg_class c "
            "JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 AND a.attidentity = '' "
            "WHERE c.relnamespace = 'turnkeeper'::regnamespace AND c.relkind IN ('r', 'v', 'm', 'p', 'f') "
            "ORDER BY c.relname, a.attnum",
        )
    )


def columns(url: str) -> dict[str, list[str]]:
    """The columns of each table and view."""
    return dict(
        rows(
            url,
            "SELECT table_name, array_agg(column_name::text ORDER BY ordinal_position) "
            "FROM information_schema.columns WHERE table_schema = 'turnkeeper' GROUP BY 1",
        )
    )


def functions(url: str) -> dict[str, list[str]]:
    """Functions of the schema, each with the names of its parameters."""
    found = rows(
        url,
        "SELECT proname, coalesce(proargnames, '{}') FROM pg_proc WHERE pronamespace = 'turnkeeper'::regnamespace",
    )
    assert len({name for name, _ in found}) == len(found), "PostgREST cannot tell overloads apart by null arguments"
    return dict(found)


def headers_of(role: str, signed_token: Token) -> dict[str, str]:
    if role == "anon":
        return {}
    return {"Authorization": f"Bearer {signed_token(role, sub='nobody', account_id='nowhere')}"}


async def denied(client: httpx.AsyncClient, method: str, path: str, headers: dict[str, str], **body: Any) -> bool:
    reply = await client.request(method, path, headers=headers, **body)
    said = reply.json() if reply.content else {}
    if isinstance(said, dict) and said.get("code") == "42501" and said["message"].startswith("permission denied"):
        assert reply.status_code in (401, 403)
        return True
    if isinstance(said, dict) and said.get("code") == "55000":
        return True  # nobody writes to a view of ours, whatever he was granted
    assert reply.status_code in range(200, 500), reply.text
    return False


@pytest.mark.parametrize("role", ROLES)
async def test_tables(role: str, rest: httpx.AsyncClient, postgres_url: str, signed_token: Token) -> None:
    headers = headers_of(role, signed_token)
    allowed: dict[str, set[str]] = {"GET": set(), "POST": set(), "PATCH": set(), "DELETE": set()}
    known = relations(postgres_url)
    assert known.keys() > READABLE
    for name, column in known.items():
        nothing = {"params": {column: "is.null"}}
        requests: dict[str, dict[str, Any]] = {
            "GET": {},
            "POST": {"json": {column: None}},
            "PATCH": nothing | {"json": {column: None}},
            "DELETE": nothing,
        }
        for method, body in requests.items():
            if not await denied(rest, method, f"/{name}", headers, **body):
                allowed[method].add(name)
    own = known.keys() - {"schema_migrations", "sessions", "session_messages"}
    expected = {
        "anon": {"GET": set(), "POST": set(), "PATCH": set(), "DELETE": set()},
        "authenticated": {
            "GET": READABLE - HIDDEN.keys(),
            "POST": {"feedback"},
            "PATCH": {"feedback"},
            "DELETE": set(),
        },
        "service_role": {"GET": known.keys(), "POST": own, "PATCH": own, "DELETE": own},
    }
    assert allowed == expected[role]


async def test_columns(rest: httpx.AsyncClient, postgres_url: str, signed_token: Token) -> None:
    headers = headers_of("authenticated", signed_token)
    known = columns(postgres_url)
    refused: dict[str, set[str]] = {}
    for name in READABLE:
        for column in known[name]:
            for query in ({"select": column}, {column: "not.is.null", "select": known[name][0]}, {"order": column}):
                if column in HIDDEN.get(name, ()) or "select" in query:
                    if await denied(rest, "GET", f"/{name}", headers, params=query):
                        refused.setdefault(name, set()).add(column)
                    else:
                        assert column not in HIDDEN.get(name, ()), query
    assert refused == HIDDEN


@pytest.mark.parametrize("role", ROLES)
async def test_functions(role: str, rest: httpx.AsyncClient, postgres_url: str, signed_token: Token) -> None:
    headers = headers_of(role, signed_token)
    known = functions(postgres_url)
    assert known.keys() > CALLABLE | {"submit", "claim", "append", "renew", "stop", "apply_access"}
    allowed = {
        name
        for name, parameters in known.items()
        if not await denied(rest, "POST", f"/rpc/{name}", headers, json=dict.fromkeys(parameters))
    }
    expected = {"anon": set(), "authenticated": CALLABLE, "service_role": known.keys() - {"apply_access"}}
    assert allowed == expected[role]


async def test_a_token_that_is_not_ours_is_refused(rest: httpx.AsyncClient, signed_token: Token) -> None:
    head, payload, signature = signed_token("service_role").split(".")
    forged = ".".join((head, payload, signature[:-4] + ("AAAA" if signature[-4:] != "AAAA" else "BBBB")))
    reply = await rest.get("/conversations", headers={"Authorization": f"Bearer {forged}"})
    assert reply.status_code == 401


def test_every_function_pins_its_search_path_and_runs_with_its_callers_rights(postgres_url: str) -> None:
    found = rows(
        postgres_url,
        "SELECT proname, prosecdef, array_to_string(proconfig, ' ') FROM pg_proc "
        "WHERE pronamespace = 'turnkeeper'::regnamespace",
    )
    assert found
    for name, security_definer, configuration in found:
        assert not security_definer, name
        assert "search_path=turnkeeper, pg_temp" in configuration, name


def test_every_table_has_row_security(postgres_url: str) -> None:
    found = rows(
        postgres_url,
        "SELECT relname, relrowsecurity FROM pg_class "
        "WHERE relnamespace = 'turnkeeper'::regnamespace AND relkind IN ('r', 'p')",
    )
    assert found
    assert all(secured for _, secured in found), found


async def _talked(store: Store, account_id: str, user_id: str | None) -> Talk:
    """A conversation with a row in every table that has rows of conversations."""
    talk = Talk(store)
    await talk.ask("hello", account_id=account_id, request_id=f"{account_id}-{user_id}", user_id=user_id)
    lease = (await talk.claim()).lease
    await store.put_artifact(lease, Artifact.of(talk.id, "log", "text/plain", b"secret"))
    await talk.append(lease, 1, ai(1, call(1, gated=False)), result(1, 1), answer(), finish=ANSWERED)
    await store.record_feedback(f"{account_id}-{user_id}", "up")
    return talk


async def test_a_user_reads_his_own_rows_only(store: Store, rest: httpx.AsyncClient, signed_token: Token) -> None:
    mine = await _talked(store, "a", "u1")
    for account_id, user_id in (("a", "u2"), ("b", "u1"), ("a", None)):
        await _talked(store, account_id, user_id)
    tokens = [
        signed_token("authenticated", sub="u1", account_id="a"),
        signed_token("authenticated", sub="u1", app_metadata={"account_id": "a"}),
    ]
    for token in tokens:
        for name, key in OWNED.items():
            reply = await rest.get(f"/{name}", params={"select": key}, headers={"Authorization": f"Bearer {token}"})
            assert {row[key] for row in reply.json()} == {mine.id}, name


@pytest.mark.parametrize(
    "claims",
    [
        {},
        {"sub": "u1"},
        {"account_id": "a"},
        {"sub": "u1", "user_metadata": {"account_id": "a"}},
        {"sub": None, "account_id": "a"},
    ],
    ids=["nobody", "no account", "no user", "chosen by the user", "null"],
)
async def test_without_an_identity_there_is_nothing_to_see(
    claims: dict[str, Any], store: Store, rest: httpx.AsyncClient, signed_token: Token
) -> None:
    await _talked(store, "a", "u1")
    await _talked(store, "a", None)
    headers = {"Authorization": f"Bearer {signed_token('authenticated', **claims)}"}
    for name, key in OWNED.items():
        assert (await rest.get(f"/{name}", params={"select": key}, headers=headers)).json() == [], name


async def test_a_user_gives_feedback_on_his_own_turns_only(
    store: Store, rest: httpx.AsyncClient, signed_token: Token
) -> None:
    mine, other = await _talked(store, "a", "u1"), await _talked(store, "a", "u2")
    headers = {"Authorization": f"Bearer {signed_token('authenticated', sub='u1', account_id='a')}"}

    async def give(request_id: str) -> httpx.Response:
        return await rest.post(
            "/rpc/record_feedback", headers=headers, json={"p_request_id": request_id, "p_rating": "down"}
        )

    reply = await give("a-u1")
    assert (reply.status_code, reply.json()["rating"], reply.json()["conversation_id"]) == (200, "down", mine.id)
    reply = await give("a-u2")
    assert (reply.status_code, reply.json()["code"], reply.json()["message"]) == (400, "PT400", "request_invalid")

    row = {"account_id": "a", "request_id": "a-u2", "conversation_id": other.id, "turn": 1, "rating": "down"}
    forged = [row, row | {"request_id": str(uuid.uuid4())}, row | {"conversation_id": mine.id}]
    for attempt in forged:
        reply = await rest.post("/feedback", headers=headers, json=attempt)
        assert (reply.status_code, reply.json()["code"]) == (403, "42501"), attempt
    moved = {"conversation_id": other.id, "request_id": "a-u2"}
    reply = await rest.patch("/feedback", headers=headers, params={"request_id": "eq.a-u1"}, json=moved)
    assert (reply.status_code, reply.json()["code"]) == (403, "42501")
    reply = await rest.patch("/feedback", headers=headers, params={"request_id": "eq.a-u2"}, json={"rating": "down"})
    assert reply.status_code == 204
    service = {"Authorization": f"Bearer {signed_token('service_role')}"}
    stored = (await rest.get("/feedback", headers=service)).json()
    assert {row["request_id"]: row["rating"] for row in stored} == {"a-u1": "down", "a-u2": "up"}

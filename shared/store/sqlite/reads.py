"""Reads. Each is one statement, so each sees one state of the database."""

from __future__ import annotations

import base64

from shared.errors import ContentRefused
from shared.events import SNAPSHOTS
from shared.store.base import Row
from shared.store.sqlite.common import with_holmes_names
from shared.store.sqlite.connection import Transaction, parsed_timestamp, parsed_uuid

_SNAPSHOTS = with_holmes_names(SNAPSHOTS)
_USAGE_KEYS = {"model": "coalesce(t.model, '')", "account": "t.account_id", "day": "substr(t.created_at, 1, 10)"}


def get_conversation(tx: Transaction, p_conversation_id: str) -> Row | None:
    return tx.row("SELECT * FROM conversations WHERE conversation_id = ?", parsed_uuid(p_conversation_id))


def list_conversations(
    tx: Transaction,
    p_account_id: str | None = None,
    p_status: str | None = None,
    p_limit: int = 50,
    p_before: str | None = None,
) -> list[Row]:
    before, _, behind = (p_before or "").partition(",")
    return tx.rows(
        "SELECT * FROM conversations WHERE (?1 IS NULL OR account_id = ?1) AND (?2 IS NULL OR status = ?2) "
        "AND (?3 IS NULL OR updated_at < ?3 OR updated_at = ?3 AND conversation_id > ?4) "
        "ORDER BY updated_at DESC, conversation_id LIMIT ?5",
        p_account_id,
        p_status,
        parsed_timestamp(before) if before else None,
        parsed_uuid(behind) if behind else None,
        p_limit,
    )


def list_turns(tx: Transaction, p_conversation_id: str) -> list[Row]:
    sql = "SELECT * FROM conversation_turns WHERE conversation_id = ? ORDER BY turn"
    return tx.rows(sql, parsed_uuid(p_conversation_id))


def get_turn_of(tx: Transaction, p_request_id: str, p_account_id: str) -> Row | None:
    sql = "SELECT * FROM conversation_turns WHERE account_id = ? AND request_id = ?"
    return tx.row(sql, p_account_id, p_request_id)


def list_events(
    tx: Transaction, p_conversation_id: str, p_after: int = 0, p_limit: int = 1_000, p_full: bool = False
) -> list[Row]:
    rows = tx.rows(
        "SELECT * FROM conversation_events WHERE conversation_id = ? AND seq > ? ORDER BY seq LIMIT ?",
        parsed_uuid(p_conversation_id),
        p_after,
        p_limit,
    )
    if not p_full:
        for row in rows:
            if row["event"] in _SNAPSHOTS and "messages" in row["data"]:
                row["data"]["message_count"] = len(row["data"].pop("messages"))
    return rows


def list_calls(tx: Transaction, p_conversation_id: str) -> list[Row]:
    return tx.rows(
        "SELECT * FROM tool_calls WHERE conversation_id = ? ORDER BY turn, step, call_index",
        parsed_uuid(p_conversation_id),
    )


def list_approvals(tx: Transaction, p_account_id: str | None = None, p_conversation_id: str | None = None) -> list[Row]:
    rows = tx.rows(
        "SELECT k.*, c.title, c.account_id, c.user_id FROM tool_calls k JOIN conversations c USING (conversation_id) "
        "WHERE k.state = 'pending' AND k.gated AND (?1 IS NULL OR c.account_id = ?1) "
        "AND (?2 IS NULL OR k.conversation_id = ?2) "
        "ORDER BY k.created_at, k.conversation_id, k.turn, k.step, k.call_index",
        p_account_id,
        None if p_conversation_id is None else parsed_uuid(p_conversation_id),
    )
    for row in rows:
        del row["approval_token_sha256"]
    return rows


def list_dead_letters(tx: Transaction, p_limit: int = 100) -> list[Row]:
    return tx.rows("SELECT * FROM dead_letters ORDER BY letter_id DESC LIMIT ?", p_limit)


def get_artifact(tx: Transaction, p_conversation_id: str, p_artifact_id: str) -> Row | None:
    row = tx.row(
        "SELECT artifact_id, name, media_type, content FROM artifacts WHERE conversation_id = ? "
        "AND artifact_id = lower(?)",
        parsed_uuid(p_conversation_id),
        p_artifact_id,
    )
    return None if row is None else row | {"content": base64.b64encode(row["content"]).decode()}


def usage_by(tx: Transaction, p_by: str = "model", p_account_id: str | None = None) -> list[Row]:
    key = _USAGE_KEYS.get(p_by)
    if key is None:
        raise ContentRefused(f"Usage is summed by {', '.join(_USAGE_KEYS)}, not by {p_by!r}.")
    return tx.rows(
        f"SELECT {key} AS {p_by}, count(*) AS turns, sum(t.rounds) AS rounds, "  # noqa: S608
        "sum(t.prompt_tokens) AS prompt_tokens, sum(t.completion_tokens) AS completion_tokens, "
        "sum(t.cached_tokens) AS cached_tokens, sum(t.cost_usd) AS cost_usd, "
        "coalesce(sum(t.duration_ms), 0) AS duration_ms, "
        "count(CASE f.rating WHEN 'up' THEN 1 END) AS thumbs_up, "
        "count(CASE f.rating WHEN 'down' THEN 1 END) AS thumbs_down "
        "FROM conversation_turns t LEFT JOIN feedback f USING (account_id, request_id) "
        "WHERE ?1 IS NULL OR t.account_id = ?1 GROUP BY 1 ORDER BY 1",
        p_account_id,
    )


def health(tx: Transaction) -> Row:
    counts = tx.one(
        "SELECT max(m.version) AS schema_version, max(m.min_compatible) AS min_compatible, "
        "(SELECT count(*) FROM conversation_turns WHERE status = 'pending') AS pending, "
        "(SELECT count(*) FROM conversation_turns WHERE status = 'running') AS running FROM schema_migrations m"
    )
    return {"now": tx.now, "kind": "sqlite"} | counts

"""Writes beside the turn: feedback, dead letters, artifacts, renaming and deleting."""

from __future__ import annotations

from shared.errors import LeaseLost, RequestInvalid
from shared.store.base import Row
from shared.store.sqlite.common import conversation_row, update
from shared.store.sqlite.connection import Transaction, encode_optional, parsed_uuid
from shared.store.sqlite.submit import store_artifact

_LETTER_TEXTS = ("account_id", "conversation_id", "queue", "job_id", "function", "code", "description")


def record_feedback(
    tx: Transaction,
    p_request_id: str,
    p_rating: str,
    p_category: str | None = None,
    p_comment: str | None = None,
    p_account_id: str | None = None,
) -> Row:
    turns = tx.rows(
        "SELECT account_id, conversation_id, turn FROM conversation_turns "
        "WHERE request_id = ?1 AND (?2 IS NULL OR account_id = ?2) LIMIT 2",
        p_request_id,
        p_account_id,
    )
    if len(turns) != 1:
        many = "Several accounts have" if turns else "No turn has"
        raise RequestInvalid(f"{many} the request id {p_request_id!r}; nothing was recorded.")
    turn = turns[0]
    tx.run(
        "INSERT INTO feedback (account_id, request_id, conversation_id, turn, rating, category, comment, created_at, "
        "updated_at) VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?8) ON CONFLICT (account_id, request_id) DO UPDATE SET "
        "rating = excluded.rating, category = excluded.category, comment = excluded.comment, updated_at = ?8",
        turn["account_id"],
        p_request_id,
        turn["conversation_id"],
        turn["turn"],
        p_rating,
        p_category,
        p_comment,
        tx.now,
    )
    sql = "SELECT * FROM feedback WHERE account_id = ? AND request_id = ?"
    return tx.one(sql, turn["account_id"], p_request_id)


def record_dead_letter(tx: Transaction, p_letter: Row) -> int:
    texts = {name: p_letter.get(name) for name in _LETTER_TEXTS}
    return tx.insert("dead_letters", **texts, payload=encode_optional(p_letter.get("payload")), created_at=tx.now)


def take_dead_letter(tx: Transaction, p_letter_id: int) -> Row | None:
    return tx.row("DELETE FROM dead_letters WHERE letter_id = ? RETURNING *", p_letter_id)


def put_artifact(tx: Transaction, p_token: str, p_artifact: Row) -> None:
    held = "SELECT conversation_id FROM conversation_turns WHERE lease_token = ? AND status = 'running'"
    conversation_id = tx.value(held, p_token)
    if conversation_id is None:
        raise LeaseLost("No running turn is held under this lease; nothing was stored.")
    store_artifact(tx, conversation_id, p_artifact)


def rename(tx: Transaction, p_conversation_id: str, p_title: str) -> Row:
    conversation_id = parsed_uuid(p_conversation_id)
    conversation_row(tx, conversation_id)
    update(tx, "conversations", {"title": p_title}, conversation_id=conversation_id)
    return conversation_row(tx, conversation_id)


def delete_conversation(tx: Transaction, p_conversation_id: str) -> bool:
    """What refers to the conversation goes with it; rules of a wider scope stay."""
    conversation_id = parsed_uuid(p_conversation_id)
    tx.run("DELETE FROM dead_letters WHERE conversation_id = ?", conversation_id)
    return tx.run("DELETE FROM conversations WHERE conversation_id = ?", conversation_id) == 1

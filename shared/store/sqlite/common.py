"""Steps that several operations share: writing an event, ending a turn, closing calls, a conversation's status."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import orjson

from shared.errors import ConversationUnknown
from shared.events import HOLMES_NAMES, SNAPSHOTS
from shared.store.base import Row
from shared.store.sqlite.connection import Transaction, encode, encode_optional

FIRST_BACKOFF_SECONDS = 5
LONGEST_BACKOFF_SECONDS = 60
_CLOSED = {"stopped": "the turn was stopped", "failed": "the turn ended with an error"}


def with_holmes_names(names: frozenset[str]) -> frozenset[str]:
    return names | {old for old, new in HOLMES_NAMES.items() if new in names}


def names_sql(names: frozenset[str]) -> str:
    """A list for ``IN``, HolmesGPT's names included; literal, so that a partial index on the names serves."""
    return "(" + ", ".join(f"'{name}'" for name in sorted(with_holmes_names(names))) + ")"


SNAPSHOTS_SQL = names_sql(SNAPSHOTS)


def conversation_row(tx: Transaction, conversation_id: str) -> Row:
    """Raises ``ConversationUnknown``."""
    row = tx.row("SELECT * FROM conversations WHERE conversation_id = ?", conversation_id)
    if row is None:
        raise ConversationUnknown(f"There is no conversation {conversation_id}; nothing was done.")
    return row


def lowest_unfinished(tx: Transaction, conversation_id: str) -> Row | None:
    return tx.row(
        "SELECT * FROM conversation_turns WHERE conversation_id = ? AND status IN ('pending', 'running') "
        "ORDER BY turn LIMIT 1",
        conversation_id,
    )


def write_event(tx: Transaction, turn: Row, attempt: int, event: str, data: Any) -> Row:
    """Give the event the conversation's next ``seq``; its row."""
    text = encode(data)
    seq = tx.value(
        "UPDATE conversations SET last_seq = last_seq + 1 WHERE conversation_id = ? RETURNING last_seq",
        turn["conversation_id"],
    )
    insert_event(tx, turn, seq, attempt, event, text)
    return {
        "conversation_id": turn["conversation_id"],
        "seq": seq,
        "turn": turn["turn"],
        "attempt": attempt,
        "event": event,
        "data": orjson.loads(text),
        "created_at": tx.now,
    }


def insert_event(tx: Transaction, turn: Row, seq: int, attempt: int, event: str, text: str) -> None:
    tx.insert(
        "conversation_events",
        conversation_id=turn["conversation_id"],
        seq=seq,
        turn=turn["turn"],
        attempt=attempt,
        event=event,
        data=text,
        created_at=tx.now,
    )


def end_turn(
    tx: Transaction,
    turn: Row,
    status: str,
    finish_reason: str,
    *,
    error: Row | None = None,
    provider: str | None = None,
    model: str | None = None,
) -> None:
    """Give a turn its final status, and the conversation the turn's duration."""
    started = datetime.fromisoformat(turn["started_at"]) if turn["started_at"] else tx.time
    duration_ms = max(0, round((tx.time - started).total_seconds() * 1000))
    tx.run(
        "UPDATE conversation_turns SET status = ?, finish_reason = ?, error = ?, retryable = ?, provider = ?, "
        "model = ?, ended_at = ?, duration_ms = ?, wait_reason = NULL, wait_until = NULL "
        "WHERE conversation_id = ? AND turn = ?",
        status,
        finish_reason,
        encode_optional(error),
        int(bool(error and error.get("retryable"))),
        provider or turn["provider"],
        model or turn["model"],
        tx.now,
        duration_ms,
        turn["conversation_id"],
        turn["turn"],
    )
    tx.run(
        "UPDATE conversations SET duration_ms = duration_ms + ? WHERE conversation_id = ?",
        duration_ms,
        turn["conversation_id"],
    )


def close_calls(tx: Transaction, conversation_id: str, turn: int, status: str) -> None:
    """Close what a turn that is now failed or stopped leaves open; what a later turn decided belongs to that one."""
    tx.run(
        "UPDATE tool_calls SET state = CASE state WHEN 'executing' THEN 'unknown' ELSE 'superseded' END, reason = ?, "
        "ended_at = ? "
        "WHERE conversation_id = ? AND turn <= ? AND (state = 'executing' OR state IN ('pending', 'approved') "
        "AND (decided_turn IS NULL OR decided_turn <= ?))",
        _CLOSED[status],
        tx.now,
        conversation_id,
        turn,
        turn,
    )


def refresh_conversation(tx: Transaction, conversation_id: str, **columns: Any) -> None:
    """Set the conversation's status from its turns and calls, its time, and the given columns."""
    columns |= {"status": _status(tx, conversation_id), "updated_at": tx.now}
    update(tx, "conversations", columns, conversation_id=conversation_id)


def update(tx: Transaction, table: str, columns: Row, **key: Any) -> None:
    """Set columns of the row with that key. Names are from this package, never input."""
    changes = ", ".join(f"{name} = ?" for name in columns)
    where = " AND ".join(f"{name} = ?" for name in key)
    tx.run(f"UPDATE {table} SET {changes} WHERE {where}", *columns.values(), *key.values())  # noqa: S608


def _status(tx: Transaction, conversation_id: str) -> str:
    unfinished = tx.value(
        "SELECT status FROM conversation_turns WHERE conversation_id = ? AND status IN ('pending', 'running') "
        "ORDER BY turn LIMIT 1",
        conversation_id,
    )
    if unfinished is not None:
        return str(unfinished)
    open_calls = "SELECT 1 FROM tool_calls WHERE conversation_id = ? AND state = 'pending'"
    if tx.row(open_calls + " AND (gated OR kind = 'frontend')", conversation_id) is not None:
        return "awaiting_approval"
    last = "SELECT status FROM conversation_turns WHERE conversation_id = ? ORDER BY turn DESC LIMIT 1"
    return str(tx.value(last, conversation_id))


def put_off(tx: Transaction, conversation: Row) -> None:
    """Ring for the conversation after its back-off, which doubles."""
    seconds = conversation["ring_backoff_seconds"]
    ring = {
        "next_ring_at": tx.later(seconds),
        "ring_backoff_seconds": min(LONGEST_BACKOFF_SECONDS, 2 * seconds),
    }
    update(tx, "conversations", ring, conversation_id=conversation["conversation_id"])


def next_ring(tx: Transaction, conversation_id: str) -> tuple[str | None, str | None]:
    """After a turn ended: when the conversation wants a ring, and on which queue."""
    following = lowest_unfinished(tx, conversation_id)
    return (None, None) if following is None else (tx.now, following["queue"])

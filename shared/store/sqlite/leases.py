"""Leases and rings: ``renew``, ``release``, ``reap`` and ``stop``."""

from __future__ import annotations

from shared.errors import LeaseLost
from shared.store.base import Row
from shared.store.sqlite.common import (
    FIRST_BACKOFF_SECONDS,
    close_calls,
    lowest_unfinished,
    put_off,
    refresh_conversation,
    update,
)
from shared.store.sqlite.connection import Transaction, parsed_uuid
from shared.store.sqlite.limits import give_place

_ALL_DUE_SQL = """
UPDATE conversations SET next_ring_at = ?1 WHERE next_ring_at > ?1 AND NOT EXISTS (
    SELECT 1 FROM conversation_turns t WHERE t.conversation_id = conversations.conversation_id
       AND t.status IN ('pending', 'running') AND (t.lease_expires_at > ?1 OR t.wait_until > ?1))
"""
_LIVE_LATER_SQL = """
UPDATE conversations SET next_ring_at = t.lease_expires_at FROM conversation_turns t
 WHERE conversations.next_ring_at <= ?1 AND t.conversation_id = conversations.conversation_id
   AND t.status = 'running' AND t.lease_expires_at > ?1
"""
_DUE_SQL = """
SELECT c.conversation_id, c.ring_backoff_seconds, t.queue
  FROM conversations c
  JOIN conversation_turns t ON t.conversation_id = c.conversation_id AND t.turn = (
       SELECT min(u.turn) FROM conversation_turns u
        WHERE u.conversation_id = c.conversation_id AND u.status IN ('pending', 'running'))
 WHERE c.next_ring_at <= ?1
 ORDER BY c.next_ring_at LIMIT ?2
"""


def renew(tx: Transaction, p_tokens: list[str], p_lease_seconds: float) -> Row:
    """``skipped`` is empty: nobody else writes meanwhile."""
    lost: list[str] = []
    stopped: list[str] = []
    lease_end = tx.later(p_lease_seconds)
    for token in p_tokens:
        turn = _held(tx, token)
        if turn is None:
            lost.append(token)
        elif turn["status"] == "running":
            key = {"conversation_id": turn["conversation_id"]}
            update(tx, "conversation_turns", {"lease_expires_at": lease_end}, **key, turn=turn["turn"])
            update(tx, "conversations", {"next_ring_at": lease_end}, **key)
            if turn["stop_requested_at"] is not None:
                stopped.append(token)
    return {"lost": lost, "stopped": stopped, "skipped": []}


def release(tx: Transaction, p_token: str, p_delay_seconds: float = 0) -> Row:
    turn = _held(tx, p_token)
    if turn is None or turn["status"] != "running":
        raise LeaseLost("No running turn is held under this lease; nothing was released.")
    freed = {
        "status": "pending",
        "lease_token": None,
        "lease_expires_at": None,
        "claim_id": None,
        "wait_reason": "delayed" if p_delay_seconds > 0 else None,
        "wait_until": tx.later(p_delay_seconds) if p_delay_seconds > 0 else None,
    }
    update(tx, "conversation_turns", freed, conversation_id=turn["conversation_id"], turn=turn["turn"])
    give_place(tx, turn["account_id"])
    refresh_conversation(
        tx,
        turn["conversation_id"],
        next_ring_at=tx.later(p_delay_seconds),
        ring_backoff_seconds=FIRST_BACKOFF_SECONDS,
    )
    return {"conversation_id": turn["conversation_id"], "queue": turn["queue"]}


def reap(tx: Transaction, p_limit: int = 100, p_everything: bool = False) -> list[Row]:
    """What is due, put off by its back-off. One whose lease was renewed by an append is due only when that ends. With
    ``p_everything`` nothing is answered: what only a back-off holds up becomes due now, for the pages that follow."""
    if p_everything:
        tx.run(_ALL_DUE_SQL, tx.now)
        return []
    tx.run(_LIVE_LATER_SQL, tx.now)
    due = tx.rows(_DUE_SQL, tx.now, p_limit)
    for row in due:
        put_off(tx, row)
    return [{"conversation_id": row["conversation_id"], "queue": row["queue"]} for row in due]


def stop(tx: Transaction, p_conversation_id: str, p_turn: int | None = None) -> Row:
    conversation_id = parsed_uuid(p_conversation_id)
    nothing: Row = {"turn": None, "effect": "none", "queue": None}
    lowest = lowest_unfinished(tx, conversation_id)
    turn = lowest if lowest is not None and p_turn in (None, lowest["turn"]) else _other(tx, conversation_id, p_turn)
    if turn is None:
        return nothing
    if turn["status"] in ("pending", "running"):
        _flag(tx, turn, due=turn["status"] == "pending" and turn == lowest)
        return {"turn": turn["turn"], "effect": "flagged", "queue": turn["queue"]}
    if turn["status"] != "awaiting_approval":
        return nothing
    stopped = {"status": "stopped", "finish_reason": "stopped", "stop_requested_at": tx.now, "ended_at": tx.now}
    update(tx, "conversation_turns", stopped, conversation_id=conversation_id, turn=turn["turn"])
    close_calls(tx, conversation_id, turn["turn"], "stopped")
    refresh_conversation(tx, conversation_id, next_ring_at=None)
    return {"turn": turn["turn"], "effect": "stopped", "queue": None}


def _held(tx: Transaction, token: str) -> Row | None:
    """The turn under that token, without its large columns."""
    return tx.row(
        "SELECT conversation_id, turn, account_id, status, queue, stop_requested_at FROM conversation_turns "
        "WHERE lease_token = ?",
        token,
    )


def _other(tx: Transaction, conversation_id: str, number: int | None) -> Row | None:
    """The given turn if it is unfinished or the last one, or else the last one."""
    row = tx.row(
        "SELECT t.* FROM conversation_turns t JOIN conversations c USING (conversation_id) "
        "WHERE c.conversation_id = ? AND t.turn = coalesce(?, c.last_turn)",
        conversation_id,
        number,
    )
    if row is not None and row["status"] == "awaiting_approval":
        last = tx.value("SELECT last_turn FROM conversations WHERE conversation_id = ?", conversation_id)
        return row if row["turn"] == last else None
    return row


def _flag(tx: Transaction, turn: Row, *, due: bool) -> None:
    update(
        tx,
        "conversation_turns",
        {"stop_requested_at": turn["stop_requested_at"] or tx.now},
        conversation_id=turn["conversation_id"],
        turn=turn["turn"],
    )
    if due:
        ring = {"next_ring_at": tx.now, "ring_backoff_seconds": FIRST_BACKOFF_SECONDS}
        update(tx, "conversations", ring, conversation_id=turn["conversation_id"])

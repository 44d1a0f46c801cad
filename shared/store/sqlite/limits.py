"""Limits of an account: how many of its turns run at once, and what they may cost in a day."""

from __future__ import annotations

from shared.store.base import Row
from shared.store.sqlite.common import FIRST_BACKOFF_SECONDS, conversation_row, put_off, update
from shared.store.sqlite.connection import Transaction

ACCOUNT_LIMIT = "account_limit"

_BEGUN_TODAY_SQL = "SELECT coalesce(sum(cost_usd), 0) FROM conversation_turns WHERE account_id = ? AND started_at >= ?"
_RUNNING_SQL = "SELECT count(*) FROM conversation_turns WHERE account_id = ? AND status = 'running'"
_NEXT_IN_LINE_SQL = """
UPDATE conversations SET next_ring_at = ?2, ring_backoff_seconds = ?3 WHERE conversation_id = (
    SELECT c.conversation_id FROM conversation_turns t JOIN conversations c USING (conversation_id)
     WHERE t.account_id = ?1 AND t.wait_reason = 'account_limit' AND c.next_ring_at > ?2
     ORDER BY t.created_at LIMIT 1)
"""


def has_spent(tx: Transaction, turn: Row, account_cost_usd: float) -> bool:
    """Whether the turn would begin although the account's turns of this UTC day have cost so much."""
    if turn["kind"] == "tool_decisions" or turn["attempt"] > 0:
        return False
    return bool(tx.value(_BEGUN_TODAY_SQL, turn["account_id"], tx.now[:10]) >= account_cost_usd)


def has_place(tx: Transaction, turn: Row, account_turns: int | None) -> bool:
    """Whether the turn may begin. A turn that lost its worker keeps its place until it is taken over."""
    return account_turns is None or bool(tx.value(_RUNNING_SQL, turn["account_id"]) < account_turns)


def wait_for_place(tx: Transaction, turn: Row) -> None:
    """The conversation is rung again after its back-off, or by ``give_place``."""
    conversation_id = turn["conversation_id"]
    waits = {"wait_reason": ACCOUNT_LIMIT, "wait_until": None}
    update(tx, "conversation_turns", waits, conversation_id=conversation_id, turn=turn["turn"])
    conversation = conversation_row(tx, conversation_id)
    if conversation["next_ring_at"] <= tx.now:
        put_off(tx, conversation)


def give_place(tx: Transaction, account_id: str) -> None:
    """A turn of the account runs no more: the one that has waited longest for its place is due now."""
    tx.run(_NEXT_IN_LINE_SQL, account_id, tx.now, FIRST_BACKOFF_SECONDS)

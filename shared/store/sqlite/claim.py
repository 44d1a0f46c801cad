"""``claim``: take the lowest unfinished turn, ending on the way those that need no worker."""

from __future__ import annotations

import uuid
from typing import Any

from shared.errors import ApprovalsOpen
from shared.events import ERROR, MESSAGE_BEARING, TURN_STOPPED
from shared.store.base import Row
from shared.store.sqlite.common import (
    FIRST_BACKOFF_SECONDS,
    SNAPSHOTS_SQL,
    close_calls,
    conversation_row,
    end_turn,
    lowest_unfinished,
    names_sql,
    refresh_conversation,
    update,
    write_event,
)
from shared.store.sqlite.connection import Transaction, parsed_uuid
from shared.store.sqlite.decisions import EXPIRED, SUPERSEDED_BY_REQUEST
from shared.store.sqlite.submit import submit

_MESSAGES_SQL = names_sql(MESSAGE_BEARING)


def claim(
    tx: Transaction,
    p_conversation_id: str,
    p_worker: str,
    p_claim_id: str,
    p_lease_seconds: float,
    p_max_crashes: int,
    p_request: Row | None = None,
    p_artifacts: list[Row] | None = None,
) -> Row:
    conversation_id = parsed_uuid(p_conversation_id)
    submitted = submit(tx, p_request, p_artifacts) if p_request is not None else None
    conversation_row(tx, conversation_id)
    ended: list[Row] = []
    answer: Row = {"result": "idle", "now": tx.now, "ended": ended, "submitted": submitted}
    lease_end = tx.later(p_lease_seconds)
    while (turn := lowest_unfinished(tx, conversation_id)) is not None:
        if turn["status"] == "running":
            if turn["claim_id"] == p_claim_id:
                _renew(tx, turn, lease_end)
                break
            if turn["lease_expires_at"] > tx.now:
                answer["result"] = "busy"
                break
            _crashed(tx, turn)
        event = _end_without_worker(tx, turn, p_max_crashes)
        if event is None:
            _take(tx, turn, p_worker, p_claim_id, lease_end)
            break
        ended.append(event)
    if turn is None:
        update(tx, "conversations", {"next_ring_at": None}, conversation_id=conversation_id)
    if ended:
        refresh_conversation(tx, conversation_id)
    if turn is not None and answer["result"] != "busy":
        answer |= {"result": "lease"} | _hydration(tx, conversation_id, turn["turn"])
    return answer


def _renew(tx: Transaction, turn: Row, lease_end: str) -> None:
    key = {"conversation_id": turn["conversation_id"]}
    update(tx, "conversation_turns", {"lease_expires_at": lease_end}, **key, turn=turn["turn"])
    update(tx, "conversations", {"next_ring_at": lease_end}, **key)


def _crashed(tx: Transaction, turn: Row) -> None:
    """The lease expired: the turn is pending again."""
    changes: Row = {"status": "pending", "crashes": turn["crashes"] + 1}
    turn |= changes
    update(tx, "conversation_turns", changes, conversation_id=turn["conversation_id"], turn=turn["turn"])


def _end_without_worker(tx: Transaction, turn: Row, max_crashes: int) -> Row | None:
    """End the turn if it was stopped, crashed too often, or may not close what waits; its terminal event."""
    if turn["stop_requested_at"] is not None:
        data = {"code": "stopped", "description": "The turn was stopped on request.", "retryable": False}
        event = write_event(tx, turn, turn["attempt"], TURN_STOPPED, data)
        end_turn(tx, turn, "stopped", "stopped")
        close_calls(tx, turn["conversation_id"], turn["turn"], "the turn was stopped")
        return event
    if turn["crashes"] >= max_crashes:
        description = f"The worker died {turn['crashes']} times without progress; the turn was given up."
        return _fail(tx, turn, "crash_cap", description, retryable=True)
    if _met_approvals(tx, turn):
        description = "Calls of an earlier turn wait for a decision and supersede is false; nothing was closed or run."
        return _fail(tx, turn, ApprovalsOpen.code, description, retryable=False)
    return None


def _fail(tx: Transaction, turn: Row, code: str, description: str, *, retryable: bool) -> Row:
    error = {"code": code, "description": description, "retryable": retryable}
    event = write_event(tx, turn, turn["attempt"], ERROR, error)
    end_turn(tx, turn, "failed", code, error=error)
    if code != ApprovalsOpen.code:
        close_calls(tx, turn["conversation_id"], turn["turn"], description)
    return event


def _met_approvals(tx: Transaction, turn: Row) -> bool:
    if turn["kind"] != "ask" or turn["request"].get("supersede", True) or turn["attempt"] > 0:
        return False
    met = tx.row(
        "SELECT 1 FROM tool_calls WHERE conversation_id = ? AND gated AND turn < ? "
        "AND (state = 'pending' OR state = 'approved' AND decided_turn > ?)",
        turn["conversation_id"],
        turn["turn"],
        turn["turn"],
    )
    return met is not None


def _take(tx: Transaction, turn: Row, worker: str, claim_id: str, lease_end: str) -> None:
    conversation_id, number = turn["conversation_id"], turn["turn"]
    changes: Row = {
        "status": "running",
        "attempt": turn["attempt"] + 1,
        "worker": worker,
        "lease_token": str(uuid.uuid4()),
        "lease_expires_at": lease_end,
        "claim_id": claim_id,
        "last_batch": 0,
        "last_batch_result": None,
        "started_at": turn["started_at"] or tx.now,
    }
    update(tx, "conversation_turns", changes, conversation_id=conversation_id, turn=number)
    tx.run(
        "UPDATE conversation_turns SET status = 'completed' "
        "WHERE conversation_id = ? AND turn < ? AND status = 'awaiting_approval'",
        conversation_id,
        number,
    )
    if turn["kind"] == "ask":
        tx.run(
            "UPDATE tool_calls SET state = 'superseded', decided_turn = coalesce(decided_turn, ?), reason = ? "
            "WHERE conversation_id = ? AND turn < ? "
            "AND (state = 'pending' OR state = 'approved' AND decided_turn IS NOT ?)",
            number,
            SUPERSEDED_BY_REQUEST,
            conversation_id,
            number,
            number,
        )
    tx.run(
        "UPDATE tool_calls SET state = 'expired', decided_turn = ?, decided_at = ?, reason = ? "
        "WHERE conversation_id = ? AND turn < ? AND state = 'pending' AND expires_at < ?",
        number,
        tx.now,
        EXPIRED,
        conversation_id,
        number,
        tx.now,
    )
    ring = {"next_ring_at": lease_end, "ring_backoff_seconds": FIRST_BACKOFF_SECONDS}
    update(tx, "conversations", {"status": "running", "updated_at": tx.now} | ring, conversation_id=conversation_id)


def _hydration(tx: Transaction, conversation_id: str, number: int) -> dict[str, Any]:
    conversation = conversation_row(tx, conversation_id)
    snapshot = tx.row(
        f"SELECT * FROM conversation_events WHERE conversation_id = ? AND event IN {SNAPSHOTS_SQL} "  # noqa: S608
        "AND turn <= ? ORDER BY seq DESC LIMIT 1",
        conversation_id,
        number,
    )
    turn, seq = (snapshot["turn"], snapshot["seq"]) if snapshot is not None else (0, 0)
    return {
        "conversation": conversation,
        "turn": tx.row(
            "SELECT * FROM conversation_turns WHERE conversation_id = ? AND turn = ?", conversation_id, number
        ),
        "snapshot": snapshot,
        "turns": tx.rows(
            "SELECT turn, kind, request FROM conversation_turns WHERE conversation_id = ? AND turn > ? AND turn <= ? "
            "ORDER BY turn",
            conversation_id,
            turn,
            number,
        ),
        "events": tx.rows(
            f"SELECT * FROM conversation_events WHERE conversation_id = ? AND seq > ? AND turn >= ? "  # noqa: S608
            f"AND event IN {_MESSAGES_SQL} ORDER BY seq",
            conversation_id,
            seq,
            turn,
        ),
        "calls": tx.rows(
            "SELECT * FROM tool_calls WHERE conversation_id = ? AND turn <= ? AND result_seq IS NULL "
            "ORDER BY turn, step, call_index",
            conversation_id,
            number,
        ),
        "rules": tx.rows(
            "SELECT * FROM approval_rules WHERE account_id = ? AND (scope = 'account' "
            "OR scope = 'user' AND user_id = ? OR scope = 'conversation' AND conversation_id = ?) ORDER BY rule_id",
            conversation["account_id"],
            conversation["user_id"],
            conversation_id,
        ),
    }

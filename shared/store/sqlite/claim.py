"""``claim``: take the lowest unfinished turn, ending on the way those that need no worker."""

from __future__ import annotations

import uuid
from typing import Any

from shared.errors import AccountBudget, ApprovalsOpen
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
from shared.store.sqlite.limits import ACCOUNT_LIMIT, give_place, has_place, has_spent, wait_for_place
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
    p_account_turns: int | None = None,
    p_account_cost_usd: float | None = None,
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
            turn["crashes"] += 1
        event = _end_without_worker(tx, turn, p_max_crashes, p_account_cost_usd)
        if event is None:
            if turn["status"] == "pending" and not has_place(tx, turn, p_account_turns):
                wait_for_place(tx, turn)
                answer |= {"result": "busy", "wait_reason": ACCOUNT_LIMIT}
            else:
                _take(tx, turn, p_worker, p_claim_id, lease_end)
            break
        if turn["status"] == "running":
            give_place(tx, turn["account_id"])
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


def _end_without_worker(tx: Transaction, turn: Row, max_crashes: int, account_cost_usd: float | None) -> Row | None:
    """End the turn if it was stopped, crashed too often, may not close what waits, or costs more than its account
    has; its terminal event."""
    if turn["stop_requested_at"] is not None:
        data = {"code": "stopped", "description": "The turn was stopped on request.", "retryable": False}
        event = write_event(tx, turn, turn["attempt"], TURN_STOPPED, data)
        _end(tx, turn, "stopped", "stopped")
        close_calls(tx, turn["conversation_id"], turn["turn"], "stopped")
        return event
    if turn["crashes"] >= max_crashes:
        description = f"The turn was given up after {turn['crashes']} attempts that were cut off."
        return _fail(tx, turn, "crash_cap", description, retryable=True)
    if _met_approvals(tx, turn):
        description = "A call still waits for a decision; the question was not asked."
        return _fail(tx, turn, ApprovalsOpen.code, description, retryable=False)
    if account_cost_usd is not None and has_spent(tx, turn, account_cost_usd):
        description = "The account has spent its budget of the day; the question was not asked."
        return _fail(tx, turn, AccountBudget.code, description, retryable=True)
    return None


def _end(tx: Transaction, turn: Row, status: str, reason: str, *, error: Row | None = None) -> None:
    end_turn(tx, turn, status, reason, error=error)
    key = {"conversation_id": turn["conversation_id"], "turn": turn["turn"]}
    update(tx, "conversation_turns", {"crashes": turn["crashes"]}, **key)


def _fail(tx: Transaction, turn: Row, code: str, description: str, *, retryable: bool) -> Row:
    error = {"code": code, "description": description, "retryable": retryable}
    event = write_event(tx, turn, turn["attempt"], ERROR, error)
    _end(tx, turn, "failed", code, error=error)
    if code != ApprovalsOpen.code:  # such a question closes nothing
        close_calls(tx, turn["conversation_id"], turn["turn"], "failed")
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
        "crashes": turn["crashes"],
        "taken_over": _taken_over(turn),
        "wait_reason": None,
        "wait_until": None,
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
            "UPDATE tool_calls SET state = 'superseded', decided_turn = coalesce(decided_turn, ?1), "
            "decided_at = coalesce(decided_at, ?2), ended_at = ?2, reason = ?3 "
            "WHERE conversation_id = ?4 AND turn < ?1 "
            "AND (state = 'pending' OR state = 'approved' AND decided_turn IS NOT ?1)",
            number,
            tx.now,
            SUPERSEDED_BY_REQUEST,
            conversation_id,
        )
    tx.run(
        "UPDATE tool_calls SET state = 'expired', decided_turn = ?1, decided_at = ?2, ended_at = ?2, reason = ?3 "
        "WHERE conversation_id = ?4 AND turn < ?1 AND state = 'pending' AND expires_at < ?2",
        number,
        tx.now,
        EXPIRED,
        conversation_id,
    )
    ring = {"next_ring_at": lease_end, "ring_backoff_seconds": FIRST_BACKOFF_SECONDS}
    update(tx, "conversations", {"status": "running", "updated_at": tx.now} | ring, conversation_id=conversation_id)


def _taken_over(turn: Row) -> str | None:
    if turn["status"] == "running":
        return "crash"
    return "release" if turn["attempt"] else None


def _hydration(tx: Transaction, conversation_id: str, number: int) -> dict[str, Any]:
    conversation = conversation_row(tx, conversation_id)
    claimed = tx.one("SELECT * FROM conversation_turns WHERE conversation_id = ? AND turn = ?", conversation_id, number)
    snapshot = tx.row(
        f"SELECT * FROM conversation_events WHERE conversation_id = ? AND event IN {SNAPSHOTS_SQL} "  # noqa: S608
        "AND turn <= ? ORDER BY seq DESC LIMIT 1",
        conversation_id,
        number,
    )
    turn, seq = (snapshot["turn"], snapshot["seq"]) if snapshot is not None else (0, 0)
    return {
        "conversation": conversation,
        "turn": claimed,
        "taken_over": claimed["taken_over"],
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

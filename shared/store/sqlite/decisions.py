"""Decisions on waiting calls: compare-and-set, the first durable one wins."""

from __future__ import annotations

from shared.store.base import Row
from shared.store.sqlite.common import update
from shared.store.sqlite.connection import Transaction, encode

SUPERSEDED_BY_REQUEST = "superseded by a new request"
EXPIRED = "the approval request had expired"

_CALLS_UNDER_ID = "SELECT * FROM tool_calls WHERE conversation_id = ? AND tool_call_id = ?"


def decide(tx: Transaction, conversation: Row, turn: int, decision: Row, decided_by: str | None) -> str:
    """Apply one decision; its verdict."""
    call = _gated_call(tx, conversation["conversation_id"], decision)
    if call is None:
        return "unknown"
    refused = _refused(tx, call, turn)
    if refused is not None:
        return refused
    verdict = "approved" if decision["approved"] else "denied"
    _set(
        tx,
        call,
        state=verdict,
        decided_turn=turn,
        decided_by=decided_by,
        decided_at=tx.now,
        ended_at=None if decision["approved"] else tx.now,
        decision=encode({"approved": decision["approved"], "feedback": decision.get("feedback")}),
    )
    if decision["approved"] and decision.get("remember"):
        _remember(tx, conversation, call, decision["remember"], decided_by)
    return verdict


def record_frontend_result(tx: Transaction, conversation: Row, turn: int, result: Row, decided_by: str | None) -> str:
    """Record what the asking client's own tool answered; its verdict."""
    newest_pending_first = " ORDER BY state = 'pending' DESC, turn DESC, step DESC, call_index DESC"
    call = tx.row(
        _CALLS_UNDER_ID + " AND kind = 'frontend'" + newest_pending_first,
        conversation["conversation_id"],
        result["tool_call_id"],
    )
    if call is None:
        return "unknown"
    refused = _refused(tx, call, turn)
    if refused is not None:
        return refused
    is_error = bool(result.get("is_error"))
    _set(
        tx,
        call,
        state="failed" if is_error else "done",
        decided_turn=turn,
        decided_by=decided_by,
        decided_at=tx.now,
        ended_at=tx.now,
        decision=encode({"content": result["content"], "is_error": is_error}),
    )
    return "result_recorded"


def close_pending(tx: Transaction, conversation_id: str, turn: int) -> None:
    """A new question closes every call that still waits."""
    tx.run(
        "UPDATE tool_calls SET state = 'superseded', decided_turn = ?1, decided_at = ?2, ended_at = ?2, reason = ?3 "
        "WHERE conversation_id = ?4 AND state = 'pending'",
        turn,
        tx.now,
        SUPERSEDED_BY_REQUEST,
        conversation_id,
    )


def _gated_call(tx: Transaction, conversation_id: str, decision: Row) -> Row | None:
    under_id = (_CALLS_UNDER_ID + " AND gated", conversation_id, decision["tool_call_id"])
    if (token := decision.get("approval_token_sha256")) is not None:
        return tx.row(under_id[0] + " AND approval_token_sha256 = ?", *under_id[1:], token)
    if decision.get("by_key"):
        key = (decision.get(name) for name in ("turn", "step", "call_index"))
        return tx.row(under_id[0] + " AND turn = ? AND step = ? AND call_index = ?", *under_id[1:], *key)
    return None


def _refused(tx: Transaction, call: Row, turn: int) -> str | None:
    """Why a decision recorded as ``turn`` does not act on this call, or None. One that waited too long expires now."""
    if call["state"] == "superseded":
        return "stale"
    if call["state"] == "expired":
        return "expired"
    if call["state"] != "pending":
        return "already_resolved"
    doomed = tx.row(
        "SELECT 1 FROM conversation_turns WHERE conversation_id = ? AND turn > ? AND turn < ? AND kind = 'ask' "
        "AND status IN ('pending', 'running') AND coalesce(json_extract(request, '$.supersede'), 1)",
        call["conversation_id"],
        call["turn"],
        turn,
    )
    if doomed is not None:
        return "stale"
    if call["expires_at"] is not None and tx.now > call["expires_at"]:
        _set(tx, call, state="expired", decided_turn=turn, decided_at=tx.now, ended_at=tx.now, reason=EXPIRED)
        return "expired"
    return None


def _remember(tx: Transaction, conversation: Row, call: Row, remember: Row, created_by: str | None) -> None:
    scope = remember.get("scope", "conversation")
    tx.insert(
        "approval_rules",
        account_id=conversation["account_id"],
        user_id=conversation.get("user_id") if scope == "user" else None,
        conversation_id=conversation["conversation_id"] if scope == "conversation" else None,
        scope=scope,
        tool_name=call["tool_name"],
        prefix=remember.get("prefix"),
        created_by=created_by,
        created_at=tx.now,
    )


def _set(tx: Transaction, call: Row, **columns: object) -> None:
    update(
        tx,
        "tool_calls",
        columns,
        conversation_id=call["conversation_id"],
        turn=call["turn"],
        step=call["step"],
        call_index=call["call_index"],
    )

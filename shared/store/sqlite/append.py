"""``append``: write a batch of a lease's events, apply what they do to calls, and optionally end the turn."""

from __future__ import annotations

from typing import Any

from shared.errors import LeaseLost, TurnkeeperError
from shared.events import AI_MESSAGE, APPROVAL_REQUIRED, ERROR, HISTORY_COMPACTED, HOLMES_NAMES, SNAPSHOTS, TURN_STOPPED
from shared.store.base import Row
from shared.store.sqlite.common import (
    FIRST_BACKOFF_SECONDS,
    SNAPSHOTS_SQL,
    close_calls,
    end_turn,
    insert_event,
    next_ring,
    refresh_conversation,
    update,
)
from shared.store.sqlite.connection import Transaction, encode, parsed_timestamp
from shared.store.sqlite.limits import give_place

_TURN = """
SELECT conversation_id, account_id, turn, status, queue, attempt, last_batch, last_batch_result, stop_requested_at,
       lease_expires_at, started_at, provider, model
FROM conversation_turns WHERE lease_token = ?
"""  # not the request, which may be large
_USAGE = ("prompt_tokens", "completion_tokens", "cached_tokens", "cost_usd")
_COUNTED = frozenset({AI_MESSAGE, HISTORY_COMPACTED, ERROR, TURN_STOPPED})  # the rest repeat a turn's total
_OPEN = ("pending", "approved", "executing")


def append(
    tx: Transaction,
    p_token: str,
    p_batch: int,
    p_events: list[Row],
    p_finish: Row | None = None,
    p_snapshots_kept: int = 1,
    p_lease_seconds: float | None = None,
) -> Row:
    turn = tx.row(_TURN, p_token)
    if turn is None:
        raise LeaseLost("No turn is held under this lease; nothing was written.")
    if p_batch == turn["last_batch"] and turn["last_batch_result"] is not None:
        stored: Row = turn["last_batch_result"]
        return stored
    if turn["status"] != "running" or p_batch != turn["last_batch"] + 1:
        raise LeaseLost(f"Batch {p_batch} does not follow {turn['last_batch']}, the lease's last; nothing was written.")
    if turn["stop_requested_at"] is not None and any(e["event"] == APPROVAL_REQUIRED for e in p_events):
        p_events = [_stopped(event) for event in p_events]
        if p_finish is not None:
            p_finish = p_finish | {"status": "stopped", "finish_reason": "stopped", "error": None}
    last_seq = _write(tx, turn, p_events)
    if any(event["event"] in SNAPSHOTS for event in p_events):
        _drop_superseded_messages(tx, turn["conversation_id"], p_snapshots_kept)
    next_queue = _finish(tx, turn, p_finish) if p_finish is not None else None
    answer = {
        "first_seq": last_seq - len(p_events) + 1,
        "status": p_finish["status"] if p_finish is not None else "running",
        "stop_requested": turn["stop_requested_at"] is not None,
        "next_queue": next_queue,
    }
    lease_end = turn["lease_expires_at"] if p_lease_seconds is None else tx.later(p_lease_seconds)
    update(
        tx,
        "conversation_turns",
        {
            "last_batch": p_batch,
            "last_batch_result": encode(answer),
            "lease_expires_at": max(turn["lease_expires_at"], lease_end),
        },
        conversation_id=turn["conversation_id"],
        turn=turn["turn"],
    )
    return answer


def _stopped(event: Row) -> Row:
    if event["event"] != APPROVAL_REQUIRED:
        return event
    return {"event": TURN_STOPPED, "data": {}, "calls": []}


def _write(tx: Transaction, turn: Row, events: list[Row]) -> int:
    """Insert the events, apply their calls, add up what they cost; the last sequence number."""
    conversation_id = turn["conversation_id"]
    last_seq: int = tx.value("SELECT last_seq FROM conversations WHERE conversation_id = ?", conversation_id)
    sums: dict[str, Any] = dict.fromkeys((*_USAGE, "rounds", "tool_calls"), 0)
    for event in events:
        last_seq += 1
        insert_event(tx, turn, last_seq, turn["attempt"], event["event"], encode(event["data"]))
        for change in event.get("calls") or ():
            _apply(tx, turn, last_seq, change)
            sums["tool_calls"] += change["op"] == "new"
        usage = event["data"].get("usage") or {} if event["event"] in _COUNTED else {}
        for name in _USAGE:
            sums[name] += usage.get(name) or 0
        sums["rounds"] += event["event"] == AI_MESSAGE
    crashes = ", crashes = 0" if sums["rounds"] else ""
    added = ", ".join(f"{name} = {name} + ?" for name in sums)
    tx.run(
        f"UPDATE conversation_turns SET {added}{crashes} WHERE conversation_id = ? AND turn = ?",  # noqa: S608
        *sums.values(),
        conversation_id,
        turn["turn"],
    )
    tx.run(
        f"UPDATE conversations SET {added}, last_seq = ?, updated_at = ? WHERE conversation_id = ?",  # noqa: S608
        *sums.values(),
        last_seq,
        tx.now,
        conversation_id,
    )
    return last_seq


def _apply(tx: Transaction, turn: Row, seq: int, change: Row) -> None:
    if change["op"] == "new":
        _insert_call(tx, turn, change)
        return
    key = {
        "conversation_id": turn["conversation_id"],
        "turn": change["turn"],
        "step": change["step"],
        "call_index": change["call_index"],
    }
    call = tx.row(
        "SELECT * FROM tool_calls WHERE conversation_id = ? AND turn = ? AND step = ? AND call_index = ?", *key.values()
    )
    if call is None:
        raise TurnkeeperError(f"There is no call {tuple(key.values())[1:]}; nothing was written.")
    update(tx, "tool_calls", _CHANGES[change["op"]](tx, call, seq, change), **key)


def _insert_call(tx: Transaction, turn: Row, change: Row) -> None:
    decided = change["state"] != "pending"
    tx.insert(
        "tool_calls",
        conversation_id=turn["conversation_id"],
        turn=turn["turn"],
        step=change["step"],
        call_index=change["call_index"],
        tool_call_id=change["tool_call_id"],
        tool_name=change["tool_name"],
        arguments=change["arguments"],
        arguments_digest=change["arguments_digest"],
        risk=change["risk"],
        kind=change["kind"],
        gated=int(change["gated"]),
        state=change["state"],
        decided_by=change["decided_by"],
        reason=change.get("reason"),
        decided_at=tx.now if decided else None,
        created_at=tx.now,
    )


def _start(tx: Transaction, call: Row, seq: int, change: Row) -> Row:
    if call["state"] != "approved":
        raise _forbidden(call, "executing")
    return {"state": "executing", "started_at": tx.now}


def _await(tx: Transaction, call: Row, seq: int, change: Row) -> Row:
    """A token that the call already has, and its expiry, stay as they are."""
    expires_at = parsed_timestamp(change["expires_at"])
    return {
        "approval_token_sha256": call["approval_token_sha256"] or change["approval_token_sha256"],
        "expires_at": call["expires_at"] if call["approval_token_sha256"] else expires_at,
    }


def _result(tx: Transaction, call: Row, seq: int, change: Row) -> Row:
    if call["result_seq"] is not None or call["state"] not in (*_OPEN, change["state"]) or change["state"] in _OPEN:
        raise _forbidden(call, change["state"])
    return {
        "state": change["state"],
        "result_summary": change.get("result_summary"),
        "result_raw": change.get("result_raw"),
        "duration_ms": change.get("duration_ms"),
        "result_seq": seq,
        "ended_at": tx.now,
    }


_CHANGES = {"start": _start, "await": _await, "result": _result}


def _forbidden(call: Row, state: str) -> TurnkeeperError:
    key = f"turn {call['turn']}, step {call['step']}, call {call['call_index']}"
    return TurnkeeperError(f"A call that is {call['state']} cannot become {state} ({key}); nothing was written.")


def _drop_superseded_messages(tx: Transaction, conversation_id: str, kept: int) -> None:
    """Take the messages out of older snapshots; the newest ``kept`` and every compaction keep theirs.

    What lies behind an already emptied snapshot was looked at when that one was emptied.
    """
    snapshots = (
        f"SELECT seq, event, json_type(data, '$.messages') IS NOT NULL AS full FROM conversation_events "  # noqa: S608
        f"WHERE conversation_id = ? AND event IN {SNAPSHOTS_SQL} ORDER BY seq DESC"
    )
    superseded: list[int] = []
    for row in tx.each(snapshots, conversation_id):
        if kept > 0:
            kept -= row["full"]
        elif not row["full"]:
            break
        elif HOLMES_NAMES.get(row["event"], row["event"]) != HISTORY_COMPACTED:
            superseded.append(row["seq"])
    for seq in superseded:
        key = {"conversation_id": conversation_id, "seq": seq}
        data = tx.value("SELECT data FROM conversation_events WHERE conversation_id = ? AND seq = ?", *key.values())
        del data["messages"]
        update(tx, "conversation_events", {"data": encode(data)}, **key)


def _finish(tx: Transaction, turn: Row, finish: Row) -> str | None:
    """End the turn; the queue of the conversation's next unfinished turn."""
    conversation_id = turn["conversation_id"]
    end_turn(
        tx,
        turn,
        finish["status"],
        finish["finish_reason"],
        error=finish.get("error"),
        provider=finish.get("provider"),
        model=finish.get("model"),
    )
    if finish["status"] in ("failed", "stopped"):
        close_calls(tx, conversation_id, turn["turn"], finish["status"])
    give_place(tx, turn["account_id"])
    ring_at, queue = next_ring(tx, conversation_id)
    refresh_conversation(tx, conversation_id, next_ring_at=ring_at, ring_backoff_seconds=FIRST_BACKOFF_SECONDS)
    return queue

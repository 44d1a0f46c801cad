"""``submit``: record a turn, its question, and the decisions that come with it."""

from __future__ import annotations

import base64
from typing import Any

from shared.errors import (
    ApprovalsOpen,
    ConversationUnknown,
    IdentityMismatch,
    NotRetryable,
    RequestConflict,
    RequestInvalid,
)
from shared.events import USER_MESSAGE
from shared.store.base import Row
from shared.store.sqlite.common import FIRST_BACKOFF_SECONDS, insert_event, lowest_unfinished, refresh_conversation
from shared.store.sqlite.connection import Transaction, encode, encode_optional, parsed_uuid
from shared.store.sqlite.decisions import close_pending, decide, record_frontend_result

_EVENT_FIELDS = ("request_id", "kind", "ask", "images", "tool_decisions", "frontend_tool_results", "metadata")
_NOT_SHOWN = frozenset({"approval_token_sha256", "by_key"})


def submit(tx: Transaction, p_request: Row, p_artifacts: list[Row] | None = None) -> Row:
    conversation_id = parsed_uuid(p_request["conversation_id"])
    conversation = _conversation(tx, conversation_id, p_request)
    known = tx.row(
        "SELECT * FROM conversation_turns WHERE account_id = ? AND request_id = ?",
        conversation["account_id"],
        p_request["request_id"],
    )
    if known is not None:
        if known["digest"] != p_request["digest"] or known["conversation_id"] != conversation_id:
            raise RequestConflict(
                f"The request id {p_request['request_id']!r} was used for another request; nothing was recorded.",
                hint="Use a fresh request_id for every request.",
            )
        return _answer(known, created=False)
    _refuse(tx, conversation, p_request)
    turn = _record(tx, conversation, p_request)
    for artifact in p_artifacts or ():
        store_artifact(tx, conversation_id, artifact)
    verdicts = _decide(tx, conversation, turn, p_request)
    turn["decisions"] = verdicts
    tx.run(
        "UPDATE conversation_turns SET decisions = ? WHERE conversation_id = ? AND turn = ?",
        encode(verdicts),
        conversation_id,
        turn["turn"],
    )
    seq = conversation["last_seq"] + 1
    insert_event(tx, turn, seq, 0, USER_MESSAGE, encode(_shown(p_request, verdicts)))
    if p_request["kind"] == "ask":
        close_pending(tx, conversation_id, turn["turn"])
    due: Row = {}
    lowest = lowest_unfinished(tx, conversation_id)
    if lowest is not None and lowest["status"] == "pending":
        due = {"next_ring_at": tx.now, "ring_backoff_seconds": FIRST_BACKOFF_SECONDS}
    refresh_conversation(tx, conversation_id, last_turn=turn["turn"], last_seq=seq, **due)
    return _answer(turn, created=True)


def _answer(turn: Row, *, created: bool) -> Row:
    return {
        "conversation_id": turn["conversation_id"],
        "turn": turn["turn"],
        "created": created,
        "status": turn["status"],
        "queue": turn["queue"],
        "decisions": turn["decisions"],
    }


def _conversation(tx: Transaction, conversation_id: str, request: Row) -> Row:
    """The conversation's row, created for a first ask; checked against the request's identity."""
    row = tx.row("SELECT * FROM conversations WHERE conversation_id = ?", conversation_id)
    if row is None:
        if request["kind"] != "ask":
            raise ConversationUnknown(f"There is no conversation {conversation_id}; nothing was recorded.")
        return _create(tx, conversation_id, request)
    named = {"account_id": request.get("account_id")}
    if request["kind"] != "tool_decisions":  # user_id of a decision is the person who decides
        named |= {name: request.get(name) for name in ("user_id", "team_id") if row[name] is not None}
    for name, value in named.items():
        if value is not None and value != row[name]:
            raise IdentityMismatch(f"The conversation belongs to another {name}; nothing was recorded.")
    return row


def _create(tx: Transaction, conversation_id: str, request: Row) -> Row:
    row = {
        "conversation_id": conversation_id,
        "account_id": request.get("account_id") or request["default_account"],
        "user_id": request.get("user_id"),
        "team_id": request.get("team_id"),
        "title": request.get("title", ""),
        "target": encode_optional(request.get("target")),
        "target_id": request.get("target_id"),
        "model": request.get("model"),
        "metadata": encode(request.get("metadata", {})),
        "created_at": tx.now,
        "updated_at": tx.now,
    }
    tx.insert("conversations", **row)
    return row | {"last_seq": 0, "last_turn": 0}


def _refuse(tx: Transaction, conversation: Row, request: Row) -> None:
    conversation_id, kind = conversation["conversation_id"], request["kind"]
    if kind == "ask" and request.get("supersede") is False:
        gated = "SELECT 1 FROM tool_calls WHERE conversation_id = ? AND state = 'pending' AND gated"
        if tx.row(gated, conversation_id) is not None:
            raise ApprovalsOpen(
                "Calls of this conversation wait for a decision and supersede is false; nothing was recorded.",
                hint="Decide first, or ask with supersede.",
            )
    elif kind == "retry":
        last = "SELECT status, retryable FROM conversation_turns WHERE conversation_id = ? AND turn = ?"
        row = tx.row(last, conversation_id, conversation["last_turn"])
        if row is None or row["status"] != "failed" or not row["retryable"]:
            raise NotRetryable("The last turn did not fail, or may not be tried again; nothing was recorded.")
    elif kind == "tool_decisions" and conversation["last_turn"] == 0:
        raise RequestInvalid("The conversation has no turn that could wait for a decision; nothing was recorded.")


def _record(tx: Transaction, conversation: Row, request: Row) -> Row:
    row = {
        "conversation_id": conversation["conversation_id"],
        "turn": conversation["last_turn"] + 1,
        "account_id": conversation["account_id"],
        "request_id": request["request_id"],
        "digest": request["digest"],
        "kind": request["kind"],
        "queue": request["queue"],
        "status": "pending",
        "created_at": tx.now,
    }
    tx.insert("conversation_turns", **row, request=encode(request))
    return row


def _decide(tx: Transaction, conversation: Row, turn: Row, request: Row) -> dict[str, str]:
    verdicts: dict[str, str] = {}
    for decision in request.get("tool_decisions", ()):
        verdict = decide(tx, conversation, turn["turn"], decision, request.get("user_id"))
        _note(verdicts, decision["tool_call_id"], verdict)
    for result in request.get("frontend_tool_results", ()):
        verdict = record_frontend_result(tx, conversation, turn["turn"], result, request.get("user_id"))
        _note(verdicts, result["tool_call_id"], verdict)
    return verdicts


def _note(verdicts: dict[str, str], tool_call_id: str, verdict: str) -> None:
    """Of several verdicts under one id (it repeats across turns, or the same was sent twice), tell what took effect."""
    if verdicts.get(tool_call_id) not in ("approved", "denied", "result_recorded"):
        verdicts[tool_call_id] = verdict


def _shown(request: Row, verdicts: dict[str, str]) -> Row:
    """The ``user_message`` event's data, without tokens, hashes and empty fields."""
    data: dict[str, Any] = {name: request[name] for name in _EVENT_FIELDS if request.get(name)}
    if "tool_decisions" in data:
        data["tool_decisions"] = [
            {key: value for key, value in decision.items() if key not in _NOT_SHOWN}
            for decision in data["tool_decisions"]
        ]
    return data | {"decisions": verdicts} if verdicts else data


def store_artifact(tx: Transaction, conversation_id: str, artifact: Row) -> None:
    content = base64.b64decode(artifact["content"])
    tx.run(
        "INSERT INTO artifacts (artifact_id, conversation_id, name, media_type, size_bytes, content, created_at) "
        "VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING",
        artifact["artifact_id"],
        conversation_id,
        artifact["name"],
        artifact["media_type"],
        len(content),
        content,
        tx.now,
    )

"""Events: the names of the log's entries, and the drafts that a worker hands to the publisher.

An event's ``data`` is what people and programs read; the ``calls`` of a draft are what the same transaction does to
the ``tool_calls`` table. The shapes are in ``docs/events.md``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypedDict

USER_MESSAGE: Final = "user_message"
AI_MESSAGE: Final = "ai_message"
AI_MESSAGE_DELTA: Final = "ai_message_delta"  # live only, never stored
TOOL_CALL_STARTED: Final = "tool_call_started"
TOOL_CALL_RESULT: Final = "tool_call_result"
APPROVAL_REQUIRED: Final = "approval_required"
HISTORY_COMPACTION_STARTED: Final = "history_compaction_started"
HISTORY_COMPACTED: Final = "history_compacted"
ANSWER_END: Final = "answer_end"
ERROR: Final = "error"
TURN_STOPPED: Final = "turn_stopped"
TURN_RESUMED: Final = "turn_resumed"

SNAPSHOTS: Final = frozenset({ANSWER_END, APPROVAL_REQUIRED, HISTORY_COMPACTED})
TERMINALS: Final = frozenset({ANSWER_END, APPROVAL_REQUIRED, ERROR, TURN_STOPPED})
MESSAGE_BEARING: Final = frozenset({AI_MESSAGE, TOOL_CALL_RESULT})

HOLMES_NAMES: Final = {
    "ai_answer_end": ANSWER_END,
    "conversation_history_compacted": HISTORY_COMPACTED,
    "start_tool_calling": TOOL_CALL_STARTED,
    "tool_calling_result": TOOL_CALL_RESULT,
}
"""HolmesGPT's names for the same facts; accepted when reading, so that an existing table can be hydrated."""

Risk = Literal["read_only", "idempotent", "side_effect"]
CallState = Literal["pending", "approved", "denied", "expired", "superseded", "executing", "done", "failed", "unknown"]


class NewCall(TypedDict):
    """A call that an ``ai_message`` made; ``op`` is ``new``. Born ``pending`` (gated or frontend), ``approved``
    (``decided_by`` says by which policy), ``denied`` (approval mode ``deny``) or ``failed`` (it can never run: broken
    arguments, no such tool; ``reason`` becomes its result)."""

    op: Literal["new"]
    step: int
    call_index: int
    tool_call_id: str
    tool_name: str
    arguments: str
    arguments_digest: str
    risk: Risk
    kind: Literal["tool", "frontend"]
    gated: bool
    state: Literal["pending", "approved", "denied", "failed"]
    decided_by: str | None
    reason: str | None


class CallStart(TypedDict):
    """``approved`` → ``executing``, committed before a side effect begins; any other state refuses the batch."""

    op: Literal["start"]
    turn: int
    step: int
    call_index: int


class CallAwait(TypedDict):
    """A gated call waits for a decision; a token that it already has, and its expiry, stay as they are."""

    op: Literal["await"]
    turn: int
    step: int
    call_index: int
    approval_token_sha256: str
    expires_at: str


class CallResult(TypedDict):
    """The end of a call. From ``pending``, ``approved`` or ``executing`` it moves to ``state``; a call that already
    ended must be in ``state``. ``result_seq`` is set, so that the call needs no result any more."""

    op: Literal["result"]
    turn: int
    step: int
    call_index: int
    state: CallState
    result_summary: str | None
    result_raw: str | None
    duration_ms: int | None


CallChange = NewCall | CallStart | CallAwait | CallResult


@dataclass(frozen=True, slots=True)
class EventDraft:
    """An event on its way to the log. ``data`` is cleaned JSON and is not changed after the draft was emitted."""

    event: str
    data: dict[str, Any] = field(default_factory=dict)
    calls: tuple[CallChange, ...] = ()

    @property
    def is_snapshot(self) -> bool:
        return self.event in SNAPSHOTS

    def as_dict(self) -> dict[str, Any]:
        return {"event": self.event, "data": self.data, "calls": list(self.calls)}


@dataclass(frozen=True, slots=True)
class Finish:
    """How a turn ends; travels with the batch that holds its terminal event."""

    status: Literal["completed", "awaiting_approval", "failed", "stopped"]
    finish_reason: str
    error: dict[str, Any] | None = None
    provider: str | None = None
    model: str | None = None

    def as_dict(self) -> dict[str, Any]:
        return {
            "status": self.status,
            "finish_reason": self.finish_reason,
            "error": self.error,
            "provider": self.provider,
            "model": self.model,
        }

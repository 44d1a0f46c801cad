"""Talking to a conversation: record a request, ring, and show the turn until it ends or stops for a decision."""

from __future__ import annotations

from contextlib import aclosing
from typing import Any

from scripts.decisions import Choice
from scripts.desk import FAILED, Desk
from scripts.turn_view import TurnView, totals_line
from shared.requests import parse_request
from shared.store.base import Submitted

Row = dict[str, Any]

_TOOK_EFFECT = frozenset({"approved", "denied", "result_recorded"})
_VERDICTS = {
    "already_resolved": "somebody else decided first",
    "unknown": "no call waits under that id",
    "stale": "the call is not wanted any more: a newer question took its place",
    "expired": "the decision came too late",
}


async def ask(desk: Desk, fields: Row, *, wait: bool) -> int:
    """Record a question; see ``shared.requests.Ask`` for ``fields`` (None: left out)."""
    return await submit(desk, "ask", fields, wait=wait)


async def decide(desk: Desk, conversation_id: str, choice: Choice, *, user: str | None, wait: bool) -> int:
    """Decide about waiting calls; their tokens are looked up."""
    pending = await desk.pending_approvals(conversation_id)
    fields = {
        "conversation_id": conversation_id,
        "user_id": user,
        "tool_decisions": choice.decisions(pending),
    }
    return await submit(desk, "tool_decisions", fields, wait=wait)


async def retry(desk: Desk, conversation_id: str, *, wait: bool) -> int:
    return await submit(desk, "retry", {"conversation_id": conversation_id}, wait=wait)


async def stop(desk: Desk, conversation_id: str, turn: int | None) -> None:
    await desk.require_conversation(conversation_id)
    stopped = await desk.stop(conversation_id, turn)
    texts = {
        "flagged": f"Turn {stopped.turn} was asked to stop.",
        "stopped": f"Turn {stopped.turn} is stopped; the calls that waited are closed.",
        "none": "Nothing runs or waits there; nothing changed.",
    }
    row = {"conversation_id": conversation_id, "turn": stopped.turn, "effect": stopped.effect}
    desk.out.row(row, text=texts[stopped.effect])


async def submit(desk: Desk, kind: str, fields: Row, *, wait: bool) -> int:
    """Record and ring, then watch the turn unless told otherwise; the exit status."""
    request = parse_request(kind, {k: v for k, v in fields.items() if v is not None})
    submitted = await desk.submit(request)
    _tell_verdicts(desk, submitted)
    if not wait:
        row = {
            "conversation_id": submitted.conversation_id,
            "turn": submitted.turn,
            "created": submitted.created,
            "status": submitted.status,
            "decisions": submitted.decisions,
        }
        desk.out.row(row, text=f"Recorded as turn {submitted.turn} of conversation {submitted.conversation_id}.")
        return 0
    await _tell_if_nobody_works(desk, submitted)
    return await watch(desk, submitted.conversation_id, submitted.turn)


async def watch(desk: Desk, conversation_id: str, turn: int) -> int:
    """Show a turn until it has ended; the exit status: 1 if it failed."""
    view = TurnView(desk.out, conversation_id)
    async with aclosing(desk.follow(conversation_id, after=await _before(desk, conversation_id, turn), until=turn)) as rows:
        async for row in rows:
            if row["turn"] == turn:
                view.show(row)
    row = next(t for t in await desk.store.turns(conversation_id) if t["turn"] == turn)
    if row["status"] in ("completed", "failed", "stopped"):
        desk.out.note(f"conversation {conversation_id}, turn {turn}: {totals_line(row)}", "dim")
    return FAILED if row["status"] == "failed" else 0

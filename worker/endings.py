"""Endings: what an attempt writes when it goes on, ends, or is cut off. One terminal event for every way out."""

from __future__ import annotations

from typing import Any, Final

from shared.errors import RateLimited, TurnkeeperError
from shared.events import (
    AI_MESSAGE,
    ANSWER_END,
    APPROVAL_REQUIRED,
    ERROR,
    TURN_RESUMED,
    TURN_STOPPED,
    EventDraft,
    Finish,
)
from shared.store.base import Claim
from worker.agent.run import Answered, Outcome, Paused, Run

SHORTEST_WAIT_SECONDS: Final = 1.0  # of a turn that the provider's rate limit sends away; doubled with each attempt
LONGEST_WAIT_SECONDS: Final = 60.0


def wait_for(error: RateLimited, attempt: int) -> float | None:
    """How long a rate-limited turn waits before its next attempt, in seconds: at least as long as the provider asks,
    and longer each time, whatever it asks. None where it asks nothing: then the tries of the call were enough."""
    asked = error.details.get("retry_after_seconds")
    if asked is None:
        return None
    return max(float(asked), min(SHORTEST_WAIT_SECONDS * 2.0 ** min(attempt - 1, 10), LONGEST_WAIT_SECONDS))


def resumed(claim: Claim) -> EventDraft:
    why = "crash" if claim.taken_over == "crash" else "handed_back"
    data = {"why": why, "attempt": claim.lease.attempt, "crashes": claim.turn["crashes"]}
    return EventDraft(TURN_RESUMED, data)


def ended(run: Run, outcome: Outcome) -> tuple[EventDraft, Finish]:
    common: dict[str, Any] = {
        "request_id": run.request["request_id"],
        "messages": run.with_system(),
        "usage": run.totals.as_dict(),
        "cost_usd": run.totals.cost_usd,
        "rounds": run.totals.rounds,
        "tool_calls": run.totals.tool_calls,
        "model": run.model_used or run.model,
    }
    match outcome:
        case Answered(content):
            data = {"content": content, **common}
            return EventDraft(ANSWER_END, data), Finish("completed", "answer", None, run.provider, run.model_used)
        case Paused(approvals, frontend, awaits):
            data = {"pending_approvals": approvals, "pending_frontend_tool_calls": frontend, **common}
            if run.options:
                data["options"] = dict(run.options)
            reason = "approval_required" if approvals or not frontend else "frontend_tool_calls"
            return (
                EventDraft(APPROVAL_REQUIRED, data, awaits),
                Finish("awaiting_approval", reason, None, run.provider, run.model_used),
            )


def failed(run: Run, error: TurnkeeperError) -> tuple[EventDraft, Finish]:
    data = {**error.as_dict(), "request_id": run.request["request_id"]}
    usage = error.details.get("usage")
    if usage:
        data["usage"] = usage
    return EventDraft(ERROR, data), Finish("failed", error.code, error.as_dict(), run.provider, run.model_used)


def stopped(run: Run) -> tuple[EventDraft, Finish]:
    data = {
        "code": "stopped",
        "description": "The turn was stopped on request; what was shown is kept.",
        "retryable": False,
        "request_id": run.request["request_id"],
    }
    return EventDraft(TURN_STOPPED, data), Finish("stopped", "stopped", None, run.provider, run.model_used)


def partial(run: Run) -> EventDraft | None:
    """Text that people saw stays in the history; calls that were still arriving do not."""
    text = "".join(run.partial)
    if not text.strip():
        return None
    message = {"role": "assistant", "content": text}
    return EventDraft(AI_MESSAGE, {"step": run.totals.rounds + 1, "message": message, "interrupted": True})


def internal(error: Exception) -> TurnkeeperError:
    """A bug as people see it: its kind, not its words, which may hold anything."""
    return TurnkeeperError(
        f"The worker failed with {type(error).__name__}; the turn was ended and what was done is kept.",
        hint="The worker's log has the details.",
    )

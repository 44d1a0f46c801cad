"""Words that become tool results or nudges. None may read as if a call had run and returned nothing."""

from __future__ import annotations

from typing import Final

DENIED: Final = "Tool execution was denied by the user."
DENIED_BY_MODE: Final = "Tool execution was denied: approvals are switched off for this request, so nobody was asked."
EXPIRED: Final = "Not executed: the approval request expired before anybody decided. Ask again if it is still needed."
UNKNOWN: Final = (
    "Outcome unknown: the call had begun and was interrupted. It may or may not have taken effect; do not assume "
    "either way, and check before you repeat it."
)
CHANGED: Final = "Not executed: the arguments are not the ones that were recorded for this call."
INCOMPLETE: Final = "Arguments incomplete, nothing was executed: the answer was cut off. Send the whole call again."
STEP_LIMIT: Final = "Not executed: the limit of model calls for this request is reached. Answer with what is known."
NUDGE: Final = "Your last reply was empty. Answer the request, or call a tool."


def denied(feedback: str | None) -> str:
    return f"{DENIED} User feedback: {feedback}" if feedback else DENIED


def not_executed(reason: str | None) -> str:
    return f"Not executed: {(reason or 'superseded by a new request').rstrip('.')}."


def gone(name: str) -> str:
    return f"Not executed: the tool {name!r} is no longer available."


def cut_notice(artifact_id: str | None) -> str:
    where = f' Read the rest with read_artifact(artifact_id="{artifact_id}").' if artifact_id else ""
    return f"[The result was too long and was cut here.{where}]"

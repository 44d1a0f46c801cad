"""Dead letters: what is kept of a job that could not become a turn, so that its sender can find it."""

from __future__ import annotations

import base64
from typing import Any, Final

import orjson

from shared.clean import clean, clean_text, too_deep
from shared.errors import TurnkeeperError
from shared.redaction import Redactor
from shared.store.base import Row
from worker.jobs import TurnJob

PAYLOAD_BYTES: Final = 64_000  # of a job's arguments, at most


def letter_of_job(job: TurnJob, error: TurnkeeperError, redactor: Redactor) -> Row:
    """The letter of a request that was refused."""
    return {
        **_letter(job.job_id, job.queue, f"worker.jobs.{job.function}", job.arguments, error, redactor),
        "conversation_id": _text(job.arguments.get("conversation_id")),
        "account_id": _text(job.arguments.get("account_id")),
    }


def letter_of_stranger(
    job_id: str, queue: str, payload: dict[str, Any], error: TurnkeeperError, redactor: Redactor
) -> Row:
    """The letter of a job that is none of ours, or cannot be read."""
    function = payload.get("function")
    kept = {name: value for name, value in payload.items() if name != "function"}
    if "data_base64" in kept:
        readable = base64.b64decode(kept["data_base64"]).decode("latin-1")
        kept["data_base64"] = base64.b64encode(redactor.text(readable).encode("latin-1")).decode()
    return {
        **_letter(job_id, queue, function if isinstance(function, str) else "", kept, error, redactor),
        "conversation_id": None,
        "account_id": None,
    }


def _letter(
    job_id: str, queue: str, function: str, arguments: dict[str, Any], error: TurnkeeperError, redactor: Redactor
) -> Row:
    return {
        "job_id": clean_text(job_id),
        "queue": queue,
        "function": function,
        "payload": redactor.value(_payload(arguments)),
        "code": error.code,
        "description": redactor.text(str(error)),
    }


def _payload(arguments: dict[str, Any]) -> dict[str, Any]:
    """What is kept of the arguments: all of them, or, where that cannot be written or is too much, their names."""
    names = clean(sorted(map(str, arguments))[:50])
    try:
        if too_deep(arguments):
            return {"unreadable": True, "keys": names}
        payload: dict[str, Any] = clean(_without_tokens(arguments))
        size = len(orjson.dumps(payload))
    except (TypeError, ValueError, RecursionError):  # a job may hold anything, and its letter is to be kept anyway
        return {"unreadable": True, "keys": names}
    return payload if size <= PAYLOAD_BYTES else {"too_large_to_keep": True, "bytes": size, "keys": names}


def _without_tokens(value: Any) -> Any:
    """Approval tokens stay in their event: whoever reads letters must not be able to decide."""
    if isinstance(value, dict):
        return {k: _without_tokens(v) for k, v in value.items() if k != "approval_token"}
    return [_without_tokens(v) for v in value] if isinstance(value, list) else value


def _text(value: Any) -> str | None:
    return clean_text(value) if isinstance(value, str) else None

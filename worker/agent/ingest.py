"""Ingestion: from a provider's reply to the assistant message that is stored, and the calls that it makes.

What is stored is what later requests replay, so it is made replayable once, here: ids are present and differ within
the message, arguments are valid JSON, an empty list of calls is no key at all. What the model sent is otherwise kept.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from shared.clean import clean
from shared.events import NewCall
from shared.history import Message
from worker.agent import texts
from worker.agent.base import ModelReply, Toolbox, ToolSpec
from worker.agent.tools.arguments import arguments_digest, parse_arguments
from worker.agent.tools.schema import invalid_arguments

ID_CHARACTERS: Final = 1_000  # more than any provider makes; a database index takes no more than a few thousand
CUT_REASONS: Final = frozenset({"length", "max_tokens", "max_output_tokens", "cut", "content_filter"})


@dataclass(frozen=True, slots=True)
class Ingested:
    """``message`` to store, ``calls`` for the ledger. ``empty``: neither text nor a call came back."""

    message: Message
    calls: tuple[NewCall, ...]
    empty: bool


@dataclass(frozen=True, slots=True)
class Policy:
    """What decides about a call before a person does: the request's own tools and mode, and the stored rules."""

    frontend: Mapping[str, ToolSpec]
    deny: bool
    rules: Sequence[Mapping[str, Any]]


def text_of(message: Message) -> str:
    """The visible text of a message; parts that are not text are left out."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return ""


def ingest(reply: ModelReply, *, step: int, toolbox: Toolbox, policy: Policy, may_call: bool) -> Ingested:
    """Make a reply storable. ``may_call`` False (the last step): its calls are dropped where it has an answer, else
    recorded as failed; they never run."""
    message: Message = dict(clean(reply.message))
    message["role"] = "assistant"
    raw_calls = [c for c in message.get("tool_calls") or () if isinstance(c, dict)]
    if not may_call and text_of(message).strip():
        raw_calls = []
    message.pop("tool_calls", None)
    calls: list[NewCall] = []
    if raw_calls:
        whole = reply.finish_reason not in CUT_REASONS
        stored: list[dict[str, Any]] = []
        for index, raw in enumerate(raw_calls):
            entry, reason = _replayable(raw, {c["id"] for c in stored})
            if not whole:
                reason = texts.INCOMPLETE
            elif not may_call:
                reason = texts.STEP_LIMIT
            stored.append(entry)
            calls.append(_new_call(entry, step, index, reason, toolbox, policy))
        message["tool_calls"] = stored
    if "content" not in message:
        message["content"] = None
    return Ingested(message, tuple(calls), not calls and not text_of(message).strip())


def _replayable(raw: dict[str, Any], taken: set[str]) -> tuple[dict[str, Any], str | None]:
    """The call as it is stored, and why it can never run, if so."""
    entry = {k: v for k, v in raw.items() if k != "index"}
    identifier = str(raw.get("id") or "")
    if len(identifier) > ID_CHARACTERS or not identifier or identifier in taken:
        identifier = f"call_{uuid.uuid4().hex[:24]}"
    function = dict(raw["function"]) if isinstance(raw.get("function"), dict) else {}
    parsed = parse_arguments(function.get("arguments"))
    function["name"] = str(function.get("name") or "unnamed")
    function["arguments"] = parsed.text
    entry.update(id=identifier, type=entry.get("type") or "function", function=function)
    return entry, parsed.error


def _new_call(
    entry: dict[str, Any], step: int, index: int, reason: str | None, toolbox: Toolbox, policy: Policy
) -> NewCall:
    name, arguments = entry["function"]["name"], entry["function"]["arguments"]
    frontend = policy.frontend.get(name)
    spec = frontend or toolbox.get(name)
    new: NewCall = {
        "op": "new",
        "step": step,
        "call_index": index,
        "tool_call_id": entry["id"],
        "tool_name": name,
        "arguments": arguments,
        "arguments_digest": arguments_digest(arguments),
        "risk": spec.risk if spec else "side_effect",
        "kind": "frontend" if frontend else "tool",
        "gated": False,
        "state": "failed",
        "decided_by": None,
        "reason": reason,
    }
    if reason is not None:
        return new
    if spec is None:
        available = sorted({*policy.frontend, *(s.name for s in toolbox.specs())})
        new["reason"] = f"Not executed: there is no tool {name!r}. Available: {', '.join(available) or 'none'}."
        return new
    value = parse_arguments(arguments).value
    wrong = invalid_arguments(frontend.parameters, value) if frontend else toolbox.invalid(name, value)
    if wrong is not None:
        new["reason"] = wrong
        return new
    if frontend:
        new["state"] = "pending"
        return new
    decided_by = toolbox.decided_by_policy(name, value, policy.rules)
    if decided_by is not None:
        new["state"], new["decided_by"] = "approved", decided_by
        return new
    new["gated"] = True
    if policy.deny:
        new["state"], new["decided_by"], new["reason"] = "denied", "policy:approval_mode", texts.DENIED_BY_MODE
    else:
        new["state"] = "pending"
    return new

"""What a chat history says: the question, the calls made so far, and what came of them.

The demo's scripted model knows nothing but this, so what it says about an earlier turn it has from the restored
history.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Message = dict[str, Any]

_DENIED = "Tool execution was denied by the user."
_FEEDBACK = "User feedback:"


@dataclass(frozen=True, slots=True)
class Seen:
    """A call with its result. ``data`` is the result's JSON, or None where it is none (an error, a denial)."""

    name: str
    arguments: dict[str, Any]
    text: str
    data: Any

    @property
    def denied(self) -> bool:
        return self.text.startswith(_DENIED)

    @property
    def feedback(self) -> str:
        """What the person who denied the call said; empty without a word."""
        return self.text.partition(_FEEDBACK)[2].strip()


@dataclass(frozen=True, slots=True)
class Scene:
    """``question``: the current request; ``questions``: all of them; ``now``: the calls since it; ``seen``: all calls;
    ``offered``: the names of the tools that may be called."""

    question: str
    questions: tuple[str, ...]
    now: tuple[Seen, ...]
    seen: tuple[Seen, ...]
    offered: frozenset[str]

    @classmethod
    def of(cls, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> Scene:
        last = max((i for i, m in enumerate(messages) if m["role"] == "user"), default=-1)
        questions = tuple(_text(m) for m in messages if m["role"] == "user")
        return cls(
            question=questions[-1] if questions else "",
            questions=questions,
            now=tuple(_calls(messages[last + 1 :])),
            seen=tuple(_calls(messages)),
            offered=frozenset(t["function"]["name"] for t in tools),
        )

    def latest(self, name: str, *, everywhere: bool = False) -> Seen | None:
        """The latest call of a tool since the question, or in the whole history."""
        return next((s for s in reversed(self.seen if everywhere else self.now) if s.name == name), None)


def _calls(messages: Sequence[Message]) -> list[Seen]:
    open_calls: dict[str, dict[str, Any]] = {}
    found: list[Seen] = []
    for message in messages:
        for call in message.get("tool_calls") or ():
            open_calls[call["id"]] = call["function"]
        if message["role"] == "tool" and (function := open_calls.pop(message.get("tool_call_id", ""), None)):
            text = _text(message)
            found.append(Seen(function["name"], _json(function["arguments"]) or {}, text, _json(text)))
    return found


def _text(message: Message) -> str:
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    return "\n".join(part.get("text", "") for part in content)


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None

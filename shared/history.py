"""History: from stored rows to the messages of a turn. One function serves hydration and every check of it.

Messages are OpenAI chat messages as plain dicts; unknown keys are kept. A snapshot holds the whole list; what came
after it is folded in turn by turn, each turn's question first and then its events in order. Never by sequence alone:
a question that was recorded while an earlier turn ran has a lower sequence than that turn's answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from shared.events import AI_MESSAGE, HOLMES_NAMES, TOOL_CALL_RESULT

Message = dict[str, Any]

ARTIFACT_SCHEME = "artifact:"  # stored form of an image: a reference, resolved only on the wire


@dataclass(frozen=True, slots=True)
class OpenCall:
    """A tool call without a result: ``message`` is the assistant message that made it, ``call`` its entry."""

    message_index: int
    call_index: int
    call: dict[str, Any]

    @property
    def tool_call_id(self) -> str:
        return str(self.call.get("id", ""))


def user_message(request: dict[str, Any]) -> Message | None:
    """The message that a request adds to the history: its question with its images; None if it asks nothing."""
    if not request.get("ask"):
        return None
    images = request.get("images") or ()
    if not images:
        return {"role": "user", "content": request["ask"]}
    parts: list[dict[str, Any]] = [{"type": "text", "text": request["ask"]}]
    for image in images:
        url = image.get("url") or f"{ARTIFACT_SCHEME}{image['artifact_id']};{image.get('media_type', 'image/png')}"
        parts.append({"type": "image_url", "image_url": {"url": url}})
    return {"role": "user", "content": parts}


def fold(
    snapshot: dict[str, Any] | None, turns: Sequence[dict[str, Any]], events: Iterable[dict[str, Any]]
) -> list[Message]:
    """The messages up to the last of ``turns``, without a system message.

    ``snapshot``: the latest snapshot event (``turn``, ``seq``, ``data.messages``) or None. ``turns``: ``{"turn",
    "request"}`` of every turn after the snapshot's. ``events``: the message-bearing events (``seq``, ``turn``,
    ``event``, ``data.message``) later than the snapshot, from its turn on.
    """
    messages: list[Message] = []
    first_turn = after_seq = 0
    if snapshot is not None:
        messages = [m for m in snapshot["data"].get("messages") or () if m.get("role") != "system"]
        first_turn, after_seq = snapshot["turn"], snapshot["seq"]
    by_turn: dict[int, list[dict[str, Any]]] = {}
    for event in events:
        if event["seq"] > after_seq and event["turn"] >= first_turn and _message_of(event) is not None:
            by_turn.setdefault(event["turn"], []).append(event)
    questions = {t["turn"]: t["request"] for t in turns if t["turn"] > first_turn}
    for turn in sorted(by_turn.keys() | questions.keys()):
        if turn in questions and (question := user_message(questions[turn])) is not None:
            messages.append(question)
        for event in sorted(by_turn.get(turn, ()), key=lambda e: int(e["seq"])):
            messages.append(event["data"]["message"])
    return pair(messages)


def _message_of(event: dict[str, Any]) -> Message | None:
    name = HOLMES_NAMES.get(event["event"], event["event"])
    if name not in (AI_MESSAGE, TOOL_CALL_RESULT):
        return None
    message = event["data"].get("message")
    return message if isinstance(message, dict) else None


def pair(messages: Sequence[Message]) -> list[Message]:
    """Each result directly behind the assistant message whose call it answers, in call order.

    A call arms its id, a result consumes it: pairing is with the latest assistant message that has an unanswered
    call of that id, since ids repeat across turns. A result without a call becomes inert text. Valid histories come
    out equal.
    """
    waiting: dict[str, list[tuple[int, int]]] = {}
    answers: dict[int, dict[int, Message]] = {}
    kept: list[tuple[int, Message]] = []
    for index, message in enumerate(messages):
        role = message.get("role")
        if role == "tool":
            slots = waiting.get(str(message.get("tool_call_id", "")))
            if slots:
                owner, position = slots.pop()
                answers[owner][position] = message
            else:
                kept.append((index, _inert(message)))
            continue
        kept.append((index, message))
        calls = message.get("tool_calls") if role == "assistant" else None
        if calls:
            answers[index] = {}
            for position in reversed(range(len(calls))):
                waiting.setdefault(str(calls[position].get("id", "")), []).append((index, position))
    paired: list[Message] = []
    for index, message in kept:
        paired.append(message)
        if index in answers:
            paired.extend(answer for _, answer in sorted(answers[index].items(), key=lambda item: item[0]))
    return paired


def _inert(message: Message) -> Message:
    content, note = message.get("content"), "[A tool result whose call is not in the history]"
    if isinstance(content, list):
        return {"role": "user", "content": [{"type": "text", "text": note}, *content]}
    return {"role": "user", "content": f"{note}\n{content}"}


def open_calls(messages: Sequence[Message]) -> list[OpenCall]:
    """The calls without a result in a paired history, oldest first."""
    found: list[OpenCall] = []
    for index, message in enumerate(messages):
        calls = message.get("tool_calls") if message.get("role") == "assistant" else None
        if not calls:
            continue
        answered: dict[str, int] = {}
        for later in range(index + 1, len(messages)):
            if messages[later].get("role") != "tool":
                break
            identifier = str(messages[later].get("tool_call_id", ""))
            answered[identifier] = answered.get(identifier, 0) + 1
        for position, call in enumerate(calls):
            identifier = str(call.get("id", ""))
            if answered.get(identifier, 0) > 0:
                answered[identifier] -= 1
            else:
                found.append(OpenCall(index, position, call))
    return found

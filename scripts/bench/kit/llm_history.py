"""The rules that strict providers keep about a request: what is wrong with it, as they would say it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})
TOOL_NAME = re.compile(r"^[a-zA-Z0-9_-]{1,64}$")
ID_LIMIT = 64  # characters


def violations(body: dict[str, Any]) -> Iterator[str]:
    """Every rule that the request breaks. None: it is valid."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        yield "messages: must be a list with at least one message"
        return
    for index, message in enumerate(messages):
        yield from (f"messages[{index}]: {wrong}" for wrong in _message(message))
    if messages[-1].get("role") == "assistant":
        yield "messages: the last one must not be the assistant's"
    yield from _pairing(messages)
    yield from _tools(body)


def _message(message: dict[str, Any]) -> Iterator[str]:
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        yield f"unknown role {role!r}"
    if role == "assistant":
        yield from _assistant(message)
    elif not isinstance(content, str | list) or (role != "tool" and not content):
        yield f"content of role {role} must not be empty"
    if role == "tool" and not message.get("tool_call_id"):
        yield "a tool message needs a tool_call_id"
    for part in content if isinstance(content, list) else ():
        yield from _part(role, part)


def _assistant(message: dict[str, Any]) -> Iterator[str]:
    calls, content = message.get("tool_calls"), message.get("content")
    if "tool_calls" in message and not calls:
        yield "tool_calls must not be empty"
    if not calls and not content:
        yield "an assistant message needs content or tool_calls"
    if isinstance(content, str) and content and not content.strip():
        yield "content must not be blank"
    for call in calls or ():
        function = call.get("function") or {}
        if not isinstance(call.get("id"), str) or not 0 < len(call["id"]) <= ID_LIMIT:
            yield f"tool call id must be a string of 1 to {ID_LIMIT} characters"
        if not TOOL_NAME.match(str(function.get("name", ""))):
            yield f"tool call name {function.get('name')!r} does not match {TOOL_NAME.pattern}"
        if not _is_object(function.get("arguments")):
            yield f"arguments of {call.get('id')!r} are not a JSON object in a string"


def _part(role: Any, part: Any) -> Iterator[str]:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "image_url":
        url = str(part.get("image_url", {}).get("url", ""))
        if role != "user":
            yield f"images are not allowed in role {role}"
        if not url.startswith(("https://", "http://", "data:image/")):
            yield f"image url {url[:40]!r} is neither http(s) nor a data URL"
    elif kind not in ("text", "refusal"):
        yield f"unknown content part {kind!r}"
    elif not part.get(kind):
        yield "text parts must not be empty"


def _pairing(messages: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Every call is answered exactly once, directly behind its assistant message; nothing else is answered."""
    open_ids: list[str] = []
    for index, message in enumerate(messages):
        if message.get("role") == "tool":
            identifier = str(message.get("tool_call_id"))
            if identifier in open_ids:
                open_ids.remove(identifier)
            else:
                yield f"messages[{index}]: tool message {identifier!r} answers no preceding call"
            continue
        if open_ids:
            yield f"messages[{index}]: tool calls without a result before it: {', '.join(open_ids)}"
        open_ids = [str(call.get("id")) for call in message.get("tool_calls") or ()]
    if open_ids:
        yield f"messages: tool calls without a result at the end: {', '.join(open_ids)}"


def _tools(body: dict[str, Any]) -> Iterator[str]:
    tools = body.get("tools")
    if tools is None:
        if body.get("tool_choice") is not None:
            yield "tool_choice without tools"
        if any(message.get("tool_calls") for message in body["messages"]):
            yield "the history has tool calls but no tools are declared"
        return
    if not tools:
        yield "tools must not be empty"
    names = [str(tool.get("function", {}).get("name", "")) for tool in tools]
    yield from (f"tool name {name!r} does not match {TOOL_NAME.pattern}" for name in names if not TOOL_NAME.match(name))
    if len(set(names)) < len(names):
        yield "tool names are not unique"


def _is_object(arguments: Any) -> bool:
    if not isinstance(arguments, str):
        return False
    try:
        return isinstance(json.loads(arguments), dict)
    except ValueError:
        return False

"""One assistant message from the pieces of a stream.

Nothing that a provider sends is lost: text and reasoning are joined, thinking blocks keep their signatures, unknown
keys of the message and of its calls are kept, so that the next request can send them back. Fragments of tool calls
are put together for every shape that servers have been seen to send: no index, always index 0, an index that moves,
an id that is missing, repeated or different in each fragment, a repeated name, arguments as an object.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final

from shared.history import Message

_JOINED_KEYS: Final = frozenset({"content", "reasoning_content", "reasoning", "refusal"})
_JOINED_ITEM_KEYS: Final = frozenset({"text", "summary", "data", "thinking"})
_OWN_KEYS: Final = frozenset({"role", "tool_calls", "thinking_blocks", "function_call"})


class MalformedDelta(Exception):
    """A delta in a shape that no provider documents."""


class Assembly:
    """Collects deltas with ``add``; ``message`` is what they amount to."""

    def __init__(self) -> None:
        self.text: list[str] = []
        self.calls: list[dict[str, Any]] = []
        self._joined: dict[str, list[str]] = {}
        self._fields: dict[str, Any] = {}
        self._thinking: list[dict[str, Any]] = []
        self._by_index: dict[int, dict[str, Any]] = {}
        self._parts: dict[int, list[str]] = {}

    @property
    def empty(self) -> bool:
        return not (self.text or self.calls or self._joined or self._fields or self._thinking)

    def add(self, delta: Any) -> tuple[str, str]:
        """Take one delta (a pydantic object that keeps extra fields); its visible text and reasoning.

        Raises ``MalformedDelta`` where a provider sent one thing for another, such as a text for a list of calls.
        """
        try:
            return self._add(delta)
        except (AttributeError, TypeError, ValueError, RecursionError) as error:
            raise MalformedDelta(f"{type(error).__name__}: {error}") from error

    def _add(self, delta: Any) -> tuple[str, str]:
        text = reasoning = ""
        for key, value in _fields_of(delta):
            if value is None or value == "":
                continue
            if key == "content" and isinstance(value, str):
                self.text.append(value)
                text = value
            elif key in _JOINED_KEYS and isinstance(value, str):
                self._joined.setdefault(key, []).append(value)
                if key == "reasoning_content":
                    reasoning = value
            elif key == "tool_calls":
                for fragment in value:
                    self._add_call(_plain(fragment))
            elif key == "thinking_blocks":
                for block in value:
                    self._add_thinking(_plain(block))
            elif key not in _OWN_KEYS:
                self._fields[key] = _merged(self._fields.get(key), _plain(value))
        return text, reasoning

    def message(self) -> Message:
        """The assistant message; ``content`` is None when there was no text."""
        message: Message = {"role": "assistant", "content": "".join(self.text) or None}
        message.update({key: "".join(parts) for key, parts in self._joined.items()})
        message.update(self._fields)
        if self._thinking:
            message["thinking_blocks"] = self._thinking
        if self.calls:
            for call in self.calls:
                call["function"]["arguments"] = self._arguments(call)
            message["tool_calls"] = self.calls
        return message

    def _add_thinking(self, block: dict[str, Any]) -> None:
        """Pieces of one block follow each other; its signature ends it."""
        last = self._thinking[-1] if self._thinking else None
        if last is None or last.get("type") != block.get("type") or last.get("signature") or block.get("data"):
            self._thinking.append({key: value for key, value in block.items() if value is not None})
            return
        last["thinking"] = (last.get("thinking") or "") + (block.get("thinking") or "")
        last.update({key: value for key, value in block.items() if key != "thinking" and value is not None})

    def _add_call(self, fragment: dict[str, Any]) -> None:
        index = fragment.pop("index", None)
        function = fragment.pop("function", None) or {}
        identifier = fragment.pop("id", None) or ""
        name, arguments = function.pop("name", None) or "", _text(function.pop("arguments", None))
        call = self._owner(index, identifier, name, arguments)
        if call is None:
            call = {"id": identifier, "type": "function", "function": {"name": name}}
            self.calls.append(call)
            self._parts[id(call)] = []
        elif not call["id"]:
            call["id"] = identifier
        call["function"]["name"] = call["function"]["name"] or name
        call["function"].update({key: value for key, value in function.items() if value is not None})
        self._parts[id(call)].append(arguments)
        if isinstance(index, int):
            self._by_index[index] = call
        fragment.pop("type", None)
        for key, value in fragment.items():
            if value is not None:
                call[key] = _merged(call.get(key), value)

    def _owner(self, index: Any, identifier: str, name: str, arguments: str) -> dict[str, Any] | None:
        """The call that a fragment goes on with; None: it begins one."""
        if not self.calls:
            return None
        here = self._by_index.get(index) if isinstance(index, int) else None
        if identifier:
            same = next((call for call in reversed(self.calls) if call["id"] == identifier), None)
            if same is not None:  # or two calls under one id: the second begins after the first is whole
                elsewhere = same is not here or arguments.lstrip().startswith("{")
                begins = name and (name != same["function"]["name"] or (elsewhere and self._whole(same)))
                return None if begins else same
            if name or here is None:
                return here if here is not None and not here["id"] and self._repeats(here, name, arguments) else None
            return here  # a new id in each fragment
        if name:
            target = here or self.calls[-1]
            return target if self._repeats(target, name, arguments) else None
        return here or self.calls[-1]

    def _repeats(self, call: dict[str, Any], name: str, arguments: str) -> bool:
        """The fragment names the call again rather than begin another one of the same tool."""
        known = call["function"]["name"]
        return not known or (known == name and not (arguments.lstrip().startswith("{") and self._whole(call)))

    def _whole(self, call: dict[str, Any]) -> bool:
        try:
            return isinstance(json.loads("".join(self._parts[id(call)])), dict)
        except (ValueError, RecursionError):
            return False

    def _arguments(self, call: dict[str, Any]) -> str:
        return "".join(self._parts[id(call)])


def _fields_of(delta: Any) -> Iterator[tuple[str, Any]]:
    yield from vars(delta).items()
    yield from (delta.__pydantic_extra__ or {}).items()


def _plain(value: Any) -> Any:
    if hasattr(value, "model_dump"):
        return value.model_dump()
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return dict(value) if isinstance(value, dict) else value


def _text(arguments: Any) -> str:
    if arguments is None:
        return ""
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _merged(old: Any, new: Any) -> Any:
    """Objects are merged key by key, lists appended to (items of one index and type are one), the rest replaced."""
    if isinstance(old, dict) and isinstance(new, dict):
        return {**old, **{key: _merged(old.get(key), value) for key, value in new.items() if value is not None}}
    if isinstance(old, list) and isinstance(new, list):
        out = list(old)
        for item in new:
            _append(out, item)
        return out
    return new


def _append(items: list[Any], item: Any) -> None:
    index = item.get("index") if isinstance(item, dict) else None
    if index is not None:
        for known in items:
            if isinstance(known, dict) and (known.get("index"), known.get("type")) == (index, item.get("type")):
                for key, value in item.items():
                    if value is not None:
                        joins = key in _JOINED_ITEM_KEYS and isinstance(value, str)
                        known[key] = (known.get(key) or "") + value if joins else value
                return
    items.append(dict(item) if isinstance(item, dict) else item)

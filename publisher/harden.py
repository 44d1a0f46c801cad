"""Cleaning of events, and weaker versions of one that a database refuses, so that it never holds up the rest.

Most events become a marker of the same name that says why; what it does to ``tool_calls`` is kept. An event that
bears a message keeps the message, and a snapshot stays a snapshot: their texts are cleaned harder and harder, since a
history without one of its messages is worse than one with question marks in it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import orjson

from shared.clean import clean
from shared.errors import ContentRefused
from shared.events import MESSAGE_BEARING, EventDraft, Finish

TEXT_LIMITS = (20_000, 1_000)  # characters of one text, once plain ASCII was refused too
DEPTH_LIMIT = 64  # lists and objects within each other
TOO_DEEP = "[nested too deep to be stored]"

_PAIRING = frozenset({"role", "type", "id", "tool_call_id", "name", "tool_name", "event", "op", "state"})
"""Keys whose texts stay: an id that changed in one message would no longer meet its partner in another."""

_ESCAPE = re.compile(r"\\u(?:0000|[dD][89a-fA-F][0-9a-fA-F]{2})")
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")


def versions(
    draft: EventDraft, finish: Finish | None, refusal: ContentRefused
) -> Iterator[tuple[EventDraft, Finish | None]]:
    """Ever weaker versions of a refused event and the turn's end that goes with it; the first one loses nothing."""
    finish = clean_finish(finish)
    with suppress(RecursionError):
        draft = _cleaned(draft)
        yield draft, finish
    kept = draft.data if draft.is_snapshot else _marker(draft, refusal)
    yield replace(draft, data=_plain(kept, None)), finish
    for limit in (None, *TEXT_LIMITS):
        weaker = replace(draft, data=_plain(kept, limit), calls=_plain(draft.calls, limit))
        yield weaker, finish and replace(finish, error=_plain(finish.error, limit))


def measured(draft: EventDraft) -> tuple[EventDraft, int]:
    """The event and its bytes. What slipped past the cleaning at ingestion is cleaned here: it costs one look."""
    try:
        encoded = orjson.dumps((draft.data, draft.calls))
        if b"\\u0000" not in encoded:
            return draft, len(encoded)
    except TypeError:
        encoded = b""
    try:
        draft = _cleaned(draft)
        return draft, len(encoded) or len(orjson.dumps((draft.data, draft.calls)))
    except (TypeError, RecursionError):  # nested too deep: the store will refuse it, and it goes on as a marker
        return draft, 0


def _cleaned(draft: EventDraft) -> EventDraft:
    return replace(draft, data=clean(draft.data), calls=tuple(clean(call) for call in draft.calls))


def clean_finish(finish: Finish | None) -> Finish | None:
    """The turn's end with its texts cleaned, as ``shared.clean`` does for events."""
    return finish and replace(finish, **{name: clean(value) for name, value in finish.as_dict().items()})


def _marker(draft: EventDraft, refusal: ContentRefused) -> dict[str, Any]:
    """What is left of an event: why, its numbers (steps and usage are counted from them) and its message if any."""
    marker = {key: value for key, value in draft.data.items() if value is None or isinstance(value, bool | int | float)}
    if draft.event in MESSAGE_BEARING:
        marker |= {key: draft.data[key] for key in ("tool_call_id", "usage", "message") if key in draft.data}
    return marker | {"unstorable": True, "code": refusal.code, "description": refusal.description}


def _plain(value: Any, limit: int | None, depth: int = 0) -> Any:
    """``value`` with its texts in plain ASCII, at most ``limit`` characters each, and without what lies too deep."""
    if isinstance(value, str):
        return _plain_text(value, limit)
    if depth > DEPTH_LIMIT and isinstance(value, dict | list | tuple):
        return TOO_DEEP
    if isinstance(value, dict):
        return {_plain_text(key, limit): _plain_item(key, item, limit, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_plain(item, limit, depth + 1) for item in value)
    return value


def _plain_item(key: str, item: Any, limit: int | None, depth: int) -> Any:
    if key in _PAIRING and isinstance(item, str):
        return item
    if key == "arguments" and isinstance(item, str) and limit is not None and len(item) > limit:
        return "{}"  # a cut text would no longer be JSON, and providers would refuse the whole history
    return _plain(item, limit, depth)


def _plain_text(text: str, limit: int | None) -> str:
    plain = _CONTROL.sub(" ", _ESCAPE.sub("?", text.encode("ascii", "replace").decode("ascii")))
    if limit is None or len(plain) <= limit:
        return plain
    return f"{plain[:limit]} [{len(plain) - limit} characters could not be stored]"

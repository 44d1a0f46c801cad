"""Tool-call arguments: from what a model sent to what may run, and to what is stored.

A model's arguments are text that should be one JSON object. They may be cut by the output limit, empty, two objects
glued together, or no object at all; such a call is never run, and a text that later requests can replay is stored in
its place.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass, field
from typing import Any, Final

from shared.clean import clean, too_deep

UNPARSED_KEY: Final = "unparsed_arguments"
UNPARSED_CHARACTERS: Final = 2_000  # of a broken text that are kept
_TOO_DEEP: Final = "Arguments refused, nothing was executed: the JSON is too large or too deep to be read."


@dataclass(frozen=True, slots=True)
class ParsedArguments:
    """``value`` is what runs and ``text`` the JSON object that is stored, hashed and replayed: the model's own text
    where that is one. ``error`` is None, or tells the model why nothing was executed; ``value`` is then only to show.
    """

    value: dict[str, Any] = field(default_factory=dict)
    text: str = "{}"
    error: str | None = None


class _Refused(ValueError):
    """JSON that parses, but not to one clear meaning."""


def parse_arguments(raw: str | dict[str, Any] | None) -> ParsedArguments:
    """Read a call's ``arguments``. None and blank text mean no arguments; a dictionary (some providers decode) is
    encoded again. Duplicate keys and numbers beyond any range are refused: two readers would see two calls."""
    if raw is None or (isinstance(raw, str) and not raw.strip()):
        return ParsedArguments()
    if not isinstance(raw, str) and too_deep(raw):
        return _broken("", _TOO_DEEP)
    if isinstance(raw, dict):
        value = clean(raw)
        return ParsedArguments(value, _encode(value))
    if not isinstance(raw, str):
        return _broken(_encode(clean(raw)), _not_an_object(raw))
    try:
        value = json.loads(raw, object_pairs_hook=_unique, parse_constant=_no_constant, parse_float=_finite)
    except _Refused as error:
        return _broken(raw, f"Arguments refused, nothing was executed: {error}")
    except json.JSONDecodeError as error:
        return _broken(raw, _reason(raw, error))
    except (ValueError, RecursionError):  # an integer of thousands of digits, or thousands of nested lists
        return _broken(raw, _TOO_DEEP)
    if too_deep(value):
        return _broken(raw, _TOO_DEEP)
    if not isinstance(value, dict):
        return _broken(raw, _not_an_object(value))
    cleaned = clean(value)
    return ParsedArguments(cleaned, raw if cleaned is value and clean(raw) is raw else _encode(cleaned))


def arguments_digest(text: str) -> str:
    """SHA-256 of the stored arguments: what a person approved is compared with what is about to run."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _encode(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(", ", ": "))


def _broken(raw: str, error: str) -> ParsedArguments:
    kept = {UNPARSED_KEY: clean(raw)[:UNPARSED_CHARACTERS]}
    return ParsedArguments(kept, _encode(kept), error)


def _reason(raw: str, error: json.JSONDecodeError) -> str:
    if error.msg == "Extra data":
        return (
            "Arguments refused, nothing was executed: they hold more than one JSON value. "
            "Send one JSON object per call, and several calls for several actions."
        )
    if _is_cut(raw, error):
        return "Arguments incomplete, nothing was executed: the JSON breaks off. Send the whole call again."
    return (
        f"Arguments refused, nothing was executed: not valid JSON ({error.msg}, line {error.lineno} "
        f"column {error.colno}). Send one JSON object."
    )


def _is_cut(raw: str, error: json.JSONDecodeError) -> bool:
    text = raw.strip()
    at_the_end = error.pos >= len(raw.rstrip()) - 1 or error.msg.startswith("Unterminated string")
    return at_the_end or (text.startswith("{") and not text.endswith("}"))


def _not_an_object(value: Any) -> str:
    kind = {list: "an array", str: "a string", bool: "a boolean", type(None): "null"}.get(type(value), "a number")
    return f"Arguments refused, nothing was executed: they must be a JSON object, not {kind}."


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise _Refused(f"{twice!r} is given more than once.")
    return value


def _no_constant(name: str) -> Any:
    raise _Refused(f"{name} is not a JSON number.")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise _Refused(f"the number {text[:40]} is out of range.")
    return number

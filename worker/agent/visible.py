"""Approval texts: what a person reads before deciding must be what will run.

Control, bidirectional and invisible characters are shown as ``\\u{202E}``. Nothing is removed or cut, and the form is
unambiguous: a backslash that would start such an escape in the original is itself written ``\\u{5C}``.
"""

from __future__ import annotations

import json
import re
from typing import Any, Final

DESCRIPTION_VALUE_CHARACTERS: Final = 200

_KEPT: Final = frozenset("\n\t")
# Characters that Unicode counts as printable but that show nothing: fillers, joiners and variation selectors.
_BLANK: Final = frozenset(
    "\u034f\u115f\u1160\u17b4\u17b5\u180b\u180c\u180d\u180f\u2800\u3164\uffa0\U0001d159"
    + "".join(map(chr, range(0xFE00, 0xFE10)))
    + "".join(map(chr, range(0xE0100, 0xE01F0)))
)
_EMOJI_STYLE: Final = "\ufe0f"
_PLAIN: Final = re.compile(r"[ -\[\]-~\n\t]*")  # printable ASCII without the backslash


def make_visible(value: Any) -> Any:
    """A JSON value with every string and key made visible; numbers, booleans and null as they are."""
    if isinstance(value, str):
        return visible_text(value)
    if isinstance(value, dict):
        return {visible_text(str(k)): make_visible(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [make_visible(v) for v in value]
    return value


def visible_text(text: str) -> str:
    """``text`` with each deceptive character as an escape. Line feeds and tabs stay: they are layout, not disguise."""
    if _PLAIN.fullmatch(text):
        return text
    out: list[str] = []
    for index, char in enumerate(text):
        if char == "\\" and text.startswith("u{", index + 1):
            out.append("\\u{5C}")
        elif _deceives(char, text[index - 1] if index else ""):
            out.append(f"\\u{{{ord(char):04X}}}")
        else:
            out.append(char)
    return "".join(out)


def _deceives(char: str, before: str) -> bool:
    if char in _KEPT:
        return False
    if char == _EMOJI_STYLE:  # an ordinary part of emoji; behind anything else it hides data
        return not (before.isprintable() and before > "\u203b" and not before.isalnum() and before not in _BLANK)
    # False for Unicode's Other (control, format, surrogate, private, unassigned) and Separator, but for the space.
    return not char.isprintable() or char in _BLANK


def describe_call(name: str, arguments: dict[str, Any]) -> str:
    """One line for a person: ``restart_deployment(namespace="production", deployment="checkout-api")``.

    Values longer than ``DESCRIPTION_VALUE_CHARACTERS`` are abbreviated and say by how much; ``params`` has them whole.
    """
    shown = ", ".join(f"{visible_text(k)}={_short(v)}" for k, v in arguments.items())
    return f"{visible_text(name)}({shown})".replace("\n", "\\n").replace("\t", "\\t")


def _short(value: Any) -> str:
    text = visible_text(json.dumps(value, ensure_ascii=False))
    excess = len(text) - DESCRIPTION_VALUE_CHARACTERS
    if excess <= 0:
        return text
    return f"{text[:DESCRIPTION_VALUE_CHARACTERS]}… (+{excess:,} characters)"

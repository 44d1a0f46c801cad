"""Cleaning of values that no database, provider or JSON parser would take, once, where they come in.

NUL is removed (Postgres' ``jsonb`` refuses it, SQLSTATE 22P05), a lone surrogate becomes U+FFFD, NaN and infinities
become null. Cleaning happens before encoding, since afterwards an escaped NUL cannot be told from the literal text.
"""

from __future__ import annotations

import math
import re
from typing import Any, Final

MAX_DEPTH: Final = 64  # of nested objects and arrays; far below what JSON encoders and databases give up at

_BAD = re.compile("[\x00\ud800-\udfff]")


def clean_text(text: str) -> str:
    """``text`` without NUL and lone surrogates; the same object when there is nothing to do."""
    if not _BAD.search(text):
        return text
    paired = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return paired.replace("\x00", "")


def clean(value: Any) -> Any:
    """A JSON value with every string, key and number cleaned; unchanged parts are shared, not copied.

    Keys that become equal by cleaning keep the last value. Values that JSON has no form for, and integers of more
    than 64 bits, become their ``str``.
    """
    if isinstance(value, str):
        return clean_text(value)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return value if -(2**63) <= value < 2**64 else str(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        cleaned = {clean_text(k if isinstance(k, str) else str(k)): clean(v) for k, v in value.items()}
        return value if _same(cleaned.items(), value.items()) else cleaned
    if isinstance(value, list | tuple):
        items = [clean(v) for v in value]
        return value if isinstance(value, list) and all(a is b for a, b in zip(items, value, strict=True)) else items
    if isinstance(value, bytes | bytearray):
        return clean_text(bytes(value).decode("utf-8", "replace"))
    return clean_text(str(value))


def too_deep(value: Any) -> bool:
    """Whether a JSON value is nested deeper than ``MAX_DEPTH`` levels. Looks level by level, so any depth is safe."""
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            child
            for item in level
            if isinstance(item, dict | list | tuple)
            for child in (item.values() if isinstance(item, dict) else item)
        ]
        if not level:
            return False
    return True


def _same(cleaned: Any, original: Any) -> bool:
    return len(cleaned) == len(original) and all(
        a is c and b is d for (a, b), (c, d) in zip(cleaned, original, strict=True)
    )

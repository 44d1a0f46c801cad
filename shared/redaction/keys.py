"""Keys of JSON objects that announce a secret: ``{"password": "hunter2"}``, where key and value are apart."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass

from shared.redaction.detectors import MARKER_START
from shared.redaction.formats import KEYWORDS, Keyword
from shared.redaction.values import counts

_SCHEME = re.compile(r"(?:bearer|basic|token|digest|negotiate|apikey)[ \t]+", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Announced:
    """The value's secret: from ``begin`` to its end."""

    kind: str
    begin: int


def announced(key: str, value: str) -> Announced | None:
    """What the key says of the value, if that counts as a secret."""
    keyword = _keyword_of(key)
    if keyword is None or MARKER_START in value:
        return None
    scheme = _SCHEME.match(value) if keyword.rule == "header" else None
    begin = scheme.end() if scheme else 0
    return Announced(keyword.kind, begin) if counts(keyword.rule, value[begin:]) else None


@functools.lru_cache(maxsize=4_096)
def _keyword_of(key: str) -> Keyword | None:
    low = key.lower().removesuffix("s")
    for keyword in KEYWORDS:
        word = keyword.word.removeprefix('"')
        if keyword.word != word and low != word:  # a whole key only
            continue
        if not low.endswith(word):
            continue
        before = key[: len(low) - len(word)]
        if keyword.before and not re.search(keyword.before, before):
            continue
        if not (keyword.unless and re.search(keyword.unless, before)):
            return keyword
    return None

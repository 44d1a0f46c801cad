"""Kubernetes secrets in the output of tools: every value below ``data`` and ``stringData`` of an object of kind Secret.

``kubectl`` prints ``data`` before ``kind``, so this looks at a whole text, not at a stream: YAML and JSON, single
objects and lists, and the copy that ``kubectl apply`` leaves in an annotation.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable
from typing import Final

from shared.redaction.detectors import MARKER_START

_KIND: Final = re.compile(r"""(?<![\w.])kind\\{0,3}["']?[ \t]{0,4}:[ \t]{0,4}\\{0,3}["']?(\w+)""")
_YAML_BLOCK: Final = re.compile(r"^(?P<indent>[ \t]*(?:- )?)(?:data|stringData):[ \t]*\r?\n", re.MULTILINE)
_YAML_ENTRY: Final = re.compile(r"(?P<indent>[ \t]+)(?P<key>[\w.\-\"']{1,253}):[ \t]*(?P<value>[^\r\n]*)(?:\r?\n|$)")
_JSON_BLOCK: Final = re.compile(r"""(?<!\w)(?:data|stringData)\\{0,3}"\s{0,8}:\s{0,8}\{""")
_JSON_ENTRY: Final = re.compile(
    r"""\s{0,80},?\s{0,80}\\{0,3}"[\w.-]{1,253}\\{0,3}"\s{0,8}:\s{0,8}(?P<quote>\\{0,3}")(?P<value>[^"\\]*(?:\\[^"][^"\\]*)*)"""
)
_BLOCK_SCALAR: Final = re.compile(r"[|>][+-]?\d?[ \t]*(?:#.*)?")
_BETWEEN: Final = 200  # characters, at most, between an object's data and its kind
_NOTHING_ELSE: Final = re.compile(r"""[^:]*(?:immutable[\\"']*:[^:]*)?""")
_EMPTY: Final = frozenset({"", '""', "''", "null", "~", "{}"})


def redact_secrets(text: str, marker: Callable[[str], str]) -> str:
    """``text`` with the values of Secrets replaced by ``marker(value)``; the keys stay."""
    if "Secret" not in text or ("data" not in text and "stringData" not in text):
        return text
    kinds = [(match.start(), match[1]) for match in _KIND.finditer(text)]
    if not any(kind == "Secret" for _, kind in kinds):
        return text
    spans: list[tuple[int, int]] = []
    for block in _YAML_BLOCK.finditer(text):
        entries, end = _yaml_values(text, block)
        if _is_secret(kinds, text, block.start(), end):
            spans += entries
    for block in _JSON_BLOCK.finditer(text):
        entries, end = _json_values(text, block.end())
        if _is_secret(kinds, text, block.start(), end):
            spans += entries
    return _replaced(text, sorted(spans), marker)


def _is_secret(kinds: list[tuple[int, str]], text: str, begin: int, end: int) -> bool:
    """The object's kind stands right behind its data, or else before it."""
    after = bisect_left(kinds, (end, ""))
    if after < len(kinds) and kinds[after][0] - end < _BETWEEN and _NOTHING_ELSE.fullmatch(text, end, kinds[after][0]):
        return kinds[after][1] == "Secret"
    before = bisect_left(kinds, (begin, "")) - 1
    return before >= 0 and kinds[before][1] == "Secret"


def _yaml_values(text: str, block: re.Match[str]) -> tuple[list[tuple[int, int]], int]:
    """The values below ``block``, and where they end. A block scalar's lines are deeper than its key's."""
    outer, place = len(block["indent"]), block.end()
    values: list[tuple[int, int]] = []
    while (entry := _YAML_ENTRY.match(text, place)) is not None and len(entry["indent"]) > outer:
        depth, place = len(entry["indent"]), entry.end()
        if _BLOCK_SCALAR.fullmatch(entry["value"]):
            begin = place
            place = _deeper(text, place, depth)
            values += [(begin + len(entry["indent"]), place - 1)] if place > begin + depth else []
        elif (value := entry["value"].strip()) not in _EMPTY:
            begin = entry.start("value") + entry["value"].index(value)
            inset = 1 if len(value) > 2 and value[0] == value[-1] and value[0] in "\"'" else 0
            values.append((begin + inset, begin + len(value) - inset))
    return values, place


def _deeper(text: str, place: int, depth: int) -> int:
    """The end of the lines from ``place`` on that are deeper than ``depth``, or blank."""
    while place < len(text):
        end = text.find("\n", place) + 1 or len(text)
        line = text[place:end]
        if line.strip() and len(line) - len(line.lstrip()) <= depth:
            return place
        place = end
    return place


def _json_values(text: str, place: int) -> tuple[list[tuple[int, int]], int]:
    values: list[tuple[int, int]] = []
    while (entry := _JSON_ENTRY.match(text, place)) is not None:
        values += [entry.span("value")] if entry["value"] else []
        place = entry.end()
        if text.startswith(entry["quote"], place):
            place += len(entry["quote"])
    return values, place


def _replaced(text: str, spans: list[tuple[int, int]], marker: Callable[[str], str]) -> str:
    out: list[str] = []
    place = 0
    for begin, end in spans:
        if begin < place or MARKER_START in text[begin:end]:
            continue
        out += [text[place:begin], marker(text[begin:end])]
        place = end
    return "".join([*out, text[place:]])

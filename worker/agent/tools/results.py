"""Tool results: how they are measured, cut and summarised, and how a Python value becomes one."""

from __future__ import annotations

import string
from dataclasses import replace
from typing import Any, Final

from pydantic_core import to_json, to_jsonable_python

from shared.clean import clean, clean_text
from worker.agent.base import ToolResult

SUMMARY_CHARACTERS: Final = 200
RAW_CHARACTERS: Final = 2_000
RESULT_CHARACTERS: Final = 10_000_000  # cleaned, measured and redacted in 0.1 s, during which nothing else runs
SUMMARY_KEYS: Final = ("status", "error", "count", "message")
_NOTE_CHARACTERS: Final = 100  # more than a note of what is missing has
_HEAD_SHARE: Final = 0.7  # of what is kept; the tail of a log or an error is worth keeping too

# Bytes a token, by class, on the safe side of what cl100k gives (measured: estimate over truth 0.9 to 2.0 on prose,
# code, logs, tables, dense JSON, UUIDs, Chinese and Russian; one ratio for all, 3.5, was 44 % low on dense JSON).
# Base64 comes out at about half; nothing but decoding it would tell it from text.
_LETTER_BYTES: Final = 3.6
_OTHER_ASCII_BYTES: Final = 1.35
_WIDE_BYTES: Final = 2.0
_WIDE: Final = bytes(range(0x80, 0x100))
_LETTERS: Final = (string.ascii_letters + " ").encode()


def estimate_tokens(text: str) -> int:
    """Tokens of ``text`` by its bytes, cheaply (C speed) and rather too many than too few."""
    data = text.encode("utf-8", "surrogatepass")
    ascii_only = data.translate(None, _WIDE)
    other = len(ascii_only.translate(None, _LETTERS))
    letters = len(ascii_only) - other
    wide = len(data) - len(ascii_only)
    return int(letters / _LETTER_BYTES + other / _OTHER_ASCII_BYTES + wide / _WIDE_BYTES) + 1


def fit_result(content: str, limit_tokens: int) -> tuple[str, bool]:
    """``content`` within about ``limit_tokens``, and whether it was cut.

    A cut text keeps its head and its tail, whole lines where there are any, around a note of what is missing. The
    caller stores the whole and says where it is.
    """
    total = estimate_tokens(content)
    if total <= limit_tokens:
        return content, False
    keep = int(len(content) * limit_tokens / total)
    while keep > 0:
        text = _around_note(content, keep)
        size = estimate_tokens(text)
        if size <= limit_tokens:
            return text, True
        keep = min(keep - 1, int(keep * limit_tokens / size))  # an uneven text: what was kept is denser than the rest
    return _note(len(content)), True


def _around_note(content: str, keep: int) -> str:
    head = _to_last_line(content[: int(keep * _HEAD_SHARE)])
    tail = _from_next_line(content[len(content) - (keep - int(keep * _HEAD_SHARE)) :])
    return f"{head}\n{_note(len(content) - len(head) - len(tail))}\n{tail}"


def _note(missing: int) -> str:
    return f"[… {missing:,} characters left out …]"


def _to_last_line(text: str) -> str:
    end = text.rfind("\n")
    return text[:end] if end > len(text) // 2 else text


def _from_next_line(text: str) -> str:
    start = text.find("\n")
    return text[start + 1 :] if 0 <= start < len(text) // 2 else text


def summary_of(result: ToolResult) -> str:
    """A line for a list of calls: an object's status, error, count and message, else the first 200 characters."""
    if isinstance(result.data, dict):
        parts = [f"{key}: {_plain(result.data[key])}" for key in SUMMARY_KEYS if result.data.get(key) is not None]
        if parts:
            return ", ".join(parts)[:SUMMARY_CHARACTERS]
    return " ".join(result.content[: 2 * SUMMARY_CHARACTERS].split())[:SUMMARY_CHARACTERS]


def _plain(value: Any) -> str:
    return " ".join((value if isinstance(value, str) else encode(value)).split())


def raw_of(result: ToolResult) -> str:
    """The result's beginning, for the ``tool_calls`` row."""
    return result.content[:RAW_CHARACTERS]


def encode(value: Any) -> str:
    """JSON text of any value; what JSON has no form for becomes its ``str``."""
    return to_json(value, serialize_unknown=True, inf_nan_mode="null").decode()


def bounded(result: ToolResult) -> ToolResult:
    """The result with at most about ``RESULT_CHARACTERS``: the middle of a longer text is left out, for good, and with
    it the text as data."""
    content, data = bounded_text(result.content), result.data
    if content is not result.content or (data is not None and len(encode(data)) > RESULT_CHARACTERS):
        return replace(result, content=content, data=None)
    return result


def bounded_text(text: str) -> str:
    """``text``, without its middle if it is longer than ``RESULT_CHARACTERS``."""
    return text if len(text) <= RESULT_CHARACTERS else _around_note(text, RESULT_CHARACTERS - _NOTE_CHARACTERS)


def result_of(value: Any) -> ToolResult:
    """What a Python tool returned, as a result: text as it is, other values as JSON, a ``ToolResult`` untouched. What
    is too long is cut before anything looks at it; see ``bounded``."""
    if isinstance(value, ToolResult):
        return value
    if value is None:
        return ToolResult("done", "Done; the tool returned nothing.")
    if isinstance(value, str):
        return ToolResult("done", clean_text(bounded_text(value)))
    if isinstance(value, bytes | bytearray):
        return ToolResult("done", clean_text(bounded_text(bytes(value).decode("utf-8", "replace"))))
    data = clean(to_jsonable_python(value, serialize_unknown=True, bytes_mode="base64", inf_nan_mode="constants"))
    return bounded(ToolResult("done", encode(data), data))

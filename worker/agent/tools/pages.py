"""Pages of long texts: numbered lines from an offset, within a budget of tokens.

A line longer than ``LINE_CHARACTERS`` counts as several, so that every part of a text can be reached, also of one that
has no line breaks at all.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Final

from worker.agent.tools.results import estimate_tokens

LINE_CHARACTERS: Final = 2_000
DEFAULT_LINES: Final = 200
MATCHES: Final = 100  # lines that a search shows, at most


def wrapped(lines: Iterable[str]) -> Iterator[str]:
    """``lines`` without their line ends, long ones in pieces."""
    for line in lines:
        text = line.rstrip("\r\n")
        yield text[:LINE_CHARACTERS]
        for start in range(LINE_CHARACTERS, len(text), LINE_CHARACTERS):
            yield text[start : start + LINE_CHARACTERS]


def page(lines: Iterable[str], offset: int, limit: int, budget_tokens: int) -> str:
    """Lines ``offset`` to ``offset + limit - 1`` (the first is 1), fewer if the budget ends, and where to go on."""
    numbered = enumerate(wrapped(lines), 1)
    shown: list[str] = []
    spent, last = 0, 0
    for last, line in islice(numbered, offset - 1, None):
        spent += estimate_tokens(line)
        if len(shown) == limit or (shown and spent > budget_tokens):
            note = f"[lines {offset} to {last - 1}; there is more: continue with offset={last}]"
            return "\n".join([*shown, note])
        shown.append(line)
    if not shown:
        return f"[no line {offset}: the text ends before it]"
    return "\n".join([*shown, f"[lines {offset} to {last}, the end]"])


def search(lines: Iterable[str], text: str, offset: int, budget_tokens: int) -> str:
    """The lines from ``offset`` on that hold ``text``, in whatever case, each with its number."""
    wanted = text.casefold()
    shown: list[str] = []
    spent = 0
    for number, line in islice(enumerate(wrapped(lines), 1), offset - 1, None):
        if wanted not in line.casefold():
            continue
        spent += estimate_tokens(line)
        if len(shown) == MATCHES or (shown and spent > budget_tokens):
            return "\n".join([*shown, f"[there are more: continue with offset={number}]"])
        shown.append(f"{number}: {line}")
    return "\n".join([*shown, "[the end]"]) if shown else f"[no line from {offset} on holds {text!r}]"

"""Streaming text to a terminal of some width: lines break between words, though the words come in pieces."""

from __future__ import annotations

import re

from rich.cells import cell_len

_PARTS = re.compile(r"\n|[^\S\n]+|\S+")


class Wrapper:
    """Takes pieces, gives what can be printed. The end of a piece may be half a word, so it is kept for the next."""

    def __init__(self, width: int) -> None:
        self._width = width
        self._column = 0
        self._rest = ""

    def feed(self, text: str) -> str:
        """What can be printed now."""
        *whole, self._rest = _PARTS.findall(self._rest + text) or [""]
        return "".join(self._placed(part) for part in whole)

    def end(self) -> str:
        """The rest; the next piece begins a new line."""
        last = self._placed(self._rest)
        self._rest, self._column = "", 0
        return last

    def _placed(self, part: str) -> str:
        if part == "\n":
            self._column = 0
            return part
        length = cell_len(part)
        if self._column + length <= self._width:
            self._column += length
            return part
        if part.isspace():  # it is where the line breaks
            self._column = 0
            return "\n"
        fresh = "\n" if self._column else ""
        self._column = (length - 1) % self._width + 1  # a word longer than the line is broken by the terminal
        return f"{fresh}{part}"

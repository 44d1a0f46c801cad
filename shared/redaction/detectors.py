"""Detectors: what a secret looks like from a place in the text where a known word begins.

A detector's answer must not depend on how the text was cut into pieces. So it looks at no more than ``WINDOW``
characters from its word on, and says ``MORE`` whenever what comes next could change what it says; behind the window, a
secret that has begun goes on for as long as its characters do, which needs no second look. Where a regular expression
is used on text that may still grow, it is a chain of optional steps (``chain``), so that a match which ends before the
text does cannot come out differently later.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Final, Protocol

from shared.redaction.formats import TokenFormat

WINDOW: Final = 4_000  # characters that decide; with a closing line, at most 4 KB are held back meanwhile
LOOK_BACK: Final = 80  # characters before a word that its detector may look at; longer than any marker

MARKER_START: Final = "[redacted:"
MARKER: Final = re.compile(r"\[redacted:[a-z0-9_]{1,40}:[0-9a-f]{6}\]")
KIND: Final = re.compile(r"[a-z0-9_]{1,40}")


class More(Enum):
    """The next characters decide."""

    MORE = "more"


MORE: Final = More.MORE


@dataclass(frozen=True, slots=True)
class Hit:
    """A secret at ``begin:end`` of the text. ``kind`` None: a marker, which stays as it is. ``tail``: it fills the
    window, and goes on for as long as this matches; then ``closer``, if there is one, belongs to it too."""

    begin: int
    end: int
    kind: str | None
    tail: re.Pattern[str] | None = None
    closer: re.Pattern[str] | None = None


Found = Hit | More | None
Specific = Callable[[int], Found]


class Detector(Protocol):
    """``words``: in lower case; the detector is asked wherever one of them begins."""

    words: tuple[str, ...]

    def at(self, text: str, place: int, final: bool, specific: Specific) -> Found:
        """The secret that the word at ``place`` begins or announces. ``final``: nothing comes behind ``text``.
        ``specific``: the token that begins at a place, if any; its own marker goes before a keyword's."""
        ...


def chain(*steps: str) -> str:
    """A pattern that goes as far along ``steps`` as the text does; the last one is the group ``last``."""
    pattern = f"(?P<last>{steps[-1]})"
    for step in reversed(steps[:-1]):
        pattern = f"{step}(?:{pattern})?"
    return pattern


def open_ended(text: str, end: int, place: int, final: bool) -> bool:
    """What ends at ``end`` might go on in text that has not come yet, and the window still has room for it."""
    return end == len(text) and not final and end - place < WINDOW


def before_marker(text: str, end: int, final: bool) -> bool | More:
    """Whether a marker begins at ``end``. There a secret has been cut out already, and what is left of the word is
    none: without this, redacting twice could change what redacting once left."""
    following = text[end : end + len(MARKER_START)]
    if not following.startswith("["):
        return False
    if following != MARKER_START and MARKER_START.startswith(following) and not final:
        return MORE
    return following == MARKER_START


class MarkerDetector:
    """Markers are left alone."""

    words: tuple[str, ...] = (MARKER_START,)

    def at(self, text: str, place: int, final: bool, specific: Specific) -> Found:
        match = MARKER.match(text, place)
        if match is not None:
            return Hit(place, match.end(), None)
        partial = _PARTIAL_MARKER.match(text, place)
        return MORE if partial is not None and open_ended(text, partial.end(), place, final) else None


_PARTIAL_MARKER: Final = re.compile(chain(r"\[redacted:", "[a-z0-9_]{1,40}", ":", "[0-9a-f]{1,6}", r"\]"))


class TokenDetector:
    """A token with a prefix of its own, within one run of the characters that tokens have."""

    _RUN = re.compile(r"[\w.+/=~%-]*", re.ASCII)

    def __init__(self, format: TokenFormat) -> None:
        self.words: tuple[str, ...] = tuple(prefix.lower() for prefix in format.prefixes)
        self._format = format
        self._shape = re.compile(format.shape, re.ASCII)

    def at(self, text: str, place: int, final: bool, specific: Specific) -> Found:
        if not text.startswith(self._format.prefixes, place) or (self._format.apart and not _apart(text, place)):
            return None
        run = self._RUN.match(text, place, place + WINDOW)
        assert run is not None
        if open_ended(text, run.end(), place, final):
            return MORE
        match = self._shape.match(text, place, run.end())
        if match is None:
            return None
        cut = before_marker(text, run.end(), final)
        if cut:
            return MORE if cut is MORE else None
        full = match.end() - place == WINDOW
        return Hit(place, match.end(), self._format.kind, self._RUN if full else None)


_ESCAPE: Final = re.compile(r"\\[nrt]$")
_MARKER_END: Final = re.compile(r"\[redacted:[a-z0-9_]{1,40}:[0-9a-f]{6}\]$")


def _apart(text: str, place: int) -> bool:
    """No word or token goes on into ``place``; an escape such as ``\\n`` in JSON is no word."""
    before = text[place - 1 : place]
    if before == "]":
        return _MARKER_END.search(text, max(0, place - LOOK_BACK), place) is None
    if not (before.isalnum() or before in ("_", "+", "-")) or not before:
        return True
    return _ESCAPE.search(text, max(0, place - 2), place) is not None

"""Detectors: what a secret looks like from a place in the text where a known word begins.

A detector's answer must not depend on how the text was cut into pieces. So it looks at no more than ``WINDOW``
characters from its word on, and says ``MORE`` whenever what comes next could change what it says; behind the window, a
secret that has begun goes on for as long as its characters do, which needs no second look. Where a regular expression
is used on text that may still grow, it is a chain of optional steps (``chain``), so that a match which ends before the
text does cannot come out differently later.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Final, Protocol

from shared.redaction.formats import BEARER, KEYWORDS, TOKENS, Keyword, TokenFormat
from shared.redaction.values import counts, is_random

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


_WORD_BEFORE: Final = 16  # characters before a keyword that may belong to the same name
_SPACE: Final = r"[ \t]{0,8}"
_OPERATOR: Final = r"(?:[:=]{1,2}>?|>)"
_QUOTE: Final = "[\"'`]?"
_UNQUOTED: Final = re.compile(r"""[^\s"'`,;&<>(){}\[\]\\|]*""")
_QUOTED: Final = {q: re.compile(rf"(?:[^{q}\\\r\n]|\\[^\r\n]?)*") for q in "\"'`"}
_QUOTED_INSIDE: Final = {q: re.compile(rf"[^{q}\\\r\n]*") for q in "\"'`"}  # within JSON that is a string itself


class KeywordDetector:
    """A value behind a word: ``DB_PASSWORD=…``, ``"apiKey": "…"``, ``Authorization: Bearer …``, ``<token>…``."""

    def __init__(self, keyword: Keyword) -> None:
        self.words: tuple[str, ...] = (keyword.word,)
        self._keyword = keyword
        scheme = ("(?:(?:bearer|basic|token|digest|negotiate|apikey)[ \t]{1,8})?",) if keyword.rule == "header" else ()
        self._lead = re.compile(
            chain(
                re.escape(keyword.word) + r"s?\\{0,3}" + _QUOTE + _SPACE,
                _OPERATOR,
                _SPACE + r"(?P<escape>\\{0,3})(?P<quote>" + _QUOTE + ")" + "".join(scheme),
            ),
            re.IGNORECASE,
        )
        self._before = re.compile(keyword.before) if keyword.before else None
        self._unless = re.compile(keyword.unless) if keyword.unless else None

    def at(self, text: str, place: int, final: bool, specific: Specific) -> Found:
        start = max(0, place - _WORD_BEFORE)
        if self._before is not None and not self._before.search(text, start, place):
            return None
        if self._unless is not None and self._unless.search(text, start, place):
            return None
        lead = self._lead.match(text, place, place + WINDOW)
        assert lead is not None
        if open_ended(text, lead.end(), place, final):
            return MORE
        if lead["last"] is None:
            return None
        return self._value(text, place, lead, final, specific)

    def _value(self, text: str, place: int, lead: re.Match[str], final: bool, specific: Specific) -> Found:
        begin, quote = lead.end(), lead["quote"]
        shape = (_QUOTED_INSIDE if lead["escape"] else _QUOTED)[quote] if quote else _UNQUOTED
        match = shape.match(text, begin, place + WINDOW)
        assert match is not None
        end = match.end()
        if open_ended(text, end, place, final):
            return MORE
        full = end - place == WINDOW
        value = match.group()
        if not quote:
            if text[end : end + 1] in ("(", "[") and not full:  # a call or an item: code, or a marker
                return None
            value = value.rstrip(".:")
            end = begin + len(value) if not full else end
        if MARKER_START in value or not counts(self._keyword.rule, value):
            return None
        token = specific(begin)  # it has the marker of its own kind wherever it stands
        return token or Hit(begin, end, self._keyword.kind, shape if full else None)


class BearerDetector:
    """``Bearer …`` without its header's name."""

    words: tuple[str, ...] = (BEARER,)
    _LEAD = re.compile(chain("bearer[ \t]", "[ \t]{0,8}"), re.IGNORECASE)
    _VALUE = re.compile(r"[\w.~+/=-]*", re.ASCII)

    def at(self, text: str, place: int, final: bool, specific: Specific) -> Found:
        head = text[place : place + len(BEARER) + 1]
        if len(head) == len(BEARER):
            return None if final else MORE
        if head[-1] not in " \t":
            return None
        lead = self._LEAD.match(text, place)
        assert lead is not None
        value = self._VALUE.match(text, lead.end(), place + WINDOW)
        assert value is not None
        if open_ended(text, value.end(), place, final):
            return MORE
        if len(value.group()) < 16 or not is_random(value.group()):
            return None
        cut = before_marker(text, value.end(), final)
        if cut:
            return MORE if cut is MORE else None
        full = value.end() - place == WINDOW
        return specific(lead.end()) or Hit(lead.end(), value.end(), "authorization", self._VALUE if full else None)


class UrlDetector:
    """The password in ``scheme://user:password@host``."""

    words: tuple[str, ...] = ("://",)
    _RUN = re.compile(r"""://[^\s/?#"'`<>\\]{0,1000}""")

    def at(self, text: str, place: int, final: bool, specific: Specific) -> Found:
        run = self._RUN.match(text, place)
        assert run is not None
        if open_ended(text, run.end(), place, final) and run.end() - place < 1000:
            return MORE
        colon, at = text.find(":", place + 3, run.end()), text.rfind("@", place + 3, run.end())
        if not 0 <= colon < at - 1:
            return None
        value = text[colon + 1 : at]
        if MARKER_START in value or not _is_url_password(value):
            return None
        return specific(colon + 1) or Hit(colon + 1, at, "password")


def _is_url_password(value: str) -> bool:
    return value[0] not in "<{$%[" and counts("any", value)


class PemDetector:
    """A private key in PEM, whole or cut off, with real line ends or escaped ones."""

    words: tuple[str, ...] = ("-----begin",)
    _HEAD = re.compile(chain("-----BEGIN", "[ A-Z0-9]{0,60}", "-----"))
    _BODY = re.compile(r"(?:[A-Za-z0-9+/=\s\\:,.]|-(?!-))*")
    _TAIL = re.compile(r"[A-Za-z0-9+/=\s\\:,.]*")
    _CLOSER = re.compile(chain("-----END", "[ A-Z0-9]{0,60}", "-----"))
    _STRETCH = re.compile(r"[A-Za-z0-9+/=]{16}")

    def at(self, text: str, place: int, final: bool, specific: Specific) -> Found:
        head = self._HEAD.match(text, place)
        partial = _prefix_of(text, place, "-----BEGIN")
        if head is None:
            return MORE if partial and not final else None
        if head["last"] is None:
            return MORE if _header_open(text, head.end(), final) else None
        if "PRIVATE KEY" not in head.group():
            return None
        body = self._BODY.match(text, head.end(), place + WINDOW)
        assert body is not None
        if open_ended(text, body.end(), place, final):
            return MORE
        if not self._STRETCH.search(body.group()):
            return None
        if body.end() - place == WINDOW:
            return Hit(place, body.end(), "private_key", self._TAIL, self._CLOSER)
        closing = close(self._CLOSER, text, body.end(), final)
        return MORE if closing is MORE else Hit(place, closing, "private_key")


def _header_open(text: str, end: int, final: bool) -> bool:
    return not final and len(text) - end < len("-----") and set(text[end:]) <= {"-"}


def _prefix_of(text: str, place: int, whole: str) -> bool:
    rest = text[place : place + len(whole)]
    return len(rest) < len(whole) and whole.startswith(rest)


def close(closer: re.Pattern[str], text: str, end: int, final: bool) -> int | More:
    """Where the closing line at ``end`` ends, or ``end`` if there is none."""
    match = closer.match(text, end)
    if match is not None and match["last"] is not None:
        return match.end()
    if final:
        return end
    rest = text[end : end + 90]
    reached = match.end() - end if match is not None else 0
    waits = rest[reached:] == "-" * len(rest[reached:]) if match is not None else "-----END".startswith(rest)
    return MORE if end + len(rest) == len(text) and waits else end


def detectors() -> Iterator[Detector]:
    yield MarkerDetector()
    yield PemDetector()
    yield UrlDetector()
    yield BearerDetector()
    yield from (TokenDetector(format) for format in TOKENS)
    yield from (KeywordDetector(keyword) for keyword in KEYWORDS)

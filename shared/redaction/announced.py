"""Values that the text around them makes a secret: behind a keyword, behind ``Bearer``, in a URL."""

from __future__ import annotations

import re
from typing import Final

from shared.redaction.detectors import (
    MARKER_START,
    MORE,
    WINDOW,
    Found,
    Hit,
    Specific,
    before_marker,
    chain,
    open_ended,
)
from shared.redaction.formats import BEARER, Keyword
from shared.redaction.values import counts, is_random

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

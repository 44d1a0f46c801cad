"""Private keys in PEM: the one shape that may be longer than what can be held back."""

from __future__ import annotations

import re

from shared.redaction.detectors import MORE, WINDOW, Found, Hit, More, Specific, chain, open_ended


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

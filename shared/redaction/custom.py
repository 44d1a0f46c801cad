"""Patterns from the settings: named regular expressions of an installation's own secrets.

They run on the ``regex`` package, which can say whether a text is the beginning of a match (so that a streamed answer
is held back exactly as long as needed), and which gives up on a pattern that takes too long.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import regex
import yaml

from shared.errors import ConfigurationError
from shared.redaction.detectors import KIND, MARKER_START, MORE, WINDOW, Found, Hit

MATCH_SECONDS: Final = 1.0  # of one search; after that the whole text counts as a secret


class CustomPattern:
    """One pattern, matched in at most ``WINDOW`` characters."""

    def __init__(self, name: str, pattern: str) -> None:
        self.name = name
        self._pattern = regex.compile(pattern)

    def first(self, text: str, start: int, final: bool) -> tuple[int, Found]:
        """The first match from ``start`` on and its place; ``MORE`` and the place where one may have begun."""
        try:
            return self._first(text, start, final)
        except TimeoutError:  # fail closed
            return start, Hit(start, len(text), self.name) if start < len(text) else None

    def _first(self, text: str, start: int, final: bool) -> tuple[int, Found]:
        place, found = self._whole(text, start)
        if final:
            return place, found
        last = place + 1 if found else len(text)
        for begun in range(max(start, len(text) - WINDOW + 1), min(last, len(text))):
            if self._pattern.fullmatch(text, begun, partial=True, timeout=MATCH_SECONDS) is not None:
                return begun, MORE
        return place, found

    def _whole(self, text: str, start: int) -> tuple[int, Found]:
        while (match := self._pattern.search(text, start, timeout=MATCH_SECONDS)) is not None:
            begin, end = match.span()
            if end - begin > WINDOW:
                match = self._pattern.match(text, begin, begin + WINDOW, timeout=MATCH_SECONDS)
                end = match.end() if match else begin
            if end > begin and MARKER_START not in text[begin:end]:
                return begin, Hit(begin, end, self.name)
            start = begin + 1
        return len(text), None

    def at(self, text: str, place: int) -> Found:
        """The match that begins at ``place`` in text that will not change."""
        match = self._pattern.match(text, place, place + WINDOW, timeout=MATCH_SECONDS)
        return Hit(place, match.end(), self.name) if match is not None and match.end() > place else None


def read_patterns(path: Path) -> list[CustomPattern]:
    """The patterns of a YAML file, ``name: regex``. Raises ``ConfigurationError`` that names the wrong one."""
    try:
        loaded: Any = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise ConfigurationError(f"TURNKEEPER_REDACT: {path} cannot be read: {reason}.") from None
    if not isinstance(loaded, Mapping):
        raise ConfigurationError(f"TURNKEEPER_REDACT: {path} has to map names to regular expressions.")
    return [_checked(path, name, pattern) for name, pattern in loaded.items()]


def _checked(path: Path, name: Any, pattern: Any) -> CustomPattern:
    where = f"TURNKEEPER_REDACT: {path}: {name}"
    if not isinstance(name, str) or not KIND.fullmatch(name):
        raise ConfigurationError(f"{where}: a name has up to 40 of a-z, 0-9 and _.")
    if not isinstance(pattern, str):
        raise ConfigurationError(f"{where}: the pattern has to be text.")
    try:
        custom = CustomPattern(name, pattern)
        empty = regex.compile(pattern).search("") is not None
    except regex.error as error:
        raise ConfigurationError(f"{where}: not a regular expression: {error}.") from None
    if empty:
        raise ConfigurationError(f"{where}: the pattern matches the empty text.")
    return custom

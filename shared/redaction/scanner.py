"""The scanner: a text, whole or in pieces, with its secrets replaced; both go through the same code.

Most text holds few of the words that a secret begins with. They are all looked for at once, in bytes, by the
Aho-Corasick automaton of the Rust crate (600 MB/s; one regular expression for all of them does 12).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from ahocorasick_rs import BytesAhoCorasick

from shared.redaction.announced import BearerDetector, KeywordDetector, UrlDetector
from shared.redaction.detectors import (
    LOOK_BACK,
    MORE,
    Detector,
    Found,
    Hit,
    MarkerDetector,
    More,
    Specific,
    TokenDetector,
)
from shared.redaction.formats import KEYWORDS, TOKENS
from shared.redaction.pem import PemDetector, close

if TYPE_CHECKING:
    from shared.redaction.custom import CustomPattern

Marker = Callable[[str, str], str]
Places = dict[int, list[Detector]]


class Scanner:
    """Detectors by the words that they wait for. Immutable: one serves a process."""

    def __init__(self, custom: Sequence[CustomPattern] = ()) -> None:
        self._custom = tuple(custom)
        by_word: dict[str, list[Detector]] = {}
        for detector in detectors():
            for word in detector.words:
                by_word.setdefault(word, []).append(detector)
        self._detectors = list(by_word.values())
        self._words = BytesAhoCorasick([word.encode() for word in by_word])
        self._prefixes = frozenset(word[:length] for word in by_word for length in range(1, len(word)))
        self._longest = max(map(len, by_word)) - 1

    def secrets(self, text: str, start: int, final: bool) -> Iterator[tuple[int, Hit | More]]:
        """Each secret from ``start`` on, with the place of the word that led to it; or ``MORE`` at last, with the place
        from which on it is open what the text holds."""
        places = self._places(text, start)
        order = list(places)

        def specific(place: int) -> Found:
            return self._specific(text, place, places)

        firsts = [pattern.first(text, start, final) for pattern in self._custom]
        index = 0
        while True:
            index = bisect_left(order, start, index)
            place, found = len(text), None
            while index < len(order) and found is None:
                found = _ask(places[order[index]], text, order[index], final, specific)
                if found is None:
                    index += 1
                else:
                    place = order[index]
            for number, pattern in enumerate(self._custom):
                if firsts[number][0] < start:
                    firsts[number] = pattern.first(text, start, final)
                if firsts[number][1] is not None and (found is None or firsts[number][0] < place):
                    place, found = firsts[number]
            waits = len(text) if final else self._unfinished(text, start)
            if waits < place:
                place, found = waits, MORE
            if found is None:
                return
            yield place, found
            if found is MORE:
                return
            start = found.end

    def begins(self, text: str) -> bool:
        """Whether ``text`` is the beginning of a word, and no more than that."""
        return text.lower() in self._prefixes

    def _places(self, text: str, start: int) -> Places:
        """Where words begin from ``start`` on, in order, and whom to ask there: those of the longest word first."""
        data = text[start:].encode("utf-8", "surrogatepass")
        matches = self._words.find_matches_as_indexes(data.lower(), overlapping=True)
        ascii_only = len(data) == len(text) - start
        places: Places = {}
        char, byte = start, 0
        for word, begin, _end in sorted(matches, key=lambda match: (match[1], -match[2])):
            char += begin - byte if ascii_only else len(data[byte:begin].decode("utf-8", "surrogatepass"))
            byte = begin
            places.setdefault(char, []).extend(self._detectors[word])
        return places

    def _specific(self, text: str, place: int, places: Places) -> Found:
        """The token at ``place`` itself, if there is one, in text that goes on behind it."""
        for pattern in self._custom:
            if (found := pattern.at(text, place)) is not None:
                return found
        for detector in places.get(place, ()):
            found = detector.at(text, place, True, _nothing)
            if isinstance(found, Hit) and found.begin == place and found.kind is not None:
                return found
        return None

    def _unfinished(self, text: str, start: int) -> int:
        """Where a word may have begun that the text breaks off in, or its end."""
        tail = text[max(start, len(text) - self._longest) :].lower()
        for place in range(len(tail)):
            if tail[place:] in self._prefixes:
                return len(text) - len(tail) + place
        return len(text)


def detectors() -> Iterator[Detector]:
    """All there are; of two that wait for the same word, the first is asked first."""
    yield MarkerDetector()
    yield PemDetector()
    yield UrlDetector()
    yield BearerDetector()
    yield from (TokenDetector(format) for format in TOKENS)
    yield from (KeywordDetector(keyword) for keyword in KEYWORDS)


def _ask(asked: Sequence[Detector], text: str, place: int, final: bool, specific: Specific) -> Found:
    for detector in asked:
        if (found := detector.at(text, place, final, specific)) is not None:
            return found
    return None


def _nothing(_place: int) -> Found:
    return None


class Stream:
    """One text that comes in pieces. ``feed`` gives what can be shown by now, ``end`` the rest; joined they are what
    the whole text is redacted to, however it was cut."""

    def __init__(self, scanner: Scanner, marker: Marker) -> None:
        self._scanner, self._marker = scanner, marker
        self._behind = ""  # the last characters that were given out, as they came: detectors look back
        self._open = ""  # held back
        self._dropping: Hit | None = None  # a secret longer than the window, still going on

    def feed(self, text: str) -> str:
        return self.take(text, final=False)

    def end(self) -> str:
        return self.take("", final=True)

    def cut(self) -> str:
        """In place of ``end`` where the text was broken off: what is held back if it only might have begun a known
        word; of a secret that was coming, nothing is given out."""
        return self._open if self._scanner.begins(self._open) else ""

    def take(self, piece: str, *, final: bool) -> str:
        """``feed``, and ``end`` with the last piece if ``final``."""
        text = self._behind + self._open + piece
        place = len(self._behind)
        out: list[str] = []
        if self._dropping is not None:
            place = self._drop(text, place, final)
        while self._dropping is None:
            place = self._show(text, place, final, out)
            if self._dropping is None:
                break
            place = self._drop(text, place, final)
        self._behind, self._open = text[max(0, place - LOOK_BACK) : place], text[place:]
        return "".join(out)

    def _show(self, text: str, place: int, final: bool, out: list[str]) -> int:
        """Append what can be shown, up to what is open or to a secret that fills the window; where that is."""
        for word, found in self._scanner.secrets(text, place, final):
            if found is MORE:
                out.append(text[place:word])
                return word
            assert isinstance(found, Hit)
            secret = text[found.begin : found.end]
            out += [text[place : found.begin], self._marker(found.kind, secret) if found.kind else secret]
            place = found.end
            if found.tail is not None:
                self._dropping = found
                return place
        out.append(text[place:])
        return len(text)

    def _drop(self, text: str, place: int, final: bool) -> int:
        """Leave out what belongs to the secret that goes on; where it ended, or all that there is."""
        secret = self._dropping
        assert secret is not None
        assert secret.tail is not None
        match = secret.tail.match(text, place)
        assert match is not None
        end = match.end()
        if end == len(text) and not final:
            return len(text.rstrip("\\"))  # an escape is not to be taken apart
        if secret.closer is not None:
            closed = close(secret.closer, text, end, final)
            if closed is MORE:
                return end
            assert isinstance(closed, int)
            end = closed
        self._dropping = None
        return end

"""The people of the demo: who asks, who decides, and how the one at the keyboard says what to do."""

from __future__ import annotations

import asyncio
import os
import sys
from dataclasses import dataclass

from scripts.render import Output
from shared.errors import RequestInvalid

_CTRL_D = "\x04"
ASKS = "dana"
DECIDES = "lee"


@dataclass(frozen=True, slots=True)
class Word:
    """What somebody said about a call."""

    approved: bool
    feedback: str | None = None


class InputEnded(RequestInvalid):
    """There is nobody to decide: the input has ended."""


@dataclass(frozen=True, slots=True)
class Keyboard:
    """Asks for a decision, with the story's own as the default. ``yes``: takes the story's without asking."""

    out: Output
    yes: bool

    @property
    def terminal(self) -> bool:
        return sys.stdin.isatty()

    async def decide(self, story: Word) -> Word:
        """A key press on a terminal, a line otherwise: ``a`` approves, ``d`` denies, Enter does as the story does.

        Raises ``InputEnded`` when there is nobody to ask.
        """
        if self.yes:
            self._tell(story)
            return story
        default = "approve" if story.approved else f"deny: “{story.feedback}”"
        self.out.note(f"{DECIDES}, it is your decision: [a]pprove, [d]eny, or Enter to {default}", "bold yellow")
        while True:
            key = await _read_key()
            if key in ("", "\n", "\r"):
                word = story
            elif key in ("a", "y"):
                word = Word(True)
            elif key in ("d", "n"):
                word = Word(False, await self._feedback(story))
            else:
                continue
            self._tell(word)
            return word

    async def _feedback(self, story: Word) -> str | None:
        self.out.note(f"Why not? Enter for: {story.feedback or 'no reason'}", "yellow")
        try:
            return await _read_line() or story.feedback
        except InputEnded:  # it is decided, only the reason is missing
            return story.feedback

    def _tell(self, word: Word) -> None:
        what = "approves" if word.approved else "denies"
        why = f": {word.feedback}" if word.feedback else ""
        self.out.note(f"> {DECIDES} {what}{why}", "bold")


async def _read_key() -> str:
    """One key without Enter on a terminal; the first letter of a line otherwise."""
    if not sys.stdin.isatty():
        return (await _read_line())[:1].lower()
    import termios
    import tty

    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    try:
        tty.setcbreak(descriptor)  # Ctrl+C still interrupts
        key = (await _read_byte()).decode("ascii", "replace").lower()
        if key == _CTRL_D:  # no key of its own in this mode
            raise InputEnded("The input has ended.")
        return key
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


async def _read_line() -> str:
    """A line of the input, byte by byte: what is behind it stays for the next one. The last line may lack its end."""
    line = bytearray()
    while (byte := await _read_byte(expected=not line)) not in (b"\n", b""):
        line += byte
    return line.decode("utf-8", "replace").strip()


async def _read_byte(*, expected: bool = True) -> bytes:
    """The next byte; nothing at the end of the input, unless one is expected. The loop goes on meanwhile, so that
    Ctrl+C and the worker's end are noticed."""
    descriptor, loop = sys.stdin.fileno(), asyncio.get_running_loop()
    readable = asyncio.Event()
    try:
        loop.add_reader(descriptor, readable.set)
    except PermissionError:  # a plain file: always readable
        readable.set()
    try:
        await readable.wait()
    finally:
        loop.remove_reader(descriptor)
    byte = os.read(descriptor, 1)
    if not byte and expected:
        raise InputEnded("The demo waits for a decision and its input has ended.", hint="Run it with --yes.")
    return byte

"""The people of the demo: who asks, who decides, and how the one at the keyboard says what to do."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from scripts.render import Output
from shared.errors import RequestInvalid

ASKS = "dana"
DECIDES = "lee"


@dataclass(frozen=True, slots=True)
class Word:
    """What somebody said about a call."""

    approved: bool
    feedback: str | None = None


@dataclass(frozen=True, slots=True)
class Keyboard:
    """Asks for a decision, with the story's own as the default. ``yes``: takes the story's without asking."""

    out: Output
    yes: bool

    def decide(self, story: Word) -> Word:
        """A key press on a terminal, a line otherwise: ``a`` approves, ``d`` denies, Enter does as the story does.

        Raises ``RequestInvalid`` when there is nobody to ask.
        """
        if self.yes:
            self._tell(story)
            return story
        default = "approve" if story.approved else f"deny: “{story.feedback}”"
        self.out.note(f"{DECIDES}, it is your decision: [a]pprove, [d]eny, or Enter to {default}", "bold yellow")
        while True:
            key = _read_key()
            if key in ("", "\n", "\r"):
                word = story
            elif key in ("a", "y"):
                word = Word(True)
            elif key in ("d", "n"):
                word = Word(False, self._feedback(story))
            else:
                continue
            self._tell(word)
            return word

    def _feedback(self, story: Word) -> str | None:
        self.out.note(f"Why not? Enter for: {story.feedback or 'no reason'}", "yellow")
        return _read_line() or story.feedback

    def _tell(self, word: Word) -> None:
        what = "approves" if word.approved else "denies"
        why = f": {word.feedback}" if word.feedback else ""
        self.out.note(f"> {DECIDES} {what}{why}", "bold")


def _read_key() -> str:
    """One key without Enter on a terminal; the first letter of a line otherwise."""
    if not sys.stdin.isatty():
        return _read_line()[:1].lower()
    import termios
    import tty

    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    try:
        tty.setcbreak(descriptor)  # Ctrl+C still interrupts
        return sys.stdin.read(1).lower()
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def _read_line() -> str:
    line = sys.stdin.readline()
    if not line:
        raise RequestInvalid("The demo waits for a decision and its input has ended.", hint="Run it with --yes.")
    return line.strip()

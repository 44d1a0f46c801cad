"""The player: an incident from the first question to its end, on the product's own parts."""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
from collections.abc import Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.columns import Columns
from rich.rule import Rule

from scripts.demo.people import ASKS, DECIDES, InputEnded, Keyboard, Word
from scripts.demo.stage import NOT_OURS, Stage, open_stage
from scripts.desk import FAILED, INTERRUPTED, Desk, guarded, open_desk
from scripts.inspection import stored_events
from scripts.program import program
from scripts.render import Output, table
from scripts.turn_view import TurnView
from shared.log import configure_logging

_SERVICE = "checkout-api"
_APPROVE = Word(True)
_DENY = Word(False, "Do not restart production; check last night's image first.")
_MOST_DECISIONS = 8  # in one chapter: a real model may insist


@dataclass(frozen=True, slots=True)
class Chapter:
    """A question, and what the story decides about the calls that wait. ``worsens``: the incident goes on before."""

    title: str
    question: str
    decision: Word = _APPROVE
    worsens: bool = False


_STORY = (
    Chapter(
        "An incident, and an approval",
        f"{_SERVICE} in production keeps returning 500. Find out why and get it going again.",
    ),
    Chapter("A second question, answered from the restored history", "How many times did it restart?"),
    Chapter(
        "A denial with a reason, and another course",
        f"{_SERVICE} in production is failing again. Restart it once more.",
        _DENY,
        worsens=True,
    ),
)


def play(*, yes: bool, fast: bool) -> int:
    """Play the demo; the exit status."""
    out = Output()
    configure_logging("error")

    def run() -> int:
        try:
            return asyncio.run(_play(out, Keyboard(out, yes), fast=fast))
        except asyncio.CancelledError:  # see _end_with_the_terminal
            return INTERRUPTED

    return guarded(run)


def _end_with_the_terminal() -> None:
    """A terminal that is closed and a SIGTERM end the demo in order, as Ctrl+C does. Only the first of them counts,
    since several come where a session ends."""
    loop, story = asyncio.get_running_loop(), asyncio.current_task()
    assert story is not None
    for number in (signal.SIGHUP, signal.SIGTERM):
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup
            loop.add_signal_handler(number, lambda: story.cancelling() or story.cancel())


async def _play(out: Output, keyboard: Keyboard, *, fast: bool) -> int:
    _end_with_the_terminal()
    out.note("Turnkeeper demo: one conversation, three questions, two decisions.", "bold")
    out.note("Starting Valkey, SQLite and a worker, on this machine and for nobody else …", "dim")
    async with open_stage(fast=fast) as stage:
        _announce(stage, out)
        async with open_desk(stage.settings, out) as desk:
            return await _unless_gone(stage, _tell_story(desk, stage, keyboard))


async def _unless_gone(stage: Stage, story: Coroutine[Any, Any, int]) -> int:
    """The story's exit status; raises when the worker ends before."""
    tasks = [asyncio.create_task(story), asyncio.create_task(stage.worker.gone())]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return done.pop().result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _tell_story(desk: Desk, stage: Stage, keyboard: Keyboard) -> int:
    player = Player(desk, stage, keyboard)
    status = 0
    for chapter in _STORY:
        try:
            status = await player.play(chapter)
        except InputEnded:  # Ctrl+D
            if not keyboard.terminal:
                raise
            desk.out.note("\nThe demo ends here; what waits is closed.")
            await desk.client.stop(player.conversation_id)
            break
        if status:
            desk.out.note(f"The worker's log: {stage.worker.log}", "dim")
            break
    await _close(desk, stage, player.conversation_id)
    return status


def _announce(stage: Stage, out: Output) -> None:
    if not stage.scripted:
        out.note(f"Model: {stage.settings.model}", "dim")
        return
    missing = f" The key of {stage.unusable_model} is not set." if stage.unusable_model else ""
    out.note(
        f"Model: a scripted one, registered with litellm as a custom provider.{missing} No API key is needed; set "
        "TURNKEEPER_MODEL and its key to see a real model in its place.",
        "dim",
    )


@dataclass(slots=True)
class Player:
    """Plays chapters in one conversation."""

    desk: Desk
    stage: Stage
    keyboard: Keyboard
    conversation_id: str = ""
    _seq: int = field(default=0)

    async def play(self, chapter: Chapter) -> int:
        """Ask, decide until the turn is over; 1 if it failed."""
        out = self.desk.out
        out.console.print()
        out.console.print(Rule(chapter.title, align="left", style="dim"))
        if chapter.worsens:
            self.stage.cluster.worsen(_SERVICE)
        out.note(f"> {ASKS}: {chapter.question}", "bold")
        about: dict[str, Any] = {"conversation_id": self.conversation_id} if self.conversation_id else {}
        asked = await self.desk.client.ask(chapter.question, user_id=ASKS, **about)
        self.conversation_id = asked.conversation_id
        status = await self._watch(asked.turn)
        for _ in range(_MOST_DECISIONS):
            if status != "awaiting_approval":
                break
            status = await self._decide(chapter.decision)
        return FAILED if status == "failed" else 0

    async def _decide(self, story: Word) -> str:
        word = await self.keyboard.decide(story)
        decisions = [
            {"tool_call_id": a["tool_call_id"], "approved": word.approved, "feedback": word.feedback}
            for a in await self.desk.client.approvals(self.conversation_id)
        ]
        decided = await self.desk.client.decide(self.conversation_id, decisions, user_id=DECIDES)
        return await self._watch(decided.turn)

    async def _watch(self, turn: int) -> str:
        """Show a turn to its end; its status."""
        view = TurnView(self.desk.out, self.conversation_id, commands=False)
        async for row in self.desk.client.follow(self.conversation_id, after=self._seq, until=turn):
            if row["turn"] == turn:
                view.show(row)
            self._seq = max(self._seq, row["seq"] or 0)
        turns = await self.desk.store.turns(self.conversation_id)
        return str(next(t["status"] for t in turns if t["turn"] == turn))


async def _close(desk: Desk, stage: Stage, conversation_id: str) -> None:
    """What is left: the events, the journal, and what to try next."""
    out, settings = desk.out, stage.settings
    rows = [event async for event in stored_events(desk, conversation_id)]
    out.console.print()
    out.console.print(Rule("What is left", align="left", style="dim"))
    turns = [[row for row in rows if row["turn"] == turn] for turn in sorted({row["turn"] for row in rows})]
    out.console.print(Columns([table(turn, ("seq", "turn", "event")) for turn in turns], padding=(1, 4)))
    out.console.print()
    restarts = stage.cluster.journal()
    out.note(f"Restarts that really happened: {len(restarts)} ({stage.cluster.folder / 'journal.jsonl'})")
    out.note(f"Events: table conversation_events in {settings.sqlite_path}")
    out.note("\nTry next:", "bold")
    for command in ("show", "events", "replay"):
        out.note(f"  {_command(settings.home)} {command} {conversation_id}")


def _command(home: Path) -> str:
    """Works as it is typed, also where the user's own services are set."""
    others = "".join(f"{name}= " for name in NOT_OURS if os.environ.get(name))
    return f"{others}TURNKEEPER_HOME={shlex.quote(str(home))} {program()}"

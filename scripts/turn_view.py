"""A turn as a person watches it: the answer as it streams, a line per tool call, and the approvals it stops for."""

from __future__ import annotations

from collections import Counter
from typing import Any

from rich.text import Text

from scripts.program import program
from scripts.render import Output, approval_panel, call_line, cell, counted, plain, print_json
from scripts.wrap import Wrapper
from shared import events as names

Row = dict[str, Any]

_CALL_CHARACTERS = 300  # of a tool call's line; an approval is shown whole
_SLOW_MS = 1_000  # from here on a call's duration is worth a line


class TurnView:
    """Shows events one after the other. ``questions``: also what people said, which a reader who has just typed it
    does not need; ``commands``: how to decide about a call.

    Text streams ahead of the events that are stored in batches, so it is held back until the step before it is on the
    screen with its calls.
    """

    def __init__(self, out: Output, conversation_id: str, *, questions: bool = False, commands: bool = True) -> None:
        self._out = out
        self._conversation_id = conversation_id
        self._questions = questions
        self._commands = commands
        self._printed: dict[tuple[int, int, int], str] = {}  # (turn, attempt, step) → its text on the screen
        self._open_calls: Counter[str] = Counter()  # tool_call_ids whose results come before further text
        self._last_step: dict[int, int] = {}  # turn → its last step whose message was shown
        self._held: list[Row] = []  # deltas
        self._within_text = False
        self._wrap = Wrapper(out.console.width) if out.console.is_terminal else None

    def show(self, event: Row) -> None:
        """One event, stored or streamed."""
        if self._out.as_json:
            if event["event"] != names.AI_MESSAGE_DELTA:
                print_json(event)
            return
        shower = getattr(self, f"_{event['event']}", None)
        if shower is not None:
            shower(event, event["data"])

    def _user_message(self, event: Row, data: Row) -> None:
        verdicts = data.get("decisions") or {}
        self._open_calls.update(i for i, verdict in verdicts.items() if verdict in ("approved", "denied"))
        if not self._questions:
            return
        if data.get("ask"):
            self._line(f"\n> {data['ask']}", "bold")
        for decision in data.get("tool_decisions") or ():
            verb = "approved" if decision["approved"] else "denied"
            why = f": {decision['feedback']}" if decision.get("feedback") else ""
            self._line(f"\n> {verb} {decision['tool_call_id']}{why}", "bold")

    def _ai_message_delta(self, event: Row, data: Row) -> None:
        if data.get("reset"):
            self._held.clear()
            self._end_text()
        elif self._open_calls or data["step"] > self._last_step.get(event["turn"], 0) + 1:
            self._held.append(event)
        else:
            self._write(event, data, data.get("text") or "")

    def _ai_message(self, event: Row, data: Row) -> None:
        self._last_step[event["turn"]] = data["step"]
        text, printed = text_of(data["message"]), self._printed.get(_step(event, data), "")
        if text.startswith(printed):
            self._write(event, data, text[len(printed) :])
        else:  # pieces were missed
            self._end_text()
            self._write(event, data, text)
        self._end_text()
        self._open_calls = Counter(call["id"] for call in data["message"].get("tool_calls") or ())
        self._release()

    def _release(self) -> None:
        """Show the text that was held back, unless it has to wait on or its message has come in between."""
        held, self._held = self._held, []
        for delta in held:
            if delta["data"]["step"] > self._last_step.get(delta["turn"], 0):
                self._ai_message_delta(delta, delta["data"])

    def _write(self, event: Row, data: Row, text: str) -> None:
        step = _step(event, data)
        if text and step not in self._printed:
            self._end_text()
        self._printed[step] = self._printed.get(step, "") + text
        self._print(text)

    def _tool_call_started(self, event: Row, data: Row) -> None:
        line = call_line(data["tool_name"], data.get("params"))
        self._line(f"→ {line[:_CALL_CHARACTERS]}{'…' if len(line) > _CALL_CHARACTERS else ''}", "dim")

    def _tool_call_result(self, event: Row, data: Row) -> None:
        status, duration = data["status"], data.get("duration_ms")
        if status != "done":
            self._line(f"← {data['tool_name']} {status}: {text_of(data['message'])}", "yellow")
        elif duration and duration >= _SLOW_MS:
            self._line(f"← {data['tool_name']} {duration / 1000:.1f} s", "dim")
        if data.get("rule_refused"):
            self._line(f"You will be asked again: {data['rule_refused']}", "yellow")
        self._open_calls.subtract([data["tool_call_id"]])
        self._open_calls = +self._open_calls
        self._release()

    def _approval_required(self, event: Row, data: Row) -> None:
        self._end_text()
        for approval in data.get("pending_approvals") or ():
            if self._commands:
                self._out.approval(approval, self._conversation_id)
            else:
                self._out.console.print(approval_panel(approval))
        for call in data.get("pending_frontend_tool_calls") or ():
            self._line(f"waits for the client's result of {call_line(call['tool_name'], call.get('params'))}", "yellow")

    def _history_compacted(self, event: Row, data: Row) -> None:
        self._line("(older messages were summarised)", "dim")

    def _turn_resumed(self, event: Row, data: Row) -> None:
        self._line(f"(another worker goes on, attempt {event['attempt']})", "dim")

    def _answer_end(self, event: Row, data: Row) -> None:
        self._end_text()

    def _turn_stopped(self, event: Row, data: Row) -> None:
        self._line("(stopped)", "yellow")

    def _error(self, event: Row, data: Row) -> None:
        self._line(f"failed: {data['description']}", "red")
        if data.get("hint"):
            self._line(data["hint"], "yellow")
        if data.get("retryable") and self._commands:
            self._line(f"Try it again from where it failed: {program()} retry {self._conversation_id}", "")

    def _line(self, text: str, style: str) -> None:
        self._end_text()
        self._out.console.print(Text(plain(text), style=style), soft_wrap=True)

    def _print(self, text: str) -> None:
        if text:
            self._within_text = not text.endswith("\n")
            self._put(self._wrap.feed(plain(text)) if self._wrap else plain(text))

    def _end_text(self) -> None:
        rest = self._wrap.end() if self._wrap else ""
        self._put(f"{rest}\n" if self._within_text else rest)
        self._within_text = False

    def _put(self, text: str) -> None:
        if text:
            self._out.console.print(Text(text), end="", soft_wrap=True)
            self._out.console.file.flush()


def _step(event: Row, data: Row) -> tuple[int, int, int]:
    return event["turn"], event["attempt"], data["step"]


def text_of(message: Row) -> str:
    """A message's words; images and other parts are left out."""
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    return "\n".join(part.get("text", "") for part in content if isinstance(part, dict))


def totals_line(turn: Row) -> str:
    """What a turn used, in one line."""
    seconds = (turn.get("duration_ms") or 0) / 1000
    tokens = (turn.get("prompt_tokens") or 0) + (turn.get("completion_tokens") or 0)
    parts = [counted(turn["rounds"], "round"), counted(turn["tool_calls"], "tool call"), counted(tokens, "token")]
    parts.append(f"{seconds:.1f} s")
    cost = float(turn.get("cost_usd") or 0)
    if cost:
        parts.append(f"${cell('cost_usd', cost)}")
    return ", ".join(parts)

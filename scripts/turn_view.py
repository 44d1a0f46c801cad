"""A turn as a person watches it: the answer as it streams, a line per tool call, and the approvals it stops for."""

from __future__ import annotations

from typing import Any

from rich.text import Text

from scripts.render import Output, approval_panel, call_line, cell, plain, print_json
from shared import events as names

Row = dict[str, Any]

_CALL_CHARACTERS = 300  # of a tool call's line; an approval is shown whole
_SLOW_MS = 1_000  # from here on a call's duration is worth a line


class TurnView:
    """Shows events one after the other. ``live``: questions were typed by the reader and are not repeated."""

    def __init__(self, out: Output, conversation_id: str, *, live: bool = True) -> None:
        self._out = out
        self._conversation_id = conversation_id
        self._live = live
        self._step: tuple[int, int, int] | None = None  # (turn, attempt, step) whose text is on the screen
        self._shown = ""

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
        if self._live:
            return
        asked = data.get("ask")
        if asked:
            self._line(f"\n> {asked}", "bold")
        for decision in data.get("tool_decisions") or ():
            verb = "approved" if decision["approved"] else "denied"
            why = f": {decision['feedback']}" if decision.get("feedback") else ""
            self._line(f"\n> {verb} {decision['tool_call_id']}{why}", "bold")

    def _ai_message_delta(self, event: Row, data: Row) -> None:
        step = (event["turn"], event["attempt"], data["step"])
        if step != self._step:
            self._end_text()
            self._step = step
        text = data.get("text") or ""
        self._shown += text
        self._print(text)

    def _ai_message(self, event: Row, data: Row) -> None:
        text = text_of(data["message"])
        if text.startswith(self._shown):
            self._print(text[len(self._shown) :])
            self._shown = text
        else:  # pieces were missed: the message as it is stored counts
            self._end_text()
            self._shown = text
            self._print(text)
        self._end_text()

    def _tool_call_started(self, event: Row, data: Row) -> None:
        line = call_line(data["tool_name"], data.get("params"))
        self._line(f"→ {line[:_CALL_CHARACTERS]}{'…' if len(line) > _CALL_CHARACTERS else ''}", "dim")

    def _tool_call_result(self, event: Row, data: Row) -> None:
        status, duration = data["status"], data.get("duration_ms")
        if status != "done":
            self._line(f"← {data['tool_name']} {status}: {text_of(data['message'])}", "yellow")
        elif duration and duration >= _SLOW_MS:
            self._line(f"← {data['tool_name']} {duration / 1000:.1f} s", "dim")

    def _approval_required(self, event: Row, data: Row) -> None:
        self._end_text()
        for approval in data.get("pending_approvals") or ():
            self._out.console.print(approval_panel(approval, conversation_id=self._conversation_id, how=self._live))
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
        hint = f" {data['hint']}" if data.get("hint") else ""
        self._line(f"failed: {data['description']}{hint}", "red")

    def _line(self, text: str, style: str) -> None:
        self._end_text()
        self._out.console.print(Text(plain(text), style=style), soft_wrap=True)

    def _print(self, text: str) -> None:
        if text:
            self._out.console.print(Text(plain(text)), end="", soft_wrap=True)
            self._out.console.file.flush()

    def _end_text(self) -> None:
        if self._shown:
            self._out.console.print()
        self._shown = ""
        self._step = None


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
    parts = [f"{turn['rounds']} rounds", f"{turn['tool_calls']} tool calls", f"{tokens} tokens", f"{seconds:.1f} s"]
    cost = float(turn.get("cost_usd") or 0)
    if cost:
        parts.append(f"${cell('cost_usd', cost)}")
    return ", ".join(parts)

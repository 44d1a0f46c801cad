"""What the command line shows: a turn as it happens, tables for people, and JSON lines for programs.

Everything goes to stdout. Texts from models, tools and users are printed as they are, never as markup.
"""

from __future__ import annotations

import errno
import json
import re
import sys
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any

from rich.console import Console, Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from scripts.program import program
from shared import events as names
from worker.agent.visible import visible_text

Row = dict[str, Any]

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_PROGRAM_WIDTH = 160  # columns when nobody's terminal says otherwise


class _Console(Console):
    def on_broken_pipe(self) -> None:
        raise BrokenPipeError(errno.EPIPE, "The reader has closed the pipe")  # rich would end the process, status 1


class Output:
    """Where a command's answer goes. ``as_json``: one JSON object a line, else for people."""

    def __init__(self, as_json: bool = False) -> None:
        self.as_json = as_json
        width = None if sys.stdout.isatty() else _PROGRAM_WIDTH
        self.console = _Console(highlight=False, soft_wrap=False, width=width)

    def row(self, row: Row, *, text: str | None = None) -> None:
        """One answer: the row as JSON, or ``text`` (default: a line per column)."""
        if self.as_json:
            print_json(row)
        elif text is not None:
            self.note(text)
        else:
            self.console.print(_fields(row))

    def rows(self, rows: Iterable[Row], columns: Sequence[str], *, empty: str, cut: str | None = None) -> None:
        """A list: a JSON line each, or a table of ``columns``; see ``table`` for ``cut``."""
        if self.as_json:
            for row in rows:
                print_json(row)
            return
        rows = list(rows)
        if not rows:
            self.note(empty)
            return
        self.console.print(table(rows, columns, cut=cut))

    def approval(self, approval: Row, conversation_id: str) -> None:
        """A call that waits, and how to decide about it."""
        if self.as_json:
            return
        self.console.print(approval_panel(approval))
        identifier = approval["tool_call_id"]
        decide = f"{program()} decide {conversation_id}"
        self.note(f"{decide} --approve {identifier}")
        self.note(f"{decide} --deny {identifier}      (--feedback tells the model why)")

    def line(self, text: str) -> None:
        """A line for people that ends at the right edge."""
        if not self.as_json:
            self.console.print(Text(plain(text)), no_wrap=True, overflow="ellipsis")

    def note(self, text: str, style: str = "") -> None:
        """A line for people; programs do not get it."""
        if not self.as_json:
            self.console.print(Text(plain(text), style=style), soft_wrap=True)


def print_json(row: Row) -> None:
    print(json.dumps(row, ensure_ascii=False, default=str), flush=True)


def table(rows: Sequence[Row], columns: Sequence[str], *, cut: str | None = None) -> Table:
    """A plain table; nested values are shown as JSON. ``cut``: the column that ends at the right edge, so that every
    row has one line; without one, long values are folded."""
    shown = Table(box=None, pad_edge=False, header_style="dim")
    for column in columns:
        shown.add_column(column, overflow="fold", no_wrap=column.endswith("_id") or cut not in (None, column))
    for row in rows:
        shown.add_row(*(_cell(column, row, cut) for column in columns))
    return shown


def _cell(column: str, row: Row, cut: str | None) -> Text:
    text = cell(column, row.get(column))
    return Text(" ".join(text.split()), no_wrap=True, overflow="ellipsis") if column == cut else Text(text)


def cell(column: str, value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return short_time(value) if column.endswith(("_at", "now")) else visible_text(value)
    if isinstance(value, dict | list):
        return visible_text(json.dumps(value, ensure_ascii=False, default=str))
    if isinstance(value, float):
        return f"{value:.4f}".rstrip("0").rstrip(".")
    return str(value)


def counted(number: int, thing: str) -> str:
    """``1 call``, ``2 calls``."""
    return f"{number} {thing}{'' if number == 1 else 's'}"


def short_time(text: str) -> str:
    """A stored time (RFC 3339, UTC) in the reader's zone, to the second."""
    return datetime.fromisoformat(text).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def _fields(row: Row) -> Table:
    shown = Table(box=None, show_header=False, pad_edge=False)
    shown.add_column(style="dim")
    shown.add_column(overflow="fold")
    for column, value in row.items():
        if value not in (None, [], {}):
            shown.add_row(column, Text(cell(column, value)))
    return shown


def call_line(name: str, params: Any) -> str:
    """A call as a person writes it: ``get_pods(namespace="production")``. ``params`` were made visible before."""
    if not isinstance(params, dict):
        return f"{visible_text(name)}({_shown(params)})"
    return f"{visible_text(name)}({', '.join(f'{k}={_shown(v)}' for k, v in params.items())})"


def _shown(value: Any) -> str:
    """A visible value as JSON; the escapes of what was invisible keep their one backslash."""
    return plain(json.dumps(value, ensure_ascii=False, default=str)).replace("\\\\u{", "\\u{")


def plain(text: str) -> str:
    """Text that a terminal prints and does not obey: control characters are replaced, line feeds and tabs stay."""
    return _CONTROL.sub("\ufffd", text)


def approval_panel(approval: Row) -> Panel:
    """One call that waits for a person, whole: nothing of its arguments is cut or hidden."""
    params = approval.get("params") or {}
    lines: list[Any] = [Text(visible_text(approval["tool_name"]), style="bold")]
    lines += [Text(f"  {name} = {_shown(value)}") for name, value in params.items()]
    if approval.get("tool_description"):
        lines.append(Text(visible_text(approval["tool_description"]), style="dim"))
    expires = f", decide before {short_time(approval['expires_at'])}" if approval.get("expires_at") else ""
    lines.append(Text(f"{approval.get('risk', '')}{expires}", style="dim"))
    title = "approval required"
    return Panel(Group(*lines), title=title, title_align="left", border_style="yellow", expand=False)


def event_line(event: Row) -> str:
    """What an event says, in one line."""
    data, name = event["data"], event["event"]
    if name == names.USER_MESSAGE:
        return str(data.get("ask") or f"{data.get('kind', 'request')}: {_decisions(data)}")
    if name == names.AI_MESSAGE:
        message = data.get("message") or {}
        calls = ", ".join(c["function"]["name"] for c in message.get("tool_calls") or ())
        return " → ".join(part for part in (_content(message), calls) if part)
    if name == names.TOOL_CALL_STARTED:
        return call_line(data["tool_name"], data.get("params"))
    if name == names.TOOL_CALL_RESULT:
        return f"{data.get('status', '')}: {_content(data.get('message') or {})}"
    if name == names.APPROVAL_REQUIRED:
        waiting = [call_line(a["tool_name"], a.get("params")) for a in data.get("pending_approvals") or ()]
        waiting += [call_line(c["tool_name"], c.get("params")) for c in data.get("pending_frontend_tool_calls") or ()]
        return ", ".join(waiting)
    if name == names.ANSWER_END:
        return str(data.get("content") or "")
    if name == names.ERROR:
        return f"{data.get('code')}: {data.get('description')}"
    return ", ".join(f"{k}={v}" for k, v in data.items() if k != "messages" and isinstance(v, str | int | float))


def _decisions(data: Row) -> str:
    words = []
    for decision in data.get("tool_decisions") or ():
        verb = "approve" if decision["approved"] else "deny"
        feedback = f" ({decision['feedback']})" if decision.get("feedback") else ""
        words.append(f"{verb} {decision['tool_call_id']}{feedback}")
    words += [f"result of {r['tool_call_id']}" for r in data.get("frontend_tool_results") or ()]
    return ", ".join(words) or "go on"


def _content(message: Row) -> str:
    content = message.get("content") or ""
    return content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)

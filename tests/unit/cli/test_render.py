"""What is printed: whole where a person decides, harmless where a terminal would obey."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from scripts.render import Output, approval_panel, call_line, event_line, plain
from worker.agent.visible import make_visible


def printed(renderable: object) -> str:
    console = Console(file=io.StringIO(), width=200, highlight=False)
    console.print(renderable)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def approval(params: dict[str, object]) -> dict[str, object]:
    return {"tool_call_id": "c1", "tool_name": "shell", "params": make_visible(params), "risk": "side_effect"}


def test_an_approval_shows_long_arguments_whole() -> None:
    long = "x" * 5_000
    shown = printed(approval_panel(approval({"command": long})))
    assert shown.count("x") == 5_000


def test_an_approval_shows_what_would_hide() -> None:
    shown = printed(approval_panel(approval({"command": "ls \u202egnp.exe\x1b[8m\nrm -rf /"})))
    assert '"ls \\u{202E}gnp.exe\\u{001B}[8m\\nrm -rf /"' in shown
    assert "\x1b" not in shown
    assert "\u202e" not in shown


def test_an_approval_does_not_read_arguments_as_markup() -> None:
    assert "[red]x[/red]" in printed(approval_panel(approval({"command": "[red]x[/red]"})))


def test_a_literal_escape_and_a_hidden_character_stay_apart() -> None:
    literal, hidden = (call_line("f", make_visible({"a": text})) for text in ("\\u{202E}", "\u202e"))
    assert literal != hidden


def test_strings_and_numbers_of_a_call_stay_apart() -> None:
    assert call_line("scale", {"n": 5}) == "scale(n=5)"
    assert call_line("scale", {"n": "5"}) == 'scale(n="5")'


def test_plain_keeps_layout_and_disarms_control_characters() -> None:
    assert plain("a\tb\nc") == "a\tb\nc"
    assert plain("a\x1b[2Jb\x07\r\x9b") == "a\ufffd[2Jb\ufffd\ufffd\ufffd"


@pytest.mark.parametrize(
    ("event", "data", "line"),
    [
        ("user_message", {"ask": "why?"}, "why?"),
        (
            "user_message",
            {"kind": "tool_decisions", "tool_decisions": [{"tool_call_id": "c1", "approved": False, "feedback": "no"}]},
            "tool_decisions: deny c1 (no)",
        ),
        ("user_message", {"kind": "retry"}, "retry: go on"),
        (
            "ai_message",
            {"message": {"content": "Let me see.", "tool_calls": [{"function": {"name": "get_pods"}}]}},
            "Let me see. → get_pods",
        ),
        ("tool_call_started", {"tool_name": "get_pods", "params": {"app": "web"}}, 'get_pods(app="web")'),
        ("tool_call_result", {"status": "done", "message": {"content": "3 pods"}}, "done: 3 pods"),
        (
            "approval_required",
            {"pending_approvals": [{"tool_name": "restart", "params": {"app": "web"}}]},
            'restart(app="web")',
        ),
        ("answer_end", {"content": "It is up."}, "It is up."),
        ("error", {"code": "rate_limited", "description": "Too many."}, "rate_limited: Too many."),
        ("turn_stopped", {}, ""),
    ],
)
def test_every_event_says_what_happened_in_a_line(event: str, data: dict[str, object], line: str) -> None:
    assert event_line({"event": event, "data": data}) == line


def test_json_output_is_one_object_a_line_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    out = Output(as_json=True)
    out.note("for people")
    out.row({"title": "é\n"}, text="for people")
    out.rows([{"a": 1}, {"a": 2}], ("a",), empty="none")
    lines = capsys.readouterr().out.splitlines()
    assert [json.loads(line) for line in lines] == [{"title": "é\n"}, {"a": 1}, {"a": 2}]


def test_a_table_keeps_ids_in_one_piece(capsys: pytest.CaptureFixture[str]) -> None:
    identifier = "1f32ea24-f326-534d-9a05-08ecfb43f503"
    Output().rows([{"conversation_id": identifier, "title": "t " * 200}], ("conversation_id", "title"), empty="none")
    assert identifier in capsys.readouterr().out


def test_a_line_ends_at_the_right_edge(capsys: pytest.CaptureFixture[str]) -> None:
    Output().line("word " * 100)
    (line,) = capsys.readouterr().out.splitlines()
    assert len(line) <= 160
    assert line.endswith("…")

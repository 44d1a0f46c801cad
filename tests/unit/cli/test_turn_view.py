"""A turn on the screen: every word once, in the order of what happened, however the events arrive."""

from __future__ import annotations

from typing import Any

import pytest

from scripts.render import Output
from scripts.turn_view import TurnView

CALL = {"id": "c1", "type": "function", "function": {"name": "get_pods", "arguments": "{}"}}


def row(event: str, seq: int | None, attempt: int = 1, **data: Any) -> dict[str, Any]:
    return {"conversation_id": "x", "seq": seq, "turn": 1, "attempt": attempt, "event": event, "data": data}


def delta(step: int, text: str, attempt: int = 1, **more: Any) -> dict[str, Any]:
    return row("ai_message_delta", None, attempt, step=step, text=text, **more)


def message(step: int, text: str, seq: int, attempt: int = 1, **more: Any) -> dict[str, Any]:
    return row("ai_message", seq, attempt, step=step, message={"role": "assistant", "content": text, **more})


def screen(rows: list[dict[str, Any]], capsys: pytest.CaptureFixture[str], **options: bool) -> list[str]:
    view = TurnView(Output(), "x", **options)
    for entry in rows:
        view.show(entry)
    return capsys.readouterr().out.splitlines()


STARTED = row("tool_call_started", 3, tool_call_id="c1", tool_name="get_pods", params={"app": "web"})
RESULT = row(
    "tool_call_result", 4, tool_call_id="c1", tool_name="get_pods", status="done", duration_ms=2,
    message={"role": "tool", "content": "[]"},
)  # fmt: skip


def test_streamed_text_is_not_repeated_by_its_message(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [delta(1, "It "), delta(1, "is up."), message(1, "It is up.", 2), row("answer_end", 3, content="It is up.")]
    assert screen(rows, capsys) == ["It is up."]


def test_text_that_was_missed_comes_with_the_message(capsys: pytest.CaptureFixture[str]) -> None:
    assert screen([delta(1, "It "), message(1, "It is up.", 2)], capsys) == ["It is up."]
    assert screen([message(1, "It is up.", 2)], capsys) == ["It is up."]
    assert screen([delta(1, "up.", gap=True), message(1, "It is up.", 2)], capsys) == ["up.", "It is up."]


def test_text_that_overtakes_a_calls_events_waits_for_them(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        message(1, "I look.", 2, tool_calls=[CALL]),
        delta(2, "It is up."),
        STARTED,
        RESULT,
        message(2, "It is up.", 5),
    ]
    assert screen(rows, capsys) == ["I look.", '→ get_pods(app="web")', "It is up."]


def test_text_that_overtakes_a_whole_step_waits_for_it(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        delta(1, "I lo"),
        delta(2, "It is "),
        delta(2, "up."),
        message(1, "I look.", 2, tool_calls=[CALL]),
        STARTED,
        RESULT,
        message(2, "It is up.", 5),
    ]
    assert screen(rows, capsys) == ["I look.", '→ get_pods(app="web")', "It is up."]


def test_text_behind_a_decision_waits_for_the_decided_calls_result(capsys: pytest.CaptureFixture[str]) -> None:
    asked = row("user_message", 1, kind="tool_decisions", decisions={"c1": "denied", "c9": "unknown"})
    denied = row(
        "tool_call_result", 2, tool_call_id="c1", tool_name="get_pods", status="denied", duration_ms=None,
        message={"role": "tool", "content": "Tool execution was denied by the user."},
    )  # fmt: skip
    rows = [asked, delta(1, "Then not."), denied, message(1, "Then not.", 3)]
    assert screen(rows, capsys) == ["← get_pods denied: Tool execution was denied by the user.", "Then not."]


def test_another_attempt_begins_its_text_anew(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        delta(1, "It is do"),
        delta(1, "", attempt=2, reset=True),
        row("turn_resumed", 2, 2, reason="lease_expired"),
        delta(1, "It is up.", attempt=2),
        message(1, "It is up.", 3, attempt=2),
    ]
    assert screen(rows, capsys) == ["It is do", "(another worker goes on, attempt 2)", "It is up."]


def test_an_approval_shows_its_call_and_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    pending = {"tool_call_id": "c1", "tool_name": "restart", "params": {"app": "web"}, "risk": "side_effect"}
    rows = [row("approval_required", 2, pending_approvals=[pending], pending_frontend_tool_calls=[])]
    shown = "\n".join(screen(rows, capsys))
    assert 'app = "web"' in shown
    assert " decide x --approve c1" in shown
    assert " decide " not in "\n".join(screen(rows, capsys, commands=False))


def test_questions_are_shown_only_to_who_did_not_type_them(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [row("user_message", 1, kind="ask", ask="why?")]
    assert screen(rows, capsys) == []
    assert screen(rows, capsys, questions=True)[-1] == "> why?"


def test_an_answer_cannot_drive_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    assert screen([delta(1, "a\x1b[2Jb"), message(1, "a\x1b[2Jb", 2)], capsys) == ["a\ufffd[2Jb"]


def test_unknown_events_do_not_disturb(capsys: pytest.CaptureFixture[str]) -> None:
    assert screen([row("something_new", 2, x=1)], capsys) == []


@pytest.mark.parametrize("retryable", [True, False])
def test_a_failure_says_how_to_try_again_only_if_that_may_help(
    retryable: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    failed = row("error", 2, code="model_unavailable", description="It broke.", hint="Wait.", retryable=retryable)
    lines = screen([failed], capsys)
    assert lines[:2] == ["failed: It broke.", "Wait."]
    assert [line for line in lines if line.endswith(" retry x")] == lines[2:]
    assert len(lines) == 2 + retryable


def test_a_rule_that_will_decide_nothing_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    result = {**RESULT, "data": {**RESULT["data"], "rule_refused": "A rule for shell needs a prefix."}}
    assert "You will be asked again: A rule for shell needs a prefix." in screen([STARTED, result], capsys)

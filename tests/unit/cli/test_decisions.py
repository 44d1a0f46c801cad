"""What is typed at ``turnkeeper decide`` becomes decisions, or is refused before anything is recorded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scripts.decisions import Choice
from shared.errors import RequestInvalid

PENDING = [
    {"tool_call_id": "c1", "tool_name": "restart", "approval_token": "t1", "can_remember": True},
    {"tool_call_id": "c2", "tool_name": "scale", "approval_token": "t2"},
    {"tool_call_id": "c3", "tool_name": "delete", "approval_token": "t3"},
]


def test_approves_and_denies_by_id_with_the_tokens_of_the_event() -> None:
    decisions = Choice(approve=("c1",), deny=("c3",), feedback=("not now",)).decisions(PENDING)
    assert decisions == [
        {"approval_token": "t1", "tool_call_id": "c1", "approved": True},
        {"approval_token": "t3", "tool_call_id": "c3", "approved": False, "feedback": "not now"},
    ]


def test_all_means_every_call_that_waits() -> None:
    assert [d["tool_call_id"] for d in Choice(approve=("all",)).decisions(PENDING)] == ["c1", "c2", "c3"]
    assert [d["approved"] for d in Choice(deny=("all",)).decisions(PENDING)] == [False] * 3


def test_one_feedback_goes_to_all_denials_and_several_go_in_order() -> None:
    same = Choice(deny=("c1", "c2"), feedback=("no",)).decisions(PENDING)
    assert [d["feedback"] for d in same] == ["no", "no"]
    each = Choice(deny=("c1", "c2"), feedback=("no", "never")).decisions(PENDING)
    assert [d["feedback"] for d in each] == ["no", "never"]


def test_a_denial_without_words_has_none() -> None:
    (denied,) = Choice(deny=("c2",)).decisions(PENDING)
    assert "feedback" not in denied


def test_feedback_that_fits_no_denial_is_refused() -> None:
    with pytest.raises(RequestInvalid, match="2 --feedback for 1"):
        Choice(deny=("c1",), feedback=("a", "b")).decisions(PENDING)
    with pytest.raises(RequestInvalid, match="1 --feedback for 0"):
        Choice(approve=("c1",), feedback=("a",)).decisions(PENDING)


def test_an_unknown_id_is_refused_and_the_waiting_ones_are_named() -> None:
    with pytest.raises(RequestInvalid, match="c1 \\(restart\\)") as refused:
        Choice(approve=("zz",)).decisions(PENDING)
    assert "'zz'" in refused.value.description


def test_nothing_chosen_is_refused() -> None:
    with pytest.raises(RequestInvalid, match="Nothing was decided"):
        Choice().decisions(PENDING)
    with pytest.raises(RequestInvalid, match="Nothing waits"):
        Choice(approve=("all",)).decisions([])


@pytest.mark.parametrize(
    ("text", "expected"),
    [("user", {"scope": "user"}), ("conversation:kubectl get", {"scope": "conversation", "prefix": "kubectl get"})],
)
def test_remember_is_a_scope_with_an_optional_prefix(text: str, expected: dict[str, str]) -> None:
    shell = {"tool_call_id": "c1", "tool_name": "shell", "approval_token": "t1", "can_remember": True}
    shell["remember_needs_prefix"] = ":" in text
    approved, denied = Choice(approve=("c1",), deny=("c2",), remember=text).decisions([shell, PENDING[1]])
    assert approved["remember"] == expected
    assert "remember" not in denied


@pytest.mark.parametrize(
    ("remember", "told"),
    [
        ("conversation", "needs a prefix"),
        ("conversation:", "needs a prefix"),
        ("user:bash", "runs other programs"),
        ("user:kubectl get | sh", "one plain command"),
        ("everybody:kubectl get", "'everybody' is no scope"),
    ],
)
def test_a_rule_that_would_decide_nothing_is_refused_with_the_form(remember: str, told: str) -> None:
    call = {"tool_call_id": "c1", "tool_name": "shell", "approval_token": "t1"}
    pending = [{**call, "can_remember": True, "remember_needs_prefix": True}]
    with pytest.raises(RequestInvalid, match="othing was decided") as refused:
        Choice(approve=("c1",), remember=remember).decisions(pending)
    assert told in refused.value.description
    assert "SCOPE:PREFIX" in refused.value.hint


def test_a_prefix_that_the_tool_does_not_take_is_refused() -> None:
    with pytest.raises(RequestInvalid, match="takes no prefix"):
        Choice(approve=("c1",), remember="user:x").decisions(PENDING)


def test_remembering_what_is_asked_every_time_is_refused() -> None:
    with pytest.raises(RequestInvalid, match="no effect on scale"):
        Choice(approve=("c2",), remember="user").decisions(PENDING)


def test_an_id_that_waits_twice_is_decided_for_both() -> None:
    twice = [*PENDING, {"tool_call_id": "c1", "tool_name": "restart", "approval_token": "t9"}]
    assert [d["approval_token"] for d in Choice(approve=("c1",)).decisions(twice)] == ["t1", "t9"]


def test_a_file_holds_decisions_in_the_form_of_the_request(tmp_path: Path) -> None:
    path = tmp_path / "d.json"
    path.write_text(json.dumps([{"tool_call_id": "c2", "approved": False, "feedback": "no"}]))
    assert Choice(file=path).decisions(PENDING) == [
        {"approval_token": "t2", "tool_call_id": "c2", "approved": False, "feedback": "no"}
    ]


@pytest.mark.parametrize("content", ["{", "[1]", '[{"approved": true}]', "null"])
def test_a_file_that_is_none_of_that_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "d.json"
    path.write_text(content)
    with pytest.raises(RequestInvalid, match="nothing was decided"):
        Choice(file=path).decisions(PENDING)

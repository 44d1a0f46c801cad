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
    approved, denied = Choice(approve=("c1",), deny=("c2",), remember=text).decisions(PENDING)
    assert approved["remember"] == expected
    assert "remember" not in denied


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

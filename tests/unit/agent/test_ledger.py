"""The ledger: which row an open call of the history belongs to, and what waits in which turn."""

from __future__ import annotations

from typing import Any

import pytest

from shared.history import open_calls
from tests.support.agent import call
from worker.agent.ledger import Call, Ledger


def row(turn: int, step: int, index: int, call_id: str, **columns: Any) -> dict[str, Any]:
    return {
        "turn": turn,
        "step": step,
        "call_index": index,
        "tool_call_id": call_id,
        "tool_name": "t",
        "arguments": "{}",
        "arguments_digest": "d",
        "risk": "side_effect",
        "kind": "tool",
        "gated": True,
        "state": "pending",
        "decided_turn": None,
        "decided_by": None,
        "decision": None,
        "expires_at": None,
        "reason": None,
        **columns,
    }


def assistant(*ids: str) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": [call("t", id) for id in ids]}


def keys(ledger: Ledger, *messages: dict[str, Any]) -> list[Any]:
    return [c.key for c in ledger.match(open_calls([{"role": "user", "content": "?"}, *messages]))]


def test_each_open_call_finds_its_row() -> None:
    ledger = Ledger([row(1, 1, 0, "a"), row(1, 1, 1, "b")])
    assert keys(ledger, assistant("a", "b")) == [(1, 1, 0), (1, 1, 1)]


def test_of_rows_under_one_id_the_latest_call_takes_the_latest() -> None:
    ledger = Ledger([row(2, 1, 0, "x"), row(1, 1, 0, "x")])
    assert keys(ledger, assistant("x")) == [(2, 1, 0)]
    assert keys(ledger, assistant("x"), {"role": "user", "content": "?"}, assistant("x")) == [(1, 1, 0), (2, 1, 0)]


def test_steps_are_compared_as_numbers() -> None:
    ledger = Ledger([row(1, 10, 0, "x"), row(1, 9, 0, "x")])
    assert keys(ledger, assistant("x")) == [(1, 10, 0)]


def test_a_call_that_no_row_knows_is_unknown_and_never_runs() -> None:
    (found,) = Ledger([]).match(open_calls([assistant("imported")]))
    assert (found.key, found.state, found.tool_call_id) == (None, "unknown", "imported")
    assert not found.waits_in(1)


def test_a_closed_call_is_found_no_more() -> None:
    ledger = Ledger([row(1, 1, 0, "x")])
    (found,) = ledger.match(open_calls([assistant("x")]))
    ledger.closed(found)
    assert keys(ledger, assistant("x")) == [None]


@pytest.mark.parametrize(
    ("columns", "waits"),
    [
        ({}, True),
        ({"state": "approved", "decided_turn": 2}, False),
        ({"state": "approved", "decided_turn": 3}, True),
        ({"state": "denied", "decided_turn": 3}, True),
        ({"state": "expired", "decided_turn": 2}, False),
        ({"state": "approved", "gated": False}, False),
        ({"state": "done", "kind": "frontend", "gated": False, "decided_turn": 3}, True),
        ({"state": "done", "kind": "frontend", "gated": False, "decided_turn": 2}, False),
        ({"state": "executing", "decided_turn": 2}, False),
    ],
)
def test_what_a_later_turn_decided_waits_for_that_turn(columns: dict[str, Any], waits: bool) -> None:
    assert Call.of_row(row(1, 1, 0, "x", **columns)).waits_in(2) is waits


def test_a_decision_is_found_by_its_turn() -> None:
    ledger = Ledger([row(1, 1, 0, "x", state="approved", decided_turn=2)])
    assert ledger.decided_in(2)
    assert not ledger.decided_in(3)

"""The chaos run's checks: they pass over what is right, and each kind of wrong is found under its name."""

from __future__ import annotations

import ast
import copy
import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from scripts.bench.kit.chaos.check import Left, check
from scripts.bench.kit.chaos.plan import MARK, Plan, plan_of
from scripts.bench.kit.chaos.rows import Tables

ID = "c0ffee00-0000-4000-8000-000000000001"
ASK = MARK + json.dumps({"conversation": ID, "ask": 1, "think": 1, "steps": [["restart"]]})
CALL = {"id": "t1", "type": "function", "function": {"name": "restart", "arguments": '{"what": "w"}'}}
QUESTION = {"role": "user", "content": ASK}
CALLING = {"role": "assistant", "content": "Step", "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "t1", "content": "receipt r1"}
ANSWER = {"role": "assistant", "content": "Done."}
PLACE = {"call_turn": 1, "step": 1, "call_index": 0}


def _event(seq: int, event: str, data: dict[str, Any], attempt: int = 1) -> dict[str, Any]:
    return {
        "conversation_id": ID, "seq": seq, "turn": 1, "attempt": attempt, "event": event, "data": data,
        "created_at": 100.0 + seq,
    }  # fmt: skip


def _left() -> Left:
    """One conversation, one turn, one side effect; nothing wrong with it."""
    events = [
        _event(1, "user_message", {"ask": ASK}, 0),
        _event(2, "ai_message", {"step": 1, "message": CALLING}),
        _event(3, "tool_call_started", PLACE),
        _event(4, "tool_call_result", {**PLACE, "message": RESULT}),
        _event(5, "ai_message", {"step": 2, "message": ANSWER}),
        _event(6, "answer_end", {"messages": [{"role": "system"}, QUESTION, CALLING, RESULT, ANSWER]}),
    ]
    turn = {
        "conversation_id": ID, "turn": 1, "request_id": "q1", "status": "completed", "attempt": 1,
        "request": {"ask": ASK}, "started_at": 100.0, "ended_at": 107.0,
    }  # fmt: skip
    call = {
        "conversation_id": ID, "turn": 1, "step": 1, "call_index": 0, "tool_name": "restart", "risk": "side_effect",
        "state": "done", "arguments": '{"what": "w"}', "result_seq": 4, "result_summary": "receipt r1",
    }  # fmt: skip
    people = [
        {"kind": "accepted", "conversation": ID, "request_id": "q1", "turn": 1},
        {"kind": "seen", "conversation": ID, "events": [[e["seq"], 1, e["event"]] for e in events]},
    ]
    effect = {
        "kind": "effect", "tool": "restart", "conversation": ID, "call": [1, 1, 0], "key": "k", "what": "w",
        "receipt": "r1", "pid": 7,
    }  # fmt: skip
    work = [
        {"kind": "asked", "conversation": ID, "ask": 1, "answer": 1, "at": 100.5, "pid": 7},
        effect,
        {"kind": "asked", "conversation": ID, "ask": 1, "answer": 2, "at": 104.5, "pid": 7},
    ]
    return Left(Tables([turn], events, [call], [{"conversation_id": ID, "last_seq": 6}], []), people, work, 103.0)


def test_what_is_right_has_no_violations() -> None:
    findings = check(_left())
    assert findings.violations == {}
    assert findings.figures["turns accepted"] == findings.figures["turns ended by answer_end"] == 1
    assert findings.figures["side effects executed once"] == 1


def _set(row: dict[str, Any], **fields: Any) -> None:
    row.update(fields)


WRONG: list[tuple[str, Callable[[Left], Any]]] = [
    ("turns lost", lambda left: left.tables.turns.clear()),
    ("turns lost", lambda left: _set(left.tables.turns[0], status="running")),
    ("turns lost", lambda left: left.tables.events.pop()),
    ("turns doubled", lambda left: left.tables.turns.append(copy.deepcopy(left.tables.turns[0]))),
    ("turns doubled", lambda left: left.tables.events.append(_event(7, "answer_end", {}))),
    ("turns whose status is not their end", lambda left: _set(left.tables.turns[0], status="stopped")),
    ("turns that nobody asked for", lambda left: _set(left.tables.turns[0], request_id="q2")),
    ("turns failed", lambda left: _set(left.tables.events[5], event="error")),
    ("dead letters", lambda left: left.tables.dead_letters.append({"code": "c", "description": "d"})),
    ("turns out of order", lambda left: left.people.append({**left.people[0], "request_id": "q0"})),
    ("side effects executed more than once", lambda left: left.work.append(dict(left.work[1]))),
    ("calls whose state is not what happened", lambda left: left.work.pop(1)),
    ("calls whose state is not what happened", lambda left: _set(left.tables.calls[0], state="superseded")),
    ("calls whose state is not what happened", lambda left: _set(left.tables.calls[0], state="executing")),
    ("calls whose state is not what happened", lambda left: _set(left.work[1], receipt="other")),
    ("calls whose state is not what happened", lambda left: _set(left.work[1], call=[1, 1, 1])),
    ("events missing", lambda left: left.tables.events.pop(2)),
    ("events missing", lambda left: left.tables.events.pop(3)),
    ("events missing", lambda left: left.tables.events.pop(1)),
    ("events doubled", lambda left: left.tables.events.append(_event(7, "ai_message", {"step": 2, "message": ANSWER}))),
    ("events doubled", lambda left: left.tables.events.insert(4, left.tables.events[3])),
    ("events out of order", lambda left: left.tables.events.append(_event(7, "turn_resumed", {}))),
    ("events out of order", lambda left: _set(left.tables.events[2], attempt=2)),
    ("events out of order", lambda left: left.tables.events.insert(1, left.tables.events.pop(3))),
    ("histories that are not what happened", lambda left: left.tables.events[5]["data"]["messages"].pop(3)),
    ("histories that are not what happened", lambda left: left.tables.events[5]["data"]["messages"].reverse()),
    ("model answers asked for although stored", lambda left: left.work.append({**left.work[0], "at": 102.5})),
    ("people who saw another log", lambda left: left.people[1]["events"].pop(2)),
    ("people who met an error", lambda left: left.people.append({**left.people[0], "kind": "error", "what": "e"})),
    (
        "plain RQ jobs lost otherwise",
        lambda left: left.people.extend(
            {"kind": kind, "conversation": ID, "request_id": "q9", "at": 104.0} for kind in ("enqueued", "unrecorded")
        ),
    ),
]  # fmt: skip


@pytest.mark.parametrize(("figure", "spoil"), WRONG, ids=[f"{i}-{name}" for i, (name, _) in enumerate(WRONG)])
def test_what_is_wrong_is_found(figure: str, spoil: Callable[[Left], Any]) -> None:
    left = copy.deepcopy(_left())
    spoil(left)
    assert figure in check(left).violations


def test_a_job_that_was_in_redis_when_it_was_emptied_is_the_documented_exception() -> None:
    left = _left()
    left.people.extend(
        {"kind": kind, "conversation": ID, "request_id": "q9", "at": 102.0} for kind in ("enqueued", "unrecorded")
    )
    findings = check(left)
    assert findings.violations == {}
    assert findings.figures["plain RQ jobs that the emptied Redis took with it"] == 1


def test_the_checks_share_no_code_with_the_product() -> None:
    program = "import sys, scripts.bench.kit.chaos.check; print({m.split('.')[0] for m in sys.modules})"
    imported = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout
    assert not {"shared", "worker", "publisher"} & set(ast.literal_eval(imported))


def test_a_seed_makes_one_plan() -> None:
    def plan(seed: int) -> Plan:
        return plan_of(seed=seed, turns=100, turn_seconds=5, seconds=60)

    assert plan(1) == plan(1) != plan(2)
    assert 100 <= plan(1).turns < 105
    assert len({c.kind for c in plan(1).conversations}) == 8

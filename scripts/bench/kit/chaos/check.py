"""The invariants, from the tables as plain SQL sees them and from the journals. Nothing of the product is imported.

Each function looks at one promise and adds to ``Findings``: figures for the table, and a line per violation.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final

from scripts.bench.kit.chaos.journal import Record
from scripts.bench.kit.chaos.plan import EFFECT, GATED, script_in
from scripts.bench.kit.chaos.rows import Row, Tables

TERMINALS: Final = {"answer_end", "approval_required", "error", "turn_stopped"}
ENDS: Final = {
    "completed": {"answer_end", "approval_required"},
    "awaiting_approval": {"approval_required"},
    "failed": {"error"},
    "stopped": {"turn_stopped", "approval_required"},
}
"""Which last event a turn of a status may have; a paused one becomes ``completed`` by the next, or ``stopped``."""
NOT_RUN: Final = {"pending", "approved", "denied", "expired", "superseded"}
Place = tuple[str, int, int, int]  # conversation, turn, step, call_index


@dataclass(slots=True)
class Findings:
    """``figures`` in the order of the table. ``violations``: figure → a line for each."""

    figures: dict[str, Any] = field(default_factory=dict)
    violations: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))

    def zero(self, name: str, lines: Iterable[str]) -> None:
        """A figure that must be 0."""
        found = list(lines)
        self.figures[name] = len(found)
        if found:
            self.violations[name].extend(found)


@dataclass(frozen=True, slots=True)
class Left:
    """What a run left behind: the tables, what people noted, what tools and models did, when Redis was emptied."""

    tables: Tables
    people: list[Record]
    work: list[Record]
    flushed_at: float | None

    def noted(self, kind: str) -> list[Record]:
        return [record for record in self.people if record["kind"] == kind]

    def worked(self, kind: str) -> list[Record]:
        return [record for record in self.work if record["kind"] == kind]

    def events_by_turn(self) -> dict[tuple[str, int], list[Row]]:
        return _grouped(self.tables.events, lambda e: (e["conversation_id"], e["turn"]))


def check(left: Left) -> Findings:
    findings = Findings()
    for look in (_turns, _order, _effects, _events, _log_order, _histories, _models, _people):
        look(left, findings)
    return findings


def _turns(left: Left, out: Findings) -> None:
    """Every accepted request is one turn with one end."""
    accepted = {(r["conversation"], r["request_id"]): r["turn"] for r in left.noted("accepted")}
    rows = _grouped(left.tables.turns, lambda t: (t["conversation_id"], t["request_id"]))
    by_turn = left.events_by_turn()
    ends = {key: [e["event"] for e in events if e["event"] in TERMINALS] for key, events in by_turn.items()}
    out.figures["turns accepted"] = len(accepted)
    lost = [f"{_short(key)}: accepted as turn {turn}, no such row" for key, turn in accepted.items()
            if not any(row["turn"] == turn for row in rows.get(key, ()))]  # fmt: skip
    kinds: Counter[str] = Counter()
    doubled, torn = [], []
    for key, found in rows.items():
        if len(found) > 1:
            doubled.append(f"{_short(key)}: {len(found)} turns of one request")
        for row in found:
            name, last = f"{_short((row['conversation_id'], row['turn']))}", ends.get(_turn_key(row), [])
            kinds.update(last[:1])
            if len(last) > 1:
                doubled.append(f"{name}: ended {len(last)} times: {last}")
            if row["status"] not in ENDS or not last:
                lost.append(f"{name}: {row['status']} after {row['attempt']} attempts, ends {last}")
            elif not set(last) <= ENDS[row["status"]]:
                torn.append(f"{name}: status {row['status']}, but its end is {last}")
    out.figures |= {f"turns ended by {kind}": kinds[kind] for kind in sorted(TERMINALS)}
    out.zero("turns lost", lost)
    out.zero("turns doubled", doubled)
    out.zero("turns whose status is not their end", torn)
    out.zero("turns that nobody asked for", (_short(key) for key in rows if key not in accepted))
    out.zero("turns failed", (
        f"{_short(_turn_key(e))}: {e['data'].get('code')}, attempt {e['attempt']}: {e['data'].get('description')}"
        for e in left.tables.events if e["event"] == "error"
    ))  # fmt: skip
    _plain_rq(left, out)
    out.zero("dead letters", (f"{r['code']}: {r['description']}" for r in left.tables.dead_letters))


def _plain_rq(left: Left, out: Findings) -> None:
    """The one documented exception: a plain RQ job that Redis forgot before a worker had recorded it."""
    sent = {(r["conversation"], r["request_id"]): r["at"] for r in left.noted("enqueued")}
    forgotten = [(r["conversation"], r["request_id"]) for r in left.noted("unrecorded")]
    excused = [key for key in forgotten if left.flushed_at is not None and sent[key] <= left.flushed_at]
    out.figures["plain RQ jobs that the emptied Redis took with it"] = len(excused)
    out.zero("plain RQ jobs lost otherwise", (_short(key) for key in forgotten if key not in excused))


def _order(left: Left, out: Findings) -> None:
    """Turns of a conversation are numbered 1, 2, 3 as they were accepted, and begin in that order."""
    wrong = []
    for conversation, receipts in _grouped(left.noted("accepted"), lambda r: r["conversation"]).items():
        turns = [r["turn"] for r in receipts]
        if turns != sorted(set(turns)):
            wrong.append(f"{conversation[:8]}: accepted in the order {turns}")
    for conversation, rows in _grouped(left.tables.turns, lambda t: t["conversation_id"]).items():
        if [r["turn"] for r in rows] != list(range(1, len(rows) + 1)):
            wrong.append(f"{conversation[:8]}: turns {[r['turn'] for r in rows]}")
        for before, after in pairwise(rows):
            if None not in (before["ended_at"], after["started_at"]) and after["started_at"] < before["ended_at"]:
                wrong.append(f"{conversation[:8]}: turn {after['turn']} began before turn {before['turn']} had ended")
    out.zero("turns out of order", wrong)


def _effects(left: Left, out: Findings) -> None:
    """What tools did, by their own record, against what the ledger says of their calls."""
    done = _grouped(left.worked("effect"), lambda r: (r["conversation"], *r["call"]))
    calls = {_place(row): row for row in left.tables.calls}
    results = _results(left)
    effects = {place: row for place, row in calls.items() if row["risk"] == "side_effect"}
    times = Counter(min(len(done.get(place, ())), 2) for place in effects)
    out.figures |= {
        "side effects executed once": times[1],
        "side effects executed 0 times": times[0],
        "of those, unknown": sum(r["state"] == "unknown" and not done.get(p) for p, r in effects.items()),
        "side effects executed once, unknown": sum(
            r["state"] == "unknown" and len(done.get(p, ())) == 1 for p, r in effects.items()
        ),
    }
    out.zero(
        "side effects executed more than once",
        (f"{_short(p)}: {r['tool_name']} {len(done[p])} times, pids {[d['pid'] for d in done[p]]}, {r['state']}"
         for p, r in effects.items() if len(done.get(p, ())) > 1),
    )  # fmt: skip
    out.figures["repeatable calls executed again"] = sum(
        len(found) - 1 for place, found in done.items() if place in calls and place not in effects
    )
    wrong = [
        f"{_short(place)}: {found[0]['tool']} executed, but the ledger has no such call"
        for place, found in done.items()
        if place not in calls and found[0]["tool"] in (EFFECT, GATED)  # what may run again runs before it is stored
    ]
    for place, row in calls.items():
        wrong += (f"{_short(place)}: {line}" for line in _against(row, done.get(place, []), results.get(place, [])))
    keys = _grouped(left.worked("effect"), lambda r: r["key"])
    wrong += (f"key {key} for several calls" for key, found in keys.items() if len({_called(r) for r in found}) > 1)
    out.zero("calls whose state is not what happened", wrong)


def _against(row: Row, done: list[Record], results: list[Row]) -> Iterable[str]:
    """What is wrong with one call."""
    state, times = row["state"], len(done)
    cut_off = state == "superseded" and row["risk"] != "side_effect"  # such a call is not marked while it runs
    if state in NOT_RUN and times and not cut_off:
        yield f"{row['tool_name']} is {state}, and was executed {times} times"
    if state == "executing" or (state == "done" and not times):
        yield f"{row['tool_name']} is {state}, and was executed {times} times"
    if state == "failed":
        yield f"{row['tool_name']} failed: {row['result_summary']}"
    if len({record["key"] for record in done}) > 1:
        yield f"{row['tool_name']} had several idempotency keys"
    if any(record["what"] not in row["arguments"] for record in done):
        yield f"{row['tool_name']} was executed with other arguments"
    told = [str(event["data"].get("message", {}).get("content")) for event in results]
    if state == "done" and not any(f"receipt {record['receipt']}" in told for record in done):
        yield f"{row['tool_name']} is done, but its result {told} is none of what it gave"


def _events(left: Left, out: Findings) -> None:
    """Nothing is missing from the log, nothing stands in it twice."""
    missing: list[str] = []
    doubled: list[str] = []
    last_seq = {row["conversation_id"]: row["last_seq"] for row in left.tables.conversations}
    for conversation, events in _grouped(left.tables.events, lambda e: e["conversation_id"]).items():
        seqs = [e["seq"] for e in events]
        missing += (f"{conversation[:8]}: no seq {s}" for s in set(range(1, last_seq[conversation] + 1)) - set(seqs))
        doubled += (f"{conversation[:8]}: seq {s} twice" for s, n in Counter(seqs).items() if n > 1)
    by_turn = left.events_by_turn()
    for row in left.tables.turns:
        events, name = by_turn.get(_turn_key(row), []), _short(_turn_key(row))
        questions = sum(e["event"] == "user_message" for e in events)
        if questions != 1:
            (doubled if questions else missing).append(f"{name}: {questions} user_message events")
        steps = Counter(e["data"]["step"] for e in events if e["event"] == "ai_message")
        doubled += (f"{name}: {n} answers of step {step}" for step, n in steps.items() if n > 1)
        missing += (f"{name}: no answer of step {s}" for s in range(1, max(steps, default=0)) if s not in steps)
    results, started = _results(left), _started(left)
    for call in left.tables.calls:
        place = _place(call)
        if len(results.get(place, ())) > 1:
            doubled.append(f"{_short(place)}: {len(results[place])} results")
        if call["result_seq"] is not None and not results.get(place):
            missing.append(f"{_short(place)}: {call['state']}, and no result")
        if call["state"] == "done" and place not in started:
            missing.append(f"{_short(place)}: done, and never announced")
    out.figures["events"] = len(left.tables.events)
    out.zero("events missing", missing)
    out.zero("events doubled", doubled)


def _log_order(left: Left, out: Findings) -> None:
    """In the log: turn after turn, attempt after attempt, a result behind its call, nothing behind an end."""
    wrong = []
    for conversation, log in _grouped(left.tables.events, lambda e: e["conversation_id"]).items():
        questions = [e["turn"] for e in log if e["event"] == "user_message"]
        if questions != sorted(questions):
            wrong.append(f"{conversation[:8]}: questions in the order {questions}")
        work = [e for e in log if e["event"] != "user_message"]
        for before, after in pairwise(work):
            where = f"{conversation[:8]} seq {after['seq']}"
            if (after["turn"], after["attempt"]) < (before["turn"], before["attempt"]):
                wrong.append(
                    f"{where}: turn {after['turn']}.{after['attempt']} behind {before['turn']}.{before['attempt']}"
                )
            if after["turn"] == before["turn"] and before["event"] in TERMINALS:
                wrong.append(f"{where}: {after['event']} behind {before['event']}")
        said: set[tuple[int, int]] = set()
        for event in work:
            data = event["data"]
            if event["event"] == "ai_message":
                said.add((event["turn"], data["step"]))
            elif event["event"] == "tool_call_result" and (data["call_turn"], data["step"]) not in said:
                wrong.append(f"{conversation[:8]} seq {event['seq']}: a result before its call")
    out.zero("events out of order", wrong)


def _histories(left: Left, out: Findings) -> None:
    """The last snapshot of a conversation is what its events say, each call with its one result behind it."""
    wrong = []
    questions = {_turn_key(t): t["request"].get("ask") for t in left.tables.turns}
    for conversation, log in _grouped(left.tables.events, lambda e: e["conversation_id"]).items():
        snapshot = next((e for e in reversed(log) if e["data"].get("messages")), None)
        if snapshot is None:
            continue
        turn, messages = snapshot["turn"], [m for m in snapshot["data"]["messages"] if m["role"] != "system"]
        known = [e["data"]["message"] for e in log if e["seq"] < snapshot["seq"] and "message" in e["data"]]
        asked = [ask for (of, number), ask in questions.items() if of == conversation and number <= turn and ask]
        held = Counter(_digest(m) for m in messages)
        told = Counter(_digest(m) for m in known) + Counter(_digest({"role": "user", "content": ask}) for ask in asked)
        if held != told:
            wrong.append(
                f"{conversation[:8]} seq {snapshot['seq']}: {held - told} more, {told - held} less than the log"
            )
        if [m["content"] for m in messages if m["role"] == "user"] != asked:
            wrong.append(f"{conversation[:8]} seq {snapshot['seq']}: the questions are not in order")
        open_calls = snapshot["event"] == "approval_required"
        wrong += (f"{conversation[:8]} seq {snapshot['seq']}: {line}" for line in _pairs(messages, open_calls))
    out.zero("histories that are not what happened", wrong)


def _pairs(messages: list[Mapping[str, Any]], open_calls: bool) -> Iterable[str]:
    for index, message in enumerate(messages):
        called = [call["id"] for call in message.get("tool_calls") or ()]
        behind = []
        for later in messages[index + 1 :]:
            if later["role"] != "tool":
                break
            behind.append(later["tool_call_id"])
        if message["role"] == "assistant" and behind != called:
            if open_calls and behind == [call for call in called if call in behind]:
                continue
            yield f"message {index} calls {called}, and {behind} stand behind it"


def _models(left: Left, out: Findings) -> None:
    """An answer that is stored is not asked for again."""
    stored: dict[tuple[str, int, int], float] = {}
    for conversation, turns in _grouped(left.tables.turns, lambda t: t["conversation_id"]).items():
        ask = answer = 0
        log = [e for e in left.tables.events if e["conversation_id"] == conversation and e["event"] == "ai_message"]
        by_turn = _grouped(log, lambda e: e["turn"])
        for turn in turns:
            script = script_in(turn["request"].get("ask") or "")
            if script is not None:
                ask, answer = script["ask"], 0
            for event in by_turn.get(turn["turn"], ()):
                answer += 1
                stored[conversation, ask, answer] = event["created_at"]
    asked = left.worked("asked")
    never = float("inf")
    again = [
        f"{r['conversation'][:8]} ask {r['ask']} answer {r['answer']}: asked again by pid {r['pid']}, "
        f"{r['at'] - stored[key]:.2f} s after it was stored"
        for r in asked
        if r["at"] > stored.get(key := (r["conversation"], r["ask"], r["answer"]), never)
    ]
    out.figures["model answers asked for"] = len(asked)
    out.figures["of those, again because they were not stored"] = (
        len(asked) - len({(r["conversation"], r["ask"], r["answer"]) for r in asked}) - len(again)
    )
    out.zero("model answers asked for although stored", again)
    out.zero("model calls without their question", (str(r["content"]) for r in left.worked("unplanned")))


def _people(left: Left, out: Findings) -> None:
    """Whoever followed a conversation saw the log: every event, once, in order, and no error of ours."""
    wrong = []
    logs = _grouped(left.tables.events, lambda e: e["conversation_id"])
    for record in left.noted("seen"):
        seen = [tuple(event) for event in record["events"]]
        log = [(e["seq"], e["turn"], e["event"]) for e in logs.get(record["conversation"], ())]
        if seen != log[: len(seen)]:
            wrong.append(f"{record['conversation'][:8]}: saw {seen}, the log is {log}")
    out.zero("people who saw another log", wrong)
    out.zero(
        "people who met an error",
        (f"{r['conversation'][:8]} turn {r['turn']}: {r['what']}" for r in left.noted("error")),
    )


def _results(left: Left) -> dict[Place, list[Row]]:
    return _of_calls(left, "tool_call_result")


def _started(left: Left) -> dict[Place, list[Row]]:
    return _of_calls(left, "tool_call_started")


def _of_calls(left: Left, name: str) -> dict[Place, list[Row]]:
    events = (e for e in left.tables.events if e["event"] == name)
    return _grouped(
        events, lambda e: (e["conversation_id"], e["data"]["call_turn"], e["data"]["step"], e["data"]["call_index"])
    )


def _grouped(rows: Iterable[Any], key: Any) -> dict[Any, list[Any]]:
    found: dict[Any, list[Any]] = {}
    for row in rows:
        found.setdefault(key(row), []).append(row)
    return found


def _place(row: Row) -> Place:
    return row["conversation_id"], row["turn"], row["step"], row["call_index"]


def _turn_key(row: Row) -> tuple[str, int]:
    return row["conversation_id"], row["turn"]


def _called(record: Record) -> Hashable:
    return record["conversation"], *record["call"]


def _digest(message: Mapping[str, Any]) -> tuple[Any, ...]:
    calls = tuple(call["id"] for call in message.get("tool_calls") or ())
    return message["role"], message.get("content"), message.get("tool_call_id"), calls


def _short(key: Iterable[Any]) -> str:
    first, *others = key
    return " ".join([str(first)[:8], *(str(part) for part in others)])

"""What must hold of a conversation whatever happened to its workers, read by plain SQL and judged by code that shares
nothing with the product."""

from __future__ import annotations

import json
import sqlite3
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
from psycopg.rows import dict_row

Row = dict[str, Any]

END_OF = {
    "completed": {"answer_end", "approval_required"},  # a pause is completed by the turn that decides
    "awaiting_approval": {"approval_required"},
    "failed": {"error"},
    "stopped": {"turn_stopped", "approval_required"},
}
ENDS = {"answer_end", "approval_required", "error", "turn_stopped"}
SNAPSHOTS = {"answer_end", "approval_required", "history_compacted"}


class Database:
    """Read-only SQL on a store: a SQLite file, or the URL of a Postgres."""

    def __init__(self, where: Path | str) -> None:
        self._file = self._server = None
        if isinstance(where, Path):
            self._file = sqlite3.connect(f"file:{where}?mode=ro", uri=True)
            self._file.row_factory = sqlite3.Row
        else:
            self._server = psycopg.connect(where, autocommit=True, row_factory=dict_row)
            self._server.execute("SET search_path = turnkeeper")

    def rows(self, query: str, *values: Any) -> list[Row]:
        """``%s`` stands for a value."""
        if self._file is not None:
            return [dict(row) for row in self._file.execute(query.replace("%s", "?"), values)]
        assert self._server is not None
        return self._server.execute(query.encode(), values).fetchall()

    def close(self) -> None:
        for connection in (self._file, self._server):
            if connection is not None:
                connection.close()


@dataclass(frozen=True)
class Story:
    """All rows of a conversation: turns by number, events by sequence, calls by key."""

    turns: list[Row]
    events: list[Row]
    calls: list[Row]

    @classmethod
    def of(cls, database: Database, conversation: str) -> Story:
        of_it = "WHERE conversation_id = %s ORDER BY"
        events = database.rows(f"SELECT * FROM conversation_events {of_it} seq", conversation)
        for event in events:
            if isinstance(event["data"], str):
                event["data"] = json.loads(event["data"])
        return cls(
            database.rows(f"SELECT * FROM conversation_turns {of_it} turn", conversation),
            events,
            database.rows(f"SELECT * FROM tool_calls {of_it} turn, step, call_index", conversation),
        )

    def named(self, event: str, turn: int | None = None) -> list[Row]:
        return [e for e in self.events if e["event"] == event and turn in (None, e["turn"])]

    def call(self, tool_call_id: str) -> Row:
        [row] = [c for c in self.calls if c["tool_call_id"] == tool_call_id]
        return row


def broken(story: Story, effects: Mapping[str, int]) -> list[str]:
    """Every rule that the conversation breaks, once none of its turns is under way. ``effects``: how often each side
    effect happened, by the one argument that names it."""
    return [*_log(story), *_ends(story), *_calls(story), *_effects(story, effects), *_snapshots(story)]


def _log(story: Story) -> Iterator[str]:
    numbers = [event["seq"] for event in story.events]
    if numbers != list(range(1, len(numbers) + 1)):
        yield f"the sequence has holes or doubles: {numbers}"
    if not story.events:
        yield "nothing is stored"
    said = Counter((e["turn"], e["data"]["step"]) for e in story.named("ai_message"))
    yield from (f"turn and step {key} have {n} answers" for key, n in said.items() if n > 1)
    asked = Counter(e["turn"] for e in story.named("user_message"))
    if asked != Counter(turn["turn"] for turn in story.turns):
        yield f"requests in the log: {dict(asked)}"


def _ends(story: Story) -> Iterator[str]:
    for turn in story.turns:
        own = [e for e in story.events if e["turn"] == turn["turn"]]
        ends = [e for e in own if e["event"] in ENDS]
        name = f"turn {turn['turn']} ({turn['status']})"
        if turn["status"] not in END_OF:
            yield f"{name} is under way"
        elif len(ends) != 1:
            yield f"{name} has the ends {[e['event'] for e in ends]}"
        elif ends[0]["event"] not in END_OF[turn["status"]]:
            yield f"{name} ended with {ends[0]['event']}"
        elif own[-1] is not ends[0]:
            yield f"{name} goes on after its end: {[e['event'] for e in own]}"
        resumed = [e["data"]["attempt"] for e in own if e["event"] == "turn_resumed"]
        if len(set(resumed)) != len(resumed) or 1 in resumed:
            yield f"{name} was resumed as {resumed}"
        order = [e["attempt"] for e in own]
        if order != sorted(order):
            yield f"{name} was written by attempts {order}"


def _calls(story: Story) -> Iterator[str]:
    results: dict[tuple[int, int, int], list[Row]] = {}
    for event in story.named("tool_call_result"):
        data = event["data"]
        results.setdefault((data["call_turn"], data["step"], data["call_index"]), []).append(event)
    for call in story.calls:
        own = results.pop((call["turn"], call["step"], call["call_index"]), [])
        name = f"call {call['tool_call_id']} ({call['state']})"
        if call["state"] in ("pending", "approved", "executing") or call["result_seq"] is None:
            yield f"{name} is open"
        elif [e["seq"] for e in own] != [call["result_seq"]]:
            yield f"{name} has the results {[e['seq'] for e in own]}, its row says {call['result_seq']}"
        elif own[0]["data"]["status"] != call["state"]:
            yield f"{name} was told as {own[0]['data']['status']}"
    yield from (f"a result of no call: {key}" for key in results)


def _effects(story: Story, effects: Mapping[str, int]) -> Iterator[str]:
    """At most once, exactly once where the row says done, never where it says that nothing ran."""
    allowed = {"done": {1}, "unknown": {0, 1}, "failed": {0}, "denied": {0}, "expired": {0}, "superseded": {0}}
    for call in story.calls:
        if call["risk"] == "side_effect":
            [name] = json.loads(call["arguments"]).values()
            times = effects.get(name, 0)
            if times not in allowed.get(call["state"], set()):
                yield f"the side effect {name} happened {times} times, its call is {call['state']}"


def _snapshots(story: Story) -> Iterator[str]:
    for event in story.events:
        if event["event"] in SNAPSHOTS - {"history_compacted"} and "messages" in event["data"]:
            whole, known = event["data"]["messages"], _history(story, event)
            if whole[:1] and whole[0]["role"] != "system":
                yield f"the snapshot {event['seq']} does not begin with the system message"
            if whole[1:] != known:
                yield f"the snapshot {event['seq']} differs from its events:\n{whole[1:]}\n{known}"
    if story.events and not any("messages" in e["data"] for e in story.events if e["event"] in SNAPSHOTS):
        yield "no snapshot has its messages"


def _history(story: Story, snapshot: Row) -> list[Row]:
    """The messages that the events before a snapshot make, those of its turn and of earlier ones."""
    until, first, messages = snapshot["turn"], 0, []
    for event in story.named("history_compacted"):
        if event["seq"] < snapshot["seq"]:
            first, messages = event["seq"], list(event["data"]["messages"][1:])
    compacted_in = next((e["turn"] for e in story.events if e["seq"] == first), 0)
    for turn in range(max(1, compacted_in), until + 1):
        for event in story.events:
            data = event["data"]
            if event["turn"] != turn or event["seq"] > snapshot["seq"]:
                continue
            if event["event"] == "user_message" and turn > compacted_in and data.get("ask"):
                messages.append({"role": "user", "content": data["ask"]})
            elif event["seq"] > first and event["event"] == "ai_message":
                messages.append(data["message"])
            elif event["seq"] > first and event["event"] == "tool_call_result":
                _place(messages, data["message"])
    return messages


def _place(messages: list[Row], result: Row) -> None:
    """Behind the latest assistant message with an unanswered call of that id, in the order of its calls."""
    for index in range(len(messages) - 1, -1, -1):
        ids = [call["id"] for call in messages[index].get("tool_calls") or ()]
        if result["tool_call_id"] not in ids:
            continue
        end = index + 1
        while end < len(messages) and messages[end]["role"] == "tool":
            end += 1
        answers = messages[index + 1 : end]
        if result["tool_call_id"] not in [m["tool_call_id"] for m in answers]:
            messages[index + 1 : end] = sorted([*answers, result], key=lambda m: ids.index(m["tool_call_id"]))
            return
    messages.append(result)

"""A simulated worker and its clients on a real store, with every promise checked that can be seen from outside.

The worker keeps the rules of a turn (hydrate, settle open calls, call the model, pause, answer) one batch at a time,
so that a test can put kills, zombies, lost replies, racing decisions and stops between any two of them.
"""

from __future__ import annotations

import asyncio
import random
import uuid
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import orjson

from shared.errors import ApprovalsOpen, LeaseLost, NotRetryable
from shared.events import AI_MESSAGE, HISTORY_COMPACTED, SNAPSHOTS, TERMINALS, TOOL_CALL_RESULT, EventDraft, Finish
from shared.history import Message, OpenCall, fold, open_calls, pair
from shared.requests import token_sha256
from shared.store.base import Appended, Claim, NotClaimed, Row, Store
from tests.contract.driver import (
    ANSWERED,
    PAUSED,
    Talk,
    ai,
    answer,
    call,
    compacted,
    failed,
    pause,
    result,
    start,
    waits,
)

Key = tuple[int, int, int]  # turn, step, call_index of a call
MOST_TURNS = 9
_WEIGHTS = {
    "work": 60,
    "claim": 8,
    "decide": 9,
    "ask": 4,
    "frontend": 3,
    "retry": 2,
    "stop": 2,
    "zombie": 6,
    "repeat": 4,
    "release": 2,
    "renew": 2,
}
ENDED = frozenset({"denied", "expired", "superseded", "done", "failed", "unknown"})
NEW_CALLS: dict[str, dict[str, Any]] = {
    "gated": {"gated": True},
    "effect": {"gated": False},
    "read": {"gated": False, "risk": "read_only"},
    "frontend": {"kind": "frontend"},
}


def key_of(row: Row) -> Key:
    return row["turn"], row["step"], row["call_index"]


@dataclass
class Attempt:
    """One worker on one turn: what it was told at its claim, and what it did since."""

    claim: Claim
    messages: list[Message]
    rows: dict[Key, Row]
    step: int
    batch: int = 0
    last: tuple[list[EventDraft], Finish | None, Appended] | None = None
    over: bool = False
    started: set[Key] = field(default_factory=set)

    @property
    def turn(self) -> int:
        return self.claim.lease.turn


class World:
    """One conversation with everybody who touches it."""

    def __init__(self, run: asyncio.Runner, store: Store, rng: random.Random) -> None:
        self._run = run
        self._rng = rng
        self.trace: list[str] = []
        self.store = store
        self.talk = Talk(store)
        self.attempts: list[Attempt] = []
        self.holder: Attempt | None = None
        self.shown: dict[str, tuple[Key, str]] = {}  # token -> the call that it was shown for
        self._offered: dict[str, tuple[str, Key, str]] = {}  # by hash, before it is known whether the pause was stored
        self.effects: Counter[Key] = Counter()
        self.approved: dict[Key, int] = {}  # call -> the turn whose sender was told that it is approved
        self.snapshots: dict[int, list[Message]] = {}
        self.questions: dict[int, str] = {}

    def wait(self, awaitable: Any) -> Any:
        return self._run.run(awaitable)

    # Everybody

    def live(self) -> None:
        """One more thing happens."""
        rng = self._rng
        self.trace.append(step := rng.choices(list(_WEIGHTS), list(_WEIGHTS.values()))[0])
        attempt = rng.choice(self.attempts) if self.attempts else None
        more = len(self.wait(self.talk.statuses())) < MOST_TURNS
        match step:
            case "work" if self.holder is not None and not self.holder.over:
                self.advance(self.holder)
            case "work" | "claim":
                self.claim(dies=rng.random() < 0.3)
            case "decide" if more and self.shown:
                self.decide(self._some_decisions())
            case "ask" if more:
                self.ask(supersede=rng.random() < 0.7, decisions=self._some_decisions() if rng.random() < 0.4 else {})
            case "frontend" if more:
                self.answer_frontend()
            case "retry" if more:
                self.retry()
            case "stop":
                self.stop(len(self.wait(self.talk.statuses())) - rng.choice([0, 0, 1]))
            case "zombie" if attempt is not None:
                self.write_after_the_end(attempt) if attempt.over else self.advance(attempt)
            case "repeat" if attempt is not None:
                self.repeat(attempt)
            case "release" if attempt is not None and not attempt.over:
                self.release(attempt)
            case "renew":
                self.renew()

    def _some_decisions(self) -> dict[str, bool]:
        """Tokens that people were shown, mostly those that still wait, each with a yes or a no."""
        pending = {key for key, row in self._calls().items() if row["state"] == "pending"}
        wanted = {True: 0.6, False: 0.1}
        return {
            token: self._rng.random() < 0.7
            for token, (key, _) in self.shown.items()
            if self._rng.random() < wanted[key in pending]
        }

    # Clients

    def ask(self, *, supersede: bool, decisions: dict[str, bool]) -> None:
        before = self._calls()
        text = f"question {uuid.uuid4()}"
        decided = self._decisions(decisions)
        try:
            submitted = self.wait(self.talk.ask(text, supersede=supersede, tool_decisions=decided))
        except ApprovalsOpen:
            assert not supersede
            assert self._calls() == before
            return
        self.questions[submitted.turn] = text
        self._check_decided(before, decisions, submitted.turn, submitted.decisions, closes=True)

    def decide(self, decisions: dict[str, bool]) -> None:
        before = self._calls()
        decided = self._decisions(decisions) or [{"tool_call_id": "zz", "approved": True, "approval_token": "forged"}]
        submitted = self.wait(self.talk.decide(*decided))
        self._check_decided(before, decisions, submitted.turn, submitted.decisions, closes=False)

    def answer_frontend(self) -> None:
        """Answer every call of the client's own tools that waits, if there is one."""
        waiting = {
            r["tool_call_id"] for r in self._calls().values() if r["kind"] == "frontend" and r["state"] == "pending"
        }
        if waiting:
            results = [{"tool_call_id": name, "content": "here"} for name in sorted(waiting)]
            self.wait(self.talk.decide(frontend_tool_results=results))

    def retry(self) -> None:
        last = self.wait(self.store.turns(self.talk.id))[-1]
        try:
            self.wait(self.talk.retry())
            assert (last["status"], last["retryable"]) == ("failed", True)
        except NotRetryable:
            assert (last["status"], last["retryable"]) != ("failed", True)

    def stop(self, turn: int) -> None:
        before = self.wait(self.store.turns(self.talk.id))
        stopped = self.wait(self.store.stop(self.talk.id, turn))
        after = self.wait(self.store.turns(self.talk.id))
        for old, new in zip(before, after, strict=True):
            assert old == new or (new["turn"] == turn and stopped.effect != "none")

    def _decisions(self, decisions: dict[str, bool]) -> list[dict[str, Any]]:
        """One decision a tool_call_id, since verdicts are told by that id."""
        by_id = {self.shown[token][1]: token for token in decisions}
        return [
            {"tool_call_id": name, "approved": decisions[token], "approval_token": token}
            for name, token in by_id.items()
        ]

    def _check_decided(
        self, before: dict[Key, Row], decisions: dict[str, bool], turn: int, told: dict[str, str], *, closes: bool
    ) -> None:
        """A decision acts on the call that it was shown for, and on no other."""
        by_id = {self.shown[token][1]: token for token in decisions}
        after = self._calls()
        meant = {self.shown[token][0]: (name, decisions[token]) for name, token in by_id.items()}
        for key, row in after.items():
            old = before[key]
            if key in meant and old["state"] == "pending":
                name, approved = meant[key]
                if told[name] == "stale":
                    assert row["state"] in ("pending", "superseded")
                    continue
                assert told[name] == ("approved" if approved else "denied")
                assert (row["state"], row["decided_turn"]) == (told[name], turn)
                if approved:
                    self.approved[key] = turn
            elif closes and old["state"] == "pending":
                assert (row["state"], row["decided_turn"]) == ("superseded", turn)
            else:
                assert row == old
        for key, (name, _) in meant.items():
            assert before[key]["state"] == "pending" or told[name] in ("already_resolved", "stale")

    def _calls(self) -> dict[Key, Row]:
        return {key_of(row): row for row in self.wait(self.store.calls(self.talk.id))}

    # Workers

    def claim(self, *, dies: bool) -> None:
        """Somebody rings. A worker that dies keeps its lease for no time at all, and lives on as a zombie."""
        before = self._calls()
        claim = self.wait(self.talk.try_claim(lease_seconds=0 if dies else 60, max_crashes=3))
        yielded = all(event["data"].get("code") == "approvals_open" for event in claim.ended)
        closes = isinstance(claim, Claim) and claim.turn["kind"] == "ask"
        assert closes or not yielded or self._calls() == before, "only a question closes calls"
        if isinstance(claim, NotClaimed):
            assert claim.reason == "busy" or all(
                s not in ("pending", "running") for s in self.wait(self.talk.statuses())
            )
            return
        messages = fold(claim.snapshot, claim.turns, claim.events)
        self._check_history(messages, claim.lease.turn)
        rows = {key_of(row): row for row in claim.calls}
        self.holder = Attempt(claim, messages, rows, step=claim.turn["rounds"])
        self.attempts.append(self.holder)

    def advance(self, attempt: Attempt, *, calm: bool = False) -> None:
        """The attempt's next batch."""
        events, finish, after = self._next(attempt, calm=calm)
        if self._append(attempt, attempt.batch + 1, events, finish):
            attempt.messages = after
            attempt.batch += 1
            attempt.over = finish is not None

    def write_after_the_end(self, attempt: Attempt) -> None:
        """A worker that believes in a turn which it has ended or handed back."""
        assert not self._append(attempt, attempt.batch + 1, [ai(99)], None)

    def repeat(self, attempt: Attempt) -> None:
        """A reply was lost: the last batch again, as it was."""
        if attempt.last is not None:
            self._append(attempt, attempt.batch, *attempt.last[:2])

    def release(self, attempt: Attempt) -> None:
        mine = attempt is self.holder and self._holds(attempt)
        try:
            self.wait(self.store.release(attempt.claim.lease))
        except LeaseLost:
            assert not mine
            return
        assert mine
        attempt.over = True

    def renew(self) -> None:
        tokens = {a.claim.lease.token: a for a in self.attempts}
        held = {token for token, attempt in tokens.items() if self._holds(attempt)}
        renewed = self.wait(self.store.renew(list(tokens), 0))
        assert renewed.lost.isdisjoint(held)
        assert all(tokens[token] is not self.holder or tokens[token].over for token in renewed.lost)

    def _holds(self, attempt: Attempt) -> bool:
        turns = self.wait(self.store.turns(self.talk.id))
        row = turns[attempt.turn - 1]
        return row["lease_token"] == attempt.claim.lease.token and row["status"] == "running"

    def _append(self, attempt: Attempt, batch: int, events: list[EventDraft], finish: Finish | None) -> bool:
        repeated = batch == attempt.batch
        before = self.wait(self.talk.events())
        holds = self._holds(attempt)
        try:
            appended = self.wait(self.store.append(attempt.claim.lease, batch, events, finish))
        except LeaseLost:
            assert not holds
            assert self.wait(self.talk.events()) == before
            return False
        if repeated:
            assert attempt.last is not None
            assert appended == attempt.last[2]
            assert self.wait(self.talk.events()) == before
            return True
        assert holds
        assert appended.first_seq == len(before) + 1
        attempt.last = (events, finish, appended)
        self._note(attempt, events, appended)
        return True

    def _note(self, attempt: Attempt, events: list[EventDraft], appended: Appended) -> None:
        for offset, event in enumerate(events):
            if event.is_snapshot and not (event.event == "approval_required" and appended.status == "stopped"):
                seq = appended.first_seq + offset
                self.snapshots[seq] = event.data["messages"]
                self._check_fold(seq)
            for change in event.calls:
                if change["op"] == "start":
                    key = (change["turn"], change["step"], change["call_index"])
                    self.effects[key] += 1
                    assert self.effects[key] == 1, "a side effect began twice"
                    gated = self._calls()[key]["gated"]
                    assert not gated or key in self.approved, "a gated side effect began without approval"
        for row in self._calls().values():
            if row["approval_token_sha256"] in self._offered:
                token, key, name = self._offered[row["approval_token_sha256"]]
                assert key == key_of(row)
                self.shown[token] = (key, name)

    # What a worker does next

    def _next(self, attempt: Attempt, *, calm: bool) -> tuple[list[EventDraft], Finish | None, list[Message]]:
        messages = attempt.messages
        plan = "answer" if calm else self._rng.choices(["calls", "answer", "fail", "compact"], [10, 3, 2, 1])[0]
        opened = open_calls(messages)
        if not opened and self._is_stale(attempt):
            return (
                [EventDraft("error", {"code": "approval_stale"})],
                failed("approval_stale", retryable=False),
                messages,
            )
        if opened:
            return self._settle(attempt, opened)
        if messages and messages[-1]["role"] == "assistant":
            return [answer(messages)], ANSWERED, messages
        if plan == "fail":
            return [EventDraft("error", {"code": "model"})], failed("model"), messages
        if plan == "compact" and len(messages) > 2:
            texts = [m["content"] for m in messages if m["role"] == "user"]
            summary: list[Message] = [{"role": "user", "content": f"summary {orjson.dumps(texts).decode()}"}]
            return [compacted(summary)], None, summary
        attempt.step += 1
        kinds = self._rng.choices(list(NEW_CALLS), [5, 2, 1, 1], k=self._rng.randint(1, 3)) if plan == "calls" else []
        made = [call(attempt.step, i, f"id{i}", **NEW_CALLS[kind]) for i, kind in enumerate(kinds)]
        said = ai(attempt.step, *made, content=None if made else "answer")
        said.data["message"]["key"] = [attempt.turn, attempt.step]
        for new in made:
            key = (attempt.turn, attempt.step, new["call_index"])
            attempt.rows[key] = {**new, "decided_turn": None, "approval_token_sha256": None}
        return [said], None, [*messages, said.data["message"]]

    def _is_stale(self, attempt: Attempt) -> bool:
        if attempt.claim.turn["kind"] != "tool_decisions" or attempt.batch or attempt.step:
            return False
        return not any(event["turn"] == attempt.turn for event in attempt.claim.events)

    def _settle(
        self, attempt: Attempt, opened: list[OpenCall]
    ) -> tuple[list[EventDraft], Finish | None, list[Message]]:
        """Results for what is decided, one call after another; a pause for the rest."""
        waiting: list[Key] = []
        for one in opened:
            turn, step = attempt.messages[one.message_index]["key"]
            key = (turn, step, one.call_index)
            row = attempt.rows[key]
            later = row["gated"] and (row["decided_turn"] or 0) > attempt.turn
            if row["state"] == "pending" or (later and row["state"] in ("approved", "denied", "expired")):
                waiting.append(key)
                continue
            if row["state"] == "approved" and row["risk"] == "side_effect" and key not in attempt.started:
                attempt.started.add(key)
                return [start(*key)], None, attempt.messages
            state = row["state"]
            if state == "executing":
                state = "unknown"
            elif state == "approved":
                state = "done"
            event = result(*key, one.tool_call_id, state=state)
            return [event], None, pair([*attempt.messages, event.data["message"]])
        awaits = []
        for key in waiting:
            row = attempt.rows[key]
            if row["state"] == "pending" and row["gated"]:
                token = str(uuid.uuid4())
                awaits.append(waits(*key, token=token))
                self._offered[token_sha256(token)] = (token, key, row["tool_call_id"])
        return [pause(attempt.messages, *awaits)], PAUSED, attempt.messages

    # What must hold

    def _check_history(self, messages: list[Message], turn: int) -> None:
        """Every question up to this turn is there once, and every result behind its call."""
        assert pair(messages) == messages
        text = orjson.dumps(messages).decode()
        for number, question in self.questions.items():
            assert text.count(question) == (number <= turn), f"question of turn {number} in turn {turn}"

    def _check_fold(self, seq: int) -> None:
        """The events since the last compaction give the snapshot's messages."""
        events = [e for e in self.wait(self.talk.events()) if e["seq"] <= seq]
        earlier = [e for e in events if e["event"] == HISTORY_COMPACTED and e["seq"] < seq]
        base = earlier[-1] if earlier else None
        if events[-1]["event"] == HISTORY_COMPACTED:
            return
        number = events[-1]["turn"]
        turns = [
            t for t in self.wait(self.store.turns(self.talk.id)) if (base["turn"] if base else 0) < t["turn"] <= number
        ]
        bearing = [e for e in events if e["event"] in (AI_MESSAGE, TOOL_CALL_RESULT)]
        assert fold(base, turns, bearing) == self.snapshots[seq]

    def check(self) -> None:
        """What holds at any time."""
        events, turns = self.wait(self.talk.events()), self.wait(self.store.turns(self.talk.id))
        assert [e["seq"] for e in events] == list(range(1, len(events) + 1))
        terminals = [e for e in events if e["event"] in TERMINALS]
        ended = [t["turn"] for t in turns if t["status"] not in ("pending", "running")]
        assert [e["turn"] for e in terminals] == ended, "each ended turn has one terminal event, in order"
        last = {e["turn"]: e["seq"] for e in terminals}
        assert all(e["seq"] <= last.get(e["turn"], e["seq"]) for e in events), "an event behind the end of its turn"
        full = [e for e in events if e["event"] in SNAPSHOTS and "messages" in e["data"]]
        snapshots = [e for e in events if e["event"] in SNAPSHOTS]
        assert all(e["event"] == HISTORY_COMPACTED or e is snapshots[-1] for e in full)
        assert all(e["data"]["messages"] == self.snapshots[e["seq"]] for e in full)
        assert not snapshots or snapshots[-1] in full
        assert all(e in full for e in snapshots if e["event"] == HISTORY_COMPACTED)
        stopped = [t["turn"] for t in turns if t["stop_requested_at"] and t["status"] == "awaiting_approval"]
        assert not stopped, "asked to stop, yet it waits for an approval"
        unfinished = len(ended) < len(turns)
        assert (self.wait(self.talk.row())["next_ring_at"] is not None) == unfinished

    def settle(self) -> None:
        """Everything comes to its end once faults are over."""
        for _ in range(400):
            if self.holder is None or self.holder.over or not self._holds(self.holder):
                self.claim(dies=True)
            statuses = self.wait(self.talk.statuses())
            if all(s not in ("pending", "running") for s in statuses):
                break
            if self.holder is not None:
                self.advance(self.holder, calm=True)
        else:
            raise AssertionError("waits for ever")
        self.check()
        for row in self._calls().values():
            waits_for_somebody = row["state"] == "pending" and "awaiting_approval" in statuses
            assert waits_for_somebody or row["state"] in ENDED, f"a call stays {row['state']}"
            told = self.approved.get(key_of(row))
            if told is not None and row["state"] == "superseded":
                assert statuses[told - 1] in ("stopped", "failed"), "told approved, yet it never ran"

"""Turns on a real SQLite store, in this process: workers that can be killed, a model that follows the test.

``Lab`` is a conversation's database and the clients that write to it. ``Process`` is a worker process without RQ: it
claims and runs turns with ``TurnRunner``, on a store that counts its calls, and it can die at any of them.
"""

from __future__ import annotations

import asyncio
import json
import sqlite3
import uuid
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from shared.errors import LeaseLost
from shared.events import SNAPSHOTS, TERMINALS, EventDraft
from shared.history import Message, fold
from shared.redaction import Redactor
from shared.requests import parse_request, record_of
from shared.settings import Settings
from shared.store.base import Claim, NotClaimed, Row, Submitted
from shared.store.sqlite import SqliteStore
from worker.agent.base import ChatModel, Delta, ModelReply, ModelRequest, Usage
from worker.agent.tools import ToolRegistry
from worker.agent.tools.declare import FunctionTool
from worker.agent.tools.threads import ToolThreads
from worker.attempt import Attempt
from worker.leases import LeaseKeeper
from worker.turn import Parts, TurnReport, TurnRunner

OnDelta = Callable[[Delta], None]
Reply = ModelReply | str | Exception | Callable[[ModelRequest, OnDelta], Awaitable[ModelReply]]
Hook = Callable[[tuple[Any, ...]], Awaitable[None]]

OPERATIONS = frozenset({"submit", "claim", "append", "renew", "release", "stop", "reap", "put_artifact"})
PATIENCE_SECONDS = 10  # for anything that a test waits for


def says(
    text: str | None = None,
    *calls: dict[str, Any],
    finish_reason: str | None = None,
    usage: Usage | None = None,
    **keys: Any,
) -> ModelReply:
    """An answer with that text and those calls; ``keys`` are further keys of the message."""
    message: Message = {"role": "assistant", "content": text, **keys}
    if calls:
        message["tool_calls"] = list(calls)
    reason = finish_reason or ("tool_calls" if calls else "stop")
    return ModelReply(message, usage or Usage(10, 5, 2, 0.25), reason, "test-model", "test")


def call(name: str, id: str | None = "c1", /, **arguments: Any) -> dict[str, Any]:
    return raw_call(name, json.dumps(arguments), id)


def raw_call(name: str, arguments: Any, id: str | None = "c1") -> dict[str, Any]:
    """A call with arguments as a provider sent them, broken or not; without an id if that is None."""
    entry = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return entry if id is None else {"id": id, **entry}


class Model:
    """A ``ChatModel`` that answers with the next of its replies; an exception is raised, a function is awaited.

    Every request is checked as a strict provider would. One call too many is an ``AssertionError``."""

    def __init__(self, replies: Iterable[Reply]) -> None:
        self.requests: list[ModelRequest] = []
        self.replies = deque(replies)

    async def complete(self, request: ModelRequest, on_delta: OnDelta) -> ModelReply:
        self.requests.append(request)
        check_request(request.messages)
        if not self.replies:
            raise AssertionError(f"the model was called {len(self.requests)} times")
        reply = self.replies.popleft()
        await asyncio.sleep(0)
        if callable(reply):
            return await reply(request, on_delta)
        if isinstance(reply, Exception):
            raise reply
        reply = says(reply) if isinstance(reply, str) else reply
        if reply.message["content"]:
            on_delta(Delta(reply.message["content"]))
        return reply

    async def close(self) -> None:
        """Nothing is open."""


class Held:
    """A reply that shows ``text`` and then waits; ``started`` is set meanwhile."""

    def __init__(self, text: str = "", reply: ModelReply | None = None) -> None:
        self._text, self._reply = text, reply or says(text)
        self.started, self.go_on = asyncio.Event(), asyncio.Event()

    async def __call__(self, request: ModelRequest, on_delta: OnDelta) -> ModelReply:
        if self._text:
            on_delta(Delta(self._text))
        self.started.set()
        await self.go_on.wait()
        return self._reply


def check_request(messages: Sequence[Message]) -> None:
    """What strict providers refuse: a missing, misplaced or superfluous result, broken arguments, an empty message."""
    assert messages[0]["role"] == "system"
    assert messages[-1]["role"] in ("user", "tool")
    due: list[str] = []
    for message in messages:
        if message["role"] == "tool":
            assert due, f"a result without a call: {message}"
            assert message["tool_call_id"] == due.pop(0)
            continue
        assert not due, f"calls without a result: {due}"
        if message["role"] == "assistant":
            calls = message.get("tool_calls")
            assert calls != []
            assert calls or message["content"]
            for entry in calls or ():
                assert isinstance(json.loads(entry["function"]["arguments"]), dict)
            due = [entry["id"] for entry in calls or ()]
            assert len(set(due)) == len(due)
    assert not due, f"calls without a result: {due}"


class ProcessStore:
    """A process's way to the shared store. ``counted`` lists its operations; hooks run before and after each.

    After ``dead`` nothing reaches the database any more."""

    def __init__(self, store: SqliteStore) -> None:
        self._store = store
        self.counted: list[str] = []
        self.dead = False
        self.before: dict[str, Hook] = {}
        self.after: dict[str, Hook] = {}

    def __getattr__(self, name: str) -> Any:
        operation = getattr(self._store, name)
        if name not in OPERATIONS:
            return operation

        async def watched(*arguments: Any, **options: Any) -> Any:
            self._check()
            if name in self.before:
                await self.before[name](arguments)
                self._check()
            self.counted.append(name)
            answer = await operation(*arguments, **options)
            if name in self.after:
                await self.after[name](arguments)
            self._check()
            return answer

        return watched

    def _check(self) -> None:
        if self.dead:
            raise LeaseLost("this process is dead")


@dataclass
class Process:
    """A worker process: one conversation at a time, until it is killed."""

    lab: Lab
    store: ProcessStore
    model: Any
    turns: TurnRunner
    attempt: Attempt | None = None
    started: asyncio.Event = field(default_factory=asyncio.Event)

    async def claim(self) -> tuple[Claim | NotClaimed, float]:
        return await self.turns.claim(self.lab.conversation_id, None)

    async def run(self, *, timeout_seconds: float | None = None) -> TurnReport:
        """Claim the lowest unfinished turn and run it."""
        claimed, sent_at = await self.claim()
        assert isinstance(claimed, Claim), claimed
        return await self.go_on(claimed, sent_at, timeout_seconds=timeout_seconds)

    async def go_on(self, claim: Claim, sent_at: float, *, timeout_seconds: float | None = None) -> TurnReport:
        async with asyncio.timeout(PATIENCE_SECONDS):
            return await self.turns.run(claim, sent_at, on_attempt=self._seen, timeout_seconds=timeout_seconds)

    def _seen(self, attempt: Attempt) -> None:
        self.attempt = attempt
        self.started.set()

    def kill(self) -> None:
        """As SIGKILL does: from now on nothing is written, started or gone on with."""
        self.store.dead = True
        if self.attempt is not None:
            self.attempt.lose()

    def kill_at(self, when: str, operation: str, matches: Callable[[Sequence[EventDraft], Any], bool]) -> None:
        """Die ``before`` or ``after`` the first ``operation`` whose events and finish match."""

        async def hook(arguments: tuple[Any, ...]) -> None:
            events, finish = (arguments[2], arguments[3]) if operation == "append" else ((), None)
            if matches(events, finish):
                self.kill()

        (self.store.before if when == "before" else self.store.after)[operation] = hook


class Lab:
    """One conversation on a real store, and what its clients do."""

    def __init__(self, settings: Settings, store: SqliteStore, functions: Sequence[Callable[..., Any]]) -> None:
        self.settings, self.store = settings, store
        self.conversation_id = str(uuid.uuid4())
        threads = ToolThreads(4)
        self.toolbox = ToolRegistry(
            [FunctionTool(f, threads) for f in functions], tool_timeout_seconds=settings.tool_timeout_seconds
        )
        self._workers = 0

    def process(self, replies: Iterable[Reply] | ChatModel = (), **changes: Any) -> Process:
        """A fresh worker process; ``changes`` are settings, or ``toolbox``."""
        self._workers += 1
        store = ProcessStore(self.store)
        model: Any = replies if hasattr(replies, "complete") else Model(replies)
        toolbox = changes.pop("toolbox", self.toolbox)
        settings = self.settings.model_copy(update=changes)
        keeper = LeaseKeeper(lambda: SqliteStore(settings), settings.lease_seconds)  # not started: leases are long
        parts = Parts(settings, store, model, toolbox, keeper, None, f"worker-{self._workers}")
        return Process(self, store, model, TurnRunner(parts))

    # Clients

    async def submit(self, kind: str, **arguments: Any) -> Submitted:
        request = parse_request(kind, {"conversation_id": self.conversation_id, **arguments})
        return await self.store.submit(record_of(request, redactor=Redactor.from_settings(self.settings)))

    async def ask(self, text: str = "What is wrong?", **options: Any) -> Submitted:
        return await self.submit("ask", ask=text, **options)

    async def decide(self, *decisions: dict[str, Any], **options: Any) -> Submitted:
        return await self.submit("tool_decisions", tool_decisions=list(decisions), **options)

    async def results(self, *results: dict[str, Any], **options: Any) -> Submitted:
        return await self.submit("tool_decisions", frontend_tool_results=list(results), **options)

    async def talk(self, text: str, *replies: Reply, **options: Any) -> TurnReport:
        """Ask and run."""
        await self.ask(text, **options)
        return await self.process(replies).run()

    # The database as people see it

    async def events(self, turn: int | None = None) -> list[Row]:
        rows = await self.store.events(self.conversation_id, full=True)
        return [row for row in rows if turn in (None, row["turn"])]

    async def names(self, turn: int | None = None) -> list[str]:
        return [row["event"] for row in await self.events(turn)]

    async def last(self, turn: int | None = None) -> Row:
        """The data of the last event."""
        data: Row = (await self.events(turn))[-1]["data"]
        return data

    async def turn(self, number: int) -> Row:
        return (await self.store.turns(self.conversation_id))[number - 1]

    async def calls(self) -> list[Row]:
        return await self.store.calls(self.conversation_id)

    async def states(self) -> list[str]:
        return [row["state"] for row in await self.calls()]

    async def approvals(self) -> list[Row]:
        """The pending approvals of the latest pause, as its event shows them."""
        paused = [row for row in await self.events() if row["event"] == "approval_required"]
        pending: list[Row] = paused[-1]["data"]["pending_approvals"]
        return pending

    def sql(self, statement: str, *parameters: Any) -> None:
        """Change the database behind everybody's back."""
        with sqlite3.connect(self.settings.sqlite_path, timeout=10) as db:
            db.execute(statement, parameters)
        db.close()

    def expire_lease(self) -> None:
        past = "2020-01-01T00:00:00.000000+00:00"
        self.sql("UPDATE conversation_turns SET lease_expires_at = ? WHERE status = 'running'", past)

    async def check(self) -> None:
        """What holds for every log: one terminal event a turn and nothing behind it, and each snapshot is the fold of
        what came before it."""
        rows = await self.events()
        turns = await self.store.turns(self.conversation_id)
        assert [row["seq"] for row in rows] == list(range(1, len(rows) + 1))
        for turn in turns:
            mine = [row["event"] for row in rows if row["turn"] == turn["turn"]]
            ended = turn["status"] not in ("pending", "running")
            assert len([name for name in mine if name in TERMINALS]) == ended, (turn["turn"], mine)
            assert not ended or mine[-1] in TERMINALS or mine[-1] == "user_message", mine
        for row in rows:
            if row["event"] in SNAPSHOTS and "messages" in row["data"]:
                known = [t for t in turns if t["turn"] <= row["turn"]]
                before = [r for r in rows if r["seq"] < row["seq"] and r["turn"] <= row["turn"]]
                assert fold(None, known, before) == row["data"]["messages"][1:]


def approve(approval: Row, **more: Any) -> dict[str, Any]:
    return {
        "tool_call_id": approval["tool_call_id"],
        "approval_token": approval["approval_token"],
        "approved": True,
        **more,
    }


def deny(approval: Row, feedback: str | None = None) -> dict[str, Any]:
    return approve(approval, approved=False) | ({"feedback": feedback} if feedback else {})


def results_of(request: ModelRequest | Sequence[Message]) -> list[Any]:
    """The contents of the tool results in a request."""
    messages = request.messages if isinstance(request, ModelRequest) else request
    return [m["content"] for m in messages if m["role"] == "tool"]


@asynccontextmanager
async def lab_in(home: Any, functions: Sequence[Callable[..., Any]], **changes: Any) -> AsyncIterator[Lab]:
    settings = Settings(home=home, model="test-model", system_prompt="Be brief.", lease_seconds=30, **changes)
    store = await SqliteStore(settings).open()
    try:
        yield Lab(settings, store, functions)
    finally:
        await store.close()


async def soon(event: asyncio.Event) -> None:
    """Wait for an event that has to come."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        await event.wait()

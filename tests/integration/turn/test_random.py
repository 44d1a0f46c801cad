"""Seeded random lives of one conversation: two workers that crash, become zombies, leave, and lose calls on the way to
the store, while clients ask, decide, stop and retry. Whatever happens, what the design promises holds at the end.

Everything runs on one loop in one thread, also SQLite, so that a seed is always the same run.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import publisher.writer
import worker.patience
from shared.errors import (
    ApprovalsOpen,
    ConversationUnknown,
    LeaseLost,
    ModelUnavailable,
    NotRetryable,
    RateLimited,
    StoreUnavailable,
)
from shared.settings import Settings
from shared.store.base import Claim, Row
from shared.store.sqlite import SqliteStore
from tests.support.agent import Lab, Process, approve, call, check_request, deny, says
from worker.agent.base import Delta, ModelReply, ModelRequest, ToolContext
from worker.agent.tools import tool

STEPS = 80
SEEDS = 40
CALM_ROUNDS = 60


class InlineStore(SqliteStore):
    """The store without its threads: a call runs where it is awaited, after giving way to others now and then."""

    rng: random.Random
    faults = True

    async def _call(self, function: str, arguments: dict[str, Any]) -> Any:
        for _ in range(self.rng.randrange(6)):
            await asyncio.sleep(0)
        kind = self.rng.random() if self.faults and function in ("append", "claim", "release") else 1.0
        if kind < 0.04:
            raise StoreUnavailable("the call did not arrive")
        run = self._read if function.startswith(("list_", "get_", "health")) else self._write
        answer = run(function, arguments)
        await asyncio.sleep(0)
        if kind < 0.08:
            raise StoreUnavailable("the reply was lost")
        return answer


class World:
    """One life."""

    def __init__(self, seed: int, home: Path) -> None:
        self.rng = random.Random(seed)
        settings = Settings(
            home=home,
            model="m",
            lease_seconds=30,
            batch_age_seconds=0,
            snapshots_kept=1000,
            max_steps=4,
            drain_seconds=0,
            hard_deadline_seconds=0,
        )
        self.store = InlineStore(settings)
        self.store.rng = self.rng
        self.lab = Lab(settings, self.store, self.tools())
        self.processes = [self.process(), self.process()]
        self.tasks: set[asyncio.Task[None]] = set()
        self.asked = 0
        self.effects: Counter[str] = Counter()
        self.approved: set[tuple[int, int, int]] = set()
        self.wrong: list[str] = []  # a tool cannot fail the test itself: what it raises is a result
        self.shown: dict[str, Row] = {}
        self.calm = False
        self.trouble = self.rng.choice([0.0, 0.05, 0.15])

    def process(self) -> Process:
        return self.lab.process(self)  # type: ignore[arg-type]

    # The model and the tools

    async def complete(self, request: ModelRequest, on_delta: Callable[[Delta], None]) -> ModelReply:
        check_request(request.messages)
        questions = [m["content"] for m in request.messages if m["role"] == "user"]
        assert len(questions) == len(set(questions)), questions
        for _ in range(self.rng.randrange(20)):
            await asyncio.sleep(0)
        if self.rng.random() < self.trouble:
            if self.rng.random() < 0.3:
                raise RateLimited("Slow down.", retry_after_seconds=1.0)
            raise ModelUnavailable("It is down.")
        on_delta(Delta("So "))
        await asyncio.sleep(0)
        if request.tool_choice == "none" or self.rng.random() < 0.4:
            return says("So it is.")
        names = self.rng.choices(["look", "notify", "restart", "restart"], k=self.rng.randint(1, 3))
        return says(None, *(call(name, f"c{n}", x=str(n)) for n, name in enumerate(names)))

    async def close(self) -> None:
        """Nothing is open."""

    def tools(self) -> list[Callable[..., Any]]:
        async def effect(context: ToolContext, *, gated: bool) -> None:
            key = (context.turn, context.step, context.call_index)
            self.effects[context.idempotency_key] += 1
            (row,) = [r for r in self.rows("tool_calls") if (r["turn"], r["step"], r["call_index"]) == key]
            if row["state"] != "executing":
                self.wrong.append(f"side effect of a call that is {row['state']}: {key}")
            if gated and key not in self.approved:
                self.wrong.append(f"side effect that nobody approved: {key}")
            for _ in range(self.rng.randrange(12)):
                await asyncio.sleep(0)

        @tool(risk="read_only")
        async def look(x: str) -> str:
            """Look."""
            for _ in range(self.rng.randrange(12)):
                await asyncio.sleep(0)
            return x

        @tool(risk="side_effect", approval="never")
        async def notify(x: str, context: ToolContext) -> str:
            """Notify."""
            await effect(context, gated=False)
            return x

        @tool(risk="side_effect")
        async def restart(x: str, context: ToolContext) -> str:
            """Restart."""
            await effect(context, gated=True)
            return x

        return [look, notify, restart]

    def rows(self, table: str) -> list[Row]:
        return self.store._connection().execute(f"SELECT * FROM {table}").fetchall()

    # Clients

    async def client(self) -> None:
        lab = self.lab
        await self.see_approvals()
        pending = {r["tool_call_id"] for r in await lab.calls() if r["state"] == "pending"}
        kind = self.rng.random()
        try:
            if self.shown and pending and kind < 0.5:
                await self.decide()
            elif kind < 0.75 and self.asked < 6:
                self.asked += 1
                await lab.ask(f"q{self.asked}", supersede=self.rng.random() < 0.8)
            elif kind < 0.8:
                await lab.store.stop(lab.conversation_id)
            elif kind < 0.9 and self.shown:
                await self.decide()
            else:
                await lab.submit("retry")
        except (ApprovalsOpen, ConversationUnknown, NotRetryable):
            return

    async def see_approvals(self) -> None:
        for row in await self.lab.events():
            for approval in row["data"].get("pending_approvals", ()):
                self.shown[approval["approval_token"]] = approval

    async def decide(self) -> None:
        chosen = self.rng.sample(list(self.shown.values()), k=min(len(self.shown), self.rng.randint(1, 3)))
        by_id = {a["tool_call_id"]: a for a in chosen}
        decisions = [approve(a) if self.rng.random() < 0.7 else deny(a) for a in by_id.values()]
        submitted = await self.lab.decide(*decisions)
        for tool_call_id, verdict in submitted.decisions.items():
            assert verdict != "unknown"
            if verdict == "approved":
                a = by_id[tool_call_id]
                self.approved.add((a["turn"], a["step"], a["call_index"]))

    # Workers

    async def work(self, process: Process) -> None:
        try:
            claimed, sent_at = await process.claim()
        except (ConversationUnknown, LeaseLost):
            return
        if isinstance(claimed, Claim):
            report = await process.go_on(claimed, sent_at)
            assert report.finish_reason not in ("internal", "store"), report
            assert report.status != "lost" or not self.calm, report

    def deliver(self, process: Process) -> None:
        self.tasks.add(asyncio.create_task(self.work(process)))

    async def trouble_of_workers(self, kind: float) -> None:
        index = self.rng.randrange(2)
        if kind < 0.4:
            self.processes[index].kill()
            self.processes[index] = self.process()
        elif kind < 0.7:
            self.lab.expire_lease()
        elif self.rng.random() < 0.5:
            leaving, self.processes[index] = self.processes[index], self.process()
            if leaving.attempt is not None:
                leaving.attempt.drain()
                leaving.attempt.hand_back(hard=self.rng.random() < 0.3)

    async def tick(self) -> None:
        for _ in range(self.rng.randrange(10)):
            await asyncio.sleep(0)
        for task in [t for t in self.tasks if t.done()]:
            self.tasks.discard(task)
            task.result()

    async def live(self) -> None:
        await self.client()
        for _ in range(STEPS):
            kind = self.rng.random()
            if kind < 0.15:
                await self.client()
            elif kind < 0.4:
                self.deliver(self.rng.choice(self.processes))
            elif kind < 0.55:
                await self.trouble_of_workers(self.rng.random())
            await self.tick()
        await self.calm_down()
        await self.judge()

    async def calm_down(self) -> None:
        """Faults end; rings go on. Everything must end by itself."""
        self.store.faults, self.trouble = False, 0.0
        await asyncio.gather(*self.tasks)
        self.tasks.clear()
        self.calm = True
        for _ in range(CALM_ROUNDS):
            turns = await self.store.turns(self.lab.conversation_id)
            if all(t["status"] not in ("pending", "running") for t in turns):
                return
            self.lab.expire_lease()
            await self.work(self.process())
        raise AssertionError([(t["turn"], t["kind"], t["status"]) for t in turns])

    async def judge(self) -> None:
        lab = self.lab
        assert self.wrong == []
        assert max(self.effects.values(), default=1) == 1, self.effects
        await lab.check()
        turns = {t["turn"]: t for t in await self.store.turns(lab.conversation_id)}
        waiting = any(t["status"] == "awaiting_approval" for t in turns.values())
        for row in await lab.calls():
            key = (row["turn"], row["step"], row["call_index"])
            assert row["state"] not in ("approved", "executing"), row
            assert row["state"] != "pending" or waiting, row
            if row["state"] == "done" and row["tool_name"] != "look":
                assert self.effects[f"{lab.conversation_id}:{':'.join(map(str, key))}"] == 1, key
            if key in self.approved and row["state"] == "superseded":
                assert turns[row["decided_turn"]]["status"] in ("stopped", "failed"), row
        for turn in turns.values():
            if turn["finish_reason"] == "approval_stale":
                assert not {"approved", "denied"} & set(turn["decisions"].values()), turn
        results = Counter(
            (r["data"]["call_turn"], r["data"]["step"], r["data"]["call_index"])
            for r in await lab.events()
            if r["event"] == "tool_call_result"
        )
        assert max(results.values(), default=1) == 1
        steps = Counter((r["turn"], r["data"]["step"]) for r in await lab.events() if r["event"] == "ai_message")
        assert max(steps.values(), default=1) == 1


@pytest.fixture
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publisher.writer, "RETRY_SECONDS", 0.0)
    monkeypatch.setattr(publisher.writer, "RETRY_SECONDS_MAX", 0.0)
    monkeypatch.setattr(worker.patience, "FIRST_WAIT_SECONDS", 0.0)


@pytest.mark.usefixtures("_quick")
@pytest.mark.parametrize("seed", range(SEEDS))
async def test_a_random_life(seed: int, tmp_path: Path) -> None:
    world = World(seed, tmp_path)
    await world.store.open()
    try:
        await world.live()
    finally:
        for task in world.tasks:
            task.cancel()
        await asyncio.gather(*world.tasks, return_exceptions=True)
        await world.store.close()

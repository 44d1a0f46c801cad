"""Random histories of a conversation: whatever happens between two batches, the promises hold."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import hypothesis
import pytest
from hypothesis import HealthCheck
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from shared.settings import Settings
from shared.store import open_store
from shared.store.base import Store
from tests.contract.simulation import NEW_CALLS, Attempt, World

EXAMPLES = {"sqlite": 40, "postgres": 12, "supabase": 4}
STEPS = 40
MOST_TURNS = 8

picks = st.integers(0, 1_000)
plans = st.sampled_from(["calls", "calls", "calls", "answer", "fail", "compact"])
new_calls = st.lists(st.sampled_from([*NEW_CALLS, "gated", "effect"]), min_size=1, max_size=3)


def machine(run: asyncio.Runner, store: Store) -> type[RuleBasedStateMachine]:
    class Conversation(RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            self.world = World(run, store)
            self.turns = 0

        @initialize()
        def begins(self) -> None:
            self.asks(supersede=True, wanted=[])

        @precondition(lambda self: self.turns < MOST_TURNS)
        @rule(
            supersede=st.sampled_from([True, True, False]), wanted=st.lists(st.tuples(picks, st.booleans()), max_size=2)
        )
        def asks(self, supersede: bool, wanted: list[tuple[int, bool]]) -> None:
            self.turns += 1
            self.world.ask(supersede=supersede, decisions=self._tokens(wanted))

        @precondition(lambda self: self.turns < MOST_TURNS and self.world.shown)
        @rule(wanted=st.lists(st.tuples(picks, st.booleans()), max_size=3))
        def decides(self, wanted: list[tuple[int, bool]]) -> None:
            self.turns += 1
            self.world.decide(self._tokens(wanted))

        @precondition(lambda self: self.turns < MOST_TURNS)
        @rule()
        def answers_its_own_tools(self) -> None:
            self.turns += 1
            self.world.answer_frontend()

        @precondition(lambda self: self.turns < MOST_TURNS)
        @rule()
        def retries(self) -> None:
            self.turns += 1
            self.world.retry()

        @rule(turn=st.integers(1, MOST_TURNS))
        def stops(self, turn: int) -> None:
            self.world.stop(turn)

        @rule(dies=st.booleans())
        def claims(self, dies: bool) -> None:
            self.world.claim(dies=dies)

        @precondition(lambda self: self.world.holder is not None and not self.world.holder.over)
        @rule(plan=plans, kinds=new_calls)
        def works(self, plan: str, kinds: list[str]) -> None:
            self._advance(self.world.holder, plan, kinds)

        @precondition(lambda self: self.world.holder is not None and not self.world.holder.over)
        @rule(plan=plans, kinds=new_calls, steps=st.integers(2, 6))
        def works_on(self, plan: str, kinds: list[str], steps: int) -> None:
            for _ in range(steps):
                if not self.world.holder.over:
                    self._advance(self.world.holder, plan, kinds)
                    plan = "answer"

        @precondition(lambda self: self.world.attempts)
        @rule(which=picks, plan=plans, kinds=new_calls)
        def zombie_writes(self, which: int, plan: str, kinds: list[str]) -> None:
            attempt = self._pick(which)
            if not attempt.over:
                self._advance(attempt, plan, kinds)

        @precondition(lambda self: self.world.attempts)
        @rule(which=picks)
        def reply_was_lost(self, which: int) -> None:
            self.world.repeat(self._pick(which))

        @precondition(lambda self: self.world.attempts)
        @rule(which=picks)
        def hands_back(self, which: int) -> None:
            attempt = self._pick(which)
            if not attempt.over:
                self.world.release(attempt)

        @precondition(lambda self: self.world.attempts)
        @rule()
        def renews(self) -> None:
            self.world.renew()

        @invariant()
        def holds(self) -> None:
            if self.turns:
                self.world.check()

        def teardown(self) -> None:
            if self.turns:
                self.world.settle()

        def _pick(self, which: int) -> Attempt:
            return self.world.attempts[which % len(self.world.attempts)]

        def _advance(self, attempt: Attempt | None, plan: str, kinds: list[str]) -> None:
            assert attempt is not None
            self.world.advance(attempt, plan, kinds if plan == "calls" else [])

        def _tokens(self, wanted: list[tuple[int, bool]]) -> dict[str, bool]:
            """Tokens that people were shown, old ones too."""
            shown = list(self.world.shown)
            return {shown[pick % len(shown)]: approved for pick, approved in wanted} if shown else {}

    return Conversation


@pytest.fixture
def open_world(settings: Settings) -> Iterator[tuple[asyncio.Runner, Store]]:
    with asyncio.Runner() as run:
        store = run.run(open_store(settings).open())
        yield run, store
        run.run(store.close())


def test_promises_hold_whatever_happens(settings: Settings, open_world: tuple[asyncio.Runner, Store]) -> None:
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        machine(*open_world),
        settings=hypothesis.settings(
            max_examples=EXAMPLES[settings.store_kind],
            stateful_step_count=STEPS,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )

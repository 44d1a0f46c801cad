"""SIGKILL at every step of a turn, on every store: another worker takes the turn up, and nothing is lost or doubled.

The turn is a decision: an approved restart runs, the model answers, a read-only call and an ungated side effect run
side by side, the model answers again. All victims of a store die side by side; each test looks at one of them.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from scripts.bench.kit.nursery import Nursling
from tests.acceptance.invariants import Story
from tests.acceptance.lab import HEIR, STORES, Lab, WorkingModel, open_lab

UNKNOWN = "Outcome unknown"
AT_ONCE = 8  # victims that start side by side
EAGER = {"TURNKEEPER_BATCH_AGE_SECONDS": "0"}  # every event in a batch of its own, as far as it gets

# Where a worker dies, and what the calls have come to in the end, with their side effects where that is certain:
# the approved restart, and the bump that the model asks for in the turn. ``None``: whatever the rules allow.
ONCE, LOST, DONE_LATE = ("done", 1), ("unknown", 0), ("unknown", 1)
DEATHS: dict[str, Any] = {
    "after_claim": (ONCE, ONCE),
    "before_executing": (ONCE, ONCE),
    "before_flush": (ONCE, ONCE),
    "after_flush": (LOST, ONCE),
    "after_executing": (LOST, ONCE),
    "before_tool": (LOST, ONCE),
    "after_tool": (DONE_LATE, ONCE),
    "before_model": (None, ONCE),
    "after_model": (None, ONCE),
    "after_ai_message": (None, ONCE),
    "before_executing:2": (None, ONCE),
    "before_flush:2": (None, None),
    "after_flush:2": (ONCE, None),
    "after_executing:2": (ONCE, LOST),
    "before_tool:2": (None, ONCE),
    "before_tool:3": (ONCE, LOST),
    "after_tool:2": (None, None),
    "after_tool:3": (ONCE, None),
    "before_model:2": (ONCE, None),
    "after_model:2": (ONCE, None),
    "after_ai_message:2": (ONCE, None),
    "before_end": (ONCE, None),
    "after_end": (ONCE, ONCE),
    "before_finalise": (ONCE, ONCE),
    # every event in a batch of its own
    "eager before_flush:2": (DONE_LATE, ONCE),
    "eager after_flush:2": (ONCE, None),
    "eager before_flush:3": (ONCE, None),
    "eager after_flush:3": (ONCE, None),
    "eager before_flush:4": (ONCE, None),
    "eager after_flush:4": (ONCE, None),
    # twice: the one who took it over dies too; without an answer stored in between, the third attempt runs alone
    "after_claim then after_claim": (ONCE, ONCE),
    "after_executing then after_executing": (LOST, LOST),
    "after_tool then after_flush": (DONE_LATE, None),
    "after_model then after_tool:2": (None, None),
    "after_executing:2 then before_end": (ONCE, LOST),
    # not a death: an answer of the store is lost on its way
    "after_claim=drop": (ONCE, ONCE),
    "after_flush=drop,after_flush:3=drop,after_end=drop": (ONCE, ONCE),
    # a death without a signal
    "after_tool:3=exit": (ONCE, None),
}
ENDED = ("after_end", "before_finalise")  # the turn has ended when the worker dies


@dataclass
class Scenario:
    """One conversation and those who died over it."""

    name: str
    number: int
    conversation: str
    victims: list[Nursling]

    @property
    def faults(self) -> list[str]:
        return self.name.removeprefix("eager ").split(" then ")

    @property
    def question(self) -> str:
        return f"work {self.number}"

    @property
    def next_question(self) -> str:
        return f"next {self.number}"

    @property
    def deaths(self) -> int:
        return 0 if self.name.endswith("=drop") else len(self.faults)


@dataclass
class Campaign:
    lab: Lab
    model: WorkingModel
    scenarios: dict[str, Scenario]


@pytest.fixture(scope="module", params=STORES)
def campaign(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Campaign]:
    """Everybody has died, everything has been taken over, and each conversation has answered one more question."""
    folder = tmp_path_factory.mktemp("kills")
    with open_lab(request.param, request, folder) as lab:
        model = WorkingModel()
        lab.llm.script(model)
        lab.worker(HEIR, slots=64, TURNKEEPER_DATABASE_POOL_SIZE="10").wait_for("worker_ready")
        made = [Scenario(n, i, lab.ask(f"work {i}", heir=_heir(n, i)), []) for i, n in enumerate(DEATHS)]
        _until_ended(lab, made, 1)
        for start in range(0, len(made), AT_ONCE):
            _run(lab, made[start : start + AT_ONCE])
        _until_dead(lab, made)
        seconds = [s for s in made if " then " in s.name]
        lab.worker(*(_heir(s.name, s.number) for s in seconds)).wait_for("worker_ready")
        _until_ended(lab, made, 2)
        for scenario in made:
            lab.ask(scenario.next_question, scenario.conversation)
        _until_ended(lab, made, 3)
        yield Campaign(lab, model, {s.name: s for s in made})


def _heir(name: str, number: int) -> str:
    return f"second-{number}" if " then " in name else HEIR


def _run(lab: Lab, scenarios: list[Scenario]) -> None:
    """Start the victims, give them their turns, and wait until the first of each has died over it."""
    for scenario in scenarios:
        eager = EAGER if scenario.name.startswith("eager ") else {}
        queue, heir = f"first-{scenario.number}", _heir(scenario.name, scenario.number)
        first, *more = scenario.faults
        scenario.victims = [lab.worker(queue, fault=first, slots=1, **eager)]
        scenario.victims += [lab.worker(heir, fault=fault, slots=1) for fault in more]
        lab.approve(scenario.conversation, on=queue, heir=heir)
    _until_dead(lab, scenarios, first_only=True)


def _until_dead(lab: Lab, scenarios: list[Scenario], *, first_only: bool = False) -> None:
    def over(scenario: Scenario) -> bool:
        victims = scenario.victims[:1] if first_only else scenario.victims
        return all(victim.ended is not None for victim in victims) or lab.ended(scenario.conversation, 2)

    dying = [scenario for scenario in scenarios if scenario.deaths]
    lab.until(lambda: all(map(over, dying)), "somebody neither died nor finished the turn")


def _until_ended(lab: Lab, scenarios: list[Scenario], turn: int) -> None:
    query = "SELECT count(*) AS n FROM conversation_turns WHERE turn = %s AND status NOT IN ('pending', 'running')"
    lab.until(lambda: lab.database.rows(query, turn)[0]["n"] == len(scenarios), f"the end of every turn {turn}")


@pytest.mark.parametrize("name", DEATHS)
def test_nothing_is_lost_or_done_twice(campaign: Campaign, name: str) -> None:
    lab, model, scenario = campaign.lab, campaign.model, campaign.scenarios[name]
    story = lab.story(scenario.conversation)
    assert lab.broken(scenario.conversation) == []
    assert [turn["status"] for turn in story.turns] == ["completed"] * 3
    if scenario.deaths:
        expected = 70 if name.endswith("=exit") else -signal.SIGKILL
        assert [victim.ended for victim in scenario.victims] == [expected] * scenario.deaths
    _check_attempts(story, scenario)
    _check_calls(lab, model, story, scenario)
    _check_model(model, story, scenario)
    assert story.events[-1]["data"]["content"] == f"That is all about {scenario.next_question}."


def _check_attempts(story: Story, scenario: Scenario) -> None:
    taken_over = 0 if scenario.faults[0] in ENDED else scenario.deaths
    attempts = story.turns[1]["attempt"]
    assert attempts > taken_over
    resumed = [(e["data"]["why"], e["data"]["attempt"]) for e in story.named("turn_resumed", 2)]
    assert set(resumed) <= {("crash", attempt) for attempt in range(2, 1 + attempts)}
    assert not taken_over or resumed[-1] == ("crash", attempts)


def _check_calls(lab: Lab, model: WorkingModel, story: Story, scenario: Scenario) -> None:
    gated, free = f"gated-{scenario.number}", f"free-{scenario.number}"
    effects = lab.effects
    came_to = [
        (story.call(f"g-{scenario.number}")["state"], effects[gated]),
        (story.call(f"f-{scenario.number}")["state"], effects[free]),
    ]
    for actual, expected in zip(came_to, DEATHS[scenario.name], strict=True):
        assert actual == expected or (expected is None and actual in (ONCE, LOST, DONE_LATE)), scenario.name
    for call_id, (state, _) in zip((f"g-{scenario.number}", f"f-{scenario.number}"), came_to, strict=True):
        told = model.told(scenario.next_question, call_id)
        assert told.startswith(UNKNOWN) == (state == "unknown"), told
    seen = model.told(scenario.next_question, f"n-{scenario.number}")
    assert str(scenario.number) in seen
    assert "\x00" not in seen


def _check_model(model: WorkingModel, story: Story, scenario: Scenario) -> None:
    """An answer that is stored was not asked for again: each attempt asked at most once, up to the one that stored."""
    said = [(event["turn"], event["data"]["step"]) for event in story.named("ai_message")]
    assert said == [(1, 1), (2, 1), (2, 2), (3, 1)]
    asked = [(scenario.question, step) for step in range(3)] + [(scenario.next_question, 0)]
    for event, key in zip(story.named("ai_message"), asked, strict=True):
        assert 1 <= model.asked[key] <= event["attempt"]

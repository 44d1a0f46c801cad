"""A worker that freezes, loses its turn, and wakes up: it writes nothing, starts nothing, and takes the next turn.

All zombies of a store freeze side by side, each in a conversation of its own; somebody else finishes their turns; then
they wake up.
"""

from __future__ import annotations

import json
import signal
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from scripts.bench.kit.nursery import Nursling
from tests.acceptance.invariants import Story
from tests.acceptance.lab import HEIR, STORES, Lab, WorkingModel, open_lab

# Where the worker freezes; what the approved restart has come to, and how often it happened before the zombie woke up
# and in the end. The last one is the pause that no check can exclude: frozen between its look at the clock and the
# call, it makes that one call late; nobody else has begun it.
PAUSES: dict[str, tuple[str, int, int]] = {
    "after_claim": ("done", 1, 1),
    "before_executing": ("done", 1, 1),
    "before_flush": ("done", 1, 1),
    "after_flush": ("unknown", 0, 0),
    "after_executing": ("unknown", 0, 0),
    "after_model": ("done", 1, 1),
    "before_end": ("done", 1, 1),
    "before_tool": ("unknown", 0, 1),
}


@dataclass
class Zombie:
    """One worker and its conversation, before it woke up and after."""

    worker: Nursling
    queue: str
    conversation: str
    before: Story
    effects_before: Counter[str]
    after: Story
    name: str


@dataclass
class Graveyard:
    lab: Lab
    zombies: dict[str, Zombie]


@pytest.fixture(scope="module", params=STORES)
def graveyard(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Graveyard]:
    """They have frozen, were taken over, woke up, and noticed it."""
    with open_lab(request.param, request, tmp_path_factory.mktemp("zombies")) as lab:
        lab.llm.script(WorkingModel())
        lab.worker(HEIR).wait_for("worker_ready")
        conversations = dict(zip(PAUSES, lab.paused(range(len(PAUSES))), strict=True))
        queues = {point: f"zombie-{point}" for point in PAUSES}
        workers = {point: lab.worker(queues[point], fault=f"{point}=stop", slots=1) for point in PAUSES}
        for point, conversation in conversations.items():
            lab.approve(conversation, on=queues[point])
        lab.until(lambda: all(worker.frozen for worker in workers.values()), "everybody is frozen")
        lab.until(lambda: all(lab.ended(c, 2) for c in conversations.values()), "all turns have ended elsewhere")
        before, effects = {p: lab.story(c) for p, c in conversations.items()}, lab.effects
        for worker in workers.values():
            worker.signal(signal.SIGCONT)
        for worker in workers.values():
            worker.wait_for("job_ended")
        yield Graveyard(
            lab,
            {
                point: Zombie(
                    workers[point],
                    queues[point],
                    conversation,
                    before[point],
                    effects,
                    lab.story(conversation),
                    str(number),
                )
                for number, (point, conversation) in enumerate(conversations.items())
            },
        )


@pytest.mark.parametrize("point", PAUSES)
def test_a_worker_that_wakes_up_after_its_turn_was_taken_does_nothing(graveyard: Graveyard, point: str) -> None:
    lab, zombie = graveyard.lab, graveyard.zombies[point]
    state, early, late = PAUSES[point]
    gated = f"gated-{zombie.name}"
    assert zombie.after == zombie.before
    assert zombie.after.call(f"g-{zombie.name}")["state"] == state
    assert (zombie.effects_before[gated], lab.effects[gated]) == (early, late)
    assert lab.broken(zombie.conversation) == []
    assert [turn["status"] for turn in zombie.after.turns] == ["completed"] * 2
    assert zombie.after.turns[1]["worker"] != zombie.worker.said("worker_ready")["worker"]  # type: ignore[index]
    assert [e["attempt"] for e in zombie.after.events if e["event"] in ("ai_message", "answer_end")][-1] > 1
    lost = zombie.worker.said("lease_lost")
    assert (lost is None) == (point == "after_claim")  # there it asks again before it begins, and finds nothing to do
    assert not [entry for entry in zombie.worker.entries() if "exception" in entry]


@pytest.mark.parametrize("point", PAUSES)
def test_it_is_good_for_the_next_turn(graveyard: Graveyard, point: str) -> None:
    lab, zombie = graveyard.lab, graveyard.zombies[point]
    lab.ask("next", zombie.conversation, on=zombie.queue)
    lab.until(lambda: lab.ended(zombie.conversation, 3), "the next turn")
    turn = lab.story(zombie.conversation).turns[2]
    ready = zombie.worker.said("worker_ready")
    assert ready is not None
    assert (turn["status"], turn["worker"]) == ("completed", ready["worker"]), json.dumps(turn, default=str)
    assert lab.broken(zombie.conversation) == []

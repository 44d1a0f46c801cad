"""A turn that kills its worker each time takes nobody with it for long, and ends with an error that people see."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.bench.kit.llm_server import Call, Gate, Reply, Request
from tests.acceptance.lab import HEIR, Lab, open_lab


@pytest.fixture
def lab(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Lab]:
    with open_lab("sqlite", request, tmp_path) as made:
        yield made


def test_a_poison_turn_ends_alone_and_its_neighbour_does_not(lab: Lab) -> None:
    gate = Gate()

    def answer(request: Request) -> Reply:
        if request.messages[-1]["content"] == "poison":
            return Reply(calls=[Call("die", {}, "call_d")])
        return Reply("All is well.", gate=gate)

    lab.llm.script(answer)
    poison, neighbour = lab.ask("poison"), lab.ask("question")
    deaths = 0
    worker = lab.worker(HEIR)

    def poison_ended() -> bool:
        nonlocal deaths, worker
        if worker.ended is not None:  # started again, as a supervisor would
            deaths += 1
            worker = lab.worker(HEIR)
        return lab.ended(poison, 1)

    lab.until(poison_ended, "the end of the poison turn", seconds=120)
    turn = lab.turn(poison, 1)
    assert turn is not None
    assert (turn["status"], turn["finish_reason"], turn["crashes"]) == ("failed", "crash_cap", 4)
    assert deaths < 4  # from the second on it had a process of its own
    gate.open()
    lab.until(lambda: lab.ended(neighbour, 1), "the neighbour's end")
    innocent = lab.turn(neighbour, 1)
    assert innocent is not None
    assert innocent["status"] == "completed"
    assert lab.broken(neighbour) == []

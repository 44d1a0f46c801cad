"""Workers that are told to leave: their turns go on elsewhere at once, and nobody sees an error."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from scripts.bench.kit.llm_server import Call, Reply, Request
from scripts.bench.kit.nursery import Nursling
from tests.acceptance.lab import FAST, HEIR, STORES, Lab, WorkingModel, open_lab

# Where SIGTERM comes, and whether the turn is handed over: near its end it reaches that instead. None: either, since
# the last model call may begin before the signal has reached the turn.
STAGES: dict[str, bool | None] = {
    "after_claim=term": True,
    "before_executing=term": True,
    "before_flush=term": True,
    "after_executing=term": True,
    "before_tool=term": True,
    "after_tool=term": True,
    "before_model=term": True,
    "after_model=term": True,
    "after_ai_message=term": True,
    "before_tool:2=term": True,
    "after_tool:3=term": None,
    "before_end=term": False,
    "before_finalise=term": False,
    # it dies while it hands the turn over
    "before_model=term,before_release": True,
    "before_model=term,after_release": True,
    # the answer to the release is lost
    "before_model=term,after_release=drop": True,
}
HAND_OVER_SECONDS = 2.0  # from the signal to the first event of the next attempt; a free machine needs a tenth of it
TURNS = 40
EVERY_SECONDS = 0.12


@dataclass
class Stage:
    worker: Nursling
    conversation: str
    number: int


@pytest.fixture(scope="module", params=STORES)
def lab(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with open_lab(request.param, request, tmp_path_factory.mktemp("hand-over")) as lab:
        yield lab


@pytest.fixture(scope="module")
def stages(lab: Lab) -> dict[str, Stage]:
    """Everybody was told to leave at a stage of a turn, has left, and the turns have ended."""
    lab.llm.script(WorkingModel())
    lab.worker(HEIR, TURNKEEPER_REAP_SECONDS="1").wait_for("worker_ready")
    conversations = lab.paused(range(len(STAGES)))
    made: dict[str, Stage] = {}
    for number, (fault, conversation) in enumerate(zip(STAGES, conversations, strict=True)):
        worker = lab.worker(f"leaving-{number}", fault=fault, slots=1, TURNKEEPER_REAP_SECONDS="60")
        worker.wait_for("worker_ready")
        lab.approve(conversation, on=f"leaving-{number}")
        made[fault] = Stage(worker, conversation, number)
    for stage in made.values():
        stage.worker.wait()
    lab.until(lambda: all(lab.ended(stage.conversation, 2) for stage in made.values()), "all turns end")
    return made


@pytest.mark.parametrize("fault", STAGES)
def test_a_turn_goes_on_elsewhere_at_once(lab: Lab, stages: dict[str, Stage], fault: str) -> None:
    stage = stages[fault]
    story = lab.story(stage.conversation)
    killed = fault.endswith("_release")
    assert lab.broken(stage.conversation) == []
    assert story.turns[1]["status"] == "completed"
    assert stage.worker.ended == (-9 if killed else 0)
    assert {call["state"] for call in story.calls} == {"done"}
    assert [lab.effects[f"{kind}-{stage.number}"] for kind in ("gated", "free")] == [1, 1]
    resumed = story.named("turn_resumed", 2)
    assert STAGES[fault] is None or len(resumed) == STAGES[fault]
    if resumed and not killed and "drop" not in fault:
        seconds = (_moment(resumed[0]["created_at"]) - _moment(_drained_at(stage.worker))).total_seconds()
        print(f"{fault}: went on after {seconds:.3f} s")
        assert seconds < HAND_OVER_SECONDS
    for event in resumed:
        assert event["data"]["why"] == ("crash" if fault.endswith("before_release") else "handed_back")


def _drained_at(worker: Nursling) -> object:
    entry = worker.said("worker_draining")
    assert entry is not None
    return entry["timestamp"]


def _moment(value: Any) -> datetime:
    return value if isinstance(value, datetime) else datetime.fromisoformat(value)


def test_a_rolling_restart_under_load_shows_no_error(lab: Lab) -> None:
    """Three workers are replaced one by one while turns of about a second come in steadily."""

    def answer(request: Request) -> Reply:
        messages = request.messages
        if messages[-1]["role"] == "user":
            return Reply("I look.", calls=[Call("pods", {"namespace": messages[-1]["content"]})], pause_seconds=0.1)
        question = next(m["content"] for m in reversed(messages) if m["role"] == "user")
        return Reply(f"All twelve pods of {question} are up, said with some patience.", piece=6, pause_seconds=0.1)

    lab.llm.script(answer)
    queue = "rolling"
    fleet = [lab.worker(queue) for _ in range(3)]
    for worker in fleet:
        worker.wait_for("worker_ready")
    asked: list[str] = []
    started = time.monotonic()

    def ask_what_is_due() -> None:
        while len(asked) < min(TURNS, (time.monotonic() - started) / EVERY_SECONDS):
            asked.append(lab.ask(f"service {len(asked)}", on=queue, heir=queue))

    for old in fleet:
        new = lab.worker(queue)
        lab.until(lambda: ask_what_is_due() or (len(asked) >= 8 and new.said("worker_ready")), "the new worker")  # noqa: B023
        old.leave()
        lab.until(lambda: ask_what_is_due() or old.ended is not None, "the old worker has left")  # noqa: B023
        assert old.ended == 0
    lab.until(lambda: ask_what_is_due() or len(asked) == TURNS, "everything is asked")
    lab.until(lambda: all(lab.ended(conversation, 1) for conversation in asked), "every turn ends")
    handed_over = 0
    for number, conversation in enumerate(asked):
        story = lab.story(conversation)
        assert lab.broken(conversation) == []
        [turn] = story.turns
        assert (turn["status"], turn["crashes"]) == ("completed", 0)
        assert (
            story.events[-1]["data"]["content"]
            == f"All twelve pods of service {number} are up, said with some patience."
        )
        handed_over += turn["attempt"] - 1
    print(f"{TURNS} turns, {handed_over} hand-overs")
    assert handed_over > 0


def test_pick_up_after_a_kill(lab: Lab) -> None:
    """Within the lease, the time between two looks of a reaper, and a little."""
    lab.llm.script(WorkingModel())
    lease, reap = float(FAST["TURNKEEPER_LEASE_SECONDS"]), float(FAST["TURNKEEPER_REAP_SECONDS"])
    lab.worker("pick-up").wait_for("worker_ready")
    seconds = _pick_up(lab, "killed", "pick-up")
    print(f"picked up after {seconds:.2f} s with a lease of {lease:g} s")
    assert seconds < lease + 2 * reap + 1


def test_pick_up_after_a_kill_with_defaults(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    defaults = {"TURNKEEPER_LEASE_SECONDS": "10", "TURNKEEPER_REAP_SECONDS": "2"}
    with open_lab("sqlite", request, tmp_path) as lab:
        lab.llm.script(WorkingModel())
        lab.worker(HEIR, **defaults).wait_for("worker_ready")
        seconds = _pick_up(lab, "killed", HEIR, **defaults)
    print(f"picked up after {seconds:.2f} s with defaults")
    assert seconds < 15


def _pick_up(lab: Lab, queue: str, heir: str, **environment: str) -> float:
    """Seconds from a SIGKILL at the first model call to the first event of the next attempt."""
    victim = lab.worker(queue, fault="before_model", slots=1, **environment)
    conversation = lab.ask("How long does it take?", on=queue, heir=heir)
    lab.until(lambda: victim.ended is not None, "the victim dies")
    died = datetime.now(UTC)
    lab.until(lambda: lab.ended(conversation, 1), "the turn ends")
    [resumed] = lab.story(conversation).named("turn_resumed")
    assert resumed["data"]["why"] == "crash"
    return (_moment(resumed["created_at"]) - died).total_seconds()

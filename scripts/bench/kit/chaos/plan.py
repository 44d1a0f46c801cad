"""The plan of a run: which conversations are held, what is asked in each, and what people do. All from one seed.

A question carries its own script as JSON, so that the model, wherever it runs, knows what to call next from the
messages alone.
"""

from __future__ import annotations

import json
import random
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Self

READ, IDEMPOTENT, EFFECT, GATED = "look", "scale", "restart", "deploy"
MARK: Final = "chaos "
START_SHARE: Final = 0.85  # of the storm's time, within which conversations begin
Act = dict[str, Any]

KINDS: Final = {
    "reads": 20,
    "effects": 25,
    "approved": 20,
    "partly": 5,
    "superseded": 5,
    "follow_ups": 15,
    "stopped": 5,
    "plain_rq": 5,
}
"""Shares of the kinds of conversations."""


@dataclass(frozen=True, slots=True)
class Planned:
    """A conversation. ``start``: seconds after the run began. ``acts``, one after the other: ``ask`` and ``rq`` (a
    plain RQ job, ``copies`` times) with ``text`` and ``request_id``; ``wait`` for the end of the last turn; ``think``
    for ``seconds``; ``decide`` (``approve``: share of yes in percent; ``first``: one call only; ``again``: also as
    plain RQ jobs); ``stop`` the last turn."""

    conversation_id: str
    kind: str
    start: float
    turns: int
    acts: list[Act]


@dataclass(frozen=True, slots=True)
class Plan:
    """The conversations of a run, and what their turns add up to."""

    seed: int
    conversations: list[Planned]

    @property
    def turns(self) -> int:
        return sum(c.turns for c in self.conversations)

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: Path) -> Self:
        found = json.loads(path.read_text())
        return cls(found["seed"], [Planned(**c) for c in found["conversations"]])


def plan_of(*, seed: int, turns: int, turn_seconds: float, seconds: float) -> Plan:
    """At least ``turns`` turns of about ``turn_seconds`` each, beginning within the storm's ``seconds``."""
    chance = random.Random(seed)  # noqa: S311  (reproducible, not secret)
    made: list[Planned] = []
    while sum(c.turns for c in made) < turns:
        [kind] = chance.choices(list(KINDS), list(KINDS.values()))
        made.append(_Author(chance, turn_seconds).write(kind, chance.uniform(0, seconds * START_SHARE)))
    return Plan(seed, made)


class _Author:
    """Writes one conversation."""

    def __init__(self, chance: random.Random, turn_seconds: float) -> None:
        self._chance = chance
        self._turn_seconds = turn_seconds
        self._id = str(uuid.UUID(int=chance.getrandbits(128), version=4))
        self._acts: list[Act] = []
        self._requests = 0

    def write(self, kind: str, start: float) -> Planned:
        getattr(self, f"_{kind}")()
        return Planned(self._id, kind, start, self._requests, self._acts)

    # The kinds

    def _reads(self) -> None:
        self._ask(self._some(READ, IDEMPOTENT))
        self._act("wait")

    def _effects(self) -> None:
        self._ask([*self._some(READ), [EFFECT], self._mixed(EFFECT)])
        self._act("wait")

    def _approved(self) -> None:
        self._ask([*self._some(READ), self._mixed(GATED)])
        self._act("wait")
        self._think()
        self._decide(again=self._chance.random() < 0.3)
        self._act("wait")

    def _partly(self) -> None:
        self._ask([[GATED, GATED, EFFECT]])
        self._act("wait")
        self._think()
        self._decide(first=True)
        self._act("wait")
        self._decide()
        self._act("wait")

    def _superseded(self) -> None:
        self._ask([[GATED, EFFECT]])
        self._act("wait")
        self._think()
        self._ask([[EFFECT]])
        self._act("wait")

    def _follow_ups(self) -> None:
        for _ in range(self._chance.randint(2, 4)):
            self._ask([*self._some(READ), [EFFECT]])
            if self._chance.random() < 0.3:
                self._act("wait")
        self._act("wait")

    def _stopped(self) -> None:
        self._ask([[READ], [EFFECT], [EFFECT]])
        self._act("think", seconds=self._chance.uniform(0.1, 1.2) * self._turn_seconds)
        self._act("stop")
        self._ask([[EFFECT]])
        self._act("wait")

    def _plain_rq(self) -> None:
        self._ask([*self._some(READ), [EFFECT]], act="rq", copies=self._chance.randint(2, 5))
        self._act("wait")

    # Their parts

    def _act(self, do: str, **fields: Any) -> None:
        self._acts.append({"do": do, **fields})

    def _ask(self, steps: list[list[str]], act: str = "ask", **fields: Any) -> None:
        think = self._turn_seconds / (len(steps) + 1) * self._chance.uniform(0.7, 1.3)
        self._requests += 1
        script = {"conversation": self._id, "ask": self._requests, "think": round(think, 3), "steps": steps}
        self._act(act, text=MARK + json.dumps(script), request_id=self._request_id(), **fields)

    def _decide(self, *, first: bool = False, again: bool = False) -> None:
        self._requests += 1
        self._act("decide", request_id=self._request_id(), approve=80, first=first, again=again)

    def _think(self) -> None:
        self._act("think", seconds=self._chance.uniform(0.1, 2.0))

    def _request_id(self) -> str:
        return f"{self._id}-{self._requests}"

    def _some(self, *tools: str) -> list[list[str]]:
        return [[self._chance.choice(tools)] for _ in range(self._chance.randint(1, 2))]

    def _mixed(self, tool: str) -> list[str]:
        """A step of several calls at once."""
        return [tool, *self._chance.choices([READ, EFFECT, tool], k=self._chance.randint(0, 2))]


def script_in(text: str) -> dict[str, Any] | None:
    """The script that a question carries."""
    if not text.startswith(MARK):
        return None
    script: dict[str, Any] = json.loads(text[len(MARK) :])
    return script

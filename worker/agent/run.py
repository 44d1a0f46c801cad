"""A run: everything one attempt of a turn knows and may touch, and the values that it comes to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final, Protocol

from shared.events import ANSWER_END, EventDraft
from shared.history import Message, fold
from shared.settings import Settings
from shared.store.base import Claim
from worker.agent.base import ArtifactAccess, Usage

OPTIONS: Final = ("model", "approval_mode", "response_format", "additional_system_prompt", "frontend_tools")
"""Fields of a request that hold for all the work on its question."""


class Events(Protocol):
    """The publisher as the agent sees it."""

    def emit(self, draft: EventDraft, *, soon: bool = False) -> None: ...

    def delta(self, *, step: int, text: str = "", reasoning: str = "") -> None: ...

    async def barrier(self) -> None: ...


class Guard(Protocol):
    """The attempt's right to go on, as the agent sees it."""

    def checkpoint(self) -> None:
        """A safe point: raises when the lease is lost, the turn was asked to stop, or the worker is leaving."""
        ...

    def side_effect(self) -> AbstractContextManager[None]:
        """Around a side effect. Entering raises when the lease is lost, or could be by our own clock, or the turn
        was asked to stop; inside, the worker waits for the call instead of cutting it off."""
        ...


@dataclass(frozen=True, slots=True)
class Answered:
    """The last message is the final answer."""

    content: str


@dataclass(frozen=True, slots=True)
class Paused:
    """The turn waits: gated calls for a decision, frontend calls for their results. Either list may be empty."""

    pending_approvals: list[dict[str, Any]]
    pending_frontend_tool_calls: list[dict[str, Any]]
    awaits: tuple[Any, ...] = ()


Outcome = Answered | Paused


@dataclass(slots=True)
class Totals:
    """What the whole turn has used, earlier attempts included."""

    rounds: int = 0
    tool_calls: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    cost_usd: float = 0.0

    def add(self, usage: Usage) -> None:
        self.prompt_tokens += usage.prompt_tokens
        self.completion_tokens += usage.completion_tokens
        self.cached_tokens += usage.cached_tokens
        self.cost_usd += usage.cost_usd

    def as_dict(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "cached_tokens": self.cached_tokens,
            "cost_usd": self.cost_usd,
        }


@dataclass(slots=True)
class Run:
    """One attempt's view of its turn. ``messages`` grows as the run goes on; it never holds the system message."""

    conversation_id: str
    account_id: str
    user_id: str | None
    turn: int
    attempt: int
    kind: str
    request: Mapping[str, Any]
    options: Mapping[str, Any]
    model: str
    system_prompt: str
    messages: list[Message]
    calls: list[dict[str, Any]]
    rules: Sequence[Mapping[str, Any]]
    earlier_approvals: Sequence[Mapping[str, Any]]
    totals: Totals
    worked_before: bool
    now: datetime
    claimed_at: float
    deadline: float
    artifacts: ArtifactAccess | None = None
    provider: str | None = None
    model_used: str | None = None
    partial: list[str] = field(default_factory=list)
    images: dict[str, str] = field(default_factory=dict)
    """Data URLs of the images that a model call of this turn has needed."""

    @property
    def system_message(self) -> Message:
        return {"role": "system", "content": self.system_prompt}

    def with_system(self) -> list[Message]:
        return [self.system_message, *self.messages]


def options_of(claim: Claim) -> dict[str, Any]:
    """What holds for this turn. A decision or a retry goes on with the options of the question that it goes on from
    (a pause keeps them in its snapshot), except for those that it brings itself."""
    options: dict[str, Any] = {}
    if claim.snapshot is not None and claim.snapshot["event"] != ANSWER_END:
        options = dict(claim.snapshot["data"].get("options") or {})
    for turn in (*claim.turns, claim.turn):
        own = {name: turn["request"][name] for name in OPTIONS if turn["request"].get(name)}
        options = own if turn["kind"] == "ask" else options | own
    return options


def run_of(claim: Claim, settings: Settings, *, claimed_at: float, deadline: float) -> Run:
    """The run that a claim starts. ``claimed_at`` and ``deadline`` are on the event loop's clock."""
    turn, conversation, request = claim.turn, claim.conversation, claim.turn["request"]
    number, options = claim.lease.turn, options_of(claim)
    prompt = settings.system_prompt
    if options.get("additional_system_prompt"):
        prompt = f"{prompt}\n\n{options['additional_system_prompt']}"
    return Run(
        conversation_id=claim.lease.conversation_id,
        account_id=conversation["account_id"],
        user_id=conversation["user_id"],
        turn=number,
        attempt=claim.lease.attempt,
        kind=turn["kind"],
        request=request,
        options=options,
        model=options.get("model") or conversation["model"] or settings.model,
        system_prompt=prompt,
        messages=fold(claim.snapshot, claim.turns, claim.events),
        calls=claim.calls,
        rules=claim.rules,
        earlier_approvals=(claim.snapshot or {}).get("data", {}).get("pending_approvals") or (),
        totals=Totals(
            turn["rounds"],
            turn["tool_calls"],
            turn["prompt_tokens"],
            turn["completion_tokens"],
            turn["cached_tokens"],
            float(turn["cost_usd"]),
        ),
        worked_before=any(event["turn"] == number for event in claim.events),
        now=claim.now,
        claimed_at=claimed_at,
        deadline=deadline,
    )

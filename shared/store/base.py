"""The store: one Protocol, three implementations, the same rows and the same answers.

All state changes are a handful of operations, each one round trip and one transaction that locks the conversation's
row first. Time is the database's time. Every write of a turn is fenced by its lease token. Implementations differ
only in how a call travels (``shared/store/json_store.py`` holds what they share).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal, Protocol, Self

from shared.events import EventDraft, Finish
from shared.requests import Artifact, RequestRecord

Row = dict[str, Any]
"""A table row as JSON: column names as keys, ``jsonb`` decoded, times as RFC 3339 text in UTC, ids as text."""

Verdict = Literal["approved", "denied", "already_resolved", "unknown", "stale", "expired", "result_recorded"]


@dataclass(frozen=True, slots=True)
class Submitted:
    """A recorded request. ``created`` is False when the same request had been recorded before.

    ``decisions``: a verdict per ``tool_call_id``, of decisions and frontend results alike: ``approved`` and
    ``denied`` took effect; ``already_resolved`` somebody else was first; ``unknown`` no call waits under that id and
    token; ``stale`` the call was superseded, or an unfinished question is queued behind it; ``expired`` it came too
    late; ``result_recorded`` a frontend result took effect.
    """

    conversation_id: str
    turn: int
    created: bool
    status: str
    queue: str
    decisions: dict[str, Verdict]


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to write one attempt of one turn. ``token`` is the database's, fresh per attempt."""

    conversation_id: str
    turn: int
    attempt: int
    token: str = field(repr=False)
    seconds: float


@dataclass(frozen=True, slots=True)
class Claim:
    """A claimed turn with all that hydration needs.

    - ``now``: the database's clock at the claim.
    - ``conversation``, ``turn``: their rows; ``turn["request"]`` is the request's document, ``turn["decisions"]``
      the verdicts, ``turn["crashes"]``, ``turn["rounds"]`` what earlier attempts left.
    - ``snapshot``: the latest snapshot event with its ``data``, or None.
    - ``turns``: ``{"turn", "kind", "request"}`` of the turns after the snapshot's up to this one, ascending.
    - ``events``: message-bearing events later than the snapshot, from its turn on, ascending by ``seq``.
    - ``calls``: ``tool_calls`` rows up to this turn that have no result event yet, ascending by key.
    - ``rules``: ``approval_rules`` rows that apply to the conversation.
    - ``ended``: events that the claim itself wrote (turns ended by stop, crash cap or refusal), for live readers.
    - ``taken_over``: why there was an attempt before this one: its lease ran out (``crash``) or it was handed back
      (``release``); None for a first attempt.
    """

    lease: Lease
    now: datetime
    conversation: Row
    turn: Row
    snapshot: Row | None
    turns: list[Row]
    events: list[Row]
    calls: list[Row]
    rules: list[Row]
    ended: list[Row]
    submitted: Submitted | None
    taken_over: Literal["crash", "release"] | None = None


@dataclass(frozen=True, slots=True)
class NotClaimed:
    """Nothing to run: ``busy`` (somebody holds the lowest unfinished turn, or it must wait) or ``idle`` (all turns
    have ended). ``wait_reason``: why it must wait (``account_limit``); None while somebody holds it."""

    reason: Literal["busy", "idle"]
    ended: list[Row]
    submitted: Submitted | None
    wait_reason: str | None = None


@dataclass(frozen=True, slots=True)
class Appended:
    """The answer to a batch; a repeated batch gets the stored one.

    ``first_seq``: the sequence number of its first event, the rest follow without a gap. ``status``: of the turn
    after the batch (``stopped`` where an ``approval_required`` met a stop request and was stored as
    ``turn_stopped``). ``stop_requested``: somebody asked to stop. ``next_queue``: the queue to ring for the
    conversation's next unfinished turn when the batch ended this one, else None.
    """

    first_seq: int
    status: str
    stop_requested: bool
    next_queue: str | None


@dataclass(frozen=True, slots=True)
class Renewed:
    """``lost``: tokens that were taken over or released (not those whose turn has ended). ``stopped``: tokens of
    turns that somebody asked to stop. ``skipped``: tokens that could not be looked at right now, since somebody has
    locked their conversation; they were not renewed: try again soon."""

    lost: frozenset[str]
    stopped: frozenset[str]
    skipped: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Ring:
    """A conversation to ring for, and the queue to ring on."""

    conversation_id: str
    queue: str


@dataclass(frozen=True, slots=True)
class Stopped:
    """``effect``: ``flagged`` (pending or running: the worker or the next claim ends it), ``stopped`` (a waiting
    turn ended at once) or ``none`` (no such unfinished turn; nothing changed)."""

    turn: int | None
    effect: Literal["flagged", "stopped", "none"]
    queue: str | None


def after_row(row: Row) -> str:
    """The ``before`` that continues a list of conversations behind this row, also within one ``updated_at``."""
    return f"{row['updated_at']},{row['conversation_id']}"


class Store(Protocol):
    """What the worker, the clients and the command line need from a database.

    Every method raises ``StoreUnavailable`` when the database cannot be reached or answers too late (a write may
    have landed: repeat it with the same arguments), and ``ContentRefused`` when it refuses what it was given.
    """

    async def open(self) -> Self:
        """Connect and check the schema's version. Raises ``SchemaOutdated``."""
        ...

    async def close(self) -> None: ...

    # Operations

    async def submit(self, record: RequestRecord) -> Submitted:
        """Record a turn and its ``user_message`` event. The same ``request_id`` and content again gets the first
        answer. Decisions act here, by compare-and-set. An ask closes pending calls.

        Raises ``RequestConflict``, ``IdentityMismatch``, ``ConversationUnknown`` (decisions or a retry for none),
        ``ApprovalsOpen``, ``NotRetryable``, ``RequestInvalid`` (decisions without any history)."""
        ...

    async def claim(
        self,
        conversation_id: str,
        *,
        worker: str,
        claim_id: str,
        lease_seconds: float,
        max_crashes: int,
        record: RequestRecord | None = None,
        account_turns: int | None = None,
        account_cost_usd: float | None = None,
    ) -> Claim | NotClaimed:
        """Take the lowest unfinished turn, recording ``record`` first if given. A ``claim_id`` that still holds its
        turn gets the same lease again, renewed. Raises what ``submit`` raises; ``ConversationUnknown``.

        ``account_turns``: with so many turns of the account running, the turn waits (a take-over after a crash does
        not: its turn has kept its place). ``account_cost_usd``: once the account's turns that began on this UTC day
        have cost so much, a question or a retry fails with ``account_budget``. None: no limit."""
        ...

    async def append(
        self,
        lease: Lease,
        batch: int,
        events: Sequence[EventDraft],
        finish: Finish | None = None,
        *,
        snapshots_kept: int = 1,
    ) -> Appended:
        """Write batch number ``batch`` (1, 2, 3 … per lease), and renew the lease by the way. Raises ``LeaseLost``."""
        ...

    async def renew(self, tokens: Sequence[str], lease_seconds: float) -> Renewed: ...

    async def release(self, lease: Lease, delay_seconds: float = 0) -> Ring:
        """Hand the turn back, to be rung after ``delay_seconds``. Raises ``LeaseLost``."""
        ...

    async def reap(self, *, limit: int = 100, everything: bool = False) -> list[Ring]:
        """The conversations that are due for a ring, at most ``limit``; each is then put off (5 to 60 s), so that
        pages do not overlap. ``everything`` answers none: it makes due now what only its back-off holds up (neither
        a live lease nor the delay of a release), however many there are; page through them without it."""
        ...

    async def stop(self, conversation_id: str, turn: int | None = None) -> Stopped:
        """Stop one turn: the given one, or the lowest unfinished, or else the one that waits for an approval."""
        ...

    # Beside the turn

    async def record_feedback(
        self,
        request_id: str,
        rating: Literal["up", "down"],
        *,
        category: str | None = None,
        comment: str | None = None,
        account_id: str | None = None,
    ) -> Row: ...

    async def record_dead_letter(self, letter: Row) -> int:
        """Keep a job that could not become a turn (``queue``, ``job_id``, ``function``, ``payload``,
        ``conversation_id``, ``account_id``, ``code``, ``description``); its id."""
        ...

    async def take_dead_letter(self, letter_id: int) -> Row | None:
        """Remove and return a dead letter."""
        ...

    async def put_artifact(self, lease: Lease, artifact: Artifact) -> None:
        """Store an artifact of the lease's conversation; the same one again changes nothing. Raises ``LeaseLost``."""
        ...

    async def get_artifact(self, conversation_id: str, artifact_id: str) -> Artifact | None: ...

    async def rename(self, conversation_id: str, title: str) -> Row: ...

    async def delete(self, conversation_id: str) -> bool:
        """Remove a conversation with all that belongs to it; False if there is none."""
        ...

    # Reads

    async def conversation(self, conversation_id: str) -> Row | None: ...

    async def conversations(
        self,
        *,
        account_id: str | None = None,
        status: str | None = None,
        limit: int = 50,
        before: str | None = None,
    ) -> list[Row]:
        """Newest activity first, then by id. ``before``: what ``after_row`` says of the last row of the page before,
        or an ``updated_at``."""
        ...

    async def turns(self, conversation_id: str) -> list[Row]: ...

    async def turn_of(self, request_id: str, account_id: str) -> Row | None: ...

    async def events(
        self, conversation_id: str, *, after: int = 0, limit: int = 1_000, full: bool = False
    ) -> list[Row]:
        """Events with ``seq > after``; without ``full``, snapshots come without ``data.messages``."""
        ...

    async def calls(self, conversation_id: str) -> list[Row]: ...

    async def approvals(self, *, account_id: str | None = None, conversation_id: str | None = None) -> list[Row]:
        """Gated calls that wait for a decision, oldest first, with ``title`` and ``user_id`` of their conversation
        and never a token."""
        ...

    async def dead_letters(self, limit: int = 100) -> list[Row]: ...

    async def usage(
        self, *, by: Literal["model", "account", "day"] = "model", account_id: str | None = None
    ) -> list[Row]:
        """Sums per ``by``: ``turns``, ``rounds``, tokens, ``cost_usd``, ``duration_ms``, ``thumbs_up``,
        ``thumbs_down``."""
        ...

    async def health(self) -> Row:
        """``{"now", "schema_version", "min_compatible", "kind", "pending", "running"}``."""
        ...

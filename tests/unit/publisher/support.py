"""A store that is a list, faults on demand, and a loop whose time runs only when there is nothing else to do."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import orjson

from shared.errors import ContentRefused, LeaseLost, StoreUnavailable
from shared.events import EventDraft, Finish
from shared.live import LiveEntry
from shared.store.base import Appended, Lease, Row

CONVERSATION = "6f1c1a52-0000-4000-8000-000000000001"
LEASE = Lease(CONVERSATION, 3, 1, "token", 10.0)

T = TypeVar("T")
Fault = Literal["unavailable", "reply_lost"] | None


class _Selector(selectors.DefaultSelector):
    loop: VirtualLoop

    def select(self, timeout: float | None = None) -> Any:
        ready = super().select(0)
        if not ready:
            if timeout is None:
                raise AssertionError("every task waits for ever")
            self.loop.now += timeout
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """Timers fire in order without waiting; a deadlock raises instead of hanging. Not for threads and sockets."""

    def __init__(self) -> None:
        self.now = 0.0
        selector = _Selector()
        selector.loop = self
        super().__init__(selector)

    def time(self) -> float:
        return self.now


def run(main: Coroutine[Any, Any, T]) -> T:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)


def now() -> float:
    return asyncio.get_running_loop().time()


@dataclass
class ListStore:
    """``append`` as ``docs/store.md`` has it, over a list. ``faults`` and ``delays`` are used up call by call."""

    faults: list[Fault] = field(default_factory=list)
    delays: list[float] = field(default_factory=list)
    refuses: Callable[[EventDraft, Finish | None], bool] = lambda draft, finish: False
    lost: bool = False
    stop_requested: bool = False
    down: bool = False
    events: list[EventDraft] = field(default_factory=list)
    finish: Finish | None = None
    batches: list[tuple[float, int]] = field(default_factory=list)  # when it landed, how many events
    sent: list[tuple[int, bytes]] = field(default_factory=list)  # every call: number, bytes
    last: tuple[int, Appended | None] = (0, None)

    async def append(
        self,
        lease: Lease,
        batch: int,
        events: Sequence[EventDraft],
        finish: Finish | None = None,
        *,
        snapshots_kept: int = 1,
    ) -> Appended:
        encoded = orjson.dumps([[e.as_dict() for e in events], finish.as_dict() if finish else None])
        self.sent.append((batch, encoded))
        await asyncio.sleep(self.delays.pop(0) if self.delays else 0)
        fault = self.faults.pop(0) if self.faults else None
        if self.down or fault == "unavailable":
            raise StoreUnavailable("The store is away.")
        answer = self._append(batch, events, finish)
        if fault == "reply_lost":
            raise StoreUnavailable("The reply was lost.")
        return answer

    def _append(self, batch: int, events: Sequence[EventDraft], finish: Finish | None) -> Appended:
        number, answer = self.last
        if answer is not None and batch == number:
            return answer
        if self.lost or self.finish is not None or batch != number + 1:
            raise LeaseLost("Another attempt owns the turn.")
        if any(self.refuses(event, finish) for event in events):
            raise ContentRefused("unsupported Unicode escape sequence")
        first = len(self.events) + 1
        self.events.extend(deepcopy(list(events)))
        self.finish = finish
        self.batches.append((now(), len(events)))
        answer = Appended(first, finish.status if finish else "running", self.stop_requested, None)
        self.last = (batch, answer)
        return answer

    @property
    def names(self) -> list[str]:
        return [str(event.data.get("n", event.event)) for event in self.events]


@dataclass
class ListLive:
    entries: list[LiveEntry] = field(default_factory=list)

    def push(self, entries: Sequence[LiveEntry]) -> None:
        self.entries.extend(entries)

    async def close(self) -> None:
        return None

    @property
    def rows(self) -> list[Row]:
        return [entry.as_row() for entry in self.entries]


def numbered(n: int, event: str = "tool_call_started", **data: Any) -> EventDraft:
    return EventDraft(event, {"n": n, **data})

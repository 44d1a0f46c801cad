"""The publisher on the loop that workers run on, whose timers differ from asyncio's."""

from __future__ import annotations

import asyncio

import uvloop

from publisher import EventPublisher, PublisherLimits
from shared.events import EventDraft, Finish
from tests.unit.publisher.support import LEASE, ListStore


def test_events_of_no_age_are_stored_one_after_the_other() -> None:
    """uvloop's timer for no delay is a plain handle, which does not know when it is due."""
    store = ListStore()

    async def main() -> None:
        limits = PublisherLimits(batch_age_seconds=0.0)
        async with EventPublisher(store, LEASE, limits=limits) as publisher:  # type: ignore[arg-type]
            for number in range(3):
                publisher.emit(EventDraft("tool_call_started", {"n": number}))
            await publisher.finish(EventDraft("answer_end", {"n": 3}), Finish("completed", "stop"))

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())
    assert [event.data["n"] for event in store.events] == [0, 1, 2, 3]

"""The publisher on the embedded store: replies that are lost after the commit, and an attempt that was overtaken."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from publisher import EventPublisher, PublisherLimits
from shared.errors import LeaseLost, StoreUnavailable
from shared.events import EventDraft
from shared.settings import load_settings
from shared.store.base import Appended
from shared.store.sqlite import SqliteStore
from tests.integration.publisher.support import ANSWER, DONE, ask, claim, opened, spoken, started

LIMITS = PublisherLimits(batch_events=3, batch_age_seconds=0.01)


class LosesReplies(SqliteStore):
    """Every append commits; the first answer to each is lost on the way."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.answered: set[int] = set()
        self.appends = 0

    async def append(self, *arguments: Any, **options: Any) -> Appended:
        answer = await super().append(*arguments, **options)
        self.appends += 1
        batch = arguments[1]
        if batch not in self.answered:
            self.answered.add(batch)
            raise StoreUnavailable("The connection broke after the commit.")
        return answer


async def test_a_lost_reply_stores_nothing_twice(tmp_path: Path) -> None:
    async with opened(tmp_path) as plain:
        conversation = await ask(plain)
        lease = await claim(plain, conversation)
        flaky = LosesReplies(load_settings(home=tmp_path))
        await flaky.open()
        async with EventPublisher(flaky, lease, limits=LIMITS) as publisher:
            for n in range(7):
                publisher.emit(started(n))
            await publisher.barrier()
            answer = await publisher.finish(ANSWER, DONE)
        await flaky.close()
        events = await plain.events(conversation)
        assert [e["data"].get("n", e["event"]) for e in events] == ["user_message", *range(7), "answer_end"]
        assert [e["seq"] for e in events] == list(range(1, 10))
        assert answer == Appended(9, "completed", False, None)
        assert flaky.appends == 2 * len(flaky.answered) > 4
        [turn] = await plain.turns(conversation)
        assert turn["status"] == "completed"


async def test_an_overtaken_attempt_writes_nothing_more(tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        conversation = await ask(store)
        first = await claim(store, conversation, lease_seconds=0.05)
        lost: list[bool] = []
        async with EventPublisher(store, first, limits=LIMITS, on_lost=lambda: lost.append(True)) as publisher:
            publisher.emit(spoken(1, "one"))
            await publisher.barrier()
            await asyncio.sleep(0.1)
            second = await claim(store, conversation)
            publisher.emit(spoken(2, "zombie"))
            with pytest.raises(LeaseLost):
                await publisher.barrier()
        async with EventPublisher(store, second, limits=LIMITS) as publisher:
            publisher.emit(spoken(2, "two"))
            await publisher.finish(ANSWER, DONE)
        events = await store.events(conversation)
        assert [(e["event"], e["attempt"]) for e in events[1:]] == [
            ("ai_message", 1), ("ai_message", 2), ("answer_end", 2),
        ]  # fmt: skip
        assert lost == [True]


async def test_a_stop_is_heard_with_the_next_batch(tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        conversation = await ask(store)
        heard = asyncio.Event()
        lease = await claim(store, conversation)
        async with EventPublisher(store, lease, limits=LIMITS, on_stop=heard.set) as publisher:
            await store.stop(conversation)
            publisher.emit(started(1), soon=True)
            async with asyncio.timeout(5):
                await heard.wait()
            await publisher.barrier()
            assert publisher.stop_requested


async def test_unclean_text_reaches_the_store_clean(tmp_path: Path) -> None:
    """Case 16."""
    async with opened(tmp_path) as store:
        conversation = await ask(store)
        async with EventPublisher(store, await claim(store, conversation), limits=LIMITS) as publisher:
            publisher.emit(EventDraft("tool_call_started", {"out": "a\x00b", "key\x00": 1}))
            publisher.emit(EventDraft("tool_call_started", {"out": "smile \ud83d end", "literal": "\\u0000"}))
            publisher.emit(EventDraft("tool_call_started", {"latency": float("nan"), "big": 2**70}))
            await publisher.finish(ANSWER, DONE)
        assert [e["data"] for e in (await store.events(conversation))[1:4]] == [
            {"out": "ab", "key": 1},
            {"out": "smile \ufffd end", "literal": "\\u0000"},
            {"latency": None, "big": str(2**70)},
        ]


async def test_a_snapshot_with_unclean_text_ends_its_turn(tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        conversation = await ask(store)
        messages = [{"role": "user", "content": "half a smile \ud83d"}, {"role": "assistant", "content": "fine"}]
        async with EventPublisher(store, await claim(store, conversation), limits=LIMITS) as publisher:
            await publisher.finish(EventDraft("answer_end", {"content": "fine", "messages": messages}), DONE)
        last = (await store.events(conversation, full=True))[-1]
        assert last["data"]["messages"] == [
            {"role": "user", "content": "half a smile \ufffd"},
            {"role": "assistant", "content": "fine"},
        ]

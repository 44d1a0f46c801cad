"""Content that a database refuses, on every store: snapshots are mended in the writer, since ``emit`` trusts them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from publisher import EventPublisher, PublisherLimits
from shared.events import EventDraft, Finish
from shared.settings import Settings, load_settings
from shared.store import open_store
from shared.store.base import Store
from tests.integration.publisher.support import ask, claim, spoken, started

MESSAGES: list[dict[str, Any]] = [
    {"role": "user", "content": "NUL \x00 here"},
    {"role": "assistant", "content": "half a smile \ud83d, and the literal \\u0000"},
]


@pytest.fixture
def sqlite_settings(tmp_path: Path) -> Settings:
    return load_settings(home=tmp_path)


@pytest.fixture(params=["sqlite", "postgres", "supabase"])
async def store(request: pytest.FixtureRequest) -> AsyncIterator[Store]:
    store = await open_store(request.getfixturevalue(f"{request.param}_settings")).open()
    yield store
    await store.close()


async def test_a_snapshot_with_unclean_text_ends_its_turn(store: Store) -> None:
    conversation = await ask(store)
    lease = await claim(store, conversation)
    finish = Finish("completed", "answer", {"description": "and \x00 here"})
    async with EventPublisher(store, lease, limits=PublisherLimits()) as publisher:
        publisher.emit(spoken(1, "fine"))
        publisher.emit(started(1))
        answer = await publisher.finish(EventDraft("answer_end", {"content": "fine", "messages": MESSAGES}), finish)
    assert answer.status == "completed"
    events = await store.events(conversation, full=True)
    assert [event["event"] for event in events] == ["user_message", "ai_message", "tool_call_started", "answer_end"]
    user, assistant = events[-1]["data"]["messages"]
    assert user["content"] == "NUL  here"
    assert assistant["content"] == "half a smile \ufffd, and the literal \\u0000"
    assert "unstorable" not in events[1]["data"]


async def test_what_is_nested_too_deep_never_holds_up_the_turn(store: Store) -> None:
    deep: Any = 1
    for _ in range(3_000):
        deep = [deep]
    conversation = await ask(store)
    lease = await claim(store, conversation)
    message = {"role": "assistant", "content": "kept", "provider_extra": deep}
    async with EventPublisher(store, lease, limits=PublisherLimits()) as publisher:
        publisher.emit(started(1))
        publisher.emit(EventDraft("tool_call_started", {"n": 2, "params": deep}))
        publisher.emit(EventDraft("ai_message", {"n": 3, "step": 1, "message": message}))
        publisher.emit(started(4))
        end = EventDraft("answer_end", {"content": "x", "messages": [message]})
        await publisher.finish(end, Finish("completed", "answer"))
    events = (await store.events(conversation, full=True))[1:]
    assert [event["data"].get("n") for event in events] == [1, 2, 3, 4, None]
    assert events[0]["data"] == {"n": 1}
    assert events[1]["data"]["unstorable"] is True
    assert events[2]["data"]["message"]["content"] == "kept"
    assert events[4]["data"]["messages"][0]["content"] == "kept"
    [turn] = await store.turns(conversation)
    assert turn["status"] == "completed"

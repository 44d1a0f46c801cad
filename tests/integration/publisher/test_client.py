"""The Python client on the embedded store and a real Valkey."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import orjson
import pytest
from redis import Redis

from publisher import EventPublisher, PublisherLimits
from shared.client import Client
from shared.errors import NotRetryable, RequestConflict, RequestInvalid, StoreUnavailable
from shared.events import EventDraft, Finish
from shared.queues import Ringer, connect_async
from shared.requests import RequestRecord, token_sha256
from shared.settings import Settings, load_settings
from shared.store.base import Submitted
from shared.store.sqlite import SqliteStore
from tests.integration.publisher.support import ANSWER, DONE, claim, spoken
from tests.support.valkey import Valkey

LIMITS = PublisherLimits(batch_age_seconds=0.01)


@pytest.fixture
def configured(tmp_path: Path, redis_url: str) -> Settings:
    return load_settings(home=tmp_path, redis_url=redis_url)


@pytest.fixture
async def client(configured: Settings) -> AsyncIterator[Client]:
    async with Client.connect(configured) as client:
        yield client


def rung(redis: Redis, queue: str = "interactive") -> int:
    return redis.llen(f"rq:queue:{queue}")


async def pause(client: Client, conversation: str, *calls: tuple[str, int, str]) -> None:
    """A turn that waits for (tool_call_id, call_index, token)."""
    assert isinstance(client.store, SqliteStore)
    lease = await claim(client.store, conversation)
    changes: list[Any] = []
    pending: list[Any] = []
    awaits: list[Any] = []
    for call_id, index, token in calls:
        key = {"step": 1, "call_index": index}
        changes.append(
            {"op": "new", **key, "tool_call_id": call_id, "tool_name": "restart", "arguments": "{}", "kind": "tool",
             "arguments_digest": "d", "risk": "side_effect", "gated": True, "state": "pending", "decided_by": None,
             "reason": None}
        )  # fmt: skip
        place = {"turn": lease.turn, **key}
        expiry = "2099-01-01T00:00:00+00:00"
        pending.append({"tool_call_id": call_id, "tool_name": "restart", "approval_token": token, **place})
        awaits.append({"op": "await", **place, "approval_token_sha256": token_sha256(token), "expires_at": expiry})
    data = {"messages": [], "pending_approvals": pending, "pending_frontend_tool_calls": []}
    async with EventPublisher(client.store, lease, limits=LIMITS) as publisher:
        message = {"role": "assistant", "content": None}
        publisher.emit(EventDraft("ai_message", {"step": 1, "message": message}, tuple(changes)))
        draft = EventDraft("approval_required", data, tuple(awaits))
        await publisher.finish(draft, Finish("awaiting_approval", "approval"))


async def test_a_question_is_recorded_and_rung(client: Client, redis_client: Redis) -> None:
    asked = await client.ask("why?", user_id="mai", queue="background", request_id="r-1")
    assert (asked.turn, asked.created, asked.rung, asked.request_id) == (1, True, True, "r-1")
    assert (rung(redis_client), rung(redis_client, "background")) == (0, 1)
    [turn] = await client.store.turns(asked.conversation_id)
    assert turn["request"]["ask"] == "why?"


async def test_the_same_question_again_is_the_same_turn_and_rings_again(client: Client, redis_client: Redis) -> None:
    first = await client.ask("why?", request_id="r-1")
    again = await client.ask("why?", request_id="r-1")
    assert (again.conversation_id, again.turn, again.created) == (first.conversation_id, 1, False)
    assert rung(redis_client) == 2
    with pytest.raises(RequestConflict):
        await client.ask("what?", request_id="r-1")


async def test_what_is_wrong_is_neither_recorded_nor_rung(client: Client, redis_client: Redis) -> None:
    with pytest.raises(RequestInvalid, match="colour"):
        await client.ask("why?", colour="red")
    with pytest.raises(RequestInvalid):
        await client.ask("")
    with pytest.raises(NotRetryable):
        await client.retry((await client.ask("fine")).conversation_id)
    assert rung(redis_client) == 1
    assert len(await client.store.conversations()) == 1


async def test_a_ring_that_fails_is_told_and_the_request_stays(tmp_path: Path, valkey: Valkey) -> None:
    valkey.stop()
    async with Client.connect(load_settings(home=tmp_path, redis_url=valkey.url)) as client:
        asked = await client.ask("why?")
        assert asked.rung is False
        assert [turn["status"] for turn in await client.store.turns(asked.conversation_id)] == ["pending"]


async def test_a_lost_reply_is_asked_for_again(configured: Settings, redis_url: str) -> None:
    class LosesReplies(SqliteStore):
        lose = 2

        async def submit(self, record: RequestRecord) -> Submitted:
            answer = await super().submit(record)
            if self.lose:
                self.lose -= 1
                raise StoreUnavailable("The connection broke after the commit.")
            return answer

    redis = connect_async(redis_url)
    store = LosesReplies(configured)
    await store.open()
    client = Client(configured, store, Ringer(redis))
    asked = await client.ask("why?")
    assert (asked.turn, len(await store.conversations())) == (1, 1)
    store.lose = 3
    with pytest.raises(StoreUnavailable) as caught:
        await client.ask("and?", conversation_id=asked.conversation_id)
    again = await client.ask(
        "and?", conversation_id=asked.conversation_id, request_id=caught.value.details["request_id"]
    )
    assert (again.turn, again.created) == (2, False)
    await store.close()
    await redis.aclose()


async def test_decisions_find_their_tokens(client: Client, redis_client: Redis) -> None:
    asked = await client.ask("restart it")
    conversation = asked.conversation_id
    await pause(client, conversation, ("c1", 0, "token-1"), ("c2", 1, "token-2"))
    assert await client.pending_tokens(conversation) == {"c1": ["token-1"], "c2": ["token-2"]}
    decided = await client.decide(
        conversation,
        [
            {"tool_call_id": "c1", "approved": True},
            {"tool_call_id": "c2", "approved": False, "feedback": "not now"},
            {"tool_call_id": "c3", "approved": True},
        ],
        user_id="mai",
    )
    assert decided.decisions == {"c1": "approved", "c2": "denied", "c3": "unknown"}
    assert await client.approvals(conversation) == []
    assert rung(redis_client) == 2
    calls = {call["tool_call_id"]: call for call in await client.store.calls(conversation)}
    assert calls["c1"]["decided_by"] == "mai"


async def test_an_id_that_waits_twice_has_to_be_told_apart(client: Client) -> None:
    conversation = (await client.ask("restart it")).conversation_id
    await pause(client, conversation, ("c1", 0, "token-1"), ("c1", 1, "token-2"))
    with pytest.raises(RequestInvalid, match="2 calls wait"):
        await client.decide(conversation, [{"tool_call_id": "c1", "approved": True}])
    decided = await client.decide(conversation, [{"tool_call_id": "c1", "approved": True, "approval_token": "token-2"}])
    assert decided.decisions == {"c1": "approved"}
    [left] = await client.approvals(conversation)
    assert left["approval_token"] == "token-1"
    second = await client.decide(conversation, [{"tool_call_id": "c1", "approved": False, "call_index": 0}])
    assert second.decisions == {"c1": "denied"}


async def test_a_running_turn_is_flagged_and_rung(client: Client, redis_client: Redis) -> None:
    asked = await client.ask("why?")
    stopped = await client.stop(asked.conversation_id)
    assert (stopped.turn, stopped.effect) == (1, "flagged")
    assert rung(redis_client) == 2
    assert (await client.stop(asked.conversation_id, turn=7)).effect == "none"


async def test_a_conversation_is_followed_and_rated(client: Client) -> None:
    asked = await client.ask("why?")
    assert isinstance(client.store, SqliteStore)
    lease = await claim(client.store, asked.conversation_id)
    async with EventPublisher(client.store, lease, limits=LIMITS) as publisher:
        publisher.emit(spoken(1, "because"))
        await publisher.finish(ANSWER, DONE)
    names = [row["event"] async for row in client.follow(asked.conversation_id, until=asked.turn)]
    assert names == ["user_message", "ai_message", "answer_end"]
    row = await client.feedback(asked.request_id, "up", comment="thanks")
    assert (row["rating"], row["comment"]) == ("up", "thanks")


async def test_tokens_are_never_in_what_is_followed(client: Client) -> None:
    conversation = (await client.ask("restart it")).conversation_id
    await pause(client, conversation, ("c1", 0, "very-secret"))
    rows = [row async for row in client.follow(conversation, until=1)]
    assert rows[-1]["event"] == "approval_required"
    assert b"very-secret" not in orjson.dumps(rows)

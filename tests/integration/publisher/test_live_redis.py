"""Live fan-out and following, on a real Valkey and the embedded store."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import orjson
import pytest
from redis.asyncio import Redis

from publisher import EventPublisher, PublisherLimits, RedisLive
from publisher.live import BUFFER_ENTRIES
from shared.events import EventDraft, Finish
from shared.live import LiveEntry, follow
from shared.queues import connect_async, live_key
from shared.store.base import Row
from shared.store.sqlite import SqliteStore
from tests.integration.publisher.support import ANSWER, DONE, ask, claim, opened, spoken, started
from tests.support.valkey import Valkey

CONVERSATION = "6f1c1a52-0000-4000-8000-000000000001"
LIMITS = PublisherLimits(batch_age_seconds=0.01)


def entry(
    seq: int | None, event: str = "tool_call_started", conversation_id: str = CONVERSATION, **data: Any
) -> LiveEntry:
    return LiveEntry(conversation_id, seq, 1, 1, event, data, "2026-01-01T00:00:00+00:00")


def piece(n: int, text: str, *, step: int = 1, reasoning: str = "") -> LiveEntry:
    return entry(None, "ai_message_delta", step=step, n=n, last=n, text=text, reasoning=reasoning)


@asynccontextmanager
async def connected(url: str) -> AsyncIterator[Redis]:
    redis = connect_async(url)
    try:
        yield redis
    finally:
        await redis.aclose()


async def rows_in(redis: Redis, conversation_id: str = CONVERSATION) -> list[Row]:
    entries: Any = await redis.xrange(live_key(conversation_id))
    return [orjson.loads(fields[b"entry"]) for _, fields in entries]


async def collect(rows: AsyncIterator[Row], *, seconds: float = 10) -> list[Row]:
    async with asyncio.timeout(seconds):
        return [row async for row in rows]


def brief(rows: list[Row]) -> list[Any]:
    return [row["seq"] if row["seq"] is not None else row["data"]["text"] for row in rows]


async def test_a_stream_is_capped_and_expires(redis_url: str) -> None:
    live = RedisLive(connect_async(redis_url), entries=100, seconds=60)
    for seq in range(1, 1_001):
        live.push([entry(seq)])
    await live.close()
    async with connected(redis_url) as redis:
        assert 100 <= await redis.xlen(live_key(CONVERSATION)) <= 200  # Redis trims whole nodes
        assert 0 < await redis.ttl(live_key(CONVERSATION)) <= 60
        assert (await rows_in(redis))[-1]["seq"] == 1_000


async def test_pieces_are_joined_and_keep_their_numbers_and_order(redis_url: str) -> None:
    live = RedisLive(connect_async(redis_url))
    live.push([piece(1, "Hel"), piece(2, "lo"), piece(3, "", reasoning="hm")])
    live.push([entry(4), piece(4, "!")])
    live.push([piece(1, "next", step=2)])
    live.push([piece(2, " step", step=2)])
    await live.close()
    async with connected(redis_url) as redis:
        rows = await rows_in(redis)
    assert [(r["seq"], r["data"]) for r in rows] == [
        (None, {"step": 1, "n": 1, "last": 3, "text": "Hello", "reasoning": "hm"}),
        (4, {}),
        (None, {"step": 1, "n": 4, "last": 4, "text": "!", "reasoning": ""}),
        (None, {"step": 2, "n": 1, "last": 2, "text": "next step", "reasoning": ""}),
    ]


async def test_a_smile_that_was_split_between_two_pieces_is_whole_again(redis_url: str) -> None:
    live = RedisLive(connect_async(redis_url))
    live.push([piece(1, "\ud83d"), piece(2, "\ude00"), entry(2), piece(1, "\ud83d", step=2)])
    await live.close()
    async with connected(redis_url) as redis:
        rows = await rows_in(redis)
    assert [r["data"].get("text") for r in rows] == ["\U0001f600", None, "\ufffd"]


async def test_neither_tokens_nor_messages_enter_the_stream(redis_url: str) -> None:
    live = RedisLive(connect_async(redis_url))
    pending = {"tool_call_id": "c1", "approval_token": "very-secret"}
    live.push([entry(1, "approval_required", messages=[{"content": "long"}], pending_approvals=[pending])])
    await live.close()
    async with connected(redis_url) as redis:
        [row] = await rows_in(redis)
    assert row["data"] == {"message_count": 1, "pending_approvals": [{"tool_call_id": "c1"}]}


async def test_what_redis_does_not_take_is_dropped_and_costs_no_time(valkey: Valkey) -> None:
    live = RedisLive(connect_async(valkey.url))
    live.push([entry(1)])
    async with connected(valkey.url) as redis:
        await until(lambda: redis.exists(live_key(CONVERSATION)))
    valkey.stop()
    started_at = asyncio.get_running_loop().time()
    for seq in range(2, 3 * BUFFER_ENTRIES):
        live.push([entry(seq)])
    assert asyncio.get_running_loop().time() - started_at < 2
    assert live.dropped >= 2 * BUFFER_ENTRIES - 2
    await until(lambda: _true(live.dropped == 3 * BUFFER_ENTRIES - 2))
    valkey.start()
    await until(lambda: _sent(live, valkey.url))
    await live.close()


async def _true(value: bool) -> bool:
    return value


async def _sent(live: RedisLive, url: str) -> bool:
    live.push([entry(99_999)])
    async with connected(url) as redis:
        return any(row["seq"] == 99_999 for row in await rows_in(redis))


async def until(condition: Any, seconds: float = 10) -> None:
    async with asyncio.timeout(seconds):
        while not await condition():
            await asyncio.sleep(0.05)


async def test_closing_while_redis_is_away_is_quick(valkey: Valkey) -> None:
    valkey.stop()
    live = RedisLive(connect_async(valkey.url))
    live.push([entry(1)])
    async with asyncio.timeout(5):
        await live.close()
    assert live.dropped == 1


async def test_a_turn_is_followed_as_it_happens(tmp_path: Path, redis_url: str) -> None:
    async with opened(tmp_path) as store, connected(redis_url) as redis:
        live = RedisLive(connect_async(redis_url))
        conversation = await ask(store)
        following = asyncio.create_task(collect(follow(store, redis, conversation, until=1)))
        loop = asyncio.get_running_loop()
        async with EventPublisher(store, await claim(store, conversation), limits=LIMITS, live=live) as publisher:
            for text in ("I ", "look."):
                publisher.delta(step=1, text=text)
                await asyncio.sleep(0.1)
            publisher.emit(spoken(1, "I look."))
            publisher.emit(started(1))
            await publisher.barrier()
            await publisher.finish(ANSWER, DONE)
            ended_at = loop.time()
        rows = await following
        assert loop.time() - ended_at < 1, "the stream was not used"
        assert brief(rows) == [1, "I ", "look.", 2, 3, 4]
        assert [r["event"] for r in rows if r["seq"]] == [
            "user_message", "ai_message", "tool_call_started", "answer_end",
        ]  # fmt: skip
        stored = await store.events(conversation)
        assert [{**r, "created_at": None} for r in rows if r["seq"]] == [{**r, "created_at": None} for r in stored]
        await live.close()


@pytest.mark.parametrize("options", [{"protocol": 2}, {"protocol": 3}, {"decode_responses": True}])
async def test_any_client_can_read_the_stream(tmp_path: Path, redis_url: str, options: dict[str, Any]) -> None:
    live = RedisLive(connect_async(redis_url))
    async with opened(tmp_path) as store, Redis.from_url(redis_url, **options) as redis:
        conversation = await ask(store)
        live.push([entry(None, "ai_message_delta", conversation, step=1, n=1, last=1, text="a", reasoning="")])
        rows = await collect(follow(store, redis, conversation, until=lambda row: row["seq"] is None))
        assert brief(rows) == [1, "a"]
    await live.close()


@pytest.mark.parametrize("reader", ["no redis", "empty stream"])
async def test_without_a_stream_the_store_is_followed(tmp_path: Path, redis_url: str, reader: str) -> None:
    async with opened(tmp_path) as store, connected(redis_url) as redis:
        conversation = await ask(store)
        follower = follow(store, None if reader == "no redis" else redis, conversation, until=1)
        following = asyncio.create_task(collect(follower))
        async with EventPublisher(store, await claim(store, conversation), limits=LIMITS) as publisher:
            for n in range(3):
                publisher.emit(started(n), soon=True)
                await asyncio.sleep(0.2)
            await publisher.finish(ANSWER, DONE)
        assert brief(await following) == [1, 2, 3, 4, 5]


async def test_gaps_in_the_stream_are_filled_in_order(tmp_path: Path, redis_url: str) -> None:
    async with opened(tmp_path) as store, connected(redis_url) as redis:
        live = RedisLive(connect_async(redis_url))
        conversation = await ask(store)
        lease = await claim(store, conversation)
        for batch, events in enumerate(([started(1), started(2)], [started(3), started(4)]), 1):
            await store.append(lease, batch, events)
        following = asyncio.create_task(collect(follow(store, redis, conversation, after=2, until=1)))
        await asyncio.sleep(0.3)
        await store.append(lease, 3, [started(5), started(6), started(7)])  # this worker died before the stream
        live.push([entry(8, conversation_id=conversation, n=7), entry(6, conversation_id=conversation, n=5)])
        await store.append(lease, 4, [ANSWER], DONE)
        live.push([entry(9, "answer_end", conversation, content="done", message_count=1)])
        assert brief(await following) == [3, 4, 5, 6, 7, 8, 9]
        await live.close()


async def test_rows_too_large_for_the_stream_come_from_the_store(tmp_path: Path, redis_url: str) -> None:
    async with opened(tmp_path) as store, connected(redis_url) as redis:
        live = RedisLive(connect_async(redis_url))
        conversation = await ask(store)
        following = asyncio.create_task(collect(follow(store, redis, conversation, until=1)))
        await asyncio.sleep(0.2)
        async with EventPublisher(store, await claim(store, conversation), limits=LIMITS, live=live) as publisher:
            publisher.emit(started(1, filler="x" * 200_000))
            await publisher.finish(ANSWER, DONE)
        rows = await following
        assert brief(rows) == [1, 2, 3]
        assert len(rows[1]["data"]["filler"]) == 200_000
        assert (await rows_in(redis, conversation))[0]["data"] is None
        await live.close()


async def test_following_outlives_a_redis_that_goes_and_comes_back_empty(tmp_path: Path, valkey: Valkey) -> None:
    async with opened(tmp_path) as store, connected(valkey.url) as redis:
        live = RedisLive(connect_async(valkey.url))
        conversation = await ask(store)
        following = asyncio.create_task(collect(follow(store, redis, conversation, until=1), seconds=20))
        async with EventPublisher(store, await claim(store, conversation), limits=LIMITS, live=live) as publisher:
            publisher.emit(started(1), soon=True)
            await asyncio.sleep(0.2)
            valkey.stop()
            publisher.emit(started(2), soon=True)
            await publisher.barrier()
            await asyncio.sleep(0.3)
            valkey.start()
            await redis.flushall()
            publisher.emit(started(3), soon=True)
            await publisher.barrier()
            await publisher.finish(ANSWER, DONE)
        assert brief(await following) == [1, 2, 3, 4, 5]
        await live.close()


async def test_a_waiting_turn_that_is_stopped_without_an_event_ends_the_following(tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        conversation = await ask(store)
        pause = EventDraft("approval_required", {"messages": [], "pending_approvals": []})
        async with EventPublisher(store, await claim(store, conversation), limits=LIMITS) as publisher:
            await publisher.finish(pause, Finish("awaiting_approval", "approval"))
        await store.stop(conversation)
        assert brief(await collect(follow(store, None, conversation, until=1))) == [1, 2]
        assert await collect(follow(store, None, conversation, after=2, until=1)) == []


async def test_a_deleted_conversation_ends_the_following(tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        conversation = await ask(store)
        following = asyncio.create_task(collect(follow(store, None, conversation, until=1)))
        await asyncio.sleep(0.2)
        await store.delete(conversation)
        assert brief(await following) == [1]


async def test_another_attempt_resets_what_was_shown(tmp_path: Path, redis_url: str) -> None:
    async with opened(tmp_path) as store, connected(redis_url) as redis:
        live = RedisLive(connect_async(redis_url))
        conversation = await ask(store)
        rows: list[Row] = []
        first = await claim(store, conversation, lease_seconds=0.1)
        following = asyncio.create_task(_into(rows, store, redis, conversation))
        async with EventPublisher(store, first, limits=LIMITS, live=live) as publisher:
            publisher.delta(step=1, text="half a")
            await until(lambda: _true("half a" in brief(rows)))
            await asyncio.sleep(0.1)
            second = await claim(store, conversation)
            async with EventPublisher(store, second, limits=LIMITS, live=live) as heir:
                heir.emit(EventDraft("turn_resumed", {"reason": "crash"}))
                await heir.barrier()
                heir.delta(step=1, text="whole")
                heir.emit(spoken(1, "whole"))
                await heir.finish(ANSWER, DONE)
        async with asyncio.timeout(5):
            await following
        shown = brief(rows)
        assert shown[:4] == [1, "half a", "", 2]
        assert rows[2]["data"]["reset"] is True
        assert shown[-2:] == [3, 4]
        await live.close()


async def _into(rows: list[Row], store: SqliteStore, redis: Redis, conversation: str) -> None:
    async for row in follow(store, redis, conversation, until=1):
        rows.append(row)


async def test_a_predicate_ends_the_following(tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        conversation = await ask(store)
        await ask(store, conversation, "and?")
        await ask(store, conversation, "well?")
        for after, last, seqs in ((0, 2, [1, 2]), (1, 3, [2, 3])):
            rows = follow(store, None, conversation, after=after, until=partial(_is_seq, last))
            assert brief(await collect(rows)) == seqs


def _is_seq(seq: int, row: Row) -> bool:
    return bool(row["seq"] == seq)

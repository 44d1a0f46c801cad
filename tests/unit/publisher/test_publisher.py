"""Order, batches, retries and the end of writing, on a loop with virtual time."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from publisher import EventPublisher, PublisherLimits
from shared.errors import LeaseLost, StoreError
from shared.events import EventDraft, Finish
from tests.unit.publisher.support import LEASE, ListLive, ListStore, now, numbered, run

LIMITS = PublisherLimits(batch_events=4, batch_bytes=1_000, batch_age_seconds=0.25)
DONE = Finish("completed", "stop")
ANSWER = EventDraft("answer_end", {"n": "end", "content": "done", "messages": [{"role": "user", "content": "x"}]})


def open_publisher(store: ListStore, limits: PublisherLimits = LIMITS, **options: Any) -> EventPublisher:
    return EventPublisher(store, LEASE, limits=limits, **options)  # type: ignore[arg-type]


@settings(max_examples=150, deadline=None)
@given(
    steps=st.lists(
        st.one_of(
            st.tuples(st.just("emit"), st.integers(0, 600)),
            st.tuples(st.just("soon"), st.just(0)),
            st.tuples(st.just("compact"), st.integers(0, 2_000)),
            st.tuples(st.just("barrier"), st.just(0)),
            st.tuples(st.just("wait"), st.floats(0, 1)),
        ),
        max_size=30,
    ),
    faults=st.lists(st.sampled_from([None, None, "unavailable", "reply_lost"]), max_size=40),
    delays=st.lists(st.floats(0, 0.5), max_size=40),
)
def test_whatever_fails_every_event_is_stored_once_and_in_order(
    steps: list[tuple[str, Any]], faults: list[Any], delays: list[float]
) -> None:
    store, live = ListStore(faults=faults, delays=delays), ListLive()

    async def main() -> int:
        n = 0
        async with open_publisher(store, live=live) as publisher:
            for step, size in steps:
                if step == "wait":
                    await asyncio.sleep(size)
                elif step == "barrier":
                    await publisher.barrier()
                    assert publisher.backlog == 0
                    assert len(store.events) == n
                else:
                    n += 1
                    event = "history_compacted" if step == "compact" else "tool_call_started"
                    publisher.emit(numbered(n, event, filler="x" * size), soon=step == "soon")
            await publisher.finish(ANSWER, DONE)
        return n

    emitted = run(main())
    assert store.names == [*(str(n + 1) for n in range(emitted)), "end"]
    assert store.finish == DONE
    assert [entry.seq for entry in live.entries] == list(range(1, emitted + 2))
    sealed = dict(store.sent)
    assert all(sealed[number] == sent for number, sent in store.sent), "a retry differed from the first send"
    assert sorted(sealed) == list(range(1, len(store.batches) + 1))
    for _, count in store.batches:
        assert count <= LIMITS.batch_events


def test_events_that_come_while_a_batch_is_in_flight_wait_for_the_next() -> None:
    store = ListStore(faults=["unavailable"], delays=[0.1, 0.1])

    async def main() -> None:
        async with open_publisher(store) as publisher:
            publisher.emit(numbered(1), soon=True)
            await asyncio.sleep(0.05)
            publisher.emit(numbered(2))
            await publisher.barrier()

    run(main())
    assert store.sent[0] == store.sent[1]
    assert [count for _, count in store.batches] == [1, 1]
    assert store.names == ["1", "2"]


@pytest.mark.parametrize(
    ("emit", "landed_at"),
    [
        (lambda p: p.emit(numbered(1)), 0.25),
        (lambda p: p.emit(numbered(1), soon=True), 0.005),
        (lambda p: [p.emit(numbered(n)) for n in range(4)], 0.0),
        (lambda p: p.emit(numbered(1, filler="x" * 1_200)), 0.0),
        (lambda p: [p.emit(numbered(n, filler="x" * 600)) for n in range(2)], 0.0),
        (lambda p: p.emit(numbered(1, "history_compacted")), 0.0),
    ],
    ids=["age", "soon", "count", "one large", "bytes", "snapshot"],
)
def test_a_batch_goes_out_by_age_count_bytes_and_at_once(emit: Any, landed_at: float) -> None:
    store = ListStore()

    async def main() -> None:
        async with open_publisher(store) as publisher:
            emit(publisher)
            await asyncio.sleep(1)
            assert publisher.backlog == 0

    run(main())
    assert round(store.batches[0][0], 3) == landed_at


def test_age_counts_from_the_first_event_of_a_batch() -> None:
    store = ListStore()

    async def main() -> None:
        async with open_publisher(store) as publisher:
            for n in range(3):
                publisher.emit(numbered(n))
                await asyncio.sleep(0.1)
            await asyncio.sleep(1)

    run(main())
    assert [(round(at, 3), count) for at, count in store.batches] == [(0.25, 3)]


def test_an_event_larger_than_a_batch_goes_alone_and_a_snapshot_rides_with_what_came_before() -> None:
    store = ListStore(delays=[0.1])

    async def main() -> None:
        async with open_publisher(store) as publisher:
            publisher.emit(numbered(0), soon=True)
            await asyncio.sleep(0.01)
            publisher.emit(numbered(1))
            publisher.emit(numbered(2, filler="x" * 2_000))
            publisher.emit(numbered(3))
            publisher.emit(numbered(4, "history_compacted", messages=["x" * 2_000]))
            publisher.emit(numbered(5))
            await publisher.barrier()

    run(main())
    assert [count for _, count in store.batches] == [1, 1, 1, 2, 1]
    assert store.names == ["0", "1", "2", "3", "4", "5"]


def test_a_turn_without_tools_is_one_append() -> None:
    store = ListStore()

    async def main() -> None:
        async with open_publisher(store) as publisher:
            publisher.emit(EventDraft("ai_message", {"step": 1}))
            answer = await publisher.finish(ANSWER, DONE)
            assert answer.first_seq == 1
            assert answer.status == "completed"

    run(main())
    assert [count for _, count in store.batches] == [2]


def test_nothing_follows_the_terminal_event() -> None:
    store, live = ListStore(), ListLive()

    async def main() -> None:
        async with open_publisher(store, live=live) as publisher:
            with pytest.raises(ValueError, match="finish"):
                publisher.emit(ANSWER)
            await publisher.finish(ANSWER, DONE)
            with pytest.raises(RuntimeError, match="after the end"):
                publisher.emit(numbered(1))
            with pytest.raises(RuntimeError, match="after the end"):
                await publisher.finish(ANSWER, DONE)
            publisher.delta(step=1, text="late")
            publisher.abandon()
            assert not publisher.lost

    run(main())
    assert store.names == ["end"]
    assert [row["event"] for row in live.rows] == ["answer_end"]


def test_a_terminal_event_whose_reply_was_lost_is_stored_once() -> None:
    store = ListStore(faults=["reply_lost", "unavailable"])

    async def main() -> None:
        async with open_publisher(store) as publisher:
            assert (await publisher.finish(ANSWER, DONE)).status == "completed"

    run(main())
    assert store.names == ["end"]


def test_a_lost_lease_wakes_every_waiter_and_refuses_what_comes() -> None:
    store = ListStore(delays=[0.1], lost=True)
    heard: list[str] = []

    async def main() -> None:
        async with open_publisher(store, on_lost=lambda: heard.append("lost")) as publisher:
            publisher.emit(numbered(1))
            results = await asyncio.gather(
                publisher.barrier(), publisher.barrier(), publisher.finish(ANSWER, DONE), return_exceptions=True
            )
            assert [type(r) for r in results] == [LeaseLost] * 3
            assert publisher.lost
            with pytest.raises(LeaseLost):
                publisher.emit(numbered(2))
            with pytest.raises(LeaseLost):
                await publisher.barrier()

    run(main())
    assert heard == ["lost"]
    assert store.events == []
    assert len(store.sent) == 1


def test_abandon_ends_retries_and_wakes_every_waiter() -> None:
    store = ListStore(down=True)
    heard: list[str] = []

    async def main() -> float:
        async with open_publisher(store, on_lost=lambda: heard.append("lost")) as publisher:
            publisher.emit(numbered(1))
            asyncio.get_running_loop().call_later(5, publisher.abandon)
            with pytest.raises(LeaseLost):
                await publisher.barrier()
            assert publisher.lost
            store.down = False
        return now()

    assert run(main()) == 5
    assert heard == []
    assert store.events == []


def test_retries_back_off_from_50_ms_to_2_s() -> None:
    store = ListStore(down=True)

    async def main() -> None:
        async with open_publisher(store) as publisher:
            publisher.emit(numbered(1))
            asyncio.get_running_loop().call_later(60, publisher.abandon)
            with pytest.raises(LeaseLost):
                await publisher.barrier()

    run(main())
    assert 5 + 55 / 2.0 < len(store.sent) < 6 + 60 / 1.0


@pytest.mark.parametrize("failing", [False, True])
def test_leaving_stores_what_was_emitted(failing: bool) -> None:
    store = ListStore(faults=["unavailable", "reply_lost"])

    async def main() -> None:
        async with open_publisher(store) as publisher:
            publisher.emit(numbered(1))
            publisher.emit(numbered(2))
            if failing:
                raise KeyError("the turn's own failure")

    if failing:
        with pytest.raises(KeyError):
            run(main())
    else:
        run(main())
    assert store.names == ["1", "2"]


def test_leaving_while_the_store_is_away_ends_with_the_lease() -> None:
    store = ListStore(down=True)

    async def main() -> float:
        with pytest.raises(LeaseLost):
            async with open_publisher(store) as publisher:
                publisher.emit(numbered(1))
        return now()

    assert run(main()) == LEASE.seconds


def test_leaving_never_hides_the_failure_on_its_way() -> None:
    store = ListStore(down=True)

    async def main() -> None:
        async with open_publisher(store) as publisher:
            publisher.emit(numbered(1))
            raise KeyError("the turn's own failure")

    with pytest.raises(KeyError):
        run(main())


def test_leaving_is_quick_when_an_append_never_answers_and_the_task_is_cancelled() -> None:
    store = ListStore(delays=[10_000])

    async def main() -> float:
        async def turn() -> None:
            async with open_publisher(store) as publisher:
                publisher.emit(numbered(1), soon=True)
                await publisher.barrier()

        task = asyncio.create_task(turn())
        await asyncio.sleep(1)
        task.cancel()
        await asyncio.sleep(1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return now()

    assert run(main()) == 2


def test_a_request_to_stop_is_told_once() -> None:
    store = ListStore()
    heard: list[int] = []

    async def main() -> None:
        async with open_publisher(store, on_stop=lambda: heard.append(len(store.events))) as publisher:
            for n in range(1, 4):
                store.stop_requested = n >= 2
                publisher.emit(numbered(n))
                await publisher.barrier()
                assert publisher.stop_requested is (n >= 2)

    run(main())
    assert heard == [2]


def test_an_unexpected_failure_of_the_store_ends_writing_and_is_told() -> None:
    class Broken(ListStore):
        async def append(self, *arguments: Any, **options: Any) -> Any:
            raise ZeroDivisionError

    heard: list[str] = []

    async def main() -> None:
        async with open_publisher(Broken(), on_lost=lambda: heard.append("lost")) as publisher:
            publisher.emit(numbered(1))
            with pytest.raises(StoreError) as caught:
                await publisher.barrier()
            assert isinstance(caught.value.__cause__, ZeroDivisionError)

    run(main())
    assert heard == ["lost"]


def test_a_closed_publisher_takes_nothing() -> None:
    async def main() -> None:
        publisher = open_publisher(ListStore())
        with pytest.raises(RuntimeError, match="not open"):
            publisher.emit(numbered(1))
        async with publisher:
            pass
        with pytest.raises(RuntimeError):
            publisher.emit(numbered(1))

    run(main())


def test_deltas_are_numbered_within_a_step_and_stored_events_carry_their_seq() -> None:
    store, live = ListStore(), ListLive()

    async def main() -> None:
        async with open_publisher(store, live=live) as publisher:
            publisher.delta(step=1, text="a")
            publisher.delta(step=1, reasoning="b")
            publisher.delta(step=2, text="c")
            publisher.emit(numbered(1))
            await publisher.barrier()

    run(main())
    pieces = [(r["seq"], r["data"].get("step"), r["data"]["n"], r["data"].get("text")) for r in live.rows]
    assert pieces == [(None, 1, 1, "a"), (None, 1, 2, ""), (None, 2, 1, "c"), (1, None, 1, None)]
    assert {(r["conversation_id"], r["turn"], r["attempt"]) for r in live.rows} == {(LEASE.conversation_id, 3, 1)}


def test_nothing_reaches_live_readers_before_its_commit() -> None:
    store, live = ListStore(lost=True), ListLive()

    async def main() -> None:
        async with open_publisher(store, live=live) as publisher:
            publisher.emit(numbered(1), soon=True)
            with pytest.raises(LeaseLost):
                await publisher.barrier()
            publisher.delta(step=1, text="from a zombie")

    run(main())
    assert live.entries == []


def test_a_pause_that_met_a_stop_is_shown_as_it_was_stored() -> None:
    class Stopping(ListStore):
        def _append(self, *arguments: Any) -> Any:
            answer = super()._append(*arguments)
            return type(answer)(answer.first_seq, "stopped", True, None)

    live = ListLive()
    pause = EventDraft("approval_required", {"messages": [], "pending_approvals": [{"approval_token": "t"}]})

    async def main() -> None:
        async with open_publisher(Stopping(), live=live) as publisher:
            answer = await publisher.finish(pause, Finish("awaiting_approval", "approval"))
            assert answer.status == "stopped"

    run(main())
    assert [(r["event"], r["data"]) for r in live.rows] == [("turn_stopped", {})]


def test_the_backlog_shows_what_waits_and_emitting_never_blocks() -> None:
    store = ListStore(down=True)

    async def main() -> None:
        async with open_publisher(store) as publisher:
            for n in range(1_000):
                publisher.emit(numbered(n))
            assert publisher.backlog == 1_000
            store.down = False
            await publisher.barrier()
            assert publisher.backlog == 0

    run(main())
    assert len(store.events) == 1_000

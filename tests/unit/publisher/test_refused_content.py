"""What a database refuses: batches are split, only the offender changes, and histories stay whole."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from publisher import EventPublisher, PublisherLimits
from shared.errors import ContentRefused, StoreError
from shared.events import EventDraft, Finish
from tests.unit.publisher.support import LEASE, ListLive, ListStore, numbered, run

DONE = Finish("completed", "stop")
BAD = "é"  # the store of these tests refuses it


def refuses_bad(draft: EventDraft, finish: Finish | None) -> bool:
    encoded = orjson.dumps([draft.as_dict(), finish.as_dict() if finish else None])
    return BAD.encode() in encoded or b"\\u0000" in encoded


def store_of(drafts: list[EventDraft], finish: Finish | None = None, **options: Any) -> ListStore:
    store = ListStore(**options)

    async def main() -> None:
        limits = PublisherLimits(batch_events=64, exit_seconds=1)
        async with EventPublisher(store, LEASE, limits=limits) as publisher:  # type: ignore[arg-type]
            for draft in drafts[: len(drafts) - bool(finish)]:
                publisher.emit(draft)
            if finish is not None:
                await publisher.finish(drafts[-1], finish)
            else:
                await publisher.barrier()

    run(main())
    return store


@settings(max_examples=100, deadline=None)
@given(st.lists(st.booleans(), min_size=1, max_size=20), st.lists(st.sampled_from([None, "reply_lost"]), max_size=20))
def test_only_the_offenders_become_markers_and_order_and_numbers_hold(bad: list[bool], faults: list[Any]) -> None:
    drafts = [EventDraft("tool_call_started", {"n": n, "tool_name": BAD if b else "ok"}) for n, b in enumerate(bad)]
    end = EventDraft("error", {"n": len(bad), "code": "x"})
    store = store_of([*drafts, end], Finish("failed", "x"), refuses=refuses_bad, faults=list(faults))
    assert [event.data["n"] for event in store.events] == list(range(len(bad) + 1))
    assert [event.data.get("unstorable", False) for event in store.events] == [*bad, False]
    assert [event.event for event in store.events] == [*["tool_call_started"] * len(bad), "error"]
    assert store.finish == Finish("failed", "x")
    assert store.last[0] == len(store.batches), "a refused number was consumed"


def test_a_marker_says_why_and_keeps_what_happened_to_the_calls() -> None:
    calls = ({"op": "start", "turn": 3, "step": 1, "call_index": 0},)
    draft = EventDraft("tool_call_started", {"tool_name": BAD, "step": 1}, calls)  # type: ignore[arg-type]
    [event] = store_of([draft], refuses=refuses_bad).events
    assert event.data == {
        "step": 1,
        "unstorable": True,
        "code": "content_refused",
        "description": "unsupported Unicode escape sequence",
    }
    assert event.calls == calls


@pytest.mark.parametrize("event", ["ai_message", "tool_call_result"])
def test_a_message_survives_in_plain_text(event: str) -> None:
    message = {
        "role": "assistant",
        "content": f"caf{BAD}",
        "tool_calls": [{"id": "c-ü", "function": {"name": "q", "arguments": f'{{"a": "{BAD}"}}'}}],
    }
    data = {"step": 2, "message": message, "usage": {"prompt_tokens": 7}, "shown": BAD}
    [stored] = store_of([EventDraft(event, data)], refuses=refuses_bad).events
    assert stored.data["message"] == {
        "role": "assistant",
        "content": "caf?",
        "tool_calls": [{"id": "c-ü", "function": {"name": "q", "arguments": '{"a": "?"}'}}],
    }
    assert stored.data["usage"] == {"prompt_tokens": 7}
    assert (stored.data["step"], stored.data["unstorable"]) == (2, True)
    assert "shown" not in stored.data


def test_a_snapshot_is_never_a_marker() -> None:
    messages = [{"role": "user", "content": f"{BAD}1"}, {"role": "assistant", "content": "fine"}]
    data = {"messages": messages, "content": f"caf{BAD}", "request_id": "r-1"}
    store = store_of([numbered(0), EventDraft("answer_end", data)], DONE, refuses=refuses_bad)
    assert store.events[-1].data == {
        "messages": [{"role": "user", "content": "?1"}, {"role": "assistant", "content": "fine"}],
        "content": "caf?",
        "request_id": "r-1",
    }
    assert store.finish == DONE


def test_texts_are_cut_when_nothing_else_helps_and_arguments_stay_json() -> None:
    def refuses_long(draft: EventDraft, finish: Finish | None) -> bool:
        return len(orjson.dumps(draft.as_dict())) > 5_000

    call = {"id": "c1", "type": "function", "function": {"name": "q", "arguments": '{"a": "' + "x" * 9_000 + '"}'}}
    messages = [{"role": "user", "content": "y" * 9_000}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    store = store_of([EventDraft("answer_end", {"messages": messages})], DONE, refuses=refuses_long)
    user, assistant = store.events[0].data["messages"]
    assert user["content"].startswith("y" * 1_000 + " [8000 characters")
    assert assistant["tool_calls"][0]["function"]["arguments"] == "{}"
    assert assistant["tool_calls"][0]["id"] == "c1"


def test_what_cleaning_can_mend_loses_nothing() -> None:
    """Case 16: NUL, a lone surrogate and NaN in one batch; the literal text stays."""
    drafts = [
        EventDraft("tool_call_result", {"out": "a\x00b", "key\x00": 1}),
        EventDraft("tool_call_result", {"out": "smile \ud83d end"}),
        EventDraft("tool_call_result", {"latency": float("nan"), "big": 2**80}),
        EventDraft("tool_call_result", {"literal": "\\u0000"}),
        EventDraft("answer_end", {"messages": [{"role": "user", "content": "a\x00b"}]}),
    ]
    finish = Finish("completed", "stop", {"description": "x\x00y"})

    def refuses_nul(draft: EventDraft, finish: Finish | None) -> bool:
        return "\x00" in repr_deep([draft.data, finish.as_dict() if finish else None])

    store = store_of(drafts, finish, refuses=refuses_nul)
    assert [event.data for event in store.events] == [
        {"out": "ab", "key": 1},
        {"out": "smile \ufffd end"},
        {"latency": None, "big": str(2**80)},
        {"literal": "\\u0000"},
        {"messages": [{"role": "user", "content": "ab"}]},
    ]
    assert store.finish is not None
    assert store.finish.error == {"description": "xy"}


def repr_deep(value: Any) -> str:
    if isinstance(value, dict):
        return "".join(repr_deep(k) + repr_deep(v) for k, v in value.items())
    if isinstance(value, list):
        return "".join(map(repr_deep, value))
    return str(value)


def test_a_refused_end_of_the_turn_is_mended_too() -> None:
    finish = Finish("failed", "model_error", {"code": "model_error", "description": f"caf{BAD}", "retryable": True})
    store = store_of([EventDraft("error", {"code": "model_error"})], finish, refuses=refuses_bad)
    assert store.finish == Finish(
        "failed", "model_error", {"code": "model_error", "description": "caf?", "retryable": True}
    )


def test_when_even_the_weakest_version_is_refused_writing_ends_with_that_error() -> None:
    with pytest.raises(StoreError) as caught:
        store_of([numbered(1)], refuses=lambda draft, finish: True)
    assert isinstance(caught.value.__cause__, ContentRefused)


def test_live_readers_get_what_was_stored() -> None:
    store, live = ListStore(refuses=refuses_bad), ListLive()

    async def main() -> None:
        limits = PublisherLimits()
        async with EventPublisher(store, LEASE, limits=limits, live=live) as publisher:  # type: ignore[arg-type]
            publisher.emit(numbered(1))
            publisher.emit(numbered(2, tool_name=BAD))
            await publisher.barrier()

    run(main())
    assert [(r["seq"], r["data"]) for r in live.rows] == [(1, store.events[0].data), (2, store.events[1].data)]
    assert live.rows[1]["data"]["unstorable"] is True

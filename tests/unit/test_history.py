"""Histories: folding rows into messages, and every result behind its call."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from shared.history import Message, fold, open_calls, pair, user_message


def u(text: str) -> Message:
    return {"role": "user", "content": text}


def a(*ids: str, text: str | None = None) -> Message:
    if not ids:
        return {"role": "assistant", "content": text or "answer"}
    calls = [{"id": i, "type": "function", "function": {"name": "f", "arguments": "{}"}} for i in ids]
    return {"role": "assistant", "content": text, "tool_calls": calls}


def t(call_id: str, text: str = "ok") -> Message:
    return {"role": "tool", "tool_call_id": call_id, "content": text}


def opened(messages: list[Message]) -> list[tuple[int, str]]:
    return [(call.message_index, call.tool_call_id) for call in open_calls(messages)]


def event(seq: int, turn: int, message: Message | None, name: str | None = None) -> dict[str, Any]:
    names = {"assistant": "ai_message", "tool": "tool_call_result"}
    return {
        "seq": seq,
        "turn": turn,
        "event": name or names[str((message or {})["role"])],
        "data": {} if message is None else {"message": message},
    }


def turn(number: int, ask: str | None) -> dict[str, Any]:
    return {"turn": number, "request": {"ask": ask} if ask else {"kind": "tool_decisions"}}


# pair and open_calls


def test_a_crash_half_way_leaves_the_unanswered_calls_open() -> None:
    messages = [u("check a, b, c"), a("a1", "b1", "c1"), t("a1")]
    assert pair(messages) == messages
    assert opened(messages) == [(1, "b1"), (1, "c1")]


def test_results_stand_in_call_order_directly_behind_their_message() -> None:
    made = a("a1", "b1", "c1")
    messages = [u("x"), made, t("c1", "3"), u("well?"), t("a1", "1"), a(), t("b1", "2")]
    assert pair(messages) == [u("x"), made, t("a1", "1"), t("b1", "2"), t("c1", "3"), u("well?"), a()]


def test_an_id_that_comes_again_is_a_new_call() -> None:
    messages = [u("pods?"), a("bash:0"), t("bash:0", "3 pods"), a(text="3 pods."), u("nodes?"), a("bash:0"), u("well?")]
    assert pair(messages) == messages
    assert opened(messages) == [(5, "bash:0")]
    answered = pair([*messages, t("bash:0", "2 nodes")])
    assert answered[6] == t("bash:0", "2 nodes")
    assert opened(answered) == []


def test_a_late_result_goes_to_the_latest_open_call_of_its_id() -> None:
    first, second = a("x", text="first"), a("x", text="second")
    assert pair([first, second, t("x", "new"), t("x", "old")]) == [first, t("x", "old"), second, t("x", "new")]


def test_one_message_may_use_an_id_twice() -> None:
    made = a("x", "x")
    assert pair([made, t("x", "1"), t("x", "2")]) == [made, t("x", "1"), t("x", "2")]
    calls = open_calls([made, t("x", "1")])
    assert [(call.call_index, call.tool_call_id) for call in calls] == [(1, "x")]


def test_a_result_without_a_call_becomes_text_that_nobody_mistakes_for_one() -> None:
    [message] = pair([t("gone", "42")])
    assert message["role"] == "user"
    assert "42" in message["content"]
    assert "not in the history" in message["content"]
    picture = {"type": "image_url", "image_url": {"url": "artifact:1"}}
    [message] = pair([{"role": "tool", "tool_call_id": "gone", "content": [picture]}])
    assert message["content"][1:] == [picture]


def test_a_second_result_of_one_call_becomes_text() -> None:
    paired = pair([a("x"), t("x", "1"), t("x", "2")])
    assert [m["role"] for m in paired] == ["assistant", "tool", "user"]


def test_unknown_keys_are_kept() -> None:
    made = a("x") | {"reasoning_content": "hm", "provider": {"signature": "s"}}
    assert pair([made, t("x") | {"name": "f"}]) == [made, t("x") | {"name": "f"}]


ids = st.sampled_from(["x", "y", "z"])
assistants = st.lists(ids, max_size=3).map(lambda names: a(*names))
anything = st.lists(
    st.one_of(
        st.integers(0, 9).map(lambda n: u(str(n))),
        assistants,
        st.tuples(ids, st.integers()).map(lambda p: t(p[0], str(p[1]))),
    ),
    max_size=14,
)


@st.composite
def valid(draw: st.DrawFn) -> list[Message]:
    """Histories as a strict provider wants them, up to a last step that may be half done."""
    messages: list[Message] = []
    for _ in range(draw(st.integers(0, 5))):
        if draw(st.booleans()):
            messages.append(u(str(draw(st.integers(0, 9)))))
        names = draw(st.lists(ids, max_size=3))
        messages.append(a(*names))
        messages.extend(t(name, str(draw(st.integers()))) for name in names)
    if draw(st.booleans()):
        names = draw(st.lists(ids, min_size=1, max_size=3, unique=True))
        messages.append(a(*names))
        messages.extend(t(name) for name in names if draw(st.booleans()))
    return messages


@given(anything)
def test_pairing_twice_is_pairing_once(messages: list[Message]) -> None:
    once = pair(messages)
    assert pair(once) == once


@given(valid())
def test_valid_histories_come_out_equal(messages: list[Message]) -> None:
    assert pair(messages) == messages


@given(anything)
def test_every_result_stands_behind_its_call_in_call_order(messages: list[Message]) -> None:
    paired = pair(messages)
    expected: list[str] = []
    for message in paired:
        if message["role"] == "tool":
            assert message["tool_call_id"] in expected, "a result that no call before it asks for, or out of order"
            del expected[: expected.index(message["tool_call_id"]) + 1]
        else:
            expected = [call["id"] for call in message.get("tool_calls", ())]


@given(anything)
def test_pairing_loses_and_invents_nothing(messages: list[Message]) -> None:
    paired = pair(messages)
    assert len(paired) == len(messages)
    assert [m for m in paired if m["role"] == "assistant"] == [m for m in messages if m["role"] == "assistant"]
    results = [m["content"] for m in messages if m["role"] == "tool"]
    kept = "\n".join(str(m["content"]) for m in paired)
    assert all(content in kept for content in results)


@given(anything)
def test_closing_the_open_calls_leaves_none(messages: list[Message]) -> None:
    paired = pair(messages)
    closed = pair([*paired, *(t(call.tool_call_id, "closed") for call in open_calls(paired))])
    assert open_calls(closed) == []


# fold


def test_a_history_without_a_snapshot_is_its_turns() -> None:
    made = a("x")
    events = [event(2, 1, made), event(4, 1, t("x")), event(5, 1, a())]
    assert fold(None, [turn(1, "one"), turn(2, "two")], events) == [u("one"), made, t("x"), a(), u("two")]


def test_events_are_folded_by_turn_and_then_by_sequence() -> None:
    events = [event(6, 2, a(text="second")), event(3, 1, a(text="first"))]  # question 2 had sequence 2
    folded = fold(None, [turn(2, "two"), turn(1, "one")], events)
    assert [m["content"] for m in folded] == ["one", "first", "two", "second"]


def test_a_snapshot_stands_for_all_before_it_and_its_system_message_goes() -> None:
    snapshot = {"turn": 2, "seq": 7, "data": {"messages": [{"role": "system", "content": "s"}, u("summary")]}}
    events = [event(5, 2, a(text="before")), event(9, 2, a(text="after")), event(3, 1, a(text="long ago"))]
    folded = fold(snapshot, [turn(2, "two"), turn(3, "three")], events)
    assert [m["content"] for m in folded] == ["summary", "after", "three"]


def test_a_resumed_turn_puts_results_where_their_calls_are() -> None:
    made = a("x", "y")
    snapshot = {"turn": 1, "seq": 4, "data": {"messages": [u("one"), made]}}
    events = [event(8, 2, t("y", "2")), event(9, 2, t("x", "1")), event(10, 2, a())]
    folded = fold(snapshot, [turn(2, None)], events)
    assert folded == [u("one"), made, t("x", "1"), t("y", "2"), a()]


def test_a_closure_after_a_new_question_moves_before_it() -> None:
    made = a("x")
    snapshot = {"turn": 1, "seq": 4, "data": {"messages": [u("one"), made]}}
    closure = t("x", "Not executed: superseded by a new request.")
    assert fold(snapshot, [turn(2, "two")], [event(8, 2, closure)]) == [u("one"), made, closure, u("two")]


def test_events_without_a_message_add_nothing() -> None:
    events = [
        event(2, 1, None, "tool_call_started"),
        event(3, 1, None, "ai_message"),
        event(4, 1, u("no"), "answer_end"),
    ]
    assert fold(None, [turn(1, "one")], events) == [u("one")]


def test_holmesgpt_results_are_results() -> None:
    made = a("x")
    events = [event(2, 1, made), event(3, 1, t("x"), "tool_calling_result")]
    assert fold(None, [turn(1, "one")], events) == [u("one"), made, t("x")]


# user_message


def test_a_question_is_a_message_and_decisions_are_none() -> None:
    assert user_message({"ask": "why?"}) == u("why?")
    assert user_message({"kind": "tool_decisions"}) is None


def test_images_are_parts_and_stored_ones_are_references() -> None:
    images = [{"artifact_id": "7", "media_type": "image/jpeg"}, {"url": "https://example.org/x.png"}]
    message = user_message({"ask": "what is this?", "images": images})
    assert message is not None
    text, stored, linked = message["content"]
    assert text == {"type": "text", "text": "what is this?"}
    assert stored["image_url"] == {"url": "artifact:7;image/jpeg"}
    assert linked["image_url"] == {"url": "https://example.org/x.png"}

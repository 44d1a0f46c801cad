"""What a follower shows: stored events once and in order, deltas only while their step is unfinished."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from shared.live import View, public_data
from shared.store.base import Row


def stored(seq: int, event: str = "tool_call_started", *, turn: int = 1, attempt: int = 1, **data: Any) -> Row:
    return {"seq": seq, "turn": turn, "attempt": attempt, "event": event, "data": data}


def delta(n: int, text: str = "x", *, step: int = 1, turn: int = 1, attempt: int = 1, last: int | None = None) -> Row:
    data = {"step": step, "n": n, "last": last or n, "text": text, "reasoning": ""}
    return {"seq": None, "turn": turn, "attempt": attempt, "event": "ai_message_delta", "data": data}


def shown(rows: list[Row], view: View | None = None) -> list[str]:
    view = view or View()
    out = []
    for row in rows:
        for r in view.take(row):
            data = r["data"]
            if r["seq"] is not None:
                out.append(str(r["seq"]))
            else:
                out.append("reset" if data.get("reset") else data["text"] + ("!" if data.get("gap") else ""))
    return out


@given(st.integers(0, 10), st.lists(st.integers(1, 12), max_size=40))
def test_every_seq_is_shown_once_and_ascending(after: int, seqs: list[int]) -> None:
    view = View(after)
    out: list[int] = []
    for seq in seqs:
        if view.misses(stored(seq)):
            for missing in range(view.seq + 1, seq):
                out += [r["seq"] for r in view.take(stored(missing), known=True)]
        out += [r["seq"] for r in view.take(stored(seq))]
    assert out == list(range(after + 1, max([after, *seqs]) + 1))


def test_a_row_that_the_store_does_not_have_is_not_shown() -> None:
    assert shown([stored(1), stored(5), stored(2)]) == ["1", "2"]


def test_a_row_without_its_data_is_asked_of_the_store() -> None:
    view = View(3)
    assert view.misses({**stored(4), "data": None})
    assert not view.misses({**stored(3), "data": None})
    assert not view.misses(stored(4))


def test_deltas_are_shown_until_their_message_came() -> None:
    rows = [delta(1, "a"), delta(2, "b"), stored(1, "ai_message", step=1), delta(3, "late"), delta(1, "c", step=2)]
    assert shown(rows) == ["a", "b", "1", "c"]


def test_a_read_that_holds_a_step_whole_shows_its_message_only() -> None:
    view = View(7)
    rows = [delta(1, "a"), delta(2, "b"), stored(8, "ai_message", step=1), delta(1, "c", step=2)]
    assert shown(view.foreseen(rows), view) == ["8", "c"]


def test_a_resumed_follower_does_not_show_old_deltas() -> None:
    view = View(8)
    rows = [delta(1, "a"), stored(8, "ai_message", step=1), delta(1, "b", step=2)]
    assert shown(view.foreseen(rows), view) == ["b"]


def test_pieces_that_were_missed_are_told_and_repeated_ones_dropped() -> None:
    rows = [delta(3, "c"), delta(4, "d"), delta(4, "d"), delta(7, "g"), delta(8, "hi", last=9), delta(10, "j")]
    assert shown(rows) == ["c!", "d", "g!", "hi", "j"]


def test_another_attempt_resets_the_text_once() -> None:
    assert shown([delta(1, "a"), delta(1, "b", attempt=2), delta(2, "c", attempt=2)]) == ["a", "reset", "b", "c"]
    assert shown([delta(1, "a"), stored(1, "turn_resumed", attempt=2), delta(1, "b", attempt=2)]) == [
        "a", "reset", "1", "b",
    ]  # fmt: skip


def test_a_zombie_adds_nothing() -> None:
    rows = [delta(1, "a", attempt=2), delta(5, "z", attempt=1), delta(2, "b", attempt=2)]
    assert shown(rows) == ["a", "b"]


def test_nothing_streams_into_a_turn_that_has_ended() -> None:
    rows = [delta(1, "a"), stored(1, "error"), delta(2, "b"), delta(1, "c", step=2), delta(1, "d", turn=2)]
    assert shown(rows) == ["a", "1", "d"]


def test_a_finished_step_needs_no_reset() -> None:
    rows = [delta(1, "a"), stored(1, "ai_message", step=1), stored(2, "turn_resumed", attempt=2)]
    assert shown(rows) == ["a", "1", "2"]


def test_live_readers_get_neither_tokens_nor_messages() -> None:
    data = {
        "messages": [{}, {}],
        "pending_approvals": [{"tool_call_id": "c1", "approval_token": "secret"}],
        "pending_frontend_tool_calls": [{"tool_call_id": "c2", "approval_token": "secret"}],
    }
    assert public_data("approval_required", data) == {
        "message_count": 2,
        "pending_approvals": [{"tool_call_id": "c1"}],
        "pending_frontend_tool_calls": [{"tool_call_id": "c2"}],
    }
    assert data["messages"] == [{}, {}]
    assert public_data("ai_answer_end", {"messages": [{}]}) == {"message_count": 1}
    assert public_data("user_message", {"messages": 1}) == {"messages": 1}

"""Writing a turn: fenced by its lease, numbered, once; what a batch does to calls, sums and older snapshots."""

from __future__ import annotations

import pytest

from shared.errors import ContentRefused, LeaseLost, TurnkeeperError
from shared.events import AI_MESSAGE, ERROR, HISTORY_COMPACTED, TURN_STOPPED, EventDraft, Finish
from shared.store.base import Appended, Store
from tests.contract.driver import (
    ANSWERED,
    PAUSED,
    Talk,
    ai,
    answer,
    call,
    compacted,
    failed,
    history,
    pause,
    result,
    start,
    waits,
)


async def test_batches_are_numbered_and_answer_where_they_landed(talk: Talk) -> None:
    await talk.ask()
    lease = (await talk.claim()).lease
    assert await talk.append(lease, 1, ai(1), ai(2)) == Appended(2, "running", False, None)
    assert await talk.append(lease, 2) == Appended(4, "running", False, None)
    assert await talk.append(lease, 3, answer(), finish=ANSWERED) == Appended(4, "completed", False, None)
    events = await talk.events()
    assert [(e["seq"], e["turn"], e["attempt"]) for e in events] == [(1, 1, 0), (2, 1, 1), (3, 1, 1), (4, 1, 1)]


async def test_a_repeated_batch_gets_the_first_answer_and_writes_nothing(talk: Talk) -> None:
    await talk.ask()
    lease = (await talk.claim()).lease
    first = await talk.append(lease, 1, ai(1))
    assert await talk.append(lease, 1, ai(1), ai(2)) == first
    assert len(await talk.events()) == 2


async def test_the_last_batch_may_be_repeated_after_the_end(talk: Talk) -> None:
    await talk.ask()
    await talk.ask("next", queue="background")
    lease = (await talk.claim()).lease
    last = await talk.append(lease, 1, answer(), finish=ANSWERED)
    assert last == Appended(3, "completed", False, "background")
    await talk.claim()
    assert await talk.append(lease, 1, answer(), finish=ANSWERED) == last
    assert (await talk.event_names()).count("answer_end") == 1


async def test_nothing_follows_the_end(talk: Talk) -> None:
    await talk.ask()
    lease = (await talk.claim()).lease
    await talk.append(lease, 1, answer(), finish=ANSWERED)
    with pytest.raises(LeaseLost):
        await talk.append(lease, 2, ai(1))


@pytest.mark.parametrize("batch", [0, 2, 3])
async def test_a_batch_out_of_order_is_refused(talk: Talk, batch: int) -> None:
    await talk.ask()
    lease = (await talk.claim()).lease
    with pytest.raises(LeaseLost) as caught:
        await talk.append(lease, batch, ai(1))
    assert caught.value.code == "lease_lost"
    assert len(await talk.events()) == 1


async def test_an_earlier_batch_than_the_last_is_refused(talk: Talk) -> None:
    await talk.ask()
    lease = (await talk.claim()).lease
    await talk.append(lease, 1, ai(1))
    await talk.append(lease, 2, ai(2))
    with pytest.raises(LeaseLost):
        await talk.append(lease, 1, ai(1))


async def test_an_expired_lease_that_nobody_took_still_writes(talk: Talk) -> None:
    await talk.ask()
    lease = (await talk.claim_expired()).lease
    assert (await talk.append(lease, 1, answer(), finish=ANSWERED)).status == "completed"


async def test_a_released_token_is_refused(store: Store, talk: Talk) -> None:
    await talk.ask()
    lease = (await talk.claim()).lease
    await talk.append(lease, 1, ai(1))
    await store.release(lease)
    for batch in (1, 2):
        with pytest.raises(LeaseLost):
            await talk.append(lease, batch, ai(batch))


async def test_batches_start_at_one_for_every_attempt(talk: Talk) -> None:
    await talk.ask()
    dead = (await talk.claim_expired()).lease
    await talk.append(dead, 1, ai(1))
    lease = (await talk.claim()).lease
    assert (await talk.append(lease, 1, ai(2))).first_seq == 3
    with pytest.raises(LeaseLost):
        await talk.append(dead, 1, ai(1))


async def test_a_finish_is_kept_on_the_turn(talk: Talk) -> None:
    await talk.ask()
    lease = (await talk.claim()).lease
    error = {"code": "rate_limited", "description": "Too many.", "retryable": True}
    finish = Finish("failed", "rate_limited", error, "openai", "openai/x")
    await talk.append(lease, 1, EventDraft(ERROR, error), finish=finish)
    turn = await talk.turn(1)
    assert (turn["status"], turn["finish_reason"], turn["error"]) == ("failed", "rate_limited", error)
    assert (turn["retryable"], turn["provider"], turn["model"]) == (True, "openai", "openai/x")
    assert turn["ended_at"] >= turn["started_at"]
    assert turn["duration_ms"] >= 0
    assert (await talk.row())["status"] == "failed"


async def test_usage_is_summed_over_steps_and_turns(talk: Talk) -> None:
    usage = {"prompt_tokens": 10, "completion_tokens": 5, "cached_tokens": 2, "cost_usd": 0.25}
    for _ in range(2):
        await talk.ask()
        lease = (await talk.claim()).lease
        made = [call(1, i, f"c{i}", gated=False, risk="read_only") for i in range(2)]
        await talk.append(lease, 1, ai(1, *made, usage=usage), result(lease.turn, 1, 0, "c0"))
        await talk.append(lease, 2, EventDraft(HISTORY_COMPACTED, {"messages": [], "usage": {"prompt_tokens": 100}}))
        total = EventDraft("answer_end", {"messages": [], "usage": {"prompt_tokens": 999}})
        await talk.append(lease, 3, ai(2, usage=usage), total, finish=ANSWERED)
    turn, row = await talk.turn(2), await talk.row()
    sums = ("rounds", "tool_calls", "prompt_tokens", "completion_tokens", "cached_tokens", "cost_usd")
    assert [turn[name] for name in sums] == [2, 2, 120, 10, 4, 0.5]
    assert [row[name] for name in sums] == [4, 4, 240, 20, 8, 1.0]


async def test_what_a_failed_or_stopped_turn_spent_counts(talk: Talk) -> None:
    for name, finish in ((ERROR, failed()), (TURN_STOPPED, Finish("stopped", "stopped"))):
        await talk.ask()
        lease = (await talk.claim()).lease
        await talk.append(lease, 1, EventDraft(name, {"usage": {"completion_tokens": 3}}), finish=finish)
    assert (await talk.row())["completion_tokens"] == 6


# What a batch does to calls


async def test_a_side_effect_passes_through_executing(talk: Talk) -> None:
    await talk.ask()
    lease = (await talk.claim()).lease
    await talk.append(lease, 1, ai(1, call(1, gated=False)), start(1, 1))
    row = (await talk.calls())["c1"]
    assert (row["state"], row["decided_by"], row["result_seq"]) == ("executing", "policy:never", None)
    assert row["started_at"] is not None
    await talk.append(lease, 2, result(1, 1, content="42"))
    row = (await talk.calls())["c1"]
    assert (row["state"], row["result_seq"], row["result_summary"], row["duration_ms"]) == ("done", 4, "42", 5)
    assert row["ended_at"] is not None


async def test_a_call_that_can_never_run_is_born_failed(talk: Talk) -> None:
    await talk.ask()
    lease = (await talk.claim_expired()).lease
    broken = call(1) | {"state": "failed", "reason": "broken arguments"}
    await talk.append(lease, 1, ai(1, broken))  # type: ignore[arg-type]
    [row] = (await talk.claim()).calls
    assert (row["state"], row["reason"]) == ("failed", "broken arguments")


@pytest.mark.parametrize(
    "wrong",
    [
        [start(1, 1, 0)],  # pending: nobody approved it
        [start(1, 1, 1), start(1, 1, 1)],  # twice
        [start(1, 9, 0)],  # no such call
        [result(1, 1, 1), result(1, 1, 1)],  # two results
        [result(1, 1, 1, state="done"), start(1, 1, 1)],  # after its end
        [result(1, 1, 2, state="done")],  # denied cannot become done
        [ai(1, call(1, 0, "again"))],  # a second message of one step
    ],
    ids=["pending", "twice", "missing", "results", "ended", "denied", "step"],
)
async def test_a_forbidden_transition_rolls_the_batch_back(talk: Talk, wrong: list[EventDraft]) -> None:
    await talk.ask()
    lease = (await talk.claim()).lease
    denied = call(1, 2, "denied") | {"state": "denied"}
    await talk.append(lease, 1, ai(1, call(1, 0, "gated"), call(1, 1, "free", gated=False), denied))  # type: ignore[arg-type]
    before = await talk.calls()
    with pytest.raises(TurnkeeperError) as caught:
        await talk.append(lease, 2, ai(2, content="lost too"), *wrong)
    assert caught.value.code == "internal"
    assert await talk.calls() == before
    assert len(await talk.events()) == 2
    assert (await talk.append(lease, 2, ai(2))).first_seq == 3


@pytest.mark.parametrize("state", ["denied", "expired", "superseded", "unknown", "failed"])
async def test_a_result_event_tells_of_an_end_that_came_before(talk: Talk, state: str) -> None:
    await talk.ask()
    lease = (await talk.claim()).lease
    await talk.append(lease, 1, ai(1, call(1)))
    await talk.append(lease, 2, result(1, 1, state=state))  # type: ignore[arg-type]
    row = (await talk.calls())["c1"]
    assert (row["state"], row["result_seq"]) == (state, 3)


async def test_a_repeated_pause_keeps_the_first_token_and_expiry(talk: Talk) -> None:
    await talk.paused("c1")
    before = (await talk.calls())["c1"]
    await talk.decide({"tool_call_id": "zz", "approved": True, "approval_token": "x"})
    claim = await talk.claim()
    again = pause(history(claim), waits(1, 1, token="other", seconds=9_000))
    await talk.append(claim.lease, 1, again, finish=PAUSED)
    row = (await talk.calls())["c1"]
    assert row["approval_token_sha256"] == before["approval_token_sha256"]
    assert row["expires_at"] == before["expires_at"]


@pytest.mark.parametrize("finish", [failed(), Finish("stopped", "stopped")], ids=["failed", "stopped"])
async def test_a_turn_that_fails_closes_its_calls(talk: Talk, finish: Finish) -> None:
    await talk.ask()
    lease = (await talk.claim()).lease
    made = [call(1, 0, "a"), *(call(1, i, name, gated=False) for i, name in ((1, "b"), (2, "c"), (3, "d")))]
    await talk.append(lease, 1, ai(1, *made), start(1, 1, 2), start(1, 1, 3), result(1, 1, 3, "d"))
    await talk.append(lease, 2, finish=finish)
    assert await talk.states() == {"a": "superseded", "b": "superseded", "c": "unknown", "d": "done"}
    reasons = {name: row["reason"] for name, row in (await talk.calls()).items()}
    assert all(reasons[name] for name in "abc")
    assert reasons["d"] is None


async def test_a_failing_turn_leaves_what_a_later_turn_decided(talk: Talk) -> None:
    await talk.paused("c1", "c2")
    await talk.decide({"tool_call_id": "zz", "approved": True, "approval_token": "x"})
    claim = await talk.claim()
    await talk.decide({"tool_call_id": "c1", "approved": True, "approval_token": "t1"})
    await talk.append(claim.lease, 1, finish=failed())
    assert await talk.states() == {"c1": "approved", "c2": "superseded"}


# Stop against pause and answer


async def test_a_pause_under_a_stop_request_is_stored_as_the_stop(store: Store, talk: Talk) -> None:
    await talk.ask()
    lease = (await talk.claim()).lease
    await store.stop(talk.id, 1)
    appended = await talk.append(lease, 1, ai(1, call(1)), pause([], waits(1, 1)), finish=PAUSED)
    assert (appended.status, appended.stop_requested) == ("stopped", True)
    assert await talk.event_names() == ["user_message", "ai_message", "turn_stopped"]
    assert (await talk.events())[-1]["data"] == {}
    row = (await talk.calls())["c1"]
    assert (row["state"], row["approval_token_sha256"]) == ("superseded", None)
    assert (await talk.row())["status"] == "stopped"


async def test_an_answer_beats_a_stop_request(store: Store, talk: Talk) -> None:
    await talk.ask()
    lease = (await talk.claim()).lease
    await store.stop(talk.id, 1)
    appended = await talk.append(lease, 1, answer(), finish=ANSWERED)
    assert (appended.status, appended.stop_requested) == ("completed", True)
    assert await talk.statuses() == ["completed"]


async def test_a_stop_request_is_told_with_the_next_batch(store: Store, talk: Talk) -> None:
    await talk.ask()
    lease = (await talk.claim()).lease
    assert not (await talk.append(lease, 1, ai(1))).stop_requested
    await store.stop(talk.id)
    assert (await talk.append(lease, 2, ai(2))).stop_requested


# Snapshots


async def _kept(talk: Talk) -> list[tuple[str, bool]]:
    snapshots = ("answer_end", "approval_required", "history_compacted", "ai_answer_end")
    return [(e["event"], "messages" in e["data"]) for e in await talk.events() if e["event"] in snapshots]


async def test_a_new_snapshot_drops_the_messages_of_older_ones(talk: Talk) -> None:
    for text in ("one", "two", "three"):
        await talk.answered(text)
    assert await _kept(talk) == [("answer_end", False), ("answer_end", False), ("answer_end", True)]
    [*_, last] = await talk.events()
    assert len(last["data"]["messages"]) == 6
    assert (await talk.events())[2]["data"] == {"content": "done"}


async def test_as_many_snapshots_as_asked_for_are_kept(talk: Talk) -> None:
    for text in ("one", "two", "three"):
        await talk.ask(text)
        lease = (await talk.claim()).lease
        await talk.append(lease, 1, answer([{"role": "user", "content": text}]), finish=ANSWERED, kept=2)
    assert [full for _, full in await _kept(talk)] == [False, True, True]


async def test_a_compaction_keeps_its_messages(talk: Talk) -> None:
    await talk.answered("one")
    await talk.ask("two")
    lease = (await talk.claim()).lease
    await talk.append(lease, 1, compacted([{"role": "user", "content": "summary"}]))
    assert await _kept(talk) == [("answer_end", False), ("history_compacted", True)]
    await talk.append(lease, 2, answer([{"role": "user", "content": "x"}]), finish=ANSWERED)
    await talk.answered("three")
    assert await _kept(talk) == [
        ("answer_end", False),
        ("history_compacted", True),
        ("answer_end", False),
        ("answer_end", True),
    ]


async def test_an_event_list_counts_messages_instead_of_carrying_them(store: Store, talk: Talk) -> None:
    await talk.answered("one")
    await talk.answered("two")
    old, new = [e for e in await store.events(talk.id) if e["event"] == "answer_end"]
    assert "message_count" not in old["data"]
    assert new["data"] == {"content": "done", "message_count": 4}


async def test_a_holmesgpt_snapshot_is_dropped_once_ours_holds_the_history(talk: Talk) -> None:
    messages = [{"role": "user", "content": "one"}]
    await talk.ask()
    lease = (await talk.claim()).lease
    await talk.append(lease, 1, EventDraft("ai_answer_end", {"messages": messages}), finish=ANSWERED)
    assert await _kept(talk) == [("ai_answer_end", True)]
    await talk.answered("two")
    assert await _kept(talk) == [("ai_answer_end", False), ("answer_end", True)]


# Content


async def test_any_clean_json_comes_back_as_it_was(talk: Talk) -> None:
    await talk.ask()
    lease = (await talk.claim()).lease
    data = {
        "literal": "\\u0000 and \\ud83d stay text",
        "emoji": "😀",
        "nested": [{"a": [1, 2.5, True, None, ""]}],
        "ключ": "值",
        "big": 2**53 + 1,
    }
    await talk.append(lease, 1, EventDraft(AI_MESSAGE, data))
    assert (await talk.events())[1]["data"] == data


async def test_content_that_the_database_refuses_has_its_own_error(talk: Talk) -> None:
    await talk.ask()
    lease = (await talk.claim()).lease
    with pytest.raises(ContentRefused):
        await talk.append(lease, 1, EventDraft(AI_MESSAGE, {"text": "a\x00b"}))
    assert (await talk.append(lease, 1, EventDraft(AI_MESSAGE, {"text": "ab"}))).first_seq == 2


async def test_a_large_snapshot_is_taken(talk: Talk) -> None:
    await talk.ask()
    lease = (await talk.claim()).lease
    messages = [{"role": "user", "content": f"{i} " + "x" * 1_000} for i in range(2_000)]
    await talk.append(lease, 1, answer(messages), finish=ANSWERED)
    await talk.ask("next")
    assert len(history(await talk.claim())) == 2_001

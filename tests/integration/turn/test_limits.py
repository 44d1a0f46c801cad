"""Limits and troubles: each ends in the log, once, in words, and with nothing secret in them."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
import pytest

from shared.errors import ContextTooLong, ModelUnavailable, RateLimited
from shared.requests import Ask, record_of
from shared.store.base import Claim, NotClaimed
from tests.integration.turn.conftest import Tools
from tests.support.agent import Held, Lab, call, says, soon
from worker import endings
from worker.agent.base import Usage


def looks(count: int) -> list[Any]:
    return [says(None, call("look", f"c{n}", pod=str(n))) for n in range(count)]


async def test_the_last_step_may_not_call_tools_and_answers(lab: Lab) -> None:
    await lab.ask()
    process = lab.process([*looks(2), "Enough."], max_steps=3)
    assert (await process.run()).status == "completed"
    assert [r.tool_choice for r in process.model.requests] == ["auto", "auto", "none"]
    assert process.model.requests[2].tools
    await lab.check()


async def test_calls_of_the_last_step_beside_an_answer_are_dropped(lab: Lab, tools: Tools) -> None:
    await lab.ask()
    process = lab.process([says("Enough.", call("look", pod="x"))], max_steps=1)
    assert (await process.run()).status == "completed"
    assert "tool_calls" not in (await lab.last())["messages"][-1]
    assert tools.ran == []


async def test_calls_of_the_last_step_without_an_answer_end_the_turn(lab: Lab, tools: Tools) -> None:
    await lab.ask()
    report = await lab.process(looks(2), max_steps=2).run()
    assert (report.status, report.finish_reason) == ("failed", "step_limit")
    assert tools.ran == ["look 0"]
    assert (await lab.last())["retryable"] is True
    await lab.submit("retry")
    process = lab.process(["Enough."])
    assert (await process.run()).status == "completed"
    await lab.check()


async def test_a_crash_at_the_limit_does_not_buy_another_step(lab: Lab) -> None:
    await lab.ask()
    process = lab.process(looks(2), max_steps=2, batch_events=1)
    process.kill_at("before", "append", lambda _, finish: finish is not None)
    assert (await process.run()).status == "lost"
    lab.expire_lease()
    second = lab.process([], max_steps=2)
    assert (await second.run()).finish_reason == "step_limit"
    assert second.model.requests == []
    await lab.check()


async def test_the_time_of_a_turn_counts_over_its_attempts(lab: Lab) -> None:
    await lab.ask()
    process = lab.process([Held()])
    running = asyncio.create_task(process.run())
    await soon(process.started)
    process.kill()
    await running
    lab.sql("UPDATE conversation_turns SET started_at = '2020-01-01T00:00:00.000000+00:00'")
    lab.expire_lease()
    second = lab.process([])
    report = await second.run()
    assert (report.status, report.finish_reason) == ("failed", "turn_timeout")
    assert second.model.requests == []
    assert (await lab.last())["retryable"] is True
    await lab.check()


async def test_the_time_of_the_job_ends_the_turn_too(lab: Lab, tools: Tools) -> None:
    tools.hold("notify")
    await lab.ask()
    process = lab.process([says(None, call("notify", text="x"))])
    report = await process.run(timeout_seconds=0.1)
    assert (report.status, report.finish_reason) == ("failed", "turn_timeout")
    assert await lab.states() == ["unknown"]
    await lab.check()


async def test_a_wait_that_fits_hands_the_turn_back_with_a_delay(lab: Lab) -> None:
    await lab.ask()
    process = lab.process([RateLimited("Slow down.", retry_after_seconds=60.0)])
    report = await process.run()
    assert (report.status, report.finish_reason, report.next_queue) == ("pending", "rate_limited", None)
    assert await lab.store.reap() == []
    assert (await lab.turn(1))["crashes"] == 0
    second = lab.process(["Now."])
    assert (await second.run()).status == "completed"
    await lab.check()


@pytest.mark.parametrize("wait", [None, 10_000.0])
async def test_a_wait_that_does_not_fit_is_an_error(lab: Lab, wait: float | None) -> None:
    report = await lab.talk("Well?", RateLimited("Slow down.", retry_after_seconds=wait))
    assert (report.status, report.finish_reason) == ("failed", "rate_limited")
    await lab.check()


@pytest.mark.parametrize("limit", [{"turn_tokens": 40}, {"turn_cost_usd": 0.5}])
async def test_a_turn_that_has_used_its_budget_is_not_asked_on(lab: Lab, limit: dict[str, float]) -> None:
    """What has run is kept; the turn may be retried, since a retry is a turn with a budget of its own."""
    await lab.ask("Look.")
    spent = says(None, call("look", pod="web"), usage=Usage(30, 10, 0, 0.5))
    report = await lab.process([spent], **limit).run()
    assert (report.status, report.finish_reason) == ("failed", "turn_budget")
    assert await lab.states() == ["done"]
    turn = await lab.turn(1)
    assert turn["retryable"]
    assert next(iter(limit)).upper() in turn["error"]["description"]
    await lab.check()


async def test_an_account_has_so_many_turns_at_once_and_the_others_say_what_they_wait_for(lab: Lab) -> None:
    await lab.ask("Look.")
    claimed, _ = await lab.process(account_turns=1).claim()
    assert isinstance(claimed, Claim)
    waiting = await lab.store.submit(record_of(Ask(ask="And I?")))
    process = lab.process(account_turns=1)
    blocked, _ = await process.turns.claim(waiting.conversation_id, None)
    assert isinstance(blocked, NotClaimed)
    assert (blocked.reason, blocked.wait_reason) == ("busy", "account_limit")
    [row] = await lab.store.turns(waiting.conversation_id)
    assert row["wait_reason"] == "account_limit"


def test_a_provider_that_asks_for_no_wait_does_not_make_a_busy_loop() -> None:
    waits = [endings.wait_for(RateLimited("Slow down.", retry_after_seconds=0), attempt) for attempt in (1, 2, 3, 99)]
    assert waits == [1.0, 2.0, 4.0, 60.0]
    assert endings.wait_for(RateLimited("Slow down.", retry_after_seconds=300), 1) == 300


async def test_an_empty_answer_gets_one_nudge_that_is_not_stored(lab: Lab) -> None:
    """Case 12."""
    await lab.ask()
    empty = says("", finish_reason="tool_calls", usage=Usage(7, 2))
    empty.message["tool_calls"] = []
    process = lab.process([empty, says("Here I am.", usage=Usage(9, 3))])
    assert (await process.run()).status == "completed"
    nudge = process.model.requests[1].messages[-1]
    assert nudge["role"] == "user"
    answer = await lab.last()
    assert [m["role"] for m in answer["messages"]] == ["system", "user", "assistant"]
    assert answer["rounds"] == 1
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (16, 5)
    await lab.check()


@pytest.mark.parametrize("content", [None, "", "  \n"])
async def test_two_empty_answers_are_an_error_and_no_answer(lab: Lab, content: str | None) -> None:
    await lab.ask()
    report = await lab.process([says(content, usage=Usage(7, 2)), says(content, usage=Usage(8, 2))]).run()
    assert (report.status, report.finish_reason) == ("failed", "empty_answer")
    assert await lab.names() == ["user_message", "error"]
    assert (await lab.turn(1))["prompt_tokens"] == 15
    await lab.check()


@pytest.mark.parametrize("error", [ModelUnavailable("It broke off."), ContextTooLong("Too long.")])
async def test_a_model_error_ends_the_turn_and_keeps_what_was_done(lab: Lab, tools: Tools, error: Any) -> None:
    await lab.ask()
    report = await lab.process([*looks(1), error]).run()
    assert (report.status, report.finish_reason) == ("failed", error.code)
    assert (await lab.last())["retryable"] is error.retryable
    assert await lab.names() == ["user_message", "ai_message", "tool_call_started", "tool_call_result", "error"]
    await lab.check()


async def test_a_bug_ends_the_turn_without_its_words(lab: Lab) -> None:
    report = await lab.talk("Well?", ZeroDivisionError("password=hunter2"))
    assert (report.status, report.finish_reason) == ("failed", "internal")
    data = await lab.last()
    assert "ZeroDivisionError" in data["description"]
    turn = await lab.turn(1)
    assert "hunter2" not in orjson.dumps([data, turn]).decode()
    await lab.check()


async def test_a_bug_in_the_toolbox_ends_the_turn_too(lab: Lab) -> None:
    class Broken:
        def __getattr__(self, name: str) -> Any:
            return getattr(lab.toolbox, name)

        async def call(self, *_: Any) -> Any:
            raise KeyError("secret-token")

    await lab.ask()
    report = await lab.process(looks(1), toolbox=Broken()).run()
    assert (report.status, report.finish_reason) == ("failed", "internal")
    assert "secret-token" not in orjson.dumps(await lab.events()).decode()
    await lab.check()


async def test_a_store_that_fails_for_good_leaves_the_turn_to_the_next_worker(lab: Lab) -> None:
    from shared.errors import StoreError

    async def fail(_: tuple[Any, ...]) -> None:
        raise StoreError("disk full")

    await lab.ask()
    process = lab.process(["One."])
    process.store.before["append"] = fail
    report = await process.run()
    assert (report.status, report.ended) == ("lost", False)
    lab.expire_lease()
    assert (await lab.process(["Two."]).run()).status == "completed"
    await lab.check()


async def test_a_store_that_is_away_for_a_while_costs_nothing_but_time(lab: Lab, tools: Tools) -> None:
    from shared.errors import StoreUnavailable

    away = 3

    async def fail(_: tuple[Any, ...]) -> None:
        nonlocal away
        away -= 1
        if away >= 0:
            raise StoreUnavailable("it is away")

    await lab.ask()
    process = lab.process([says(None, call("notify", text="x")), "Told."])
    process.store.before["append"] = fail
    assert (await process.run()).status == "completed"
    assert tools.ran == ["notify x"]
    await lab.check()

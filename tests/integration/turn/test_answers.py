"""Turns that answer: what they cost, what they leave in the log, and what the next one starts from."""

from __future__ import annotations

from tests.support.agent import Lab, call, results_of, says
from worker.agent.base import Usage

SYSTEM = {"role": "system", "content": "Be brief."}


async def test_a_turn_without_tools_is_two_round_trips(lab: Lab) -> None:
    await lab.ask("Why?")
    process = lab.process(["Because."])
    report = await process.run()
    assert process.store.counted == ["claim", "append"]
    assert (report.status, report.finish_reason, report.next_queue) == ("completed", "answer", None)
    assert await lab.names() == ["user_message", "ai_message", "answer_end"]
    await lab.check()


async def test_the_answer_event_holds_what_the_next_turn_starts_from(lab: Lab) -> None:
    usage = Usage(100, 20, 30, 0.5)
    submitted = await lab.ask("Why?", request_id="r1")
    await lab.process([says("Because.", usage=usage, reasoning_content="Hmm.")]).run()
    answer = await lab.last()
    message = {"role": "assistant", "content": "Because.", "reasoning_content": "Hmm."}
    assert answer["content"] == "Because."
    assert answer["messages"] == [SYSTEM, {"role": "user", "content": "Why?"}, message]
    assert (answer["request_id"], answer["rounds"], answer["usage"], answer["cost_usd"]) == (
        "r1",
        1,
        usage.as_dict(),
        0.5,
    )
    turn = await lab.turn(submitted.turn)
    assert (turn["rounds"], turn["prompt_tokens"], turn["completion_tokens"], turn["cached_tokens"]) == (1, 100, 20, 30)
    assert (turn["cost_usd"], turn["provider"], turn["model"]) == (0.5, "test", "test-model")

    await lab.ask("And now?")
    process = lab.process(["Nothing."])
    await process.run()
    assert process.model.requests[0].messages == [
        SYSTEM,
        {"role": "user", "content": "Why?"},
        message,
        {"role": "user", "content": "And now?"},
    ]
    assert process.store.counted == ["claim", "append"]
    await lab.check()


async def test_a_turn_with_one_reading_call_is_at_most_four_round_trips(lab: Lab) -> None:
    await lab.ask("Look at web.")
    process = lab.process([says(None, call("look", pod="web")), "It is fine."])
    await process.run()
    assert process.store.counted[0] == "claim"
    assert len(process.store.counted) <= 4
    assert await lab.names() == [
        "user_message",
        "ai_message",
        "tool_call_started",
        "tool_call_result",
        "ai_message",
        "answer_end",
    ]
    assert results_of(process.model.requests[1]) == ["look web: ok"]
    turn = await lab.turn(1)
    assert (turn["rounds"], turn["tool_calls"]) == (2, 1)
    await lab.check()


async def test_usage_and_rounds_add_up_over_the_steps_of_a_turn(lab: Lab) -> None:
    replies = [
        says(None, call("look", pod="web"), usage=Usage(10, 1, 0, 0.25)),
        says("Fine.", usage=Usage(30, 2, 8, 0.5)),
    ]
    await lab.talk("Look.", *replies)
    answer, turn = await lab.last(), await lab.turn(1)
    expected = {"prompt_tokens": 40, "completion_tokens": 3, "cached_tokens": 8, "cost_usd": 0.75}
    assert answer["usage"] == expected
    assert {name: turn[name] for name in expected} == expected
    assert answer["rounds"] == turn["rounds"] == 2


async def test_a_new_system_prompt_replaces_the_old_one_and_stands_first_once(lab: Lab) -> None:
    await lab.talk("Why?", "Because.")
    await lab.ask("And?", additional_system_prompt="Speak Latin.")
    process = lab.process(["Quia."], system_prompt="Be long.")
    await process.run()
    systems = [m for m in process.model.requests[0].messages if m["role"] == "system"]
    assert systems == [{"role": "system", "content": "Be long.\n\nSpeak Latin."}]
    assert process.model.requests[0].messages[0] == systems[0]


async def test_a_question_recorded_while_an_earlier_turn_runs_comes_behind_its_answer(lab: Lab) -> None:
    await lab.ask("First?")
    process = lab.process(["One."])
    claimed, sent_at = await process.claim()
    await lab.ask("Second?")
    report = await process.go_on(claimed, sent_at)  # type: ignore[arg-type]
    assert report.next_queue == "interactive"
    second = lab.process(["Two."])
    await second.run()
    assert [m["content"] for m in second.model.requests[0].messages] == ["Be brief.", "First?", "One.", "Second?"]
    await lab.check()


async def test_a_question_behind_a_failed_turn_sees_both_questions(lab: Lab) -> None:
    from shared.errors import ModelUnavailable

    await lab.talk("First?", ModelUnavailable("It is down."))
    await lab.ask("Second?")
    process = lab.process(["Both."])
    await process.run()
    assert [m["content"] for m in process.model.requests[0].messages] == ["Be brief.", "First?", "Second?"]
    await lab.check()


async def test_a_retry_goes_on_from_the_last_message_and_adds_none(lab: Lab) -> None:
    from shared.errors import ModelUnavailable

    failed = await lab.talk(
        "Look.", says(None, call("look", pod="web")), ModelUnavailable("It is down."), model="other"
    )
    assert (failed.status, failed.finish_reason) == ("failed", "model_unavailable")
    await lab.submit("retry")
    process = lab.process(["Fine."])
    report = await process.run()
    assert report.status == "completed"
    assert [m["role"] for m in process.model.requests[0].messages] == ["system", "user", "assistant", "tool"]
    assert process.model.requests[0].model == "other"
    await lab.check()

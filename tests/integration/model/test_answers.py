"""Whole answers: what comes back, what it cost, and what goes to the provider."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

import pytest

from scripts.bench.kit.llm_server import Call, LlmServer, Reply
from tests.integration.model.conftest import TOOL, Asker
from worker.agent.base import Usage
from worker.agent.scripted import ScriptedCall, ScriptedReply, ToolCall, register_scripted

QUESTION = {"role": "user", "content": "why is web down?"}


async def test_text_is_shown_as_it_streams_and_usage_is_known(llm: LlmServer, ask: Asker) -> None:
    llm.script([Reply("The image tag does not exist.", prompt_tokens=120, completion_tokens=8, cached_tokens=64)])
    reply = await ask()
    assert reply.message == {"role": "assistant", "content": "The image tag does not exist."}
    assert (reply.finish_reason, reply.model, reply.provider) == ("stop", "test-model", "openai")
    assert reply.usage == Usage(120, 8, 64, 0.0)
    assert len(ask.shown) > 1
    assert ask.text == "The image tag does not exist."


async def test_a_model_with_a_known_price_has_a_cost(llm: LlmServer, ask: Asker) -> None:
    llm.script([Reply("Yes.", prompt_tokens=1_000_000, completion_tokens=0)])
    assert (await ask(model="openai/gpt-4.1")).usage.cost_usd == pytest.approx(2.0)


async def test_usage_that_cannot_be_meant_counts_as_none(llm: LlmServer, ask: Asker) -> None:
    """Stored, it would have the database refuse every batch that holds it."""
    llm.script([Reply("Yes.", prompt_tokens=10**30, completion_tokens=-5)])
    assert (await ask(model="openai/gpt-4.1")).usage == Usage(0, 0, 0, 0.0)


async def test_the_request_is_one_plain_streamed_completion(llm: LlmServer, ask: Asker) -> None:
    llm.script(["Yes.", "No."])
    await ask()
    await ask(tool_choice="none", response_format={"type": "json_object"})
    first, last = (request.body for request in llm.requests)
    assert first == {
        "model": "test-model",
        "messages": [QUESTION],
        "stream": True,
        "stream_options": {"include_usage": True},
        "tools": [TOOL],
        "tool_choice": "auto",
    }
    assert (last["tools"], last["tool_choice"], last["response_format"]) == ([TOOL], "none", {"type": "json_object"})


async def test_parallel_calls_arrive_in_order(llm: LlmServer, ask: Asker) -> None:
    llm.script([Reply("Looking.", [Call("logs", {"pod": "a"}, "x1"), Call("logs", {"pod": "b"}, "x2")])])
    reply = await ask()
    assert reply.finish_reason == "tool_calls"
    assert reply.message["tool_calls"] == [
        {"id": "x1", "type": "function", "function": {"name": "logs", "arguments": '{"pod": "a"}'}},
        {"id": "x2", "type": "function", "function": {"name": "logs", "arguments": '{"pod": "b"}'}},
    ]


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings:UserWarning")  # as a worker's process does
@pytest.mark.parametrize(
    "fragments",
    [
        [{"id": "x1", "function": {"name": "logs", "arguments": {"pod": "a"}}}],
        [{"id": "x1", "function": {"name": "logs"}}, {"function": {"arguments": '{"pod": "a"}'}}],
        [
            {"index": 0, "id": "x1", "function": {"name": "logs", "arguments": '{"pod":'}},
            {"index": 0, "id": "x1", "function": {"name": "logs", "arguments": ' "a"}'}},
        ],
        [
            {"index": 0, "id": "x1", "function": {"name": "logs", "arguments": None}},
            {"index": 1, "id": "", "function": {"name": None, "arguments": '{"pod": "a"}'}},
        ],
    ],
    ids=["an object", "no index", "all repeated", "a moving index"],
)
async def test_odd_fragments_survive_the_library(llm: LlmServer, ask: Asker, fragments: list[dict[str, Any]]) -> None:
    llm.script([Reply(deltas=[{"tool_calls": [f]} for f in fragments], finish_reason="tool_calls")])
    expected = {"id": "x1", "type": "function", "function": {"name": "logs", "arguments": '{"pod": "a"}'}}
    assert (await ask()).message["tool_calls"] == [expected]


async def test_reasoning_and_unknown_keys_are_kept_and_sent_back(llm: LlmServer, ask: Asker) -> None:
    signature = {"google": {"thought_signature": "sig"}}
    call = {"index": 0, "id": "x1", "type": "function", "extra_content": signature}
    call["function"] = {"name": "logs", "arguments": "{}"}
    deltas = [{"reasoning_content": "The pods "}, {"reasoning_content": "restart."}, {"tool_calls": [call]}]
    llm.script([Reply(deltas=deltas, finish_reason="tool_calls"), "Done."])
    message = (await ask()).message
    assert "".join(delta.reasoning for delta in ask.shown) == message["reasoning_content"] == "The pods restart."
    await ask(QUESTION, message, {"role": "tool", "tool_call_id": "x1", "content": "OOM"})
    sent = llm.requests[-1].messages[1]
    assert sent["reasoning_content"] == "The pods restart."
    assert sent["tool_calls"][0]["extra_content"] == signature


async def test_a_history_that_a_provider_would_refuse_is_refused(llm: LlmServer, ask: Asker) -> None:
    call = {"id": "x1", "type": "function", "function": {"name": "logs", "arguments": "{}"}}
    with pytest.raises(Exception, match="tool calls without a result"):
        await ask(QUESTION, {"role": "assistant", "content": None, "tool_calls": [call]}, QUESTION)
    assert llm.violations == ["messages[2]: tool calls without a result before it: x1"]
    llm.violations.clear()


async def test_fifty_slow_answers_at_once(llm: LlmServer, ask: Asker) -> None:
    llm.script(lambda request: Reply("All is well.", delay_seconds=1.0))
    await ask()
    started = time.perf_counter()
    replies = await asyncio.gather(*(ask() for _ in range(50)))
    assert time.perf_counter() - started < 3
    assert {reply.message["content"] for reply in replies} == {"All is well."}


async def test_nothing_of_a_call_is_logged_or_left_running(
    llm: LlmServer, ask: Asker, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.INFO)
    before = asyncio.all_tasks()
    llm.script(["The secret answer.", Reply(status=400, error={"message": "refused"})])
    await ask({"role": "user", "content": "The secret question."})
    with pytest.raises(Exception, match="refused"):
        await ask({"role": "user", "content": "The secret question."})
    out, err = capfd.readouterr()
    assert "secret" not in caplog.text + out + err
    assert out + err == ""
    await asyncio.sleep(0.2)
    assert len(asyncio.all_tasks() - before) <= 1  # litellm's one logging worker of the loop


async def test_a_scripted_model_runs_through_the_library(ask: Asker) -> None:
    def script(call: ScriptedCall) -> ScriptedReply:
        if call.results:
            return ScriptedReply(f"It says {call.results[0]}.", usage=Usage(30, 5, 10))
        assert call.tools == [TOOL]
        return ScriptedReply("Let me look.", [ToolCall("logs", {"pod": "a"}), ToolCall("logs")], "Hm.", Usage(10, 5))

    register_scripted("incident", script)
    first = await ask(model="scripted/incident")
    assert [call["function"]["arguments"] for call in first.message["tool_calls"]] == ['{"pod":"a"}', "{}"]
    assert (first.message["content"], first.message["reasoning_content"]) == ("Let me look.", "Hm.")
    assert (first.finish_reason, first.usage, first.provider) == ("tool_calls", Usage(10, 5), "scripted")
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "OOM"} for call in first.message["tool_calls"]]
    last = await ask(QUESTION, first.message, *results, model="scripted/incident")
    assert (last.message["content"], last.finish_reason, last.usage) == ("It says OOM.", "stop", Usage(30, 5, 10))
    assert ask.text == "Let me look.It says OOM."

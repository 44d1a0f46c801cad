"""Refusals, silence, and streams that break: what is tried again, and what the caller is told."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from typing import Any

import pytest

from scripts.bench.kit.llm_server import Call, Gate, LlmServer, Reply, error
from shared.errors import ContextTooLong, ModelError, ModelRequestRejected, ModelUnavailable, RateLimited
from tests.integration.model.conftest import Asker
from worker.agent.base import Delta


def event(**document: Any) -> str:
    return f"data: {json.dumps(document)}\n\n"


def in_stream(message: str, code: int) -> Reply:
    """An error as an event of a stream under HTTP 200."""
    return Reply(raw=[event(error={"message": message, "code": code})])


MALFORMED = [
    Reply(deltas=[{"role": "assistant", key: value}])
    for key, value in (("tool_calls", "abc"), ("tool_calls", {"a": 1}), ("tool_calls", 5), ("thinking_blocks", ["abc"]))
]
OVERLOADED = error(503, "overloaded", retry_after="0.01")


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")  # as the worker does
@pytest.mark.parametrize(
    "trouble",
    [
        OVERLOADED,
        error(500, "oops", retry_after="0.01"),
        error(429, "slow down", retry_after="0.01"),
        error(429, "Please retry in 10ms."),
        in_stream("overloaded, try again in 10ms", 503),
        in_stream("slow down, try again in 10ms", 429),
        Reply("never shown", cut_after=1),
        Reply("never shown", cut_after=1, drop=True),
        Reply(calls=[Call("logs", {"pod": "a" * 40})], cut_after=3),
        Reply(raw=["data: {broken\n\n"]),
        Reply(raw=["<html>bad gateway</html>"]),
        *MALFORMED,
    ],
    ids=lambda reply: f"{reply.status}-{(reply.error or {}).get('message', '')}"[:30],
)
async def test_what_fails_before_anything_was_shown_is_tried_again(llm: LlmServer, ask: Asker, trouble: Reply) -> None:
    llm.script([trouble, "All is well."])
    reply = await ask()
    assert (reply.message["content"], reply.finish_reason) == ("All is well.", "stop")
    assert "tool_calls" not in reply.message
    assert ask.text == "All is well."
    assert len(llm.requests) == 2


async def test_tries_have_an_end(llm: LlmServer, asker: Callable[..., Asker]) -> None:
    llm.script([OVERLOADED] * 3)
    with pytest.raises(ModelUnavailable, match="overloaded"):
        await asker(model_retries=2)()
    assert len(llm.requests) == 3


@pytest.mark.parametrize("drop", [False, True], ids=["ended early", "connection lost"])
async def test_what_breaks_after_text_was_shown_is_not_tried_again(llm: LlmServer, ask: Asker, drop: bool) -> None:
    llm.script([Reply("The image tag does not exist.", cut_after=3, drop=drop), "again"])
    with pytest.raises(ModelUnavailable) as raised:
        await ask()
    assert ask.text == "The image tag does not exist."[: len(ask.text)]
    assert len(llm.requests) == 1
    assert raised.value.retryable
    assert raised.value.details["usage"]["completion_tokens"] > 0


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")  # as the worker does
async def test_what_is_malformed_after_text_was_shown_ends_the_call(llm: LlmServer, ask: Asker) -> None:
    llm.script([Reply(deltas=[{"role": "assistant", "content": "Looking."}, {"thinking_blocks": "abc"}])])
    with pytest.raises(ModelUnavailable):
        await ask()
    assert ask.text == "Looking."


async def test_calls_of_a_broken_answer_are_marked_as_cut(llm: LlmServer, ask: Asker) -> None:
    llm.script([Reply("Looking.", [Call("logs", {"pod": "a" * 40})], cut_after=4)])
    reply = await ask()
    assert reply.finish_reason == "cut"
    assert reply.message["content"] == "Looking."
    assert reply.message["tool_calls"][0]["function"]["arguments"] == '{"pod": "aaa'


async def test_the_providers_word_on_a_cut_answer_is_passed_on(llm: LlmServer, ask: Asker) -> None:
    llm.script([Reply(calls=[Call("logs", '{"pod": "a')], finish_reason="length")])
    assert (await ask()).finish_reason == "length"


async def test_the_latest_retry_after_is_waited_for(llm: LlmServer, ask: Asker) -> None:
    llm.script([error(429, retry_after="0.01"), error(429, retry_after="0.4"), "All is well."])
    started = time.perf_counter()
    await ask()
    assert 0.4 < time.perf_counter() - started < 2


@pytest.mark.parametrize(
    "trouble",
    [error(429, retry_after="90"), error(429, 'Quota exceeded {"retryDelay": "90s"}')],
    ids=["header", "body"],
)
async def test_a_wait_that_does_not_fit_is_reported_at_once(llm: LlmServer, ask: Asker, trouble: Reply) -> None:
    llm.script([error(429, retry_after="0.01"), trouble])
    started = time.perf_counter()
    with pytest.raises(RateLimited) as raised:
        await ask(deadline=asyncio.get_running_loop().time() + 60)
    assert time.perf_counter() - started < 2
    assert raised.value.details["retry_after_seconds"] == 90
    assert len(llm.requests) == 2


@pytest.mark.parametrize(
    ("trouble", "kind"),
    [
        (error(400, "unknown field"), ModelRequestRejected),
        (error(401, "bad key"), ModelRequestRejected),
        (error(404, "no such model"), ModelRequestRejected),
        (error(400, "This model's maximum context length is 8192 tokens."), ContextTooLong),
        (error(400, "prompt is too long: 209000 tokens > 200000 maximum"), ContextTooLong),
        (in_stream("prompt is too long: 209000 tokens > 200000 maximum", 400), ContextTooLong),
    ],
    ids=lambda value: value.error["message"][:30] if isinstance(value, Reply) and value.error else "",
)
async def test_a_refusal_is_not_tried_again(llm: LlmServer, ask: Asker, trouble: Reply, kind: type[ModelError]) -> None:
    llm.script([trouble])
    with pytest.raises(kind) as raised:
        await ask()
    assert not raised.value.retryable
    assert len(llm.requests) == 1


async def test_an_unknown_provider_is_refused_without_a_try(llm: LlmServer, ask: Asker) -> None:
    with pytest.raises(ModelRequestRejected, match="Provider"):
        await ask(model="no-such-provider-or-model")
    with pytest.raises(ModelRequestRejected, match="No script"):
        await ask(model="scripted/nobody")
    assert llm.requests == []


async def test_silence_within_a_stream_ends_it(llm: LlmServer, asker: Callable[..., Asker]) -> None:
    llm.script([Reply("The image tag does not exist.", gate=Gate(), gate_at=2)])
    with pytest.raises(ModelUnavailable, match=r"nothing for 0\.3 seconds") as raised:
        await asker(model_idle_seconds=0.3)()
    assert raised.value.details["usage"]["completion_tokens"] > 0
    await asyncio.wait_for(asyncio.wrap_future(llm.requests[0].closed), 5)


async def test_a_slow_stream_that_goes_on_is_not_silent(llm: LlmServer, asker: Callable[..., Asker]) -> None:
    llm.script([Reply("a b c d", piece=1, pause_seconds=0.1)])
    assert (await asker(model_idle_seconds=0.4)()).message["content"] == "a b c d"


@pytest.mark.parametrize("which", ["setting", "request"])
async def test_a_call_has_a_deadline(llm: LlmServer, asker: Callable[..., Asker], which: str) -> None:
    llm.script([Reply("never", gate=Gate())])
    deadline = asyncio.get_running_loop().time() + 0.5 if which == "request" else None
    ask = asker(model_timeout_seconds=0.5 if which == "setting" else 60)
    started = time.perf_counter()
    with pytest.raises(ModelUnavailable, match="did not finish"):
        await ask(deadline=deadline)
    assert 0.4 < time.perf_counter() - started < 3
    assert len(llm.requests) == 1
    await asyncio.wait_for(asyncio.wrap_future(llm.requests[0].closed), 5)


@pytest.mark.parametrize("gate_at", [0, 2], ids=["before the first word", "within the answer"])
async def test_cancelling_a_call_closes_its_connection(llm: LlmServer, ask: Asker, gate_at: int) -> None:
    gate = Gate()
    llm.script([Reply("The image tag does not exist.", gate=gate, gate_at=gate_at)])
    call = asyncio.create_task(ask())
    await gate.reached()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await asyncio.wait_for(asyncio.wrap_future(llm.requests[0].closed), 5)


async def test_an_error_of_the_listener_is_the_callers(llm: LlmServer, ask: Asker) -> None:
    def listener(delta: Delta) -> None:
        raise TimeoutError("the listener's own")

    llm.script(["All is well."])
    with pytest.raises(TimeoutError, match="the listener's own"):
        await ask(listener=listener)
    assert len(llm.requests) == 1

"""Tool calls: order, parallelism, what is stored before a side effect begins, and calls that can never run."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from shared.errors import ContentRefused, StoreUnavailable
from tests.integration.turn.conftest import Tools
from tests.support.agent import Lab, call, raw_call, results_of, says, soon


async def test_results_stand_in_call_order_whatever_ends_first(lab: Lab, tools: Tools) -> None:
    second_ended = asyncio.Event()

    async def look(pod: str) -> None:
        await second_ended.wait() if pod == "a" else second_ended.set()

    tools.on["look"] = look
    await lab.ask()
    process = lab.process([says(None, call("look", "a1", pod="a"), call("look", "b1", pod="b")), "Fine."])
    await process.run()
    assert tools.ended == ["look b", "look a"]
    assert results_of(process.model.requests[1]) == ["look a: ok", "look b: ok"]
    completed = [row["data"]["tool_call_id"] for row in await lab.events() if row["event"] == "tool_call_result"]
    assert completed == ["b1", "a1"]
    await lab.check()


async def test_a_side_effect_finds_itself_executing_in_the_store(lab: Lab, tools: Tools) -> None:
    seen: list[str] = []

    async def notify(_: str) -> None:
        seen.extend(row["state"] for row in await lab.store.calls(lab.conversation_id))

    tools.on["notify"] = notify
    report = await lab.talk("Tell them.", says(None, call("notify", text="x")), "Done.")
    assert report.status == "completed"
    assert seen == ["executing"]
    assert await lab.states() == ["done"]


async def test_a_slow_store_holds_back_the_side_effect_and_not_the_reading_call(lab: Lab, tools: Tools) -> None:
    slow, looked = asyncio.Event(), asyncio.Event()

    async def look(_: str) -> None:
        looked.set()

    async def wait(_: tuple[Any, ...]) -> None:
        await slow.wait()

    tools.on["look"] = look
    await lab.ask()
    process = lab.process([says(None, call("notify", "n", text="x"), call("look", "l", pod="web")), "Done."])
    process.store.before["append"] = wait
    running = asyncio.create_task(process.run())
    await soon(looked)
    for _ in range(20):
        await asyncio.sleep(0)
    assert tools.ran == ["look web"]
    slow.set()
    await running
    assert tools.ran == ["look web", "notify x"]
    await lab.check()


async def test_the_idempotency_key_names_the_call(lab: Lab, tools: Tools) -> None:
    await lab.talk("Label.", says(None, call("look", "a", pod="x"), call("label", "b", name="y")), "Done.")
    assert tools.keys == [f"{lab.conversation_id}:1:1:0", f"{lab.conversation_id}:1:1:1"]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ('{"pod": "we', "Arguments incomplete, nothing was executed"),
        ('{"pod": "a"}{"pod": "b"}', "more than one JSON value"),
        ('["web"]', "must be a JSON object, not an array"),
        ('{"pod": 7}', "pod"),
        ("", "pod"),
    ],
)
async def test_arguments_that_cannot_be_run_are_told_to_the_model_and_replayable(
    lab: Lab, tools: Tools, arguments: str, told: str
) -> None:
    await lab.ask()
    process = lab.process([says(None, raw_call("look", arguments)), "I see."])
    assert (await process.run()).status == "completed"
    assert tools.ran == []
    assert told in results_of(process.model.requests[1])[0]
    stored = process.model.requests[1].messages[2]["tool_calls"][0]["function"]["arguments"]
    assert isinstance(json.loads(stored), dict)
    assert await lab.states() == ["failed"]
    await lab.check()


async def test_broken_arguments_of_a_gated_tool_ask_nobody(lab: Lab, tools: Tools) -> None:
    report = await lab.talk("Restart.", says(None, raw_call("restart", '{"name": "we')), "I see.")
    assert report.status == "completed"
    assert tools.ran == []


async def test_empty_arguments_run_a_tool_that_needs_none(lab: Lab) -> None:
    await lab.ask()
    process = lab.process([says(None, raw_call("clusters", "")), "One."])
    await process.run()
    assert results_of(process.model.requests[1]) == ["one cluster"]
    assert process.model.requests[1].messages[2]["tool_calls"][0]["function"]["arguments"] == "{}"


@pytest.mark.parametrize("reason", ["length", "max_tokens", "max_output_tokens", "content_filter"])
async def test_calls_of_an_answer_that_was_cut_off_are_not_run(lab: Lab, tools: Tools, reason: str) -> None:
    await lab.ask()
    process = lab.process([says("I will", call("look", pod="web"), finish_reason=reason), "Again."])
    await process.run()
    assert tools.ran == []
    assert results_of(process.model.requests[1])[0].startswith("Arguments incomplete, nothing was executed")


async def test_an_unknown_tool_is_told_with_the_names_there_are(lab: Lab) -> None:
    await lab.ask()
    process = lab.process([says(None, call("format_disk", x=1)), "Sorry."])
    assert (await process.run()).status == "completed"
    told = results_of(process.model.requests[1])[0]
    assert "'format_disk'" in told
    assert "look" in told


@pytest.mark.parametrize("ids", [("x", "x"), (None, None), ("", "x")])
async def test_ids_within_a_message_are_there_and_differ(lab: Lab, tools: Tools, ids: tuple[str | None, ...]) -> None:
    await lab.ask()
    calls = [call("look", id, pod=f"p{n}") for n, id in enumerate(ids)]
    process = lab.process([says(None, *calls), "Fine."])
    await process.run()
    assert results_of(process.model.requests[1]) == ["look p0: ok", "look p1: ok"]
    stored = [c["id"] for c in process.model.requests[1].messages[2]["tool_calls"]]
    assert len(set(stored)) == 2
    assert all(stored)
    assert [row["tool_call_id"] for row in await lab.calls()] == stored
    await lab.check()


async def test_ids_that_come_again_in_a_later_turn_are_other_calls(lab: Lab, tools: Tools) -> None:
    """Case 04."""
    await lab.talk("Pods?", says(None, call("look", "look:0", pod="a")), "Three.")
    await lab.ask("Nodes?")
    process = lab.process([says(None, call("look", "look:0", pod="b")), "Two."])
    await process.run()
    assert tools.ran == ["look a", "look b"]
    assert results_of(process.model.requests[1]) == ["look a: ok", "look b: ok"]
    await lab.check()


async def test_an_empty_list_of_calls_is_no_key(lab: Lab) -> None:
    reply = says("Fine.")
    reply.message["tool_calls"] = []
    await lab.talk("Well?", reply)
    assert (await lab.last())["messages"][-1] == {"role": "assistant", "content": "Fine."}


async def test_unknown_keys_of_messages_and_calls_are_kept(lab: Lab) -> None:
    odd = {**call("look", pod="web"), "extra_content": {"google": {"thought_signature": "s"}}}
    await lab.ask()
    process = lab.process([says(None, odd, thinking_blocks=[{"type": "thinking", "signature": "t"}]), "Fine."])
    await process.run()
    sent = process.model.requests[1].messages[2]
    assert sent["thinking_blocks"] == [{"type": "thinking", "signature": "t"}]
    assert sent["tool_calls"][0]["extra_content"] == {"google": {"thought_signature": "s"}}


async def test_a_tool_that_raises_fails_its_call_and_not_the_turn(lab: Lab, tools: Tools) -> None:
    async def look(_: str) -> None:
        raise ValueError("no such pod")

    tools.on["look"] = look
    await lab.ask()
    process = lab.process([says(None, call("look", pod="web")), "Gone."])
    assert (await process.run()).status == "completed"
    assert results_of(process.model.requests[1]) == ["ValueError: no such pod"]
    assert await lab.states() == ["failed"]


async def test_a_result_that_is_too_long_is_cut_and_kept_whole_as_an_artifact(lab: Lab, tools: Tools) -> None:
    await lab.ask()
    long = "x y " * 4000
    process = lab.process([says(None, call("look", pod=long)), "Long."], tool_result_tokens=200)
    await process.run()
    content = results_of(process.model.requests[1])[0]
    assert len(content) < 2000
    artifact_id = content.split('artifact_id="')[1].split('"')[0]
    artifact = await lab.store.get_artifact(lab.conversation_id, artifact_id)
    assert artifact is not None
    assert artifact.content.decode() == f"look {long}: ok"


async def test_a_long_result_waits_for_a_store_that_is_away(lab: Lab) -> None:
    away = 2

    async def fail(_: tuple[Any, ...]) -> None:
        nonlocal away
        if away:
            away -= 1
            raise StoreUnavailable("it is away")

    await lab.ask()
    process = lab.process([says(None, call("notify", text="x y " * 4000)), "Long."], tool_result_tokens=200)
    process.store.before["put_artifact"] = fail
    assert (await process.run()).status == "completed"
    assert "read_artifact(" in results_of(process.model.requests[1])[0]


async def test_a_result_survives_a_store_that_refuses_its_artifact(lab: Lab, tools: Tools) -> None:
    async def refuse(_: tuple[Any, ...]) -> None:
        raise ContentRefused("too large")

    await lab.ask()
    process = lab.process([says(None, call("notify", text="x y " * 4000)), "Long."], tool_result_tokens=200)
    process.store.before["put_artifact"] = refuse
    assert (await process.run()).status == "completed"
    assert await lab.states() == ["done"]
    assert tools.ran[0].startswith("notify")
    assert results_of(process.model.requests[1])[0].endswith("was cut here.]")

"""What a provider is sent for a stored history."""

from __future__ import annotations

import copy
import json
import re
from typing import Any

import pytest

from scripts.bench.kit.llm_history import violations
from worker.agent.wire import IMAGE_GONE, image_references, load_images, to_wire

TOOL = {"type": "function", "function": {"name": "t", "parameters": {"type": "object"}}}
PICTURE = "artifact:p1;image/png"


def call(arguments: Any = "{}", **keys: Any) -> dict[str, Any]:
    return {"id": "c1", "type": "function", "function": {"name": "t", "arguments": arguments}, **keys}


def with_call(entry: dict[str, Any], result: Any = "ok", **keys: Any) -> list[dict[str, Any]]:
    return [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": None, "tool_calls": [entry], **keys},
        {"role": "tool", "tool_call_id": "c1", "content": result},
    ]


def image(url: str = PICTURE) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, "detail": "high"}}


def sent(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The wire messages, checked as a strict provider would, and with the stored ones left alone."""
    before = copy.deepcopy(messages)
    wire = to_wire(messages, images={PICTURE: "data:image/png;base64,AA=="})
    assert messages == before
    assert list(violations({"messages": wire, "tools": [TOOL]})) == []
    return wire


def test_a_valid_history_is_passed_on_as_it_is() -> None:
    messages = with_call(call('{"a":  1}', provider_specific_fields={"x": 1}), thinking_blocks=[{"signature": "s"}])
    assert sent(messages) == messages


@pytest.mark.parametrize(
    ("stored", "wire"),
    [
        ("", "{}"),
        (None, "{}"),
        ({"a": 1}, '{"a": 1}'),
        ('{"a":', '{"invalid_arguments": "{\\"a\\":"}'),
        ("[1]", '{"invalid_arguments": "[1]"}'),
        ('{"a":1}{"b":2}', '{"invalid_arguments": "{\\"a\\":1}{\\"b\\":2}"}'),
    ],
)
def test_arguments_are_always_an_object_in_a_string(stored: Any, wire: str) -> None:
    function = sent(with_call(call(stored)))[1]["tool_calls"][0]["function"]
    assert json.loads(function["arguments"]) == json.loads(wire)


def test_our_keys_stay_at_home() -> None:
    wire = sent(with_call(call(pending_approval=True, tk_note=1), tk_note=2))
    assert set(wire[1]) == {"role", "content", "tool_calls"}
    assert set(wire[1]["tool_calls"][0]) == {"id", "type", "function"}


@pytest.mark.parametrize("content", ["", "  \n", None])
def test_blank_text_is_none_beside_calls_and_a_word_without(content: str | None) -> None:
    beside = with_call(call())
    beside[1]["content"] = content
    assert sent(beside)[1]["content"] is None
    alone = [{"role": "assistant", "content": content, "tool_calls": []}, {"role": "user", "content": "well?"}]
    wire = sent(alone)
    assert wire[0]["content"].strip()
    assert "tool_calls" not in wire[0]


def test_an_image_is_resolved_and_its_other_keys_kept() -> None:
    wire = sent([{"role": "user", "content": [{"type": "text", "text": "see"}, image()]}])
    assert wire[0]["content"][1]["image_url"] == {"url": "data:image/png;base64,AA==", "detail": "high"}


def test_an_image_that_is_gone_says_so() -> None:
    wire = sent([{"role": "user", "content": [image("artifact:gone;image/png")]}])
    assert wire[0]["content"] == [{"type": "text", "text": IMAGE_GONE}]


def test_images_of_tool_results_follow_all_results_of_their_message() -> None:
    messages = with_call(call(), [{"type": "text", "text": "a graph"}, image()])
    messages[1]["tool_calls"].append({**call(), "id": "c2"})
    messages.append({"role": "tool", "tool_call_id": "c2", "content": "two"})
    messages.append({"role": "assistant", "content": "I see."})
    messages.append({"role": "user", "content": "and?"})
    wire = sent(messages)
    assert [m["role"] for m in wire] == ["user", "assistant", "tool", "tool", "user", "assistant", "user"]
    assert wire[2]["content"].startswith("a graph")
    assert wire[4]["content"][1]["image_url"]["url"].startswith("data:image/png")


class Artifacts:
    def __init__(self, **content: bytes) -> None:
        self.content = content

    async def put(self, name: str, media_type: str, content: bytes) -> str:
        raise AssertionError("reading only")

    async def get(self, artifact_id: str) -> bytes | None:
        return self.content.get(artifact_id)


async def test_images_are_loaded_from_the_artifacts_of_the_conversation() -> None:
    messages = [{"role": "user", "content": [image(), image("artifact:gone;image/png"), image("https://x/y.png")]}]
    assert list(image_references(messages)) == [PICTURE, "artifact:gone;image/png"]
    loaded: dict[str, str] = {}
    assert await load_images(messages, Artifacts(p1=b"\0"), loaded) == {PICTURE: "data:image/png;base64,AA=="}
    assert await load_images(messages[:1], None, {}) == {}


async def test_an_image_is_fetched_once_for_all_model_calls_of_a_turn() -> None:
    messages = [{"role": "user", "content": [image()]}]
    loaded = dict(await load_images(messages, Artifacts(p1=b"\0"), {}))
    assert await load_images(messages, Artifacts(), loaded) == {PICTURE: "data:image/png;base64,AA=="}


@pytest.mark.parametrize("name", ["get pods!", "x" * 65, "x" * 3_000, "工具", ""])
def test_a_name_that_a_model_invented_does_not_have_every_later_request_refused(name: str) -> None:
    entry = {"id": "c1", "type": "function", "function": {"name": name, "arguments": "{}"}}
    [_, wire, _] = to_wire(with_call(entry)[:3], images={})
    assert re.fullmatch(r"[A-Za-z0-9_-]{1,64}", wire["tool_calls"][0]["function"]["name"])
    other = to_wire(with_call({**entry, "function": {"name": name + "!", "arguments": "{}"}})[:3], images={})[1]
    assert other["tool_calls"][0]["function"]["name"] != wire["tool_calls"][0]["function"]["name"]


def test_a_long_id_is_the_same_alias_at_call_and_result() -> None:
    """Two ids that share their beginning stay two."""
    first, second = "fc_" + "0" * 70 + "a", "fc_" + "0" * 70 + "b"
    messages = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": None, "tool_calls": [{**call(), "id": first}, {**call(), "id": second}]},
        {"role": "tool", "tool_call_id": first, "content": "1"},
        {"role": "tool", "tool_call_id": second, "content": "2"},
    ]
    wire = to_wire(messages, images={})
    aliases = [c["id"] for c in wire[1]["tool_calls"]]
    assert aliases == [wire[2]["tool_call_id"], wire[3]["tool_call_id"]]
    assert len(set(aliases)) == 2
    assert all(len(alias) <= 64 for alias in aliases)
    assert messages[1]["tool_calls"][0]["id"] == first  # stored messages stay as they are

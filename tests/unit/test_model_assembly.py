"""Pieces of a stream become one message, in every shape that servers send."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict

from worker.agent.assembly import Assembly


class Delta(BaseModel):
    model_config = ConfigDict(extra="allow")


def assembled(*deltas: dict[str, Any]) -> dict[str, Any]:
    assembly = Assembly()
    for delta in deltas:
        assembly.add(Delta(**delta))
    return assembly.message()


def fragment(index: int | None = None, id: str | None = None, name: str | None = None, arguments: Any = "") -> Any:
    return {"tool_calls": [{"index": index, "id": id, "function": {"name": name, "arguments": arguments}}]}


def calls_of(message: dict[str, Any]) -> list[tuple[str, str, dict[str, Any]]]:
    calls = message["tool_calls"]
    return [(c["id"], c["function"]["name"], json.loads(c["function"]["arguments"])) for c in calls]


A, B = ("a", "logs", {"pod": "x"}), ("b", "scale", {"n": 0})

SHAPES = {
    "as documented": (
        fragment(0, "a", "logs"),
        fragment(0, arguments='{"pod":'),
        fragment(0, arguments='"x"}'),
        fragment(1, "b", "scale"),
        fragment(1, arguments='{"n":0}'),
    ),
    "interleaved": (
        fragment(0, "a", "logs"),
        fragment(1, "b", "scale"),
        fragment(0, arguments='{"pod":'),
        fragment(1, arguments='{"n":'),
        fragment(0, arguments='"x"}'),
        fragment(1, arguments="0}"),
    ),
    "no index": (
        fragment(id="a", name="logs"),
        fragment(arguments='{"pod":"x"}'),
        fragment(id="b", name="scale"),
        fragment(arguments='{"n":0}'),
    ),
    "always index 0": (
        fragment(0, "a", "logs", '{"pod":'),
        fragment(0, arguments='"x"}'),
        fragment(0, "b", "scale", '{"n":'),
        fragment(0, arguments="0}"),
    ),
    "an index that moves": (
        fragment(0, "a", "logs"),
        fragment(1, arguments='{"pod":'),
        fragment(2, arguments='"x"}'),
        fragment(3, "b", "scale"),
        fragment(4, arguments='{"n":0}'),
    ),
    "id and name in every fragment": (
        fragment(0, "a", "logs", '{"pod":'),
        fragment(0, "a", "logs", '"x"}'),
        fragment(1, "b", "scale", '{"n":'),
        fragment(1, "b", "scale", "0}"),
    ),
    "name without id repeated": (
        fragment(0, "a", "logs", '{"pod":'),
        fragment(0, None, "logs", '"x"}'),
        fragment(1, "b", "scale", '{"n":'),
        fragment(1, None, "scale", "0}"),
    ),
    "another id in every fragment": (
        fragment(0, "a", "logs", '{"pod":'),
        fragment(0, "a2", None, '"x"}'),
        fragment(1, "b", "scale", '{"n":'),
        fragment(1, "b2", None, "0}"),
    ),
    "the id comes late": (
        fragment(0, None, "logs", '{"pod":'),
        fragment(0, "a", None, '"x"}'),
        fragment(1, None, "scale", '{"n":'),
        fragment(1, "b", None, "0}"),
    ),
    "arguments as objects": (fragment(0, "a", "logs", {"pod": "x"}), fragment(1, "b", "scale", {"n": 0})),
    "whole calls in one delta": (
        {
            "tool_calls": fragment(0, "a", "logs", '{"pod":"x"}')["tool_calls"]
            + fragment(1, "b", "scale", '{"n":0}')["tool_calls"]
        },
    ),
}


@pytest.mark.parametrize("deltas", SHAPES.values(), ids=SHAPES.keys())
def test_every_shape_of_fragments_gives_the_same_calls(deltas: tuple[dict[str, Any], ...]) -> None:
    assert calls_of(assembled(*deltas)) == [A, B]


@pytest.mark.parametrize("index", [0, 1], ids=["same index", "next index"])
def test_two_calls_under_one_id_are_not_glued_together(index: int) -> None:
    message = assembled(fragment(0, "a", "logs", '{"pod":"x"}'), fragment(index, "a", "logs", '{"pod":"y"}'))
    assert calls_of(message) == [A, ("a", "logs", {"pod": "y"})]


def test_calls_of_one_tool_without_ids_are_told_apart_by_their_arguments() -> None:
    message = assembled(fragment(0, None, "logs", '{"pod":"x"}'), fragment(0, None, "logs", '{"pod":"y"}'))
    assert [arguments for _, _, arguments in calls_of(message)] == [{"pod": "x"}, {"pod": "y"}]


def test_broken_arguments_are_kept_as_received() -> None:
    message = assembled(fragment(0, "a", "logs", '{"pod":'))
    assert message["tool_calls"][0]["function"]["arguments"] == '{"pod":'


def test_text_and_reasoning_are_joined_and_shown() -> None:
    assembly = Assembly()
    shown = [assembly.add(Delta(**d)) for d in ({"reasoning_content": "be"}, {"content": "ha"}, {"content": "ha"})]
    assert shown == [("", "be"), ("ha", ""), ("ha", "")]
    assert assembly.message() == {"role": "assistant", "content": "haha", "reasoning_content": "be"}


def test_nothing_gives_a_message_without_text() -> None:
    assembly = Assembly()
    assembly.add(Delta(role="assistant", content=""))
    assert assembly.empty
    assert assembly.message() == {"role": "assistant", "content": None}


def test_thinking_blocks_are_joined_up_to_their_signature() -> None:
    def block(**fields: Any) -> dict[str, Any]:
        return {"thinking_blocks": [{"type": "thinking", **fields}]}

    message = assembled(
        block(thinking="first ", signature=None),
        block(thinking="thought", signature=None),
        block(thinking="", signature="s1"),
        {"thinking_blocks": [{"type": "redacted_thinking", "data": "xx"}]},
        block(thinking="second", signature="s2"),
    )
    assert message["thinking_blocks"] == [
        {"type": "thinking", "thinking": "first thought", "signature": "s1"},
        {"type": "redacted_thinking", "data": "xx"},
        {"type": "thinking", "thinking": "second", "signature": "s2"},
    ]


def test_unknown_keys_of_message_and_calls_are_kept() -> None:
    call = fragment(0, "a", "logs", '{"pod":"x"}')
    call["tool_calls"][0]["extra_content"] = {"google": {"thought_signature": "sig"}}
    message = assembled(
        {"provider_specific_fields": {"thought_signatures": ["one"]}},
        {"provider_specific_fields": {"thought_signatures": ["two"], "other": 1}},
        {"reasoning_details": [{"type": "reasoning.text", "index": 0, "text": "be"}]},
        {"reasoning_details": [{"type": "reasoning.text", "index": 0, "text": "cause", "signature": "s"}]},
        {"reasoning_details": [{"type": "reasoning.encrypted", "index": 0, "data": "zz"}]},
        call,
    )
    assert message["provider_specific_fields"] == {"thought_signatures": ["one", "two"], "other": 1}
    assert message["reasoning_details"] == [
        {"type": "reasoning.text", "index": 0, "text": "because", "signature": "s"},
        {"type": "reasoning.encrypted", "index": 0, "data": "zz"},
    ]
    assert message["tool_calls"][0]["extra_content"] == {"google": {"thought_signature": "sig"}}

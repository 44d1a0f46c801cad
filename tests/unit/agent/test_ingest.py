"""Ingestion: what is stored of a reply, and how its calls are born."""

from __future__ import annotations

import json
from typing import Any

import pytest

from shared.events import NewCall
from tests.support.agent import call, raw_call, says
from worker.agent.base import ModelReply, ToolSpec
from worker.agent.ingest import Ingested, Policy, ingest, text_of
from worker.agent.tools import ToolRegistry, tool
from worker.agent.tools.arguments import arguments_digest
from worker.agent.tools.declare import FunctionTool
from worker.agent.tools.threads import ToolThreads


@tool(risk="read_only")
def look(pod: str) -> str:
    """Look."""
    return pod


@tool(risk="side_effect")
def restart(name: str) -> str:
    """Restart."""
    return name


TOOLBOX = ToolRegistry([FunctionTool(f, ToolThreads(1)) for f in (look, restart)])
ASK = Policy({}, False, ())


def born(reply: ModelReply, policy: Policy = ASK, *, may_call: bool = True) -> list[NewCall]:
    return list(taken(reply, policy, may_call=may_call).calls)


def taken(reply: ModelReply, policy: Policy = ASK, *, may_call: bool = True) -> Ingested:
    return ingest(reply, step=3, toolbox=TOOLBOX, policy=policy, may_call=may_call)


def test_a_harmless_call_is_born_approved_by_policy_and_a_gated_one_pending() -> None:
    first, second = born(says(None, call("look", "a", pod="x"), call("restart", "b", name="y")))
    assert (first["state"], first["decided_by"], first["gated"], first["risk"]) == (
        "approved",
        "policy:read_only",
        False,
        "read_only",
    )
    assert (second["state"], second["decided_by"], second["gated"], second["risk"]) == (
        "pending",
        None,
        True,
        "side_effect",
    )
    assert [(c["step"], c["call_index"]) for c in (first, second)] == [(3, 0), (3, 1)]


def test_the_digest_is_of_the_arguments_that_are_stored() -> None:
    reply = says(None, raw_call("look", '{"pod":   "x"}'))
    ingested = taken(reply)
    stored = ingested.message["tool_calls"][0]["function"]["arguments"]
    assert ingested.calls[0]["arguments"] == stored
    assert ingested.calls[0]["arguments_digest"] == arguments_digest(stored)


def test_mode_deny_denies_gated_calls_only() -> None:
    first, second = born(says(None, call("look", "a", pod="x"), call("restart", "b", name="y")), Policy({}, True, ()))
    assert (first["state"], second["state"]) == ("approved", "denied")
    assert second["reason"]


def test_a_frontend_call_is_pending_and_not_gated() -> None:
    spec = ToolSpec("show", "", {"type": "object"}, source="frontend")
    (new,) = born(says(None, call("show", x=1)), Policy({"show": spec}, True, ()))
    assert (new["kind"], new["state"], new["gated"]) == ("frontend", "pending", False)


@pytest.mark.parametrize("entry", [raw_call("look", "{"), call("look", pod=7), call("nothing", x=1), call("", x=1)])
def test_a_call_that_can_never_run_is_born_failed_with_a_reason(entry: dict[str, Any]) -> None:
    (new,) = born(says(None, entry))
    assert (new["state"], new["gated"]) == ("failed", False)
    assert new["reason"]
    assert json.loads(new["arguments"]) is not None


def test_entries_that_are_no_calls_are_left_out() -> None:
    reply = says("Text.")
    reply.message["tool_calls"] = [None, "x"]
    ingested = taken(reply)
    assert "tool_calls" not in ingested.message
    assert not ingested.empty


def test_a_call_without_a_function_is_a_failed_call() -> None:
    (new,) = born(says(None, {"id": "a", "type": "function", "function": "look"}))
    assert new["state"] == "failed"


def test_the_stream_index_of_a_call_is_not_stored() -> None:
    ingested = taken(says(None, {**call("look", pod="x"), "index": 0}))
    assert set(ingested.message["tool_calls"][0]) == {"id", "type", "function"}


@pytest.mark.parametrize(
    ("reply", "empty"),
    [
        (says(None), True),
        (says(" \n"), True),
        (says("", reasoning_content="I thought."), True),
        (says("x"), False),
        (says(None, call("look", pod="x")), False),
        (says([{"type": "text", "text": "x"}]), False),  # type: ignore[arg-type]
    ],
)
def test_empty_is_neither_text_nor_call(reply: ModelReply, empty: bool) -> None:
    assert taken(reply).empty is empty


def test_nul_and_surrogates_never_enter_the_history() -> None:
    ingested = taken(says("a\x00b \ud83d", raw_call("look", '{"pod": "a\\u0000b"}')))
    assert ingested.message["content"] == "ab \ufffd"
    assert "\x00" not in json.loads(ingested.calls[0]["arguments"])["pod"]


def test_on_the_last_step_an_answer_drops_its_calls_and_calls_alone_fail() -> None:
    assert born(says("Answer.", call("look", pod="x")), may_call=False) == []
    (new,) = born(says(None, call("look", pod="x")), may_call=False)
    assert new["state"] == "failed"
    assert "limit" in str(new["reason"])


def test_text_of_parts_is_their_text() -> None:
    parts = [
        {"type": "text", "text": "a"},
        {"type": "image_url", "image_url": {"url": "x"}},
        {"type": "text", "text": "b"},
    ]
    assert text_of({"role": "assistant", "content": parts}) == "ab"
    assert text_of({"role": "assistant", "content": None}) == ""

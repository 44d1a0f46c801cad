"""Scripts and the in-process model."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from shared.errors import ModelUnavailable
from worker.agent.base import Delta, ModelRequest, Usage
from worker.agent.scripted import ScriptedCall, ScriptedReply, ToolCall, find_script, register_scripted
from worker.agent.testing import ScriptedModel

HISTORY = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": [{"type": "text", "text": "pods?"}]},
    {"role": "assistant", "content": None, "tool_calls": [{"id": "c1"}, {"id": "c2"}]},
    {"role": "tool", "tool_call_id": "c1", "content": "one"},
    {"role": "tool", "tool_call_id": "c2", "content": "two"},
]


def test_a_script_sees_the_question_and_the_results_since() -> None:
    call = ScriptedCall(HISTORY)
    assert call.question == "pods?"
    assert call.results == ["one", "two"]
    assert ScriptedCall([*HISTORY, {"role": "user", "content": "and?"}]).results == []


def test_a_registered_script_is_found_by_its_name() -> None:
    def script(call: ScriptedCall) -> ScriptedReply:
        return ScriptedReply(call.question)

    register_scripted("echo", script)
    assert find_script("echo") is script


def test_a_script_is_loaded_from_a_module_of_scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("scripts.made_up")
    module.script = lambda call: ScriptedReply("loaded")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "scripts.made_up", module)
    assert find_script("scripts.made_up")(ScriptedCall([])).text == "loaded"


@pytest.mark.parametrize(
    "name", ["os", "scripts", "scripts.no_such", "worker.agent.scripted", "scripts.cli;x", "nobody"]
)
def test_nothing_else_is_loaded(name: str) -> None:
    with pytest.raises(LookupError, match=name.split(";")[0]):
        find_script(name)


async def test_the_model_answers_from_its_list_and_remembers_what_it_was_asked() -> None:
    model = ScriptedModel([ScriptedReply("all is well", [ToolCall("t", {"a": 1}, "c9")], "hm", Usage(1, 2)), "done"])
    request, seen = ModelRequest("m", HISTORY), []
    reply = await model.complete(request, seen.append)
    assert reply.message == {
        "role": "assistant",
        "content": "all is well",
        "reasoning_content": "hm",
        "tool_calls": [{"id": "c9", "type": "function", "function": {"name": "t", "arguments": '{"a":1}'}}],
    }
    assert (reply.finish_reason, reply.usage) == ("tool_calls", Usage(1, 2))
    assert seen == [Delta(reasoning="hm"), Delta("all "), Delta("is "), Delta("well")]
    assert (await model.complete(request, seen.append)).finish_reason == "stop"
    assert model.requests == [request, request]
    with pytest.raises(AssertionError, match="3 times"):
        await model.complete(request, seen.append)


async def test_the_model_can_fail_and_can_follow_a_function() -> None:
    request = ModelRequest("m", HISTORY)
    with pytest.raises(ModelUnavailable):
        await ScriptedModel([ModelUnavailable("down")]).complete(request, lambda delta: None)
    echo = ScriptedModel(lambda call: ScriptedReply(call.question))
    assert (await echo.complete(request, lambda delta: None)).message["content"] == "pods?"

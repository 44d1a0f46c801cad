"""The model of the chaos run, ``scripted/scripts.bench.kit.chaos.model``: it takes its time, and journals each call."""

from __future__ import annotations

from scripts.bench.kit.chaos.journal import own_journal
from scripts.bench.kit.chaos.plan import script_in
from worker.agent.scripted import ScriptedCall, ScriptedReply, ToolCall

MODEL = "scripted/scripts.bench.kit.chaos.model"
WORDS = 8  # of an answer, streamed over a third of the thinking time


def script(call: ScriptedCall) -> ScriptedReply:
    """The next step of the script in the last question, by how many answers stand behind it."""
    last = max(i for i, message in enumerate(call.messages) if message["role"] == "user")
    plan = script_in(str(call.messages[last]["content"]))
    if plan is None:
        own_journal().append("unplanned", content=str(call.messages[last]["content"]))
        return ScriptedReply("I was not told what to do.")
    done = sum(message["role"] == "assistant" for message in call.messages[last:])
    name = f"{plan['conversation']}/{plan['ask']}/{done + 1}"
    own_journal().append("asked", conversation=plan["conversation"], ask=plan["ask"], answer=done + 1)
    pace = {"delay_seconds": plan["think"] * 2 / 3, "pause_seconds": plan["think"] / 3 / WORDS}
    if done < len(plan["steps"]):
        calls = [ToolCall(tool_name, {"what": f"{name}/{i}"}) for i, tool_name in enumerate(plan["steps"][done])]
        return ScriptedReply(f"Step {done + 1} of this " + "goes on " * (WORDS // 2), calls, **pace)
    return ScriptedReply(f"The answer to {name} " + "is this " * (WORDS // 2), **pace)

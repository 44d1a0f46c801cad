"""A worker of the chaos run: a scripted model that takes its time, and tools that journal what they do.

The model call is journalled when it is asked; a tool's line is its side effect, written before anything else of it.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from pathlib import Path

from scripts.bench.kit.chaos.journal import PATH_VARIABLE, Journal
from scripts.bench.kit.chaos.plan import script_in
from shared.settings import Settings
from worker.agent.scripted import ScriptedCall, ScriptedReply, ToolCall
from worker.agent.testing import ScriptedModel
from worker.agent.tools import ToolContext, ToolRegistry, tool
from worker.agent.tools.declare import FunctionTool
from worker.agent.tools.threads import ToolThreads
from worker.bootstrap import Runtime
from worker.main import main
from worker.rq_worker import ConversationWorker

TOOL_SECONDS = 0.2  # after the effect: the time in which a kill leaves its outcome unknown
WORDS = 8  # of an answer, streamed over a third of the thinking time

_journal: Journal


async def _effect(tool_name: str, what: str, context: ToolContext) -> str:
    receipt = secrets.token_hex(8)
    _journal.append(
        "effect",
        tool=tool_name,
        what=what,
        receipt=receipt,
        conversation=context.conversation_id,
        call=[context.turn, context.step, context.call_index],
        tool_call_id=context.tool_call_id,
        key=context.idempotency_key,
    )
    await asyncio.sleep(TOOL_SECONDS)
    return f"receipt {receipt}"


@tool(risk="read_only")
async def look(what: str, context: ToolContext) -> str:
    """Look at something."""
    return await _effect("look", what, context)


@tool(risk="idempotent")
async def scale(what: str, context: ToolContext) -> str:
    """Bring something to a size; twice is once."""
    return await _effect("scale", what, context)


@tool(risk="side_effect", approval="never")
async def restart(what: str, context: ToolContext) -> str:
    """Restart something without asking."""
    return await _effect("restart", what, context)


@tool(risk="side_effect", approval="always")
async def deploy(what: str, context: ToolContext) -> str:
    """Deploy something, once somebody has agreed."""
    return await _effect("deploy", what, context)


def script(call: ScriptedCall) -> ScriptedReply:
    """The next step of the script in the last question, by how many answers stand behind it."""
    last = max(i for i, message in enumerate(call.messages) if message["role"] == "user")
    plan = script_in(str(call.messages[last]["content"]))
    if plan is None:
        _journal.append("unplanned", content=str(call.messages[last]["content"]))
        return ScriptedReply("I was not told what to do.")
    done = sum(message["role"] == "assistant" for message in call.messages[last:])
    name = f"{plan['conversation']}/{plan['ask']}/{done + 1}"
    _journal.append("asked", conversation=plan["conversation"], ask=plan["ask"], answer=done + 1)
    pace = {"delay_seconds": plan["think"] * 2 / 3, "pause_seconds": plan["think"] / 3 / WORDS}
    if done < len(plan["steps"]):
        calls = [ToolCall(tool_name, {"what": f"{name}/{i}"}) for i, tool_name in enumerate(plan["steps"][done])]
        return ScriptedReply(f"Step {done + 1} of this " + "goes on " * (WORDS // 2), calls, **pace)
    return ScriptedReply(f"The answer to {name} " + "is this " * (WORDS // 2), **pace)


def build(settings: Settings) -> Runtime:
    threads = ToolThreads(settings.tool_threads)
    tools = ToolRegistry([FunctionTool(function, threads) for function in (look, scale, restart, deploy)])
    return Runtime(settings, model=ScriptedModel(script), toolbox=tools)


def work(arguments: list[str]) -> int:
    """The main function of a worker process."""
    global _journal
    _journal = Journal(Path(os.environ[PATH_VARIABLE]))
    ConversationWorker.runner_factory = build
    return main(arguments)

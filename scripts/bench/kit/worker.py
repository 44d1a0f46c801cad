"""A worker whose model is a script in its own process, for measurements of everything but the provider and litellm.

The model calls ``look`` once for each question and answers with its result; ``look`` is read-only and answers at once.
"""

from __future__ import annotations

import hashlib
import sys

from shared.settings import Settings
from worker.agent.scripted import ScriptedCall, ScriptedReply, ToolCall
from worker.agent.testing import ScriptedModel
from worker.agent.tools import ToolRegistry, tool
from worker.agent.tools.declare import FunctionTool
from worker.agent.tools.threads import ToolThreads
from worker.bootstrap import Runtime
from worker.main import main
from worker.rq_worker import ConversationWorker

RESULT_CHARACTERS = 400


def fresh_text(seed: str, characters: int = RESULT_CHARACTERS) -> str:
    """Text that does not repeat, so that no compression flatters anybody."""
    out = ""
    while len(out) < characters:
        out += hashlib.sha256(f"{seed}{len(out)}".encode()).hexdigest() + " "
    return out[:characters]


@tool(risk="read_only")
async def look(at: str) -> str:
    """Look at something."""
    return fresh_text(at)


def script(call: ScriptedCall) -> ScriptedReply:
    """One call of ``look``, then an answer."""
    if call.messages[-1]["role"] == "user":
        return ScriptedReply(tool_calls=[ToolCall("look", {"at": fresh_text(call.question, 40)})])
    return ScriptedReply(fresh_text(str(call.messages[-1]["content"])))


def build(settings: Settings) -> Runtime:
    tools = ToolRegistry([FunctionTool(look, ToolThreads(settings.tool_threads))])
    return Runtime(settings, model=ScriptedModel(script), toolbox=tools)


if __name__ == "__main__":
    ConversationWorker.runner_factory = build
    sys.exit(main())

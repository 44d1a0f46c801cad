"""The tools of the chaos run. A tool's line in the journal is its side effect, written before anything else of it."""

from __future__ import annotations

import asyncio
import secrets

from scripts.bench.kit.chaos.journal import own_journal
from worker.agent.tools import ToolContext, tool

TOOL_SECONDS = 0.2  # after the effect: the time in which a kill leaves its outcome unknown


async def _effect(tool_name: str, what: str, context: ToolContext) -> str:
    receipt = secrets.token_hex(8)
    own_journal().append(
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

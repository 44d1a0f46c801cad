"""A model that follows a script: a function from the conversation to the next answer, reached through litellm.

``register_scripted("demo", script)`` makes ``scripted/demo`` a model like any other. A worker process that cannot be
reached by a call loads a script by its module: ``TURNKEEPER_MODEL=scripted/scripts.demo.script`` uses the function
``script`` of that module; only modules of ``scripts`` are loaded.
"""

from __future__ import annotations

import asyncio
import importlib
import re
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final
from uuid import uuid4

import orjson

from shared.history import Message
from worker.agent.base import Usage

PROVIDER: Final = "scripted"
_MODULE: Final = re.compile(r"scripts(\.[A-Za-z_]\w*)+")
_PIECE: Final = re.compile(r"\s*\S+\s*")  # a word with the space around it


@dataclass(frozen=True, slots=True)
class ScriptedCall:
    """What the model is asked: the messages as a provider gets them, and the tools (OpenAI's form) it may call."""

    messages: Sequence[Message]
    tools: Sequence[dict[str, Any]] = ()

    @property
    def question(self) -> str:
        """The text of the last user message."""
        for message in reversed(self.messages):
            if message.get("role") == "user":
                content = message.get("content")
                parts = content if isinstance(content, list) else [{"text": content}]
                return "\n".join(str(part["text"]) for part in parts if part.get("text"))
        return ""

    @property
    def results(self) -> list[str]:
        """The tool results since the last user message, oldest first."""
        found: list[str] = []
        for message in reversed(self.messages):
            if message.get("role") == "user":
                break
            if message.get("role") == "tool":
                found.append(str(message.get("content")))
        return found[::-1]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call of a scripted answer; without an id it gets one."""

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    id: str | None = None

    def as_dict(self) -> dict[str, Any]:
        function = {"name": self.name, "arguments": orjson.dumps(self.arguments).decode()}
        return {"id": self.id or f"call_{uuid4().hex[:24]}", "type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class ScriptedReply:
    """An answer. ``pause_seconds`` stands between its words, ``delay_seconds`` before the first."""

    text: str = ""
    tool_calls: Sequence[ToolCall] = ()
    reasoning: str = ""
    usage: Usage = field(default_factory=Usage)
    delay_seconds: float = 0.0
    pause_seconds: float = 0.0

    @property
    def finish_reason(self) -> str:
        return "tool_calls" if self.tool_calls else "stop"


Script = Callable[[ScriptedCall], ScriptedReply]

_scripts: dict[str, Script] = {}


def register_scripted(name: str, script: Script) -> None:
    """Make ``scripted/<name>`` a model of this process. Registering a name again replaces its script."""
    _scripts[name] = script


def find_script(name: str) -> Script:
    """The script of that name, registered or in a module of ``scripts``. Raises ``LookupError``."""
    if name in _scripts:
        return _scripts[name]
    if not _MODULE.fullmatch(name):
        raise LookupError(f"No script is registered as {name!r}, and it is not a module of `scripts`.")
    try:
        found: Script = importlib.import_module(name).script
    except (ModuleNotFoundError, AttributeError) as error:
        raise LookupError(f"{name!r} is not a module with a function `script`: {error}.") from error
    _scripts[name] = found
    return found


async def pieces(reply: ScriptedReply) -> AsyncIterator[str]:
    """The text word by word, at the pace that the reply asks for."""
    await asyncio.sleep(reply.delay_seconds)
    for number, piece in enumerate(_PIECE.findall(reply.text)):
        if number and reply.pause_seconds:
            await asyncio.sleep(reply.pause_seconds)
        yield piece


def install(litellm: Any) -> None:
    """Register the provider ``scripted`` with the litellm module."""

    class ScriptedProvider(litellm.CustomLLM):  # type: ignore[misc]  # the base is only known at run time
        async def astreaming(self, *, model: str, messages: list[Message], **options: Any) -> AsyncIterator[Any]:
            tools = (options.get("optional_params") or {}).get("tools") or ()
            try:
                reply = find_script(model)(ScriptedCall(messages, tools))
            except Exception as error:  # a script's fault is not the network's: no further try
                raise litellm.BadRequestError(f"The script failed: {error!r}", model, PROVIDER) from error
            async for delta in _deltas(reply):
                yield _chunk(delta)
            yield _chunk({}, usage=_usage(reply.usage))  # before the end: litellm drops what stands beside it
            yield _chunk({}, finish_reason=reply.finish_reason)

    def _chunk(delta: dict[str, Any], *, finish_reason: str | None = None, usage: Any = None) -> Any:
        kinds = litellm.types.utils
        choice = kinds.StreamingChoices(delta=kinds.Delta(**delta), finish_reason=finish_reason)
        return kinds.ModelResponseStream(choices=[choice], usage=usage)

    litellm.custom_provider_map.append({"provider": PROVIDER, "custom_handler": ScriptedProvider()})


async def _deltas(reply: ScriptedReply) -> AsyncIterator[dict[str, Any]]:
    if reply.reasoning:
        yield {"reasoning_content": reply.reasoning}
    async for piece in pieces(reply):
        yield {"content": piece}
    for call in _indexed(reply.tool_calls):
        yield {"tool_calls": [call]}


def _indexed(calls: Sequence[ToolCall]) -> Iterator[dict[str, Any]]:
    for index, call in enumerate(calls):
        yield {**call.as_dict(), "index": index}


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }

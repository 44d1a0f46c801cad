"""How calls end other than well, in words that tell the model what did and did not happen."""

from __future__ import annotations

from typing import Any, Protocol

from shared.errors import ToolError
from worker.agent.base import ToolContext, ToolResult, ToolSpec


class Runner(Protocol):
    """A tool that can be run. ``run`` keeps to ``seconds`` itself, since only it knows how to stop its work; what it
    raises becomes a failed result."""

    @property
    def spec(self) -> ToolSpec: ...

    async def run(self, arguments: dict[str, Any], context: ToolContext, seconds: float) -> ToolResult: ...


def failed(text: str, data: Any = None) -> ToolResult:
    return ToolResult("failed", text, data)


def interrupted(spec: ToolSpec, what: str, content: str = "") -> ToolResult:
    """A call whose end nobody saw. A side effect may have happened; anything else merely has no result."""
    seen = f"\n{content}" if content else ""
    if spec.risk != "side_effect":
        return ToolResult("failed", f"{what}.{seen}")
    return ToolResult(
        "unknown",
        f"Outcome unknown: {what}. It may or may not have taken effect; do not assume either way, and check before "
        f"you repeat it.{seen}",
    )


def given_up(spec: ToolSpec, seconds: float, content: str = "") -> ToolResult:
    """A call that ran out of time."""
    return interrupted(spec, f"the call had not ended after {seconds:g} s and was given up", content)


def raised(error: BaseException) -> ToolResult:
    """A call whose tool raised: type and message, never a traceback. A ``ToolError`` is worded for the model."""
    message = _message(error)
    if isinstance(error, ToolError) and message:
        return failed(message)
    return failed(_words(error, message)[:4_000])


def harmless(error: BaseException) -> Exception:
    """What a tool raised, as an exception that is its own affair: SystemExit and its like would end the event loop,
    and StopIteration cannot be set on a future."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    return RuntimeError(_words(error, _message(error)))


def _words(error: BaseException, message: str) -> str:
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def _message(error: BaseException) -> str:
    """Empty if the tool's exception cannot say it: ``str`` of it is the tool's code too, and may raise anything."""
    try:
        return str(error)
    except BaseException:
        return ""

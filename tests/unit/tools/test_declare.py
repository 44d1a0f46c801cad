"""Python functions as tools: definitions, calls, timeouts."""

from __future__ import annotations

import asyncio
import contextvars
import enum
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, Field

from shared.errors import ToolDefinitionError, ToolError
from tests.support.tools import tool_context
from worker.agent.base import ToolContext, ToolResult
from worker.agent.tools import ToolRegistry, results, tool
from worker.agent.tools.declare import FunctionTool
from worker.agent.tools.threads import ToolThreads


class Size(enum.Enum):
    SMALL = "small"
    LARGE = "large"


class Selector(BaseModel):
    labels: dict[str, str] = {}
    size: Size = Size.SMALL


def registry(*functions: Callable[..., Any], threads: int = 4) -> ToolRegistry:
    pool = ToolThreads(threads)
    return ToolRegistry([FunctionTool(function, pool) for function in functions], tool_timeout_seconds=10)


@tool(risk="read_only")
def find_pods(
    namespace: Annotated[str, Field(description="Kubernetes namespace", min_length=1)],
    selector: Selector | None = None,
    order: Literal["name", "age"] = "name",
    *,
    copy: bool = False,
) -> dict[str, Any]:
    """Find pods.

    In one namespace."""
    return {"namespace": namespace, "selector": selector, "order": order, "copy": copy}


def test_definition_comes_from_the_signature() -> None:
    spec = FunctionTool(find_pods, ToolThreads(1)).spec
    assert (spec.name, spec.description) == ("find_pods", "Find pods.\n\nIn one namespace.")
    assert (spec.risk, spec.approval, spec.timeout_seconds) == ("read_only", "never", None)
    parameters = spec.parameters
    assert parameters["required"] == ["namespace"]
    assert list(parameters["properties"]) == ["namespace", "selector", "order", "copy"]
    assert parameters["properties"]["namespace"] == {
        "type": "string",
        "minLength": 1,
        "description": "Kubernetes namespace",
    }
    assert parameters["properties"]["order"] == {"type": "string", "enum": ["name", "age"], "default": "name"}
    assert parameters["additionalProperties"] is False
    assert "$ref" not in str(parameters)
    assert spec.for_model()["function"]["parameters"] is parameters


async def test_arguments_arrive_as_types() -> None:
    tools = registry(find_pods)
    arguments = {"namespace": "x", "selector": {"size": "large"}, "copy": True}
    assert tools.invalid("find_pods", arguments) is None
    result = await tools.call("find_pods", arguments, tool_context())
    assert result.data == {
        "namespace": "x",
        "selector": {"labels": {}, "size": "large"},
        "order": "name",
        "copy": True,
    }
    assert find_pods("y")["namespace"] == "y"  # still an ordinary function


async def test_unknown_tools_are_answered_with_the_names_there_are() -> None:
    tools = registry(find_pods)
    for text in (tools.invalid("find_pod", {}), (await tools.call("find_pod", {}, tool_context())).content):
        assert text is not None
        assert "no tool 'find_pod'" in text
        assert "find_pods" in text
    assert tools.get("find_pod") is None
    assert tools.decided_by_policy("find_pod", {}, ()) is None


def test_defaults_assume_the_worst() -> None:
    @tool
    def bare(x: int) -> int:
        """Do."""
        return x

    @tool(risk="idempotent", name="other-name", timeout_seconds=5)
    def named(x: int) -> int:
        """Do."""
        return x

    first, second = (FunctionTool(f, ToolThreads(1)).spec for f in (bare, named))
    assert (first.risk, first.approval) == ("side_effect", "always")
    assert (second.name, second.risk, second.approval, second.timeout_seconds) == (
        "other-name",
        "idempotent",
        "never",
        5,
    )


def _no_type(x) -> int:  # type: ignore[no-untyped-def]
    """Do."""
    return int(x)


def _variadic(*names: str) -> int:
    """Do."""
    return len(names)


def _no_docstring(x: int) -> int:
    return x


def _unserialisable(x: threading.Lock) -> int:
    """Do."""
    return 1


def _callback(x: Callable[[], int]) -> int:
    """Do."""
    return x()


def _unresolvable(x: Nowhere) -> int:  # type: ignore[name-defined]  # noqa: F821
    """Do."""
    return 1


@pytest.mark.parametrize("function", [_no_type, _variadic, _no_docstring, _unserialisable, _callback, _unresolvable])
def test_functions_that_cannot_be_tools_are_named(function: Callable[..., Any]) -> None:
    with pytest.raises(ToolDefinitionError, match=function.__name__):
        FunctionTool(tool(function), ToolThreads(1))


@pytest.mark.parametrize(
    "options", [{"risk": "harmless"}, {"approval": "sometimes"}, {"timeout_seconds": 0}, {"name": "not a name"}]
)
def test_wrong_declarations_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ToolDefinitionError):
        FunctionTool(tool(**options)(lambda: None), ToolThreads(1))


def test_two_tools_of_one_name_are_refused() -> None:
    with pytest.raises(ToolDefinitionError, match="two tools named 'find_pods'"):
        registry(find_pods, find_pods)


async def test_context_is_given_and_hidden() -> None:
    @tool(risk="idempotent")
    async def charge(amount: int, call: ToolContext) -> str:
        """Charge."""
        return f"{amount} under {call.idempotency_key}"

    tools = registry(charge)
    assert list(tools.specs()[0].parameters["properties"]) == ["amount"]
    assert (await tools.call("charge", {"amount": 5}, tool_context())).content == "5 under conv:1:2:3"
    assert tools.invalid("charge", {"amount": 5, "call": {}}) is not None


class Mute(Exception):
    def __str__(self) -> str:
        raise SystemExit("no words")


class MuteToolError(ToolError):
    def __str__(self) -> str:
        raise ValueError("no words")


@pytest.mark.parametrize(
    "error",
    [
        ValueError("bad value"),
        SystemExit(3),
        KeyError("k"),
        StopIteration("s"),
        KeyboardInterrupt("k"),
        GeneratorExit("g"),
        BaseExceptionGroup("several", [SystemExit(1), ValueError("v")]),
        Mute(),
        MuteToolError("m"),
    ],
    ids=lambda error: type(error).__name__,
)
@pytest.mark.parametrize("asynchronous", [True, False])
async def test_what_a_tool_raises_is_a_failed_result(error: BaseException, asynchronous: bool) -> None:
    def sync_tool() -> None:
        """Raise."""
        raise error

    async def async_tool() -> None:
        """Raise."""
        raise error

    tools = registry(tool(name="t")(async_tool if asynchronous else sync_tool))
    result = await tools.call("t", {}, tool_context())
    assert result.status == "failed"
    assert type(error).__name__ in result.content
    assert "Traceback" not in result.content
    assert __file__ not in result.content


async def test_a_tool_that_cancels_itself_fails() -> None:
    @tool
    async def odd() -> None:
        """Cancel."""
        raise asyncio.CancelledError

    assert (await registry(odd).call("odd", {}, tool_context())).status == "failed"


class Raising:
    """A tool that is no Python function, such as an MCP server's."""

    spec = FunctionTool(find_pods, ToolThreads(1)).spec

    def __init__(self, error: BaseException) -> None:
        self._error = error

    async def run(self, arguments: dict[str, Any], context: ToolContext, seconds: float) -> ToolResult:
        raise self._error


@pytest.mark.parametrize("error", [BaseExceptionGroup("g", [SystemExit(1)]), asyncio.CancelledError(), SystemExit(1)])
async def test_what_any_tool_raises_is_a_failed_result(error: BaseException) -> None:
    result = await ToolRegistry([Raising(error)]).call("find_pods", {}, tool_context())
    assert result.status == "failed"


@pytest.mark.parametrize("asynchronous", [True, False])
async def test_a_result_that_raises_when_it_is_read_is_a_failed_result(asynchronous: bool) -> None:
    def words() -> Iterator[str]:
        yield "one"
        raise SystemExit(3)

    def sync_tool() -> Any:
        """Return."""
        return words()

    async def async_tool() -> Any:
        """Return."""
        return words()

    tools = registry(tool(name="t")(async_tool if asynchronous else sync_tool))
    assert (await tools.call("t", {}, tool_context())).status == "failed"


@pytest.mark.parametrize("made", [str, bytes, list, ToolResult])
async def test_a_result_without_measure_keeps_its_head_and_tail(
    made: type[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(results, "RESULT_CHARACTERS", 10_000)
    text = "first " + "x" * 50_000 + " last"

    @tool
    def long() -> Any:
        """Return."""
        whole = ToolResult("done", text, {"message": text})
        return {str: text, bytes: text.encode(), list: [text], ToolResult: whole}[made]

    result = await registry(long).call("long", {}, tool_context())
    assert (result.status, result.data) == ("done", None)
    assert len(result.content) <= 10_000
    assert "first" in result.content
    assert "last" in result.content
    assert result.content.count("characters left out") == 1


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


@pytest.mark.parametrize(
    ("risk", "status"), [("side_effect", "unknown"), ("read_only", "failed"), ("idempotent", "failed")]
)
@pytest.mark.parametrize("asynchronous", [True, False])
async def test_a_call_out_of_time_is_given_up(
    risk: Any, status: str, asynchronous: bool, gate: threading.Event
) -> None:
    def sync_tool() -> None:
        """Wait."""
        gate.wait(20)

    async def async_tool() -> None:
        """Wait."""
        await asyncio.sleep(20)

    tools = registry(tool(risk=risk, name="t", timeout_seconds=0.1)(async_tool if asynchronous else sync_tool))
    started = time.monotonic()
    result = await tools.call("t", {}, tool_context())
    assert time.monotonic() - started < 2
    assert result.status == status
    assert "0.1 s" in result.content
    assert ("may or may not" in result.content) == (status == "unknown")


async def test_an_async_tool_that_ignores_cancellation_is_left_behind() -> None:
    ended = asyncio.Event()

    @tool(timeout_seconds=0.05)
    async def stubborn() -> None:
        """Ignore."""
        try:
            while True:
                try:
                    await asyncio.sleep(3)
                    return
                except asyncio.CancelledError:
                    continue
        finally:
            ended.set()

    started = time.monotonic()
    result = await registry(stubborn).call("stubborn", {}, tool_context())
    assert result.status == "unknown"
    assert time.monotonic() - started < 2.5
    await asyncio.wait_for(ended.wait(), 10)


async def test_the_turns_deadline_bounds_a_call(gate: threading.Event) -> None:
    @tool(timeout_seconds=20)
    def slow() -> None:
        """Wait."""
        gate.wait(20)

    tools = registry(slow)
    assert (await tools.call("slow", {}, tool_context(0.1))).status == "unknown"
    late = await tools.call("slow", {}, tool_context(-1))
    assert late.status == "failed"
    assert "Not executed" in late.content


async def test_threads_that_were_given_up_keep_their_place(gate: threading.Event) -> None:
    ran: list[int] = []

    @tool(timeout_seconds=0.2)
    def slow(number: int) -> None:
        """Wait."""
        ran.append(number)
        gate.wait(20)

    tools = registry(slow, threads=1)
    assert (await tools.call("slow", {"number": 1}, tool_context())).status == "unknown"
    busy = await tools.call("slow", {"number": 2}, tool_context())
    assert busy.status == "failed"  # it never began, so nothing is unknown
    assert "Not executed" in busy.content
    gate.set()
    assert (await tools.call("slow", {"number": 3}, tool_context())).status == "done"
    assert ran == [1, 3]


async def test_cancelling_a_call_stops_an_async_tool() -> None:
    cancelled, begun = asyncio.Event(), asyncio.Event()

    @tool
    async def slow() -> None:
        """Wait."""
        begun.set()
        try:
            await asyncio.sleep(20)
        finally:
            cancelled.set()

    call = asyncio.ensure_future(registry(slow).call("slow", {}, tool_context()))
    await begun.wait()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await asyncio.wait_for(cancelled.wait(), 5)


async def test_context_variables_and_threads() -> None:
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable")
    variable.set("bound")

    @tool
    def where() -> list[Any]:
        """Tell."""
        return [
            variable.get(),
            threading.current_thread() is threading.main_thread(),
            threading.current_thread().daemon,
        ]

    assert (await registry(where).call("where", {}, tool_context())).data == ["bound", False, True]


async def test_sync_tools_run_side_by_side() -> None:
    barrier = threading.Barrier(4, timeout=5)

    @tool
    def meet() -> int:
        """Meet."""
        return barrier.wait()

    tools = registry(meet, threads=4)
    results = await asyncio.gather(*(tools.call("meet", {}, tool_context()) for _ in range(4)))
    assert sorted(result.data for result in results) == [0, 1, 2, 3]


async def test_a_tool_may_return_a_result_of_its_own() -> None:
    @tool
    async def own() -> ToolResult:
        """Return."""
        return ToolResult("failed", "said so\x00", {"status": "no"}, ("artifact:1;image/png",))

    assert await registry(own).call("own", {}, tool_context()) == ToolResult(
        "failed", "said so", {"status": "no"}, ("artifact:1;image/png",)
    )


def test_a_hanging_thread_does_not_hold_up_the_end_of_the_process() -> None:
    program = """
import asyncio, time
from worker.agent.base import ToolContext
from worker.agent.tools import ToolRegistry, tool
from worker.agent.tools.declare import FunctionTool
from worker.agent.tools.threads import ToolThreads

@tool(timeout_seconds=0.1)
def hang() -> None:
    "Hang."
    time.sleep(60)

async def main():
    tools = ToolRegistry([FunctionTool(hang, ToolThreads(1))])
    context = ToolContext("c", "a", None, 1, 1, 0, "i", "k", asyncio.get_running_loop().time() + 30)
    print((await tools.call("hang", {}, context)).status)

asyncio.run(main())
"""
    started = time.monotonic()
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout.strip() == "unknown"
    assert time.monotonic() - started < 20

"""``@tool``: a Python function as a tool.

::

    @tool(risk="side_effect", approval="always", timeout_seconds=30)
    async def restart_deployment(
        namespace: Annotated[str, Field(description="Kubernetes namespace")],
        deployment: str,
        context: ToolContext,
    ) -> dict[str, str]:
        '''Restart a deployment by rolling its pods.'''

The name is the function's, the description its docstring, the JSON Schema its signature's. A parameter of type
``ToolContext`` is filled in by the worker and hidden from the model. The decorated function stays an ordinary function.
"""

from __future__ import annotations

import asyncio
import inspect
import typing
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Annotated, Any, Final, TypeVar, overload

import structlog
from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic.errors import PydanticUserError
from pydantic.json_schema import GenerateJsonSchema

from shared.errors import ToolDefinitionError
from shared.events import Risk
from worker.agent.base import ApprovalPolicy, ToolContext, ToolResult, ToolSpec
from worker.agent.tools.outcome import failed, given_up, harmless
from worker.agent.tools.results import result_of
from worker.agent.tools.schema import check_name, checked_parameters
from worker.agent.tools.threads import ToolThreads

_MARK: Final = "__turnkeeper_tool__"
_CLEANUP_SECONDS: Final = 1.0  # for an async tool to leave after its timeout
_RISKS: Final = typing.get_args(Risk)
_APPROVALS: Final = typing.get_args(ApprovalPolicy)

log = structlog.get_logger(__name__)

_F = TypeVar("_F", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Declaration:
    """What ``@tool`` was given."""

    risk: Risk
    approval: ApprovalPolicy | None
    timeout_seconds: float | None
    name: str | None


@overload
def tool(function: _F, /) -> _F: ...
@overload
def tool(
    *,
    risk: Risk = ...,
    approval: ApprovalPolicy | None = ...,
    timeout_seconds: float | None = ...,
    name: str | None = ...,
) -> Callable[[_F], _F]: ...
def tool(
    function: Callable[..., Any] | None = None,
    /,
    *,
    risk: Risk = "side_effect",
    approval: ApprovalPolicy | None = None,
    timeout_seconds: float | None = None,
    name: str | None = None,
) -> Any:
    """Mark a function as a tool; see the module. Without ``risk`` it is taken to have side effects; without
    ``approval`` a person is asked for side effects only. ``timeout_seconds`` defaults to the worker's setting."""
    declaration = Declaration(risk, approval, timeout_seconds, name)

    def mark(decorated: _F) -> _F:
        setattr(decorated, _MARK, declaration)
        return decorated

    return mark if function is None else mark(function)


def default_approval(risk: Risk) -> ApprovalPolicy:
    return "always" if risk == "side_effect" else "never"


def is_tool(value: Any) -> bool:
    return callable(value) and isinstance(getattr(value, _MARK, None), Declaration)


def collect(module: ModuleType) -> list[Callable[..., Any]]:
    """The decorated functions of a module, in the order in which they stand there."""
    return [value for value in vars(module).values() if is_tool(value)]


class _Plain(GenerateJsonSchema):
    """Schemas without the titles that pydantic derives from names: they cost tokens and say nothing."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


class FunctionTool:
    """A decorated function, ready to run. Raises ``ToolDefinitionError`` where it cannot be a tool."""

    def __init__(self, function: Callable[..., Any], threads: ToolThreads, source: str = "python") -> None:
        declaration: Declaration = getattr(function, _MARK)
        name = declaration.name or function.__name__
        check_name(name)
        _check_declaration(name, declaration)
        self._function = function
        self._threads = threads
        self._asynchronous = inspect.iscoroutinefunction(function)
        self._model, self._names, self._context_names = _arguments_model(name, function)
        self.spec = ToolSpec(
            name=name,
            description=inspect.cleandoc(function.__doc__ or "").strip(),
            parameters=_parameters(name, self._model),
            risk=declaration.risk,
            approval=declaration.approval or default_approval(declaration.risk),
            timeout_seconds=declaration.timeout_seconds,
            source=source,
        )
        if not self.spec.description:
            raise _refused(name, "it has no docstring to describe it")

    async def run(self, arguments: dict[str, Any], context: ToolContext, seconds: float) -> ToolResult:
        """Call the function, at most for ``seconds``; see ``Runner``."""
        try:
            parsed = self._model.model_validate(arguments)
        except ValidationError as error:
            return failed(f"Arguments do not fit the tool, nothing was executed: {_wrong_fields(error)}.")
        values = {name: parsed.__dict__[field] for field, name in self._names.items()}
        values.update(dict.fromkeys(self._context_names, context))
        if self._asynchronous:
            return await self._await(self._function(**values), seconds)
        return await self._in_thread(lambda: result_of(self._function(**values)), seconds)

    async def _await(self, work: Awaitable[Any], seconds: float) -> ToolResult:
        task = asyncio.ensure_future(_contained(work))
        task.add_done_callback(_retrieve)
        try:
            await asyncio.wait({task}, timeout=seconds)
        finally:
            out_of_time = task.cancel()  # False if it has ended
        if out_of_time:
            await asyncio.wait({task}, timeout=_CLEANUP_SECONDS)
        if task.done() and not task.cancelled():
            error = task.exception()
            if error is not None:
                raise harmless(error)
            return task.result()
        return given_up(self.spec, seconds) if out_of_time else failed("The tool cancelled its own work.")

    async def _in_thread(self, work: Callable[[], ToolResult], seconds: float) -> ToolResult:
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        if self._threads.saturated:
            log.warning("tool_threads_busy", tool=self.spec.name)
        try:
            async with asyncio.timeout_at(end):
                future = await self._threads.start(self.spec.name, work)
        except TimeoutError:
            return failed(f"Not executed: all tool threads were busy for {seconds:g} s.")
        try:
            await asyncio.wait({future}, timeout=max(0.0, end - loop.time()))
        finally:
            out_of_time = future.cancel()
        return given_up(self.spec, seconds) if out_of_time else future.result()


def _retrieve(task: asyncio.Task[Any]) -> None:
    """An exception after the call was given up is nobody's; asyncio would report it as forgotten."""
    if not task.cancelled():
        task.exception()


async def _contained(work: Awaitable[Any]) -> ToolResult:
    """A task that ends with one of these two would take the event loop with it."""
    try:
        return result_of(await work)
    except (SystemExit, KeyboardInterrupt) as error:
        raise harmless(error) from None


def _check_declaration(name: str, declaration: Declaration) -> None:
    if declaration.risk not in _RISKS:
        raise _refused(name, f"risk must be one of {', '.join(_RISKS)}")
    if declaration.approval not in (None, *_APPROVALS):
        raise _refused(name, f"approval must be one of {', '.join(_APPROVALS)}")
    if declaration.timeout_seconds is not None and declaration.timeout_seconds <= 0:
        raise _refused(name, "timeout_seconds must be positive")


def _refused(name: str, reason: str) -> ToolDefinitionError:
    return ToolDefinitionError(f"Tool {name!r} was refused: {reason}.", tool=name)


def _arguments_model(name: str, function: Callable[..., Any]) -> tuple[type[BaseModel], dict[str, str], list[str]]:
    """A pydantic model of the signature, its fields' parameter names, and the parameters that take the context.

    Fields have names of our own, with the parameter's as alias: a parameter may be called ``copy`` or ``_x``.
    """
    try:
        hints = typing.get_type_hints(function, include_extras=True)
    except (NameError, TypeError) as error:
        raise _refused(name, f"its annotations: {error}") from error
    fields: dict[str, Any] = {}
    names: dict[str, str] = {}
    context_names: list[str] = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise _refused(name, f"the parameter {parameter.name!r} cannot be given by name")
        hint = hints.get(parameter.name)
        if hint is None:
            raise _refused(name, f"the parameter {parameter.name!r} has no type")
        if hint is ToolContext or ToolContext in typing.get_args(hint):
            context_names.append(parameter.name)
            continue
        default = ... if parameter.default is parameter.empty else parameter.default
        field = f"p{len(fields)}"
        fields[field] = (Annotated[hint, Field(alias=parameter.name)], default)
        names[field] = parameter.name
    try:
        return create_model(name, __config__=ConfigDict(extra="forbid"), **fields), names, context_names
    except (PydanticUserError, NameError, TypeError) as error:
        raise _refused(name, str(error).splitlines()[0]) from error


def _parameters(name: str, model: type[BaseModel]) -> dict[str, Any]:
    try:
        schema = model.model_json_schema(schema_generator=_Plain)
    except PydanticUserError as error:
        raise _refused(name, str(error).splitlines()[0]) from error
    schema.pop("title", None)
    schema.pop("description", None)
    return checked_parameters(name, schema)


def _wrong_fields(error: ValidationError) -> str:
    return "; ".join(
        f"{'.'.join(str(part) for part in e['loc']) or 'arguments'}: {e['msg']}"
        for e in error.errors(include_input=False, include_url=False)[:5]
    )

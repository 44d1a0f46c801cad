"""The model behind litellm: one streamed call, tried again only while nothing has been shown.

The only file that imports litellm, and it does so late: ``import_litellm`` takes seconds, so a worker calls it once
before its first job, and the command line never does.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import logging
import os
import random
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import structlog

from shared.errors import ConfigurationError, ModelError, ModelRequestRejected, ModelUnavailable
from shared.settings import Settings
from worker.agent.assembly import Assembly, MalformedDelta
from worker.agent.base import Delta, ModelReply, ModelRequest, Usage
from worker.agent.failures import Failure, understand
from worker.agent.scripted import install
from worker.agent.wire import to_wire

CUT: Final = "cut"
"""``finish_reason`` of an answer whose stream broke off within its tool calls: none of them may run."""

_MOST_TOKENS: Final = 1_000_000_000  # of one call; what is above is a fault of the provider's
_MOST_DOLLARS: Final = 1_000_000.0
_BACKOFF_SECONDS: Final = 0.5  # before the second try; doubled for each further one
_BACKOFF_LIMIT_SECONDS: Final = 30.0
_CONNECTIONS_PER_HOST: Final = "2000"  # litellm's own limit is 500: the 501st turn would wait for another's answer
_ENVIRONMENT: Final = {
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # no download of the price list at import
    "AIOHTTP_CONNECTOR_LIMIT": _CONNECTIONS_PER_HOST,
    "AIOHTTP_CONNECTOR_LIMIT_PER_HOST": _CONNECTIONS_PER_HOST,
}
_NO_MODEL_HINT: Final = (
    "Set TURNKEEPER_MODEL where the worker runs and start the worker again, or name a model in the request "
    "(turnkeeper ask --model openai/gpt-4.1)."
)
_PLACEHOLDER: Final = re.compile(r"your[-_ ]|placeholder|changeme|example|<.*>|\.\.\.$|^(sk-)?x+$", re.IGNORECASE)
_LOGGERS: Final = ("LiteLLM", "LiteLLM Router", "LiteLLM Proxy")

log = structlog.get_logger(__name__)


@functools.cache
def import_litellm() -> Any:
    """The litellm module, imported cheaply and silenced. Takes 2 to 4 s the first time.

    The garbage collector rests meanwhile: the import makes 400,000 objects that stay, and scanning them again and again
    is a third of its time. They are frozen afterwards: else each full collection would stop the loop for 0.3 s.
    """
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        import litellm
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()
    litellm.telemetry = False
    litellm.suppress_debug_info = True
    litellm.turn_off_message_logging = True
    litellm.callbacks = []
    for name in _LOGGERS:  # they would log prompts and answers along with their errors
        logger = logging.getLogger(name)
        logger.handlers = [logging.NullHandler()]
        logger.propagate = False
        logger.setLevel(logging.CRITICAL)
    # pydantic's warnings about odd chunks quote what is in them
    warnings.filterwarnings("ignore", message="Pydantic serializer warnings", category=UserWarning)
    install(litellm)
    return litellm


def missing_variables(model: str) -> list[str]:
    """The environment variables that litellm expects for a model and does not find. Values are not looked at.

    A missing ``…_API_KEY`` means that calls will fail; others may have a default or another source (a local server, a
    role of the machine). Raises ``ConfigurationError`` where litellm knows no provider for the name.
    """
    litellm = import_litellm()
    try:
        litellm.get_llm_provider(model=model)
    except litellm.BadRequestError:
        raise ConfigurationError(
            f"TURNKEEPER_MODEL: litellm knows no provider for {model!r}.",
            hint="Write it as provider/model, such as openai/gpt-4.1.",
        ) from None
    return list(litellm.validate_environment(model=model)["missing_keys"])


def doubtful_key(model: str) -> str | None:
    """What is plainly wrong with the provider's key in the environment, in words that do not repeat it, or None."""
    _, provider, *_ = import_litellm().get_llm_provider(model=model)
    name = f"{provider.upper()}_API_KEY"
    key = os.environ.get(name)
    if key is None:
        return None
    if not key.strip():
        return f"{name} is empty"
    if not key.isascii():
        return f"{name} holds characters outside ASCII, which no key has"
    if key != key.strip():
        return f"{name} begins or ends with white space"
    return f"{name} looks like a placeholder" if _PLACEHOLDER.search(key) else None


@dataclass(slots=True)
class _Attempt:
    """One try of a call, for as long as it runs."""

    assembly: Assembly = field(default_factory=Assembly)
    finish_reason: str | None = None
    usage: Any = None
    stream: Any = None
    shown: bool = False


class LitellmModel:
    """``ChatModel`` for every provider that litellm reaches.

    A call may take ``model_timeout_seconds`` in all, waits between tries included, and never longer than the request's
    deadline; a stream may be silent for ``model_idle_seconds``.
    """

    def __init__(self, settings: Settings) -> None:
        self._timeout = settings.model_timeout_seconds
        self._idle = settings.model_idle_seconds
        self._retries = settings.model_retries
        self._litellm = import_litellm()

    async def complete(self, request: ModelRequest, on_delta: Callable[[Delta], None]) -> ModelReply:
        """See ``ChatModel.complete``. An answer that broke off within its tool calls after text was shown comes back
        with ``finish_reason`` "cut"; broken off within its text it is ``ModelUnavailable``."""
        if not request.model:
            raise ModelRequestRejected("No model is set; nothing was asked.", hint=_NO_MODEL_HINT)
        loop = asyncio.get_running_loop()
        deadline = min(loop.time() + self._timeout, request.deadline if request.deadline is not None else float("inf"))
        arguments = self._arguments(request)
        spent = Usage()
        for tries in range(self._retries + 1):
            attempt = _Attempt()
            failure = await self._try(attempt, arguments, deadline, on_delta)
            spent += await self._usage(request.model, attempt, failed=failure is not None)
            if failure is None or (attempt.shown and attempt.assembly.calls and failure.again):
                return self._reply(request.model, attempt, spent, cut=failure is not None)
            last = attempt.shown or not failure.again or tries == self._retries
            wait = _wait_seconds(failure, tries)
            if last or loop.time() + wait >= deadline:
                raise _with_usage(failure.error, spent)
            log.info("model_call_tried_again", code=failure.error.code, wait_seconds=round(wait, 3))
            await asyncio.sleep(wait)
        raise AssertionError("unreachable: the last try returns or raises")

    async def close(self) -> None:
        """Close the HTTP connections that litellm keeps."""
        await self._litellm.close_litellm_async_clients()

    def _arguments(self, request: ModelRequest) -> dict[str, Any]:
        """What the library is called with. The tools stay in the list when none may be called (``tool_choice`` none):
        providers refuse a history with tool calls whose tools are not declared."""
        arguments: dict[str, Any] = {
            "model": request.model,
            "messages": to_wire(request.messages, images=request.images),
            "stream": True,
            "stream_options": {"include_usage": True},
            "timeout": self._timeout,
            "max_retries": 0,
            "num_retries": 0,
            "drop_params": True,
        }
        if request.tools:
            arguments["tools"] = list(request.tools)
            arguments["tool_choice"] = request.tool_choice
        if request.response_format is not None:
            arguments["response_format"] = request.response_format
        return arguments

    async def _try(
        self, attempt: _Attempt, arguments: dict[str, Any], deadline: float, on_delta: Callable[[Delta], None]
    ) -> Failure | None:
        """One try, into ``attempt``. None: it came to its end. Errors of ``on_delta`` are the caller's."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout_at(deadline) as clock:  # the first chunk may take its time: models think
                try:
                    attempt.stream = await self._litellm.acompletion(**arguments)
                except Exception as error:  # whatever the library raises is understood, not handled
                    return understand(error)
                while True:
                    try:
                        chunk = await anext(attempt.stream)
                    except StopAsyncIteration:
                        return None if _ended(attempt) else _broken_off()
                    except Exception as error:
                        return understand(error)
                    clock.reschedule(min(deadline, loop.time() + self._idle))
                    try:
                        shown = self._take(attempt, chunk)
                    except MalformedDelta:
                        return _malformed()
                    for delta in shown:
                        on_delta(delta)
                    if attempt.usage is not None and attempt.finish_reason is not None and _ended(attempt):
                        return None  # nothing follows; asking once more would start litellm's logging of the call
        except TimeoutError:
            if not clock.expired():
                raise
            return _timed_out(deadline <= loop.time(), self._idle)
        finally:
            if attempt.stream is not None:
                await attempt.stream.aclose()

    def _take(self, attempt: _Attempt, chunk: Any) -> list[Delta]:
        """Put a chunk into ``attempt``; what of it is to be shown."""
        deltas = []
        usage = getattr(chunk, "usage", None)
        if usage is not None:
            attempt.usage = usage
        for choice in chunk.choices or ():
            text, reasoning = attempt.assembly.add(choice.delta)
            if text or reasoning:
                attempt.shown = True
                deltas.append(Delta(text, reasoning))
            if choice.finish_reason:
                attempt.finish_reason = choice.finish_reason
        return deltas

    def _reply(self, model: str, attempt: _Attempt, usage: Usage, *, cut: bool) -> ModelReply:
        name, provider = self._provider(model)
        reason = CUT if cut else str(attempt.finish_reason or "stop")
        return ModelReply(attempt.assembly.message(), usage, reason, name, provider)

    async def _usage(self, model: str, attempt: _Attempt, *, failed: bool) -> Usage:
        """What the provider said; of a failed stream, litellm's count of what did arrive."""
        usage = attempt.usage
        if usage is None and failed and attempt.stream is not None and not attempt.assembly.empty:
            usage = await asyncio.to_thread(_counted, attempt.stream)
        if usage is None:
            return Usage()
        details = getattr(usage, "prompt_tokens_details", None)
        return Usage(
            prompt_tokens=_count(usage.prompt_tokens),
            completion_tokens=_count(usage.completion_tokens),
            cached_tokens=_count(getattr(details, "cached_tokens", None)),
            cost_usd=self._cost(model, usage),
        )

    def _cost(self, model: str, usage: Any) -> float:
        """By litellm's price list; a model that is not in it costs 0."""
        name, provider = self._provider(model)
        try:
            prompt, completion = self._litellm.cost_per_token(
                model=name, custom_llm_provider=provider, usage_object=usage
            )
        except Exception:  # the library raises many kinds for a model without a price
            return 0.0
        cost = float(prompt + completion)
        return cost if 0 <= cost < _MOST_DOLLARS else 0.0

    def _provider(self, model: str) -> tuple[str, str]:
        """The provider's name of the model, and litellm's name of the provider."""
        with contextlib.suppress(Exception):  # an unknown provider is reported by the call itself
            name, provider, *_ = self._litellm.get_llm_provider(model=model)
            return str(name), str(provider)
        return model, ""


def _count(tokens: Any) -> int:
    """A provider's word on tokens, where it is a number that can be meant."""
    return tokens if isinstance(tokens, int) and 0 <= tokens < _MOST_TOKENS else 0


def _ended(attempt: _Attempt) -> bool:
    """Whether the provider said that it was done; litellm makes up "stop" for some that did not."""
    stream = attempt.stream
    return bool(getattr(stream, "received_finish_reason", None) or getattr(stream, "intermittent_finish_reason", None))


def _counted(stream: Any) -> Any:
    """litellm's count of what arrived; None where it cannot make sense of that either."""
    try:
        return getattr(stream.partial_response(), "usage", None)
    except Exception as error:
        log.info("partial_answer_not_counted", error=type(error).__name__)
        return None


def _broken_off() -> Failure:
    return Failure(ModelUnavailable("The model's answer broke off before its end."), True)


def _malformed() -> Failure:
    return Failure(ModelUnavailable("The model's provider sent a piece of an answer that has no known shape."), True)


def _timed_out(deadline_passed: bool, idle_seconds: float) -> Failure:
    if deadline_passed:
        return Failure(ModelUnavailable("The model did not finish in the time that the call or the turn has."), False)
    return Failure(ModelUnavailable(f"The model sent nothing for {idle_seconds:g} seconds."), True)


def _wait_seconds(failure: Failure, tries: int) -> float:
    """The provider's word, and otherwise a random time up to a limit that doubles."""
    if failure.wait_seconds is not None:
        return failure.wait_seconds
    return random.uniform(0.5, 1.0) * min(_BACKOFF_LIMIT_SECONDS, _BACKOFF_SECONDS * (1 << tries))  # noqa: S311


def _with_usage(error: ModelError, spent: Usage) -> ModelError:
    if spent != Usage():
        error.details["usage"] = spent.as_dict()
    return error

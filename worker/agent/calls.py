"""Calls: bringing every open call of the history to its result, or finding that it still has to wait.

At most once for side effects: ``executing`` is committed before such a call begins, and a call that is found in that
state has an unknown outcome. Everything else may run again after a crash.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, replace
from typing import Any

import orjson
import structlog

from shared import faults
from shared.errors import StoreError
from shared.events import TOOL_CALL_RESULT, TOOL_CALL_STARTED, CallResult, CallState, EventDraft
from shared.history import Message, OpenCall
from shared.redaction import Redactor
from worker.agent import texts
from worker.agent.base import Toolbox, ToolContext, ToolResult, ToolSpec
from worker.agent.ledger import Call, Ledger
from worker.agent.redacted import RedactedArtifacts, redacted_result
from worker.agent.run import Events, Guard, Run
from worker.agent.tools.arguments import arguments_digest, parse_arguments
from worker.agent.tools.results import fit_result, raw_of, summary_of
from worker.agent.tools.rules import validate_rule
from worker.agent.visible import make_visible

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Closing:
    """How a call ends without running now: the state it ends in, and what the model reads."""

    state: CallState
    content: str


class CallRunner:
    """Runs and closes the calls of one run."""

    def __init__(
        self,
        run: Run,
        ledger: Ledger,
        toolbox: Toolbox,
        events: Events,
        guard: Guard,
        *,
        timeout_seconds: float,
        result_tokens: int,
        redactor: Redactor,
    ) -> None:
        self._run = run
        self._ledger = ledger
        self._toolbox = toolbox
        self._events = events
        self._guard = guard
        self._timeout_seconds = timeout_seconds
        self._result_tokens = result_tokens
        self._redactor = redactor

    async def settle(self, open_calls: list[OpenCall]) -> tuple[list[Message], list[Call]]:
        """Run or close all that can be; the new results, and the calls that still wait."""
        waiting: list[Call] = []
        ready: list[tuple[Call, OpenCall]] = []
        for call, open_call in zip(self._ledger.match(open_calls), open_calls, strict=True):
            if call.waits_in(self._run.turn):
                waiting.append(call)
            else:
                ready.append((call, open_call))
        results = await _all_or_first_error([self._settle_one(call, open_call) for call, open_call in ready])
        return results, waiting

    async def _settle_one(self, call: Call, open_call: OpenCall) -> Message:
        closing = self._closing(call, open_call)
        if closing is not None:
            text = self._redactor.quoting(parse_arguments(call.arguments).value, closing.content)
            content = await self._fitting(call, text)  # a frontend's result may have any length
            return self._record(call, closing.state, ToolResult("failed", content))
        self._guard.checkpoint()
        spec = self._toolbox.get(call.tool_name)
        effect = call.risk == "side_effect" or (spec is not None and spec.risk == "side_effect")
        arguments = parse_arguments(call.arguments).value
        started = EventDraft(TOOL_CALL_STARTED, self._shown(call, arguments), self._start_of(call) if effect else ())
        self._events.emit(started, soon=effect)
        if not effect:
            return await self._execute(call, arguments, spec)
        faults.reach("before_executing")
        await self._events.barrier()
        faults.reach("after_executing")
        with self._guard.side_effect():
            return await self._execute(call, arguments, spec)

    def _closing(self, call: Call, open_call: OpenCall) -> Closing | None:
        """Why the call does not run now, or None."""
        decision = call.decision or {}
        match call.state:
            case "denied":
                return Closing("denied", call.reason or texts.denied(decision.get("feedback")))
            case "expired":
                return Closing("expired", texts.EXPIRED)
            case "superseded":
                return Closing("superseded", texts.not_executed(call.reason))
            case "unknown" | "executing":
                return Closing("unknown", texts.UNKNOWN)
            case "failed" | "done" if call.kind == "frontend" and call.decision is not None:
                return Closing(call.state, _frontend_content(decision.get("content")))
            case "failed":
                return Closing("failed", call.reason or "The call failed.")
            case _:
                return self._refusal(call, open_call)

    def _refusal(self, call: Call, open_call: OpenCall) -> Closing | None:
        """What has changed between the decision and now so that an approved call must not run."""
        shown = str((open_call.call.get("function") or {}).get("arguments", ""))
        if {arguments_digest(shown), arguments_digest(call.arguments)} != {call.arguments_digest}:
            return Closing("failed", texts.CHANGED)
        spec = self._toolbox.get(call.tool_name)
        if spec is None:
            return Closing("failed", texts.gone(call.tool_name))
        wrong = self._toolbox.invalid(call.tool_name, parse_arguments(call.arguments).value)
        return Closing("failed", wrong) if wrong is not None else None

    async def _execute(self, call: Call, arguments: dict[str, Any], spec: ToolSpec | None) -> Message:
        timeout = (spec.timeout_seconds if spec else None) or self._timeout_seconds
        started = time.monotonic()
        faults.reach("before_tool")
        result = await self._toolbox.call(call.tool_name, arguments, self._context(call, timeout))
        faults.reach("after_tool")
        elapsed_ms = round((time.monotonic() - started) * 1000)
        result = redacted_result(self._redactor, result, arguments)
        fitted = replace(result, content=await self._fitting(call, result.content))
        return self._record(call, result.status, fitted, duration_ms=elapsed_ms, soon=call.state == "executing")

    def _start_of(self, call: Call) -> tuple[Any, ...]:
        if call.key is None:
            raise RuntimeError(f"call {call.tool_call_id} has no row and cannot be started")
        turn, step, index = call.key
        call.state = "executing"
        return ({"op": "start", "turn": turn, "step": step, "call_index": index},)

    def _context(self, call: Call, timeout: float) -> ToolContext:
        turn, step, index = call.key or (self._run.turn, 0, 0)
        now, artifacts = asyncio.get_running_loop().time(), self._run.artifacts
        return ToolContext(
            conversation_id=self._run.conversation_id,
            account_id=self._run.account_id,
            user_id=self._run.user_id,
            turn=turn,
            step=step,
            call_index=index,
            tool_call_id=call.tool_call_id,
            idempotency_key=f"{self._run.conversation_id}:{turn}:{step}:{index}",
            deadline=min(now + timeout, self._run.deadline),
            artifacts=RedactedArtifacts(artifacts, self._redactor) if artifacts is not None else None,
        )

    async def _fitting(self, call: Call, content: str) -> str:
        """The result as it enters the history; what is too long is an artifact with a note where to read it."""
        text, cut = fit_result(content, self._result_tokens)
        if not cut:
            return content
        artifact_id = None
        if self._run.artifacts is not None:
            name = f"{call.tool_name} result"
            try:
                artifact_id = await self._run.artifacts.put(name, "text/plain; charset=utf-8", content.encode())
            except StoreError as error:  # the call has run: what is left of its result must not be lost as well
                log.warning("long_result_not_kept", tool=call.tool_name, error=error.code)
        return f"{text}\n{texts.cut_notice(artifact_id)}"

    def _useless_rule(self, call: Call) -> str | None:
        """Why the rule that came with the call's approval ("don't ask again") will never decide anything, or None."""
        spec = self._toolbox.get(call.tool_name)
        if spec is None or call.decided_turn != self._run.turn:
            return None
        for decision in self._run.request.get("tool_decisions") or ():
            if decision["tool_call_id"] == call.tool_call_id and decision["approved"] and decision.get("remember"):
                return validate_rule(spec, decision["remember"].get("prefix"))
        return None

    def _shown(self, call: Call, arguments: Any) -> dict[str, Any]:
        turn, step, index = call.key or (None, None, None)
        return {
            "tool_call_id": call.tool_call_id,
            "tool_name": call.tool_name,
            "params": make_visible(self._redactor.value(arguments)),
            "risk": call.risk,
            "call_turn": turn,
            "step": step,
            "call_index": index,
        }

    def _record(
        self, call: Call, state: CallState, result: ToolResult, *, duration_ms: int | None = None, soon: bool = False
    ) -> Message:
        """The result's event, and its message. ``soon``: a crash before it is stored would make it unknown."""
        message: Message = {"role": "tool", "tool_call_id": call.tool_call_id, "content": result.content}
        if result.images:
            message["content"] = [
                {"type": "text", "text": result.content},
                *({"type": "image_url", "image_url": {"url": url}} for url in result.images),
            ]
        data = self._shown(call, parse_arguments(call.arguments).value)
        data.update(status=state, duration_ms=duration_ms, message=message)
        if problem := self._useless_rule(call):
            data["rule_refused"] = problem
        changes: tuple[CallResult, ...] = ()
        if call.key is not None:
            turn, step, index = call.key
            changes = (
                {
                    "op": "result",
                    "turn": turn,
                    "step": step,
                    "call_index": index,
                    "state": state,
                    "result_summary": summary_of(result),
                    "result_raw": raw_of(result),
                    "duration_ms": duration_ms,
                },
            )
            self._ledger.closed(call)
        self._events.emit(EventDraft(TOOL_CALL_RESULT, data, changes), soon=soon)
        return message


def _frontend_content(content: Any) -> str:
    if isinstance(content, str):
        return content
    return orjson.dumps(content).decode()


async def _all_or_first_error(coroutines: list[Any]) -> list[Message]:
    """Results in the order given. The first error cancels the rest and is raised once they have ended."""
    if not coroutines:
        return []
    tasks = [asyncio.ensure_future(c) for c in coroutines]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise

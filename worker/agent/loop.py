"""The loop: settle the open calls, or answer, or ask the model once more.

It goes on from the last message, whatever attempt wrote it: an answer that is stored is not asked for again, a result
that is stored is not computed again. Pausing is a value; failing is an exception of the error tree.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

from shared import faults
from shared.clean import clean
from shared.errors import ApprovalStale, EmptyAnswer, ModelError, RequestInvalid, StepLimit, TurnBudget
from shared.events import AI_MESSAGE, EventDraft
from shared.history import open_calls, pair
from shared.redaction import Redactor
from shared.settings import Settings
from worker.agent import texts
from worker.agent.approvals import pause_for
from worker.agent.base import ChatModel, Delta, ModelReply, ModelRequest, Toolbox, ToolSpec
from worker.agent.calls import CallRunner
from worker.agent.ingest import Policy, ingest, text_of
from worker.agent.ledger import Ledger
from worker.agent.redacted import RedactedDeltas
from worker.agent.run import Answered, Events, Guard, Outcome, Run
from worker.agent.tools.arguments import parse_arguments
from worker.agent.tools.schema import checked_parameters
from worker.agent.wire import load_images


class AgentLoop:
    """One run of the tool-calling loop."""

    def __init__(
        self,
        run: Run,
        *,
        model: ChatModel,
        toolbox: Toolbox,
        events: Events,
        guard: Guard,
        settings: Settings,
        redactor: Redactor,
    ) -> None:
        self._run = run
        self._model = model
        self._toolbox = toolbox
        self._events = events
        self._guard = guard
        self._settings = settings
        self._redactor = redactor
        self._ledger = Ledger(run.calls)
        self._calls = CallRunner(
            run,
            self._ledger,
            toolbox,
            events,
            guard,
            timeout_seconds=settings.tool_timeout_seconds,
            result_tokens=settings.tool_result_tokens,
            redactor=redactor,
        )
        frontend = {spec.name: spec for spec in map(_frontend_spec, run.options.get("frontend_tools") or ())}
        self._policy = Policy(frontend, run.options.get("approval_mode") == "deny", run.rules)
        specs = {spec.name: spec for spec in toolbox.specs()} | frontend  # of two under one name, the asker's own
        self._tools = [spec.for_model() for spec in specs.values()]

    async def run(self) -> Outcome:
        """Go on until the turn answers or pauses. Raises the error tree, and what the guard raises."""
        run = self._run
        if not run.messages:
            raise RequestInvalid("The conversation has no history to go on from.")
        self._refuse_stale_decision()
        while True:
            if waits := open_calls(run.messages):
                results, waiting = await self._calls.settle(waits)
                run.messages = pair([*run.messages, *results])
                if waiting:
                    self._guard.checkpoint()
                    return pause_for(waiting, run, self._toolbox, self._redactor, self._settings.approval_seconds)
                continue
            if run.messages[-1].get("role") == "assistant":
                return Answered(text_of(run.messages[-1]))
            self._guard.checkpoint()
            await self._step()

    def _refuse_stale_decision(self) -> None:
        run = self._run
        if run.kind != "tool_decisions" or run.totals.rounds or run.worked_before:
            return
        if self._ledger.decided_in(run.turn):
            return
        if not any(call.waits_in(run.turn) for call in self._ledger.match(open_calls(run.messages))):
            raise ApprovalStale(
                "Nothing was executed: the calls that this decision is about are not waiting any more.",
                hint="Look at the conversation's events for what became of them.",
            )

    async def _step(self) -> None:
        """One model call, and its message in the log. Raises ``StepLimit`` where it would be one too many."""
        run, step, limit = self._run, self._run.totals.rounds + 1, self._settings.max_steps
        if step > limit:
            raise StepLimit(
                f"The model went on calling tools after {limit} steps; the last calls were not run.",
                hint="Ask again with a narrower question, or raise TURNKEEPER_MAX_STEPS.",
            )
        self._keep_to_budget()
        may_call = step < limit
        reply = await self._ask(step, may_call=may_call)
        ingested = ingest(reply, step=step, toolbox=self._toolbox, policy=self._policy, may_call=may_call)
        if ingested.empty:
            first = reply.usage
            reply = await self._ask(step, may_call=may_call, nudge=True)
            ingested = ingest(reply, step=step, toolbox=self._toolbox, policy=self._policy, may_call=may_call)
            reply = replace(reply, usage=first + reply.usage)
            if ingested.empty:
                raise EmptyAnswer(
                    "The model answered twice with neither text nor a tool call.",
                    hint="Retry the turn, or choose another model.",
                    usage=reply.usage.as_dict(),
                )
        run.totals.rounds = step
        run.totals.tool_calls += len(ingested.calls)
        run.totals.add(reply.usage)
        run.provider, run.model_used = reply.provider, reply.model
        run.partial.clear()
        data: dict[str, Any] = {
            "step": step,
            "message": ingested.message,
            "usage": reply.usage.as_dict(),
            "finish_reason": reply.finish_reason,
            "model": reply.model,
        }
        for call in ingested.calls:  # why a call cannot run may quote its arguments
            if call["reason"]:
                arguments = parse_arguments(call["arguments"]).value
                call["reason"] = self._redactor.quoting(arguments, call["reason"])
        self._ledger.add(run.turn, ingested.calls)
        self._events.emit(EventDraft(AI_MESSAGE, data, ingested.calls), soon=bool(ingested.calls))
        faults.reach("after_ai_message")
        run.messages.append(ingested.message)

    def _keep_to_budget(self) -> None:
        """Raises ``TurnBudget`` where another model call would begin above a limit of the turn."""
        used, settings = self._run.totals, self._settings
        tokens = used.prompt_tokens + used.completion_tokens
        over = []
        if settings.turn_tokens is not None and tokens >= settings.turn_tokens:
            over.append(f"{tokens:,} of {settings.turn_tokens:,} tokens (TURNKEEPER_TURN_TOKENS)")
        if settings.turn_cost_usd is not None and used.cost_usd >= settings.turn_cost_usd:
            over.append(f"{used.cost_usd:.4f} of {settings.turn_cost_usd:.4f} US dollars (TURNKEEPER_TURN_COST_USD)")
        if over:
            raise TurnBudget(
                f"The turn has used {' and '.join(over)}; the model was not asked again.",
                hint="Ask again with a narrower question, or raise the limit.",
            )

    async def _ask(self, step: int, *, may_call: bool, nudge: bool = False) -> ModelReply:
        run = self._run
        messages = run.with_system()
        if nudge:
            messages.append({"role": "user", "content": texts.NUDGE})
        run.partial.clear()

        def show(delta: Delta) -> None:
            if delta.text:
                run.partial.append(delta.text)
            self._events.delta(step=step, text=delta.text, reasoning=delta.reasoning)

        deltas = RedactedDeltas(self._redactor, show)
        request = ModelRequest(
            model=run.model,
            messages=messages,
            tools=self._tools,
            tool_choice="auto" if may_call else "none",
            response_format=run.options.get("response_format"),
            deadline=run.deadline,
            images=await load_images(messages, run.artifacts, run.images),
        )
        try:
            faults.reach("before_model")
            reply = await self._model.complete(request, deltas)
            faults.reach("after_model")
        except ModelError:
            run.partial.clear()  # a later attempt starts its answer anew
            raise
        except asyncio.CancelledError:
            deltas.cut()
            raise
        deltas.end()
        return replace(reply, message=self._redactor.message(clean(reply.message)))


def _frontend_spec(declared: dict[str, Any]) -> ToolSpec:
    """Raises ``ToolDefinitionError`` for a tool that providers would refuse."""
    name = declared["name"]
    parameters = checked_parameters(name, declared.get("parameters") or {})
    return ToolSpec(name, declared.get("description", ""), parameters, source="frontend")

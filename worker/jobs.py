"""The jobs of the queues, and the seam between the RQ worker and what runs a turn.

A producer needs RQ and nothing of ours, only the JSON serializer::

    queue = Queue("interactive", connection=redis, serializer=JSONSerializer)
    queue.enqueue("worker.jobs.ask", conversation_id=str(uuid4()), ask="Why does checkout-api return 500?")

``ConversationWorker`` never calls these functions: it knows their names and hands the arguments to a ``JobRunner``.
Arguments go by keyword; unknown ones are refused. The job's result is a JSON object that says how the turn ended.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn, Protocol, runtime_checkable

from shared.errors import ConfigurationError, TurnkeeperError

JobFunction = Literal["ask", "tool_decisions", "retry", "turn"]

FUNCTIONS: dict[str, JobFunction] = {
    "worker.jobs.ask": "ask",
    "worker.jobs.tool_decisions": "tool_decisions",
    "worker.jobs.retry": "retry",
    "worker.jobs.turn": "turn",
}
"""The allow-list: the name in an RQ job, and what it asks for."""


@dataclass(frozen=True, slots=True)
class TurnJob:
    """What a job asks for.

    ``arguments``: its keyword arguments, untouched and unchecked. ``job_id``: the default of ``request_id``.
    ``queue``: where it came from. ``timeout_seconds``: None when the job has no timeout of its own; RQ's default of
    180 s cannot be told from an explicit one and counts as none, like -1.
    """

    function: JobFunction
    arguments: dict[str, Any]
    job_id: str
    queue: str
    timeout_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class JobControl:
    """One running job, seen from its turn. ``stop_requested`` is set by RQ's stop commands, for this job only."""

    stop_requested: asyncio.Event = field(default_factory=asyncio.Event)


class JobRunner(Protocol):
    """What runs the jobs of a worker process, all on one loop."""

    async def start(self, worker: str) -> None:
        """Imports, connections, tools: what has to be there before the first job. ``worker``: the process's name."""
        ...

    async def run(self, job: TurnJob, control: JobControl) -> dict[str, Any]:
        """Run a job to its end; the job's result, JSON, with a ``status``. Raises ``StoreUnavailable`` when it could
        not begin, and the job goes back to its queue; anything else is a bug."""
        ...

    async def drain(self) -> None:
        """Send every running turn to its next safe point and hand it back; returns when none runs any more."""
        ...

    async def close(self) -> None: ...


@runtime_checkable
class RefusalRecorder(Protocol):
    """A runner that wants to know of jobs that never reached ``run``."""

    async def refuse(self, job_id: str, queue: str, payload: dict[str, Any], error: TurnkeeperError) -> None:
        """A job was refused. ``payload``: ``function``, ``args``, ``kwargs`` as far as they can be read, or
        ``data_base64``, the beginning of what cannot."""
        ...


def ask(**arguments: Any) -> NoReturn:
    """A question.

    - ``ask``: the text; required.
    - ``conversation_id``: a UUID; left out or unknown, the conversation is created.
    - ``account_id``, ``user_id``, ``team_id``: the owner, fixed when the conversation is created.
    - ``request_id``: makes submitting idempotent, unique per account; by default RQ's job id.
    - ``images``: list of ``{"url"}`` or ``{"data": base64, "media_type"}``.
    - ``model``: a litellm name, in place of the worker's.
    - ``target``: ``{"mode": "host" | "kubernetes", "server_id", "cluster_id", "namespace", …}``.
    - ``tool_decisions``: as for ``tool_decisions``; they act first, then calls still undecided are closed.
    - ``supersede``: ``False`` refuses the question while calls wait for a decision; by default it closes them.
    - ``frontend_tools``: list of ``{"name", "description", "parameters"}``: tools that the asking client runs.
    - ``frontend_tool_results``: list of ``{"tool_call_id", "content", "is_error"}``.
    - ``approval_mode``: ``"ask"`` (default) or ``"deny"``: gated calls are denied without asking anybody.
    - ``response_format``: as in the chat completions API.
    - ``additional_system_prompt``: text behind the worker's own system prompt.
    - ``metadata``: a JSON object, kept on the conversation.
    - ``queue``: where later rings for this turn go; by default the queue that the job came from.
    """
    _only_our_worker(arguments)


def tool_decisions(**arguments: Any) -> NoReturn:
    """Decisions on waiting tool calls, or results of frontend tools, without a question.

    - ``conversation_id``: required.
    - ``tool_decisions``: list of ``{"tool_call_id", "approved", "approval_token", "feedback", "remember"}``.
    - ``frontend_tool_results``: list of ``{"tool_call_id", "content", "is_error"}``; one of the two is needed.
    - and, as for ``ask``: ``account_id``, ``user_id`` (who decided), ``team_id``, ``request_id``, ``model``,
      ``target``, ``frontend_tools``, ``approval_mode``, ``response_format``, ``additional_system_prompt``,
      ``metadata``, ``queue``.
    """
    _only_our_worker(arguments)


def retry(**arguments: Any) -> NoReturn:
    """Try the conversation's last turn again: ``conversation_id``, and the options of ``ask`` without its question."""
    _only_our_worker(arguments)


def turn(**arguments: Any) -> NoReturn:
    """A ring: ``conversation_id`` only. Whatever its lowest unfinished turn is gets run; ringing twice is harmless."""
    _only_our_worker(arguments)


def _only_our_worker(_arguments: dict[str, Any]) -> NoReturn:
    raise ConfigurationError(
        "This job was taken by a worker that is not Turnkeeper's; nothing was recorded or run.",
        hint="Start workers with `turnkeeper worker` or `rq worker -w worker.rq_worker.ConversationWorker`.",
    )

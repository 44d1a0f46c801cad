"""Bootstrap: from settings to a running worker's parts, and from a job to a turn."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import structlog
from structlog.contextvars import bound_contextvars

from publisher import RedisLive
from shared import faults
from shared.errors import QueueUnavailable, RequestInvalid, RequestRefused, StoreError, TurnkeeperError
from shared.queues import Ringer
from shared.requests import RequestRecord, parse_request, record_of
from shared.settings import Settings
from shared.store import open_store
from shared.store.base import Claim, NotClaimed, Ring, Row
from worker.agent.base import ChatModel, Toolbox
from worker.agent.tools import load_toolbox
from worker.attempt import Attempt
from worker.jobs import JobControl, TurnJob
from worker.leases import LeaseKeeper
from worker.letters import letter_of_job, letter_of_stranger
from worker.reaper import Reaper
from worker.turn import Parts, TurnReport, TurnRunner

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a job names: a conversation, and the request to record in it, if it brings one."""

    conversation_id: str
    record: RequestRecord | None


class Runtime:
    """Everything a worker process runs turns with; the RQ worker calls its methods."""

    def __init__(self, settings: Settings, *, model: ChatModel | None = None, toolbox: Toolbox | None = None) -> None:
        """``model`` and ``toolbox`` stand in for litellm and for the configured tools, where given."""
        self.settings = settings
        self._model = model
        self._toolbox = toolbox
        self._parts: Parts | None = None
        self._turns: TurnRunner | None = None
        self._ringer: Ringer | None = None
        self._reaping: asyncio.Task[None] | None = None

    async def start(self, worker: str) -> None:
        """Import litellm, connect, load tools, start renewing and reaping; turns then carry the name ``worker``.
        Raises ``ConfigurationError`` and ``StoreUnavailable``."""
        settings = self.settings
        faults.arm(faults.plan_of(settings.fault))
        model = self._model or _litellm_model(settings)
        store = await open_store(settings).open()
        keeper = LeaseKeeper(lambda: open_store(settings), settings.lease_seconds)
        self._ringer = Ringer(settings.effective_redis_url)
        live = RedisLive.from_settings(settings)
        toolbox = self._toolbox or await load_toolbox(settings).open()
        self._parts = Parts(settings, store, model, toolbox, keeper, live, worker)
        self._turns = TurnRunner(self._parts)
        keeper.start()
        self._reaping = asyncio.create_task(Reaper(store, self._ringer, settings.reap_seconds).run())

    async def drain(self) -> None:
        """Hand back every running turn; returns when none runs."""
        if self._turns is not None:
            await self._turns.leave()

    async def close(self) -> None:
        if self._reaping is not None:
            self._reaping.cancel()
            await asyncio.gather(self._reaping, return_exceptions=True)
        if self._parts is not None:
            await self._parts.keeper.close()
            await self._parts.toolbox.close()
            await self._parts.model.close()
            if self._parts.live is not None:
                await self._parts.live.close()
            await self._parts.store.close()
        if self._ringer is not None:
            await self._ringer.close()

    async def run(self, job: TurnJob, control: JobControl) -> dict[str, Any]:
        """Run the turn that a job is about; the job's result. A request that is refused is a result too, and a
        dead letter: nothing that was sent is dropped silently."""
        with bound_contextvars(job=job.job_id):
            try:
                wanted = self._wanted(job)
                return await self._drive(wanted, job, control)
            except RequestRefused as error:
                log.warning("request_refused", code=error.code)
                letter = letter_of_job(job, error)
                assert self._turns is not None
                await self._turns.patiently(lambda: self._keep(letter))
                return {"status": "refused", "error": error.as_dict()}

    async def refuse(self, job_id: str, queue: str, payload: dict[str, Any], error: TurnkeeperError) -> None:
        """Keep a job that is none of ours, so that its sender can find it."""
        await self._keep(letter_of_stranger(job_id, queue, payload, error))

    async def _keep(self, letter: Row) -> None:
        assert self._parts is not None
        await self._parts.store.record_dead_letter(letter)

    def _wanted(self, job: TurnJob) -> Wanted:
        if job.function == "turn":
            conversation_id = job.arguments.get("conversation_id")
            if not isinstance(conversation_id, str):
                raise RequestInvalid("The job names no conversation; nothing was run.")
            return Wanted(conversation_id, None)
        record = record_of(
            parse_request(job.function, job.arguments),
            request_id=job.job_id,
            queue=job.queue,
            default_account=self.settings.default_account,
            max_bytes=self.settings.request_bytes,
            accept_call_keys=self.settings.accept_call_keys,
        )
        return Wanted(record.conversation_id, record)

    async def _drive(self, wanted: Wanted, job: TurnJob, control: JobControl) -> dict[str, Any]:
        """Claim and run until the job's own turn has ended. Turns queued before it come first."""
        assert self._turns is not None
        loop = asyncio.get_running_loop()
        deadline = loop.time() + job.timeout_seconds if job.timeout_seconds is not None else None
        record, own_turn, own = wanted.record, 0, {}
        while True:
            claimed, sent_at = await self._turns.claim(wanted.conversation_id, record)
            if record is not None and claimed.submitted is not None:
                own_turn = claimed.submitted.turn
                own = {"request_id": record.request_id, "decisions": claimed.submitted.decisions}
                record = None
            if isinstance(claimed, NotClaimed):
                return _not_claimed(claimed, wanted.conversation_id, own)
            left = max(0.0, deadline - loop.time()) if deadline is not None else None
            report = await self._run_stoppable(claimed, sent_at, control, left)
            if report.ended and report.turn < own_turn and report.next_queue is not None:
                continue
            await self._ring(report)
            return {**report.as_dict(), **own}

    async def _run_stoppable(
        self, claim: Claim, sent_at: float, control: JobControl, timeout_seconds: float | None
    ) -> TurnReport:
        assert self._turns is not None
        assert self._parts is not None
        store, lease = self._parts.store, claim.lease

        async def stop_when_asked(attempt: Attempt) -> None:
            await control.stop_requested.wait()
            try:
                await store.stop(lease.conversation_id, lease.turn)  # so that it holds for another attempt too
            except StoreError as error:
                log.warning("stop_not_recorded", error=error.code)
            attempt.stop()

        watchers: list[asyncio.Task[None]] = []
        try:
            return await self._turns.run(
                claim,
                sent_at,
                on_attempt=lambda attempt: watchers.append(asyncio.create_task(stop_when_asked(attempt))),
                timeout_seconds=timeout_seconds,
            )
        finally:
            for watcher in watchers:
                watcher.cancel()
            await asyncio.gather(*watchers, return_exceptions=True)

    async def _ring(self, report: TurnReport) -> None:
        assert self._ringer is not None
        if report.next_queue is None:
            return
        try:
            await self._ringer.ring([Ring(report.conversation_id, report.next_queue)])
        except QueueUnavailable:
            log.warning("ring_left_to_the_reaper", conversation=report.conversation_id)


def _litellm_model(settings: Settings) -> ChatModel:
    from worker.agent.model import LitellmModel  # takes seconds: only where it is used

    return LitellmModel(settings)


def build_runtime(settings: Settings) -> Runtime:
    """The parts of one worker process, not started yet."""
    return Runtime(settings)


def _not_claimed(claimed: NotClaimed, conversation_id: str, own: dict[str, Any]) -> dict[str, Any]:
    """The result of a job that found nothing to run: somebody else runs the turn, or it had ended before."""
    result: dict[str, Any] = {"conversation_id": conversation_id, "reason": claimed.reason, **own}
    if claimed.submitted is not None:
        result.update(turn=claimed.submitted.turn, status=claimed.submitted.status)
    elif claimed.ended:
        last = claimed.ended[-1]
        result.update(turn=last["turn"], status="stopped" if last["event"] == "turn_stopped" else "failed")
    else:
        result["status"] = claimed.reason
    return result

"""The driver: from a job to a turn, and to the job's result."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import structlog
from structlog.contextvars import bound_contextvars

from shared.errors import (
    ContentRefused,
    ConversationUnknown,
    QueueUnavailable,
    RequestInvalid,
    RequestRefused,
    StoreError,
    TurnkeeperError,
)
from shared.queues import Ringer
from shared.redaction import Redactor
from shared.requests import RequestRecord, parse_request, record_of
from shared.settings import Settings
from shared.store.base import Claim, NotClaimed, Ring, Row, Store
from worker.attempt import Attempt
from worker.isolation import Isolation
from worker.jobs import JobControl, TurnJob
from worker.letters import letter_of_job, letter_of_stranger
from worker.turn import TurnReport, TurnRunner

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a job names: a conversation, and the request to record in it, if it brings one."""

    conversation_id: str
    record: RequestRecord | None


class JobDriver:
    """Serves the jobs of a process: records what they ask for, runs their turns, rings for what remains."""

    def __init__(
        self, settings: Settings, store: Store, turns: TurnRunner, ringer: Ringer, isolation: Isolation | None
    ) -> None:
        """``isolation`` None: every turn runs in this process, as in one that was made for a single turn."""
        self._isolation = isolation
        self._settings = settings
        self._store = store
        self._turns = turns
        self._ringer = ringer
        self._redactor = Redactor.from_settings(settings)

    async def run(self, job: TurnJob, control: JobControl) -> dict[str, Any]:
        """Run the turn that a job is about; the job's result. A request that is refused is a result too, and a
        dead letter: nothing that was sent is dropped silently."""
        with bound_contextvars(job=job.job_id):
            try:
                wanted = self._wanted(job)
                return await self._drive(wanted, job, control)
            except (RequestRefused, ContentRefused) as error:
                log.warning("request_refused", code=error.code)
                letter = letter_of_job(job, error, self._redactor)
                await self._turns.patiently(lambda: self._keep(letter))
                return {"status": "refused", "error": self._redactor.value(error.as_dict())}

    async def run_once(
        self, conversation_id: str, claim_id: str | None, on_claimed: Callable[[], None]
    ) -> TurnReport | None:
        """Run the lowest unfinished turn of a conversation here, and ring for the next; None if there is nothing."""
        claimed, sent_at = await self._turns.claim(conversation_id, None, claim_id=claim_id)
        if isinstance(claimed, NotClaimed):
            return None
        on_claimed()
        report = await self._run_stoppable(claimed, sent_at, JobControl(), None, claimed.lease.turn)
        await self._ring(report)
        return report

    async def refuse(self, job_id: str, queue: str, payload: dict[str, Any], error: TurnkeeperError) -> None:
        """Keep a job that is none of ours, so that its sender can find it."""
        await self._keep(letter_of_stranger(job_id, queue, payload, error, self._redactor))

    async def _keep(self, letter: Row) -> None:
        await self._store.record_dead_letter(letter)

    def _wanted(self, job: TurnJob) -> Wanted:
        if job.function == "turn":
            return Wanted(_conversation_of(job), None)
        record = record_of(
            parse_request(job.function, job.arguments),
            request_id=job.job_id,
            queue=job.queue,
            default_account=self._settings.default_account,
            max_bytes=self._settings.request_bytes,
            accept_call_keys=self._settings.accept_call_keys,
            redactor=self._redactor,
        )
        return Wanted(record.conversation_id, record)

    async def _drive(self, wanted: Wanted, job: TurnJob, control: JobControl) -> dict[str, Any]:
        """Claim and run until the job's own turn has ended. Turns queued before it come first."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + job.timeout_seconds if job.timeout_seconds is not None else None
        record, own_turn, own = wanted.record, 0, {}
        while True:
            try:
                claimed, sent_at = await self._turns.claim(wanted.conversation_id, record)
            except ConversationUnknown:
                if wanted.record is not None:
                    raise
                return {"conversation_id": wanted.conversation_id, "status": "idle", "reason": "deleted"}
            if record is not None and claimed.submitted is not None:
                own_turn = claimed.submitted.turn
                own = {"request_id": record.request_id, "decisions": claimed.submitted.decisions}
                record = None
            if isinstance(claimed, NotClaimed):
                return _not_claimed(claimed, wanted.conversation_id, own)
            own_turn = own_turn or claimed.lease.turn
            left = None  # the job's time, like its stop, is for its own turn and no other
            if deadline is not None and claimed.lease.turn >= own_turn:
                left = max(0.0, deadline - loop.time())
            if self._isolation is not None and self._isolation.takes(claimed):
                report = await self._isolation.run(claimed, sent_at)
            else:
                report = await self._run_stoppable(claimed, sent_at, control, left, own_turn)
            if report.ended and report.turn < own_turn and report.next_queue is not None:
                continue
            await self._ring(report)
            return {**report.as_dict(), **own}

    async def _run_stoppable(
        self, claim: Claim, sent_at: float, control: JobControl, timeout_seconds: float | None, own_turn: int
    ) -> TurnReport:
        """Run a turn. A stop of the job is for ``own_turn``: while an earlier one runs, that one only waits."""
        store, lease = self._store, claim.lease

        async def stop_when_asked(attempt: Attempt) -> None:
            await control.stop_requested.wait()
            try:
                await store.stop(lease.conversation_id, own_turn)  # so that it holds for another attempt too
            except StoreError as error:
                log.warning("stop_not_recorded", error=error.code)
            if lease.turn == own_turn:
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
        if report.next_queue is None:
            return
        try:
            await self._ringer.ring([Ring(report.conversation_id, report.next_queue)])
        except QueueUnavailable:
            log.warning("ring_left_to_the_reaper", conversation=report.conversation_id)


def _conversation_of(job: TurnJob) -> str:
    try:
        return str(uuid.UUID(job.arguments.get("conversation_id")))
    except (ValueError, TypeError, AttributeError):
        raise RequestInvalid("The job names no conversation by its UUID; nothing was run.") from None


def _not_claimed(claimed: NotClaimed, conversation_id: str, own: dict[str, Any]) -> dict[str, Any]:
    """The result of a job that found nothing to run: somebody else runs the turn, or it had ended before."""
    reason = claimed.wait_reason or claimed.reason
    result: dict[str, Any] = {"conversation_id": conversation_id, "reason": reason, **own}
    if claimed.submitted is not None:
        result.update(turn=claimed.submitted.turn, status=claimed.submitted.status)
    elif claimed.ended:
        last = claimed.ended[-1]
        result.update(turn=last["turn"], status="stopped" if last["event"] == "turn_stopped" else "failed")
    else:
        result["status"] = claimed.reason
    return result

"""From a queue to a job's stored end: fetch loops with slots, and the life of one job between them."""

from __future__ import annotations

import asyncio
import time
import traceback
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Final

from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ExecAbortError, OutOfMemoryError, ReadOnlyError, RedisError, TryAgainError
from redis.exceptions import TimeoutError as RedisTimeoutError
from rq.job import Job, JobStatus
from rq.queue import Queue
from rq.rate_limit import release_slot
from rq.suspension import WORKERS_SUSPENDED
from rq.utils import current_timestamp
from rq.worker.base import WorkerStatus

from shared import faults
from shared.errors import StoreUnavailable
from shared.log import bind, get_logger
from shared.queues import redis_errors
from worker import rq_records as records
from worker.jobs import JobRunner, RefusalRecorder

POP_SECONDS: Final = 1  # one blocking pop; how long leaving may wait for it
FIRST_RETRY_SECONDS, LAST_RETRY_SECONDS = 0.05, 2.0  # between tries while Redis is away
LEAVE_SECONDS: Final = 10.0  # for bookkeeping, once the running turns were sent away

AWAY: Final = (RedisConnectionError, RedisTimeoutError, ReadOnlyError, OutOfMemoryError, ExecAbortError, TryAgainError)

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Limits:
    """``slots``: jobs at once per queue. ``max_jobs`` and ``max_idle_seconds`` end the work, as in RQ."""

    slots: dict[str, int]
    burst: bool = False
    max_jobs: int | None = None
    max_idle_seconds: float | None = None


class Intake:
    """Takes jobs from queues and runs each to its end.

    ``redis`` is for bookkeeping, ``pops`` for the blocking pops. ``closing``: take nothing more. ``draining``: the
    running turns are being sent away, and what was popped goes back.
    """

    def __init__(
        self, worker_name: str, worker_key: str, queues: list[Queue], runner: JobRunner, redis: Redis, pops: Redis,
        limits: Limits, result_ttl: int,
    ) -> None:  # fmt: skip
        self.running: dict[str, records.Running] = {}
        self.closing = asyncio.Event()
        self.draining = asyncio.Event()
        self.taken = 0
        self._worker_name = worker_name
        self._worker_key = worker_key
        self._queues = queues
        self._runner = runner
        self._redis = redis
        self._pops = pops
        self._limits = limits
        self._result_ttl = result_ttl
        self._slots = {queue.name: asyncio.Semaphore(limits.slots[queue.name]) for queue in queues}
        self._tasks: set[asyncio.Task[None]] = set()
        self._put_back_script = redis.register_script(records.PUT_BACK)
        self._suspended = False
        self._active_at = time.monotonic()
        self._drained_at: float | None = None

    @property
    def state(self) -> WorkerStatus:
        if self.running:
            return WorkerStatus.BUSY
        return WorkerStatus.SUSPENDED if self._suspended else WorkerStatus.IDLE

    async def work(self) -> None:
        """Until ``closing`` is set or a limit is reached, and then until every job has ended."""
        drain = asyncio.create_task(self._drain())
        try:
            if self._limits.burst:
                with redis_errors("taking jobs"):
                    await self._fetch_burst()
            else:
                await asyncio.gather(*(self._fetch(queue) for queue in self._queues))
        finally:
            self.closing.set()
            await self._finish(drain)
            drain.cancel()
            await asyncio.gather(drain, return_exceptions=True)

    async def recover(self, queue: Queue, entry: bytes) -> bool:
        """Put back what a dead worker took, or remove what is no job at all. True if a job was put back."""
        job_id = records.id_of(entry)
        if job_id is not None:
            return await self.put_back(queue, job_id)
        self._begin(queue, entry)
        return False

    async def put_back(self, queue: Queue, job_id: str) -> bool:
        """Return a job that was taken and not run to the front of its queue."""
        keys = records.put_back_keys(queue, job_id)
        return bool(await self._put_back_script(keys=keys, args=[job_id, current_timestamp()]))

    async def _drain(self) -> None:
        await self.draining.wait()
        try:
            await self._runner.drain()
        except Exception:
            log.exception("drain_failed")
        self._drained_at = time.monotonic()

    async def _finish(self, drain: asyncio.Task[None]) -> None:
        """Let running jobs end; once they were sent away, only for so long."""
        while self._tasks:
            if drain.done():
                _, late = await asyncio.wait(self._tasks, timeout=LEAVE_SECONDS)
                for task in late:
                    log.error("job_abandoned", job=task.get_name())
                    task.cancel()
                return
            await asyncio.wait({*self._tasks, drain}, return_when=asyncio.FIRST_COMPLETED)

    # Fetching

    async def _fetch(self, queue: Queue) -> None:
        slots = self._slots[queue.name]
        while not self.closing.is_set():
            await slots.acquire()
            entry = await self._pop(queue)
            if entry is None:
                slots.release()
            elif self.closing.is_set():
                await self._return_popped(queue, entry)
            else:
                self._take(queue, entry)

    async def _fetch_burst(self) -> None:
        """Take what there is, also what running jobs ring for, until nothing waits and nothing runs."""
        while not self.closing.is_set():
            if await self._redis.exists(WORKERS_SUSPENDED):
                log.warning("burst_ended", reason="workers are suspended")
                return
            taken = self.taken
            for queue in self._queues:
                if self.closing.is_set() or self._slots[queue.name].locked():
                    continue
                entry: Any = await self._redis.lmove(queue.key, queue.intermediate_queue_key)
                if entry is not None:
                    await self._slots[queue.name].acquire()
                    self._take(queue, entry)
            if taken == self.taken:
                if not self._tasks:
                    return
                await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)

    async def _pop(self, queue: Queue) -> bytes | None:
        """The next entry, moved to the intermediate list; None when there was none for a while."""
        try:
            if self._suspended:
                await self._pause(POP_SECONDS)
            else:
                entry: Any = await self._pops.blmove(queue.key, queue.intermediate_queue_key, POP_SECONDS)
                if entry is not None:
                    return bytes(entry)
            self._suspended = bool(await self._redis.exists(WORKERS_SUSPENDED))
        except RedisError as error:
            log.warning("redis_unavailable", error=str(error))
            await self._pause(LAST_RETRY_SECONDS)
        except Exception:  # whatever it is, the other queues and the running turns go on
            log.exception("fetch_failed", queue=queue.name)
            await self._pause(LAST_RETRY_SECONDS)
        allowed = self._limits.max_idle_seconds
        if allowed is not None and not self._tasks and time.monotonic() - self._active_at >= allowed:
            self.closing.set()
        return None

    async def _return_popped(self, queue: Queue, entry: bytes) -> None:
        """What was popped while the worker began to close; if Redis is away, another worker finds it."""
        job_id = records.id_of(entry)
        try:
            if job_id is not None:
                await self.put_back(queue, job_id)
        except RedisError as error:
            log.warning("redis_unavailable", error=str(error))

    async def _pause(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self.closing.wait()
        except TimeoutError:
            return

    def _take(self, queue: Queue, entry: bytes) -> None:
        self.taken += 1
        if self._limits.max_jobs is not None and self.taken >= self._limits.max_jobs:
            self.closing.set()
        self._begin(queue, entry).add_done_callback(lambda _: self._slots[queue.name].release())

    def _begin(self, queue: Queue, entry: bytes) -> asyncio.Task[None]:
        job_id = records.id_of(entry)
        work = self._remove(queue, entry) if job_id is None else self._work_on(queue, job_id)
        task = asyncio.create_task(self._logged(work), name=job_id or repr(entry))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # One job

    async def _logged(self, work: Coroutine[Any, Any, None]) -> None:
        """What fails on the way is logged; the job stays in the intermediate list, and some worker puts it back."""
        try:
            await work
        except RedisError as error:
            log.error("job_not_stored", error=str(error), hint="It is put back and runs again; that is harmless.")
        except Exception:
            log.exception("job_bookkeeping_failed")
        self._active_at = time.monotonic()

    async def _work_on(self, queue: Queue, job_id: str) -> None:
        bind(job=job_id)
        key = Job.key_for(job_id)
        raw, suspended = await self._store(lambda pipe: pipe.hgetall(key).exists(WORKERS_SUSPENDED))
        if suspended or self.draining.is_set():
            self._suspended = bool(suspended)
            await self.put_back(queue, job_id)
        elif not raw or raw.get(b"status") == b"canceled":
            await self._store(lambda pipe: pipe.lrem(queue.intermediate_queue_key, 1, job_id))
        else:
            await self._read_and_run(queue, job_id, raw)

    async def _remove(self, queue: Queue, entry: bytes) -> None:
        """Take an entry that is no job's id out of Redis, once there is a record of it."""
        if await self._recorded(entry.decode("utf-8", "replace"), queue.name, records.refused_entry(entry)):
            await self._store(lambda pipe: pipe.lrem(queue.intermediate_queue_key, 1, entry))

    async def _read_and_run(self, queue: Queue, job_id: str, raw: dict[bytes, bytes]) -> None:
        job = records.bare_job(job_id, queue)
        try:
            request = records.read_job(job, raw)
        except records.Refused as refused:
            await self._refuse(queue, job, refused)
            return
        running = records.Running.of(job, request, self._worker_name)
        self.running[running.execution.id] = running
        try:
            # The turn does not wait for RQ's books: they are written while it begins.
            started = asyncio.create_task(self._store(lambda pipe: self._started(pipe, running)))
            outcome = await self._run(running)
            await started
            if outcome is None:
                await self._store(lambda pipe: records.not_run(pipe, running))
                await self.put_back(queue, job_id)
                return
            faults.reach("before_finalise")
            replies = await self._store(lambda pipe: self._ended(pipe, running, *outcome), atomic=True)
        finally:
            del self.running[running.execution.id]
        if replies[-1] or job.has_rate_limit:
            await self._wake_others(queue, job)

    async def _run(self, running: records.Running) -> tuple[JobStatus, Any, str | None] | None:
        """How the job ended: its status, its value, and the reason if it failed; None if it did not begin."""
        request, control = running.request, running.control
        log.info("job_started", function=request.function, queue=request.queue)
        try:
            value = await self._runner.run(request, control)
        except StoreUnavailable as error:  # nothing was recorded: what the job brings is in the queue or nowhere
            log.warning("job_goes_back", error=error.description)
            return None
        except Exception:
            log.exception("job_failed", function=request.function)
            return JobStatus.FAILED, None, traceback.format_exc()
        log.info("job_ended", status=value.get("status"))
        stopped = control.stop_requested.is_set() and value.get("status") == "stopped"
        return JobStatus.STOPPED if stopped else JobStatus.FINISHED, value, None

    async def _refuse(self, queue: Queue, job: Job, refused: records.Refused) -> None:
        if not await self._recorded(job.id, job.origin, refused):
            await self.put_back(queue, job.id)
            return
        end = records.End(JobStatus.FAILED, self._worker_name, self._result_ttl, reason=str(refused.error))
        await self._store(lambda pipe: records.ended(pipe, job, end), atomic=True)

    async def _recorded(self, job_id: str, queue_name: str, refused: records.Refused) -> bool:
        """Tell the runner of a refusal; False, after a pause, if that is to be tried again later. What cannot be
        recorded for another reason than a store that is away never can: that is logged, and the job ends all the same.
        """
        log.warning("job_refused", error=refused.error.description)
        if isinstance(self._runner, RefusalRecorder):
            try:
                await self._runner.refuse(job_id, queue_name, refused.payload, refused.error)
            except StoreUnavailable as error:
                log.warning("job_goes_back", error=error.description)
                await self._pause(LAST_RETRY_SECONDS)
                return False
            except Exception:
                log.exception("refusal_not_recorded")
        return True

    def _started(self, pipe: Any, running: records.Running) -> None:
        records.started(pipe, running)
        if len(self.running) == 1:
            pipe.hset(self._worker_key, "state", WorkerStatus.BUSY)

    def _ended(self, pipe: Any, running: records.Running, status: JobStatus, value: Any, reason: str | None) -> None:
        end = records.End(status, self._worker_name, self._result_ttl, running.execution, value, reason)
        records.ended(pipe, running.job, end)
        records.count(pipe, self._worker_key, running.job, failed=status == JobStatus.FAILED)
        if len(self.running) == 1:
            pipe.hset(self._worker_key, "state", WorkerStatus.IDLE)
        pipe.exists(running.job.dependents_key)

    async def _wake_others(self, queue: Queue, job: Job) -> None:
        """Jobs that waited for this one, in RQ's own synchronous way."""
        await asyncio.to_thread(release_slot, job)
        await asyncio.to_thread(queue.enqueue_dependents, job)

    async def _store(self, build: Callable[[Any], object], *, atomic: bool = False) -> list[Any]:
        """Send a pipeline, again and again while Redis is away; the job itself is never repeated for it.

        Raises ``RedisError`` when Redis refuses it, or is still away when the worker has to leave.
        """
        delay = FIRST_RETRY_SECONDS
        while True:
            pipe = self._redis.pipeline(transaction=atomic)
            build(pipe)
            try:
                return list(await pipe.execute())
            except AWAY as error:
                if self._drained_at is not None and time.monotonic() - self._drained_at > LEAVE_SECONDS:
                    raise
                log.warning("redis_unavailable", error=str(error))
            await asyncio.sleep(delay)
            delay = min(delay * 2, LAST_RETRY_SECONDS)

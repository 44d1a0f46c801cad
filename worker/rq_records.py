"""What RQ keeps in Redis about a job, written as pipelines: RQ's inspection commands read exactly these keys.

Functions put commands on a redis-py pipeline and never touch the network, so that they serve RQ's synchronous clients
and our asyncio one alike. A job stays in RQ's intermediate list from the pop until its end is stored: what a dead
worker leaves there is put back, whatever state it was in.
"""

from __future__ import annotations

import base64
import json
import zlib
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from rq.executions import Execution, ExecutionRegistry
from rq.job import Job, JobStatus
from rq.queue import Queue
from rq.results import Result
from rq.serializers import JSONSerializer
from rq.utils import current_timestamp, now, utcformat

from shared.clean import clean, clean_text
from shared.errors import RequestInvalid, RequestTooLarge, TurnkeeperError
from worker.jobs import FUNCTIONS, JobControl, TurnJob

EXECUTION_SECONDS = 20  # a running job that was not heard of for so long is put back
FAILURE_SECONDS = 604_800  # a failed job is kept for a week, unless it says otherwise
MAX_DATA_BYTES = 64_000_000  # uncompressed arguments of a job, with the images of a question
UNREADABLE_BYTES = 3_000  # how much of data that cannot be read goes into the record of its refusal

PUT_BACK = """
if not redis.call('LPOS', KEYS[1], ARGV[1]) then return 0 end
local known = redis.call('EXISTS', KEYS[3])
if known == 1 then
    redis.call('HSET', KEYS[3], 'status', 'queued')
    redis.call('LPUSH', KEYS[2], ARGV[1])
end
redis.call('LREM', KEYS[1], 1, ARGV[1])
for _, member in ipairs(redis.call('ZRANGEBYSCORE', KEYS[4], '-inf', ARGV[2])) do
    if string.sub(member, 1, #ARGV[1] + 1) == ARGV[1] .. ':' then redis.call('ZREM', KEYS[4], member) end
end
return known
"""
"""From the intermediate list to the front of the queue, once even if several workers try; 1 if it was put back.
KEYS: intermediate list, queue, job, started jobs. ARGV: job id, now. A full Redis refuses what grows and allows what
shrinks, and nothing is undone: so what may be refused comes first."""


class Refused(Exception):
    """A job that does not run. ``payload`` is what could be read of it."""

    def __init__(self, error: TurnkeeperError, payload: dict[str, Any]) -> None:
        super().__init__(str(error))
        self.error = error
        self.payload = payload


@dataclass(eq=False)
class Running:
    """A job that this worker has taken. ``control`` is its turn's handle, ``execution`` RQ's record of this try."""

    job: Job
    request: TurnJob
    execution: Execution
    control: JobControl = field(default_factory=JobControl)

    @classmethod
    def of(cls, job: Job, request: TurnJob, worker_name: str) -> Running:
        return cls(job, request, Execution(uuid4().hex, job.id, job.connection, worker_name))


def id_of(entry: bytes) -> str | None:
    """The job's id that an entry of a queue is; None if it cannot be one."""
    try:
        return entry.decode()
    except UnicodeDecodeError:
        return None


def refused_entry(entry: bytes) -> Refused:
    """The refusal of an entry that is no job's id."""
    error = RequestInvalid("The queue held an entry that is not UTF-8 and so no job's id; it was removed.")
    return Refused(error, {"data_base64": base64.b64encode(entry[:UNREADABLE_BYTES]).decode()})


def bare_job(job_id: str, queue: Queue) -> Job:
    """A job of which only the id and the queue are known; the id is not checked, since it may be anything."""
    job = Job(connection=queue.connection, serializer=JSONSerializer)
    job._id = job_id
    job.origin = queue.name
    return job


def read_job(job: Job, raw: dict[bytes, bytes]) -> TurnJob:
    """Fill ``job`` from its hash and say what it asks for. Raises ``Refused`` on anything that is not ours."""
    queue = job.origin
    payload, (function, instance, args, kwargs) = _read_call(raw.get(b"data"))
    try:
        job.restore({**raw, b"data": b""})
    except Exception as error:  # the hash may hold anything, and RQ raises anything
        raise Refused(RequestInvalid(f"The job's fields cannot be read: {error!r}."), payload) from None
    job.origin = queue
    why = None
    if function not in FUNCTIONS or instance is not None:
        why = f"{function!r} is not one of {', '.join(FUNCTIONS)}"
    elif args:
        why = "its arguments are not given by keyword"
    elif job._success_callback_name or job._failure_callback_name or job._stopped_callback_name:
        why = "it has callbacks"
    elif raw.get(b"webhooks"):
        why = "it has webhooks"
    elif job.repeats_left:
        why = "it repeats"
    if why is not None:
        raise Refused(RequestInvalid(f"The job was refused, nothing was recorded or run: {why}."), payload)
    timeout = job.timeout if job.timeout and job.timeout > 0 and job.timeout != Queue.DEFAULT_TIMEOUT else None
    return TurnJob(FUNCTIONS[function], kwargs, job.id, queue, timeout)


def _read_call(data: bytes | None) -> tuple[dict[str, Any], tuple[Any, Any, list[Any], dict[str, Any]]]:
    """The call in a job's data, after the payload that a refusal would record."""
    unreadable = {"data_base64": base64.b64encode((data or b"")[:UNREADABLE_BYTES]).decode()}
    if not data:
        raise Refused(RequestInvalid("The job has no data."), unreadable)
    try:
        inflate = zlib.decompressobj()
        plain = inflate.decompress(data, MAX_DATA_BYTES)
    except zlib.error:  # old producers did not compress
        plain = data
    else:
        if inflate.unconsumed_tail:
            raise Refused(RequestTooLarge(f"The job's arguments exceed {MAX_DATA_BYTES:,} bytes."), unreadable)
    unreadable = {"data_base64": base64.b64encode(plain[:UNREADABLE_BYTES]).decode()}
    try:
        function, instance, args, kwargs = json.loads(plain)
        payload = clean({"function": function, "args": list(args), "kwargs": {**kwargs}})
    except (ValueError, TypeError, RecursionError):
        was = "was serialized with pickle" if plain[:1] == b"\x80" else "is not a call in JSON"
        error = RequestInvalid(f"The job {was}; it was not loaded.", hint="Enqueue with serializer=JSONSerializer.")
        raise Refused(error, unreadable) from None
    return payload, (function if isinstance(function, str) else None, instance, args, kwargs)


def started(pipe: Any, running: Running) -> None:
    """The job runs here."""
    job, execution = running.job, running.execution
    job.prepare_for_execution(execution.worker_name, pipeline=pipe)
    pipe.persist(job.key)
    execution.save(EXECUTION_SECONDS, pipeline=pipe)
    ExecutionRegistry(job.id, job.connection).add(execution, EXECUTION_SECONDS, pipeline=pipe)
    job.started_job_registry.add_execution(execution, pipe, ttl=EXECUTION_SECONDS)
    pipe.sadd(execution.worker_executions_key, execution.composite_key)
    pipe.expire(execution.worker_executions_key, EXECUTION_SECONDS + 60)


def not_run(pipe: Any, running: Running) -> None:
    """The job was taken here, and goes back to its queue as it came; ``PUT_BACK`` follows."""
    running.execution.delete(job=running.job, pipeline=pipe)


def alive(pipe: Any, running: Running) -> None:
    """The job still runs here."""
    running.execution.heartbeat(running.job.started_job_registry, EXECUTION_SECONDS, pipe)


@dataclass(frozen=True, slots=True)
class End:
    """How a job ended: ``finished`` with its value, ``stopped`` with it too, or ``failed`` for a reason.
    ``result_ttl``: the worker's, in seconds, for jobs without one of their own."""

    status: JobStatus
    worker_name: str
    result_ttl: int
    execution: Execution | None = None
    value: Any = None
    reason: str | None = None


def ended(pipe: Any, job: Job, end: End) -> None:
    """The job is over. When its reply is lost, the same end may be stored twice: the result has two equal entries."""
    job.ended_at = now()
    job._status = end.status
    if end.execution is not None:
        end.execution.delete(job=job, pipeline=pipe)
    pipe.lrem(Queue(job.origin, job.connection).intermediate_queue_key, 1, job.id)
    finished = end.status == JobStatus.FINISHED
    kept = job.failure_ttl if job.failure_ttl is not None else FAILURE_SECONDS
    ttl = job.get_result_ttl(end.result_ttl) if finished else kept
    if ttl == 0:
        pipe.delete(job.key)
        return
    pipe.hset(job.key, mapping={"status": end.status.value, "ended_at": utcformat(job.ended_at)})
    registry = job.finished_job_registry if finished else job.failed_job_registry
    pipe.zadd(registry.key, {job.id: current_timestamp() + ttl if ttl > 0 else "+inf"})
    if ttl > 0:
        pipe.expire(job.key, ttl)
    execution = end.execution
    Result.create(
        job,
        _RESULT_TYPES[end.status],
        ttl,
        return_value=end.value,
        exc_string=clean_text(end.reason) if end.reason is not None else None,
        worker_name=end.worker_name,
        pipeline=pipe,
        execution_id=execution.id if execution else None,
        execution_started_at=execution.created_at if execution else None,
        execution_ended_at=job.ended_at,
    )


_RESULT_TYPES = {
    JobStatus.FINISHED: Result.Type.SUCCESSFUL,
    JobStatus.STOPPED: Result.Type.STOPPED,
    JobStatus.FAILED: Result.Type.FAILED,
}


def count(pipe: Any, worker_key: str, job: Job, *, failed: bool) -> None:
    """The worker's own statistics."""
    pipe.hincrby(worker_key, "failed_job_count" if failed else "successful_job_count", 1)
    if job.started_at and job.ended_at:
        pipe.hincrbyfloat(worker_key, "total_working_time", (job.ended_at - job.started_at).total_seconds())


def sweep(pipe: Any, queue: Queue) -> None:
    """Ask what waits in the intermediate list and what runs (see ``abandoned``), and forget what has expired."""
    registry = queue.started_job_registry
    moment = current_timestamp()
    pipe.lrange(queue.intermediate_queue_key, 0, -1)
    pipe.zrangebyscore(registry.key, moment, "+inf")
    pipe.zremrangebyscore(queue.finished_job_registry.key, 0, moment)
    pipe.zremrangebyscore(queue.failed_job_registry.key, 0, moment)


def abandoned(replies: list[Any]) -> set[bytes]:
    """From the replies to ``sweep``: the entries that were taken and that no worker is heard to run."""
    taken, live = replies[0], replies[1]
    heard = {member.rpartition(b":")[0] for member in live}
    return set(taken) - heard


def put_back_keys(queue: Queue, job_id: str) -> list[str]:
    """The keys of ``PUT_BACK``."""
    return [queue.intermediate_queue_key, queue.key, Job.key_for(job_id), queue.started_job_registry.key]

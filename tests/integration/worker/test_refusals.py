"""Jobs that are not ours end as failed, with a reason, on record, and without anything of theirs being loaded."""

from __future__ import annotations

import base64
import json
import pickle
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from redis import Redis
from rq import Callback, Queue, Repeat
from rq.job import Job
from rq.webhook import Webhook

from tests.integration.worker.conftest import WorkerHere, until
from tests.integration.worker.fake import FakeRunner
from worker import rq_records

pytestmark = pytest.mark.usefixtures("no_exit_timer")

TURN = "worker.jobs.turn"


class Bomb:
    """Leaves a file behind when somebody unpickles it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.path,))


def with_data(queue: Queue, data: bytes) -> Job:
    job = queue.enqueue(TURN)
    queue.connection.hset(job.key, "data", data)
    return job


def with_field(queue: Queue, field: str, value: str) -> Job:
    job = queue.enqueue(TURN)
    queue.connection.hset(job.key, field, value)
    return job


CASES: dict[str, tuple[Callable[[Queue], Job], str]] = {
    "foreign function": (lambda q: q.enqueue("os.system", "true"), "'os.system' is not one of"),
    "near miss": (lambda q: q.enqueue("worker.jobs.asks", ask="?"), "'worker.jobs.asks' is not one of"),
    "function of another type": (lambda q: with_data(q, zlib.compress(b'[["x"], null, [], {}]')), "is not one of"),
    "method": (lambda q: with_data(q, zlib.compress(b'["worker.jobs.turn", "x", [], {}]')), "is not one of"),
    "positional arguments": (lambda q: q.enqueue(TURN, "c"), "not given by keyword"),
    "success callback": (lambda q: q.enqueue(TURN, on_success=Callback("os.abort")), "callbacks"),
    "failure callback": (lambda q: q.enqueue(TURN, on_failure=Callback("os.abort")), "callbacks"),
    "stopped callback": (lambda q: q.enqueue(TURN, on_stopped=Callback("os.abort")), "callbacks"),
    "webhook": (lambda q: q.enqueue(TURN, webhooks=[Webhook("http://127.0.0.1:9/", "finished")]), "webhooks"),
    "broken webhooks": (lambda q: with_field(q, "webhooks", "{"), "webhooks"),
    "repeat": (lambda q: q.enqueue(TURN, repeat=Repeat(times=3)), "repeats"),
    "no data": (lambda q: with_data(q, b""), "no data"),
    "garbage": (lambda q: with_data(q, b"\xff\xfe\x00garbage"), "not a call in JSON"),
    "JSON of another shape": (lambda q: with_data(q, b'{"a": 1}'), "not a call in JSON"),
    "keywords of another shape": (lambda q: with_data(q, b'["worker.jobs.turn", null, [], [1]]'), "not a call in JSON"),
    "deep JSON": (lambda q: with_data(q, zlib.compress(b"[" * 200_000)), "not a call in JSON"),
    "broken timeout": (lambda q: with_field(q, "timeout", "soon"), "cannot be read"),
    "broken time": (lambda q: with_field(q, "created_at", "yesterday"), "cannot be read"),
    "unknown status": (lambda q: with_field(q, "status", "dancing"), "cannot be read"),
}


@pytest.mark.parametrize("case", CASES)
async def test_refused(case: str, worker_here: WorkerHere, queue: Queue, redis_client: Redis) -> None:
    enqueue, reason = CASES[case]
    job, next_job = enqueue(queue), queue.enqueue(TURN)
    async with worker_here(burst=True):
        pass
    assert redis_client.hget(job.key, "status") == b"failed"
    result = job.latest_result()
    assert result is not None
    assert reason in str(result.exc_string)
    assert job.id in queue.failed_job_registry.get_job_ids(cleanup=False)
    assert queue.intermediate_queue.get_job_ids() == []
    [refusal] = [json.loads(r) for r in redis_client.lrange("refusals", 0, -1)]
    assert (refusal["job_id"], refusal["queue"], refusal["code"]) == (job.id, "interactive", "request_invalid")
    assert [json.loads(m)["job_id"] for m in redis_client.lrange("marks", 0, -1)] == [next_job.id]


async def test_a_pickle_is_not_loaded(worker_here: WorkerHere, redis_client: Redis, tmp_path: Path) -> None:
    path = tmp_path / "loaded"
    job = Queue("interactive", connection=redis_client).enqueue("worker.jobs.ask", ask=Bomb(path))
    assert pickle.loads(job.data)
    assert path.exists()  # the bomb works
    path.unlink()
    async with worker_here(burst=True):
        pass
    assert not path.exists()
    assert redis_client.hget(job.key, "status") == b"failed"
    [refusal] = [json.loads(r) for r in redis_client.lrange("refusals", 0, -1)]
    assert refusal["payload"].keys() == {"data_base64"}


async def test_the_refusal_keeps_what_could_be_read(worker_here: WorkerHere, queue: Queue, redis_client: Redis) -> None:
    queue.enqueue("worker.jobs.turn", "c", note="n\x00")
    async with worker_here(burst=True):
        pass
    [refusal] = [json.loads(r) for r in redis_client.lrange("refusals", 0, -1)]
    assert refusal["payload"] == {"function": "worker.jobs.turn", "args": ["c"], "kwargs": {"note": "n"}}


async def _fails_to_refuse(*_: Any) -> None:
    """Cannot record what is refused, for a reason that no retry heals."""
    raise RecursionError("too deep")


async def test_a_refusal_that_cannot_be_recorded_ends_the_job(
    worker_here: WorkerHere, queue: Queue, redis_client: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeRunner, "refuse", _fails_to_refuse)
    job = queue.enqueue("os.system", "true")
    async with worker_here(burst=True):
        pass
    assert redis_client.hget(job.key, "status") == b"failed"
    assert queue.intermediate_queue.get_job_ids() == []


@pytest.mark.parametrize("burst", [True, False])
async def test_an_entry_that_is_no_id_is_kept_as_a_letter(
    burst: bool, worker_here: WorkerHere, queue: Queue, redis_client: Redis
) -> None:
    redis_client.rpush(queue.key, b"\xff\xfe")
    queue.enqueue(TURN)
    async with worker_here(burst=burst):
        await until(lambda: redis_client.llen("refusals") and redis_client.llen("marks"))
        await until(lambda: not redis_client.exists(queue.key, queue.intermediate_queue_key))
    [refusal] = [json.loads(r) for r in redis_client.lrange("refusals", 0, -1)]
    assert base64.b64decode(refusal["payload"]["data_base64"]) == b"\xff\xfe"
    assert refusal["job_id"] == "\ufffd\ufffd"


async def test_what_cannot_be_recovered_keeps_nothing_else_from_it(
    worker_here: WorkerHere, queue: Queue, redis_client: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.rq_worker.BEAT_SECONDS", 0.05)
    left = [queue.enqueue(TURN) for _ in range(3)]
    redis_client.delete(queue.key, left[1].key)
    redis_client.set(left[1].key, "no job")
    redis_client.rpush(queue.intermediate_queue_key, left[0].id, b"\xff\xfe", left[1].id, left[2].id)
    async with worker_here():
        await until(lambda: redis_client.llen("refusals") and redis_client.llen("marks") == 2)
        await until(lambda: redis_client.llen(queue.intermediate_queue_key) == 1)
    done = {json.loads(mark)["job_id"] for mark in redis_client.lrange("marks", 0, -1)}
    assert done == {left[0].id, left[2].id}


async def test_data_that_swells_is_refused(
    worker_here: WorkerHere, queue: Queue, redis_client: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rq_records, "MAX_DATA_BYTES", 1_000)
    queue.enqueue(TURN, text="a" * 2_000)
    queue.enqueue(TURN, text="a" * 200)
    async with worker_here(burst=True):
        pass
    [refusal] = [json.loads(r) for r in redis_client.lrange("refusals", 0, -1)]
    assert refusal["code"] == "request_too_large"
    assert len(redis_client.lrange("marks", 0, -1)) == 1

"""A worker whose jobs do what their arguments say: for the tests of the RQ side, also in processes of their own.

``turn(conversation_id, sleep, mark, fail, hold)``: notes its start in the Redis list ``mark`` (with job id, time and
timeout), then sleeps, fails, or holds until it is stopped or drained.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from typing import Any

from redis.asyncio import Redis

from shared.errors import TurnkeeperError
from shared.queues import connect_async
from shared.settings import Settings
from worker.jobs import JobControl, TurnJob
from worker.rq_worker import ConversationWorker


class FakeRunner:
    """Keeps its marks in Redis, so that a test sees what a worker process did."""

    def __init__(self, settings: Settings) -> None:
        self._redis: Redis = connect_async(settings.effective_redis_url)
        self._draining = asyncio.Event()
        self._active = 0
        self._idle = asyncio.Event()
        self._idle.set()

    async def start(self, worker: str) -> None:
        await self._redis.ping()

    async def run(self, job: TurnJob, control: JobControl) -> dict[str, Any]:
        self._active += 1
        self._idle.clear()
        try:
            return await self._run(job, control)
        finally:
            self._active -= 1
            if not self._active:
                self._idle.set()

    async def _run(self, job: TurnJob, control: JobControl) -> dict[str, Any]:
        wish = job.arguments
        mark = {"job_id": job.job_id, "at": time.time(), "function": job.function, "queue": job.queue}
        mark |= {"timeout_seconds": job.timeout_seconds, "active": self._active, "arguments": wish}
        if "quiet" not in wish:
            await self._redis.rpush("marks", json.dumps(mark))
        if wish.get("fail"):
            raise RuntimeError("a bug in the runner")
        if wish.get("hold"):
            waits = [asyncio.create_task(e.wait()) for e in (control.stop_requested, self._draining)]
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for wait in waits:
                wait.cancel()
            return {"status": "stopped" if control.stop_requested.is_set() else "released"}
        await asyncio.sleep(wish.get("sleep", 0))
        return {"status": "completed", "conversation_id": wish.get("conversation_id")}

    async def refuse(self, job_id: str, queue: str, payload: dict[str, Any], error: TurnkeeperError) -> None:
        refusal = {"job_id": job_id, "queue": queue, "payload": payload, "code": error.code}
        await self._redis.rpush("refusals", json.dumps(refusal))

    async def drain(self) -> None:
        self._draining.set()
        await self._idle.wait()

    async def close(self) -> None:
        await self._redis.aclose()


class StubbornRunner(FakeRunner):
    """Does not let go of its turns when it is asked to drain."""

    async def drain(self) -> None:
        await self._idle.wait()


class FakeWorker(ConversationWorker):
    runner_factory = FakeRunner


class StubbornWorker(ConversationWorker):
    runner_factory = StubbornRunner


class ThreadedRunner(FakeRunner):
    """Leaves a thread behind that nobody can interrupt, as a tool may."""

    async def _run(self, job: TurnJob, control: JobControl) -> dict[str, Any]:
        threading.Thread(target=time.sleep, args=(60,)).start()
        return await super()._run(job, control)


class ThreadedWorker(ConversationWorker):
    runner_factory = ThreadedRunner
    exit_seconds = 0.5

"""RQ's worker, with many jobs on one asyncio loop: ``rq worker -w worker.rq_worker.ConversationWorker interactive``.

Each queue has a fetch loop and slots of its own: RQ pops several queues with BLPOP, which loses what was popped when
the process dies, and one queue with BLMOVE, which does not. Jobs are names on an allow-list that a ``JobRunner``
runs; nothing is imported for a job, and RQ's callbacks, webhooks and pickles are refused. RQ's work horses, death
penalties and registry cleaning are not used. Only the ``rq_*`` files know RQ's internals.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, ClassVar, Final

from redis.asyncio import Redis
from redis.exceptions import RedisError
from rq import Queue, worker_registration
from rq.serializers import JSONSerializer
from rq.utils import now, utcformat
from rq.worker import BaseWorker

from shared.errors import ConfigurationError
from shared.log import bind, configure_logging, exit_on_error, get_logger
from shared.queues import connect_async, redis_errors, url_of
from shared.redaction import Redactor
from shared.settings import Settings, load_settings
from worker import rq_records as records
from worker.jobs import JobRunner
from worker.rq_intake import AWAY, LEAVE_SECONDS, Intake, Limits

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # before anybody imports litellm: saves a download

DEFAULT_SLOTS: Final = 8  # of a queue that TURNKEEPER_SLOTS does not name
BEAT_SECONDS: Final = 5.0  # heartbeats, and the search for jobs that dead workers left
WORKER_SECONDS: Final = 60  # a worker that was not heard of for so long is gone from `rq info`
RECONNECT_SECONDS: Final = 1.0  # to the channel of RQ's commands
COMMAND_SECONDS: Final = 30.0  # one wait for a command
COMMAND_TIMEOUT_SECONDS: Final = 5  # of RQ's own synchronous connection, which blocks on nothing here
DOUBLE_SIGNAL_SECONDS: Final = 0.5  # Ctrl+C reaches a process of a worker pool twice
BOOKKEEPING_CONNECTIONS: Final = 8

log = get_logger(__name__)


class ConversationWorker(BaseWorker):
    """Many conversations in one process."""

    runner_factory: ClassVar[Callable[[Settings], JobRunner] | None] = None
    """Makes what runs the jobs; None: ``worker.bootstrap.build_runtime``."""
    exit_seconds: ClassVar[float] = LEAVE_SECONDS
    """After a signal: how long closing and threads may hold up the exit, once the turns are gone."""

    def __init__(self, queues: Any, *args: Any, settings: Settings | None = None, **kwargs: Any) -> None:
        """As RQ's; its serializer is always JSON. ``settings``: from the environment when None."""
        given = {**kwargs, "serializer": JSONSerializer, "job_class": None}
        if not args and given.get("name") is None:
            given["name"] = _telling_name()
        super().__init__(queues, *args, **given)
        for queue in self.queues:
            queue.serializer = JSONSerializer
        self.worker_ttl = WORKER_SECONDS
        self._settings = settings
        self._intake: Intake | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._signalled_at: float | None = None
        self._suspects: set[tuple[str, bytes]] = set()

    @property
    def connection_timeout(self) -> int:
        return COMMAND_TIMEOUT_SECONDS

    def work(
        self,
        burst: bool = False,
        logging_level: str | None = None,
        date_format: str = "",
        log_format: str = "",
        max_jobs: int | None = None,
        max_idle_time: int | None = None,
        with_scheduler: bool = False,
        dequeue_strategy: Any = None,
    ) -> bool:
        """Work until a signal, or until the queues are empty (``burst``). True if any job was taken.

        ``date_format``, ``log_format`` and ``dequeue_strategy`` mean nothing here: logs are JSON, and every queue has
        its own slots. Ends the process with one line on stderr and status 2 (settings) or 3 (a service is away).
        """
        with exit_on_error():
            settings = self._settings or load_settings(redis_url=url_of(self.connection))
            redactor = Redactor.from_settings(settings)
            configure_logging((logging_level or settings.log_level).lower(), redactor=redactor)
            if with_scheduler:
                raise ConfigurationError("This worker does not run RQ's scheduler.", hint="Leave out --with-scheduler.")
            slots = {name: settings.slots.get(name, DEFAULT_SLOTS) for name in self.queue_names()}
            limits = Limits(slots, burst, max_jobs, max_idle_time)
            self._install_signal_handlers()
            with asyncio.Runner(loop_factory=_loop_factory()) as loop:
                return loop.run(self.run(self._new_runner(settings), limits)) > 0

    async def run(self, runner: JobRunner, limits: Limits) -> int:
        """The worker's life on the running loop; how many jobs were taken."""
        self._loop = asyncio.get_running_loop()
        bind(worker=self.name)
        url = url_of(self.connection)
        redis = connect_async(url, max_connections=BOOKKEEPING_CONNECTIONS)
        pops = connect_async(url, max_connections=len(self.queues))
        self._intake = intake = Intake(
            self.name, self.key, self.queues, runner, redis, pops, limits, self.default_result_ttl
        )
        try:
            await runner.start(self.name)
            self._register()
            if self._signalled_at is None:
                log.info("worker_ready", slots=limits.slots, pid=os.getpid())
                await self._serve(intake, redis)
        finally:
            if self._signalled_at is not None:
                _leave_within(self.exit_seconds)
            await runner.close()
            await self._unregister(redis)
            await redis.aclose()
            await pops.aclose()
            self._loop = None
        log.info("worker_ended", jobs=intake.taken)
        return intake.taken

    async def _serve(self, intake: Intake, redis: Redis) -> None:
        background = [asyncio.create_task(self._beat(intake, redis)), asyncio.create_task(self._listen(intake, redis))]
        try:
            await intake.work()
        finally:
            for task in background:
                task.cancel()
            await asyncio.gather(*background, return_exceptions=True)

    def _new_runner(self, settings: Settings) -> JobRunner:
        factory = type(self).runner_factory
        if factory is None:
            from worker.bootstrap import build_runtime

            factory = build_runtime
        return factory(settings)

    # What RQ knows of the worker

    def _register(self) -> None:
        with redis_errors("registering the worker"):
            try:
                super().register_birth()  # type: ignore[no-untyped-call]
            except ValueError as error:  # RQ's way to say that the name is taken
                raise ConfigurationError(f"{error}.", hint="Choose another --name.") from None

    async def _unregister(self, redis: Redis) -> None:
        pipe: Any = redis.pipeline()
        worker_registration.unregister(self, pipe)
        pipe.hset(self.key, "death", utcformat(now())).expire(self.key, WORKER_SECONDS).delete(self.executions_key)
        try:
            await pipe.execute()
        except RedisError as error:
            log.warning("worker_not_unregistered", error=str(error))

    async def _beat(self, intake: Intake, redis: Redis) -> None:
        """Heartbeats of the worker and of its jobs, and the search for jobs that dead workers left."""
        while True:
            try:
                pipe: Any = redis.pipeline(transaction=False)
                self.heartbeat(WORKER_SECONDS, pipeline=pipe)
                self.set_state(intake.state, pipeline=pipe)
                worker_registration.register(self, pipe)  # a Redis that evicts may forget this and keep the rest
                for running in intake.running.values():
                    records.alive(pipe, running)
                replies = await pipe.execute()
                if replies[0] == 1:  # the hash was gone, so Redis has lost us
                    await redis.hset(self.key, mapping=self.serialize())
                await self._recover(intake, redis)
            except RedisError as error:
                log.warning("redis_unavailable", error=str(error))
            except Exception:
                log.exception("upkeep_failed")
            await asyncio.sleep(BEAT_SECONDS)

    async def _recover(self, intake: Intake, redis: Redis) -> None:
        """Put back jobs that were taken and that nobody runs, when they were so at the previous look too: between a
        pop and the first word of its worker, a job looks the same."""
        seen: set[tuple[str, bytes]] = set()
        here = {running.job.id.encode() for running in intake.running.values()}
        for queue in self.queues:
            pipe: Any = redis.pipeline(transaction=False)
            records.sweep(pipe, queue)
            for entry in records.abandoned(await pipe.execute()) - here:
                if (queue.name, entry) not in self._suspects:
                    seen.add((queue.name, entry))
                else:
                    await self._recover_one(intake, queue, entry)
        self._suspects = seen

    async def _recover_one(self, intake: Intake, queue: Queue, entry: bytes) -> None:
        """One that cannot be put back must not keep the others from it; if Redis is away, none can."""
        try:
            if await intake.recover(queue, entry):
                log.warning("job_recovered", job=records.id_of(entry), queue=queue.name)
        except AWAY:
            raise
        except Exception:
            log.exception("job_not_recovered", job=repr(entry), queue=queue.name)

    # RQ's commands

    async def _listen(self, intake: Intake, redis: Redis) -> None:
        while True:
            try:
                async with redis.pubsub(ignore_subscribe_messages=True) as channel:
                    await channel.subscribe(self.pubsub_channel_name)
                    while True:
                        message = await channel.get_message(timeout=COMMAND_SECONDS)
                        if message is not None:
                            self._obey(intake, message["data"])
            except (RedisError, OSError) as error:
                log.warning("redis_unavailable", error=str(error))
            await asyncio.sleep(RECONNECT_SECONDS)

    def _obey(self, intake: Intake, data: bytes) -> None:
        """``stop-job`` and ``stop-execution`` reach that turn only; ``shutdown`` is a first SIGTERM. A work horse to
        kill there is none."""
        try:
            command = dict(json.loads(data))
        except (ValueError, TypeError):
            command = {}
        kind, job_id, execution_id = command.get("command"), command.get("job_id"), command.get("execution_id")
        if kind == "shutdown":
            self._leave(intake)
        elif kind in ("stop-job", "stop-execution"):
            found = [
                r for r in intake.running.values()
                if r.job.id == job_id and (kind == "stop-job" or r.execution.id == execution_id)
            ]  # fmt: skip
            for running in found:
                running.control.stop_requested.set()
            log.info("stop_command", job=job_id, running=len(found))
        else:
            log.warning("command_ignored", command=kind)

    # Signals

    def _install_signal_handlers(self) -> None:
        """Plain handlers rather than the loop's: the second signal must end a process whose loop hangs."""
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, self.request_stop)
            signal.signal(signal.SIGTERM, self.request_stop)

    def request_stop(self, signum: int, frame: FrameType | None) -> None:
        """The first signal drains, the second ends the process at once."""
        moment = time.monotonic()
        if self._signalled_at is None:
            self._signalled_at = moment
            if self._loop is not None and self._intake is not None:
                self._loop.call_soon_threadsafe(self._leave, self._intake)
        elif signum != signal.SIGINT or moment - self._signalled_at > DOUBLE_SIGNAL_SECONDS:
            os.write(2, b"turnkeeper: second signal, leaving at once; what ran is taken over when its lease ends\n")
            os._exit(128 + signum)

    def _leave(self, intake: Intake) -> None:
        log.info("worker_draining", worker=self.name, running=len(intake.running))
        self._signalled_at = self._signalled_at or time.monotonic()
        intake.closing.set()
        intake.draining.set()


def _leave_within(seconds: float) -> None:
    """A tool's thread cannot be interrupted and would hold up the exit of a process that was told to leave."""
    timer = threading.Timer(seconds, os._exit, args=(0,))
    timer.daemon = True
    timer.start()


def _telling_name() -> str:
    """Host and process, and a random end: a restarted container has both again while Redis still knows the old."""
    return f"{socket.gethostname()}.{os.getpid()}.{secrets.token_hex(2)}"


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:  # no wheel for this platform
        return None
    return uvloop.new_event_loop

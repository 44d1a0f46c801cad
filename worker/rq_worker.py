"""RQ's worker, with many jobs on one asyncio loop: ``rq worker -w worker.rq_worker.ConversationWorker interactive``.

Each queue has a fetch loop and slots of its own: RQ pops several queues with BLPOP, which loses what was popped when
the process dies, and one queue with BLMOVE, which does not. Jobs are names on an allow-list that a ``JobRunner``
runs; nothing is imported for a job, and RQ's callbacks, webhooks and pickles are refused. RQ's own work horses, death
penalties and registry cleaning are not used. This file and ``rq_records`` are the only ones that know RQ's internals.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any, ClassVar, Literal

from redis import Redis
from redis.asyncio import Redis as AsyncRedis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ExecAbortError, OutOfMemoryError, ReadOnlyError, RedisError, TryAgainError
from redis.exceptions import TimeoutError as RedisTimeoutError
from rq import worker_registration
from rq.job import Job, JobStatus
from rq.queue import Queue
from rq.rate_limit import release_slot
from rq.serializers import JSONSerializer
from rq.suspension import WORKERS_SUSPENDED
from rq.utils import as_text, current_timestamp, now, utcformat
from rq.worker import BaseWorker
from rq.worker.base import WorkerStatus

from shared.errors import ConfigurationError, StoreError
from shared.log import bind, configure_logging, get_logger
from shared.queues import connect_async, redis_errors, url_of
from shared.settings import Settings, load_settings
from worker import rq_records as records
from worker.jobs import JobRunner, RefusalRecorder

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # before anybody imports litellm: saves a download

DEFAULT_SLOTS = 8  # of a queue that TURNKEEPER_SLOTS does not name
POP_SECONDS = 1.0  # one blocking pop; how long leaving may wait for it
BEAT_SECONDS = 5.0  # heartbeats, and the search for jobs that dead workers left
WORKER_SECONDS = 60  # a worker that was not heard of for so long is gone from `rq info`
RETRY_SECONDS = (0.05, 2.0)  # first and longest wait between tries when Redis is away
LEAVE_SECONDS = 10.0  # bookkeeping after the last turn has ended
DOUBLE_SIGNAL_SECONDS = 0.5  # Ctrl+C reaches a process of a worker pool twice
CONNECTIONS = 8

_AWAY = (RedisConnectionError, RedisTimeoutError, ReadOnlyError, OutOfMemoryError, ExecAbortError, TryAgainError)

log = get_logger(__name__)


class ConversationWorker(BaseWorker):
    """Many conversations in one process."""

    runner_factory: ClassVar[Callable[[Settings], JobRunner] | None] = None
    """Makes what runs the jobs; None: ``worker.bootstrap.build_runtime``."""

    def __init__(self, queues: Any, *args: Any, settings: Settings | None = None, **kwargs: Any) -> None:
        kwargs["serializer"] = JSONSerializer
        kwargs.pop("job_class", None)
        super().__init__(queues, *args, **kwargs)
        for queue in self.queues:
            queue.serializer = JSONSerializer
        self.worker_ttl = WORKER_SECONDS
        self._settings = settings
        self._running: dict[str, records.Running] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._suspects: set[tuple[str, str]] = set()
        self._taken = 0
        self._max_jobs: int | None = None
        self._suspended = False
        self._signalled_at: float | None = None

    @property
    def connection_timeout(self) -> int:
        """Seconds of a command on RQ's own synchronous connection, which does not block here."""
        return 5

    # Entry points

    def work(  # noqa: PLR0913 - RQ's signature
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
        """Work until a signal, or until the queues are empty (``burst``); True if any job was taken.

        ``date_format``, ``log_format`` and ``dequeue_strategy`` have no meaning here: every queue has its own slots.
        Raises ``SystemExit`` with 2 for wrong settings and 3 for an unreachable service, after one line on stderr.
        """
        with exit_on_error():
            settings = self._ready_settings(logging_level)
            if with_scheduler:
                raise ConfigurationError(
                    "This worker does not run RQ's scheduler.", hint="Run `rq worker --with-scheduler` of RQ beside it."
                )
            self._max_jobs = max_jobs
            runner = self._make_runner(settings)
            restore = self._take_signals()
            try:
                with asyncio.Runner(loop_factory=_loop_factory()) as loop_runner:
                    loop_runner.run(self._main(runner, settings, burst, max_idle_time))
            finally:
                restore()
        return self._taken > 0

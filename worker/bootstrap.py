"""Bootstrap: from settings to a running worker's parts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from typing import Any

import structlog

from publisher import RedisLive
from shared import faults
from shared.errors import TurnkeeperError
from shared.queues import Ringer
from shared.settings import Settings
from shared.store import open_store
from worker.agent.base import ChatModel, Toolbox
from worker.agent.tools import load_toolbox
from worker.driver import JobDriver
from worker.health import HealthServer
from worker.isolation import Isolation
from worker.jobs import JobControl, TurnJob
from worker.leases import LeaseKeeper
from worker.reaper import Reaper
from worker.turn import Parts, TurnRunner

log = structlog.get_logger(__name__)


class Runtime:
    """Everything a worker process runs turns with; the RQ worker calls its methods."""

    def __init__(
        self,
        settings: Settings,
        *,
        model: ChatModel | None = None,
        toolbox: Toolbox | None = None,
        once_command: Sequence[str] | None = None,
    ) -> None:
        """``model`` and ``toolbox`` stand in for litellm and for the configured tools, where given; ``once_command``
        then is what runs a single turn with the same ones (``worker.isolation``)."""
        self._once_command = once_command
        self.settings = settings
        self._model = model
        self._toolbox = toolbox
        self._opened = AsyncExitStack()
        self._ready = False
        self._turns: TurnRunner | None = None
        self._driver: JobDriver | None = None
        self._isolation: Isolation | None = None

    async def start(self, worker: str, *, alone: bool = False) -> None:
        """Import litellm, connect, load tools, start renewing and reaping; turns then carry the name ``worker``.
        ``alone``: for a single turn, so nothing is isolated further and nothing is reaped.
        Raises ``ConfigurationError`` and ``StoreUnavailable``."""
        settings, opened = self.settings, self._opened
        faults.arm(faults.plan_of(settings.fault))
        if settings.health_port is not None and not alone:
            health = HealthServer(lambda: self._ready)
            await health.start(settings.health_host, settings.health_port)
            opened.push_async_callback(health.close)
        model = self._model or _litellm_model(settings)
        opened.push_async_callback(model.close)
        store = open_store(settings)
        opened.push_async_callback(store.close)
        await store.open()
        ringer = Ringer(settings.effective_redis_url)
        opened.push_async_callback(ringer.close)
        live = RedisLive.from_settings(settings)
        opened.push_async_callback(live.close)
        toolbox = self._toolbox or await load_toolbox(settings).open()
        opened.push_async_callback(toolbox.close)
        keeper = LeaseKeeper(lambda: open_store(settings), settings.lease_seconds)
        keeper.start()
        opened.push_async_callback(keeper.close)
        self._turns = TurnRunner(Parts(settings, store, model, toolbox, keeper, live, worker))
        self._isolation = Isolation(settings, self._turns, self._once_command)
        self._driver = JobDriver(settings, store, self._turns, ringer, None if alone else self._isolation)
        if not alone:
            reaping = asyncio.create_task(Reaper(store, ringer, settings.reap_seconds).run())
            opened.push_async_callback(_cancelled, reaping)
        self._ready = True

    async def drain(self) -> None:
        """Hand back every running turn; returns when none runs."""
        self._ready = False
        if self._turns is not None and self._isolation is not None:
            await asyncio.gather(self._turns.leave(), self._isolation.leave())

    async def close(self) -> None:
        """Close what ``start`` opened, in reverse order, also when it failed half-way."""
        self._ready = False
        await self._opened.aclose()

    async def run(self, job: TurnJob, control: JobControl) -> dict[str, Any]:
        return await self._drive.run(job, control)

    async def run_once(
        self, conversation_id: str, claim_id: str | None, on_claimed: Callable[[], None]
    ) -> dict[str, Any]:
        """Run the lowest unfinished turn of a conversation; how it ended, empty if there was nothing to run."""
        report = await self._drive.run_once(conversation_id, claim_id, on_claimed)
        return report.as_dict() if report is not None else {}

    async def refuse(self, job_id: str, queue: str, payload: dict[str, Any], error: TurnkeeperError) -> None:
        await self._drive.refuse(job_id, queue, payload, error)

    @property
    def _drive(self) -> JobDriver:
        if self._driver is None:
            raise RuntimeError("the runtime has not been started")
        return self._driver


async def _cancelled(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def _litellm_model(settings: Settings) -> ChatModel:
    from worker.agent.model import LitellmModel  # takes seconds: only where it is used

    return LitellmModel(settings)


def build_runtime(settings: Settings) -> Runtime:
    """The parts of one worker process, not started yet."""
    return Runtime(settings)

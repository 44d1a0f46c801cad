"""Bootstrap: from settings to a running worker's parts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
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
        self._parts: Parts | None = None
        self._turns: TurnRunner | None = None
        self._driver: JobDriver | None = None
        self._isolation: Isolation | None = None
        self._ringer: Ringer | None = None
        self._reaping: asyncio.Task[None] | None = None

    async def start(self, worker: str, *, alone: bool = False) -> None:
        """Import litellm, connect, load tools, start renewing and reaping; turns then carry the name ``worker``.
        ``alone``: for a single turn, so nothing is isolated further and nothing is reaped.
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
        self._isolation = Isolation(settings, self._turns, self._once_command)
        self._driver = JobDriver(settings, store, self._turns, self._ringer, None if alone else self._isolation)
        keeper.start()
        if not alone:
            self._reaping = asyncio.create_task(Reaper(store, self._ringer, settings.reap_seconds).run())

    async def drain(self) -> None:
        """Hand back every running turn; returns when none runs."""
        if self._turns is not None and self._isolation is not None:
            await asyncio.gather(self._turns.leave(), self._isolation.leave())

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


def _litellm_model(settings: Settings) -> ChatModel:
    from worker.agent.model import LitellmModel  # takes seconds: only where it is used

    return LitellmModel(settings)


def build_runtime(settings: Settings) -> Runtime:
    """The parts of one worker process, not started yet."""
    return Runtime(settings)

"""The demo's stage: a home of its own with a real Valkey, a real SQLite file, and a real worker process."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from scripts.demo.cluster import FOLDER_VARIABLE, Cluster
from scripts.demo.script import PAUSE_VARIABLE
from scripts.demo.tether import Tether
from scripts.workers import alive_workers, tell_to_leave
from shared.embedded import EmbeddedRedis
from shared.errors import ConfigurationError
from shared.queues import connect_async
from shared.settings import Settings, load_settings
from shared.store import open_store

SCRIPTED_MODEL = "scripted/scripts.demo.script"
TOOLS = Path(__file__).parent / "tools.yaml"

_WORD_SECONDS = 0.035  # pause between words, about as fast as one reads
_STOP_SECONDS = 30.0  # for the worker to leave
_LOOK_SECONDS = 0.1
NOT_OURS = ("REDIS_URL", "DATABASE_URL", "SUPABASE_URL", "SUPABASE_KEY")  # the demo touches nobody's services


@dataclass(frozen=True, slots=True)
class Worker:
    """The running worker and the file that it logs to."""

    process: asyncio.subprocess.Process
    log: Path

    async def gone(self) -> NoReturn:
        """Wait for its end, which is an error as long as the demo plays."""
        status = await self.process.wait()
        raise ConfigurationError(f"The demo's worker ended with status {status}.", hint=f"See {self.log}.")


@dataclass(frozen=True, slots=True)
class Stage:
    """Where the demo plays. ``unusable_model``: the one that the user has set up, but without its key."""

    settings: Settings
    cluster: Cluster
    worker: Worker
    unusable_model: str = ""

    @property
    def scripted(self) -> bool:
        return self.settings.model == SCRIPTED_MODEL


@asynccontextmanager
async def open_stage(*, fast: bool) -> AsyncIterator[Stage]:
    """Set everything up, and take it down again; the home with its events stays.

    Raises ``ConfigurationError`` when something else runs in the demo's home, and what the embedded Redis raises.
    """
    own = load_settings()
    home = own.home / "demo"
    home.mkdir(parents=True, exist_ok=True)
    model = own.model if own.model and not _lacks_key(own.model) else SCRIPTED_MODEL
    settings = load_settings(
        home=home, redis_url=None, database_url=None, supabase_url=None, supabase_key=None, model=model, tools=TOOLS
    )
    async with AsyncExitStack() as stack:
        tether = stack.enter_context(Tether())
        redis = await _own_redis(settings)
        stack.callback(redis.stop)
        if redis.pid is not None:
            tether.tie(redis.pid)
        cluster = Cluster.fresh(home / "incident")
        await _stop_leftovers(settings)
        worker = await stack.enter_async_context(_worker(settings, cluster, fast=fast))
        tether.tie(worker.process.pid)
        yield Stage(settings, cluster, worker, own.model if own.model != model else "")


def _lacks_key(model: str) -> bool:
    from worker.agent.model import missing_variables

    return any(name.endswith("_API_KEY") for name in missing_variables(model))


async def _own_redis(settings: Settings) -> EmbeddedRedis:
    """A server that this demo started. One that a killed demo left behind is ended first, with its worker."""
    redis = EmbeddedRedis.start(settings)
    if redis.owner and redis.pid is None:
        try:
            await _end_workers(redis.url)
        finally:
            redis.stop()
        redis = EmbeddedRedis.start(settings)
    if not redis.owner:
        raise ConfigurationError(f"Another demo, or a worker, is running in {settings.home}.", hint="Wait for its end.")
    return redis


async def _end_workers(url: str) -> None:
    """Tell the workers of this server to leave, and wait until they have."""
    client = connect_async(url)
    try:
        for worker in await alive_workers(client):
            await tell_to_leave(client, worker)
        async with asyncio.timeout(_STOP_SECONDS):
            while True:
                if not any(worker.runs_here() for worker in await alive_workers(client)):
                    return
                await asyncio.sleep(_LOOK_SECONDS)
    except TimeoutError:
        raise ConfigurationError("The worker of an earlier demo does not end.", hint="End its process.") from None
    finally:
        await client.aclose()


async def _stop_leftovers(settings: Settings) -> None:
    """What an interrupted demo left unfinished must not go on in this one's incident."""
    store = open_store(settings)
    try:
        await store.open()
        for status in ("pending", "running", "awaiting_approval"):
            for conversation in await store.conversations(status=status, limit=1_000):
                await store.stop(conversation["conversation_id"])
    finally:
        await store.close()


@asynccontextmanager
async def _worker(settings: Settings, cluster: Cluster, *, fast: bool) -> AsyncIterator[Worker]:
    """The product's worker, as a process of its own; its log goes to a file."""
    environment = {name: value for name, value in os.environ.items() if name not in NOT_OURS} | {
        "TURNKEEPER_HOME": str(settings.home),
        "TURNKEEPER_MODEL": settings.model,
        "TURNKEEPER_TOOLS": str(TOOLS),
        FOLDER_VARIABLE: str(cluster.folder),
        PAUSE_VARIABLE: "0" if fast else str(_WORD_SECONDS),
    }
    log = settings.home / "worker.log"
    with log.open("wb") as sink:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "worker",
            env=environment,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=sink,
            stderr=sink,
            start_new_session=True,  # Ctrl+C reaches the demo, which then ends the worker in order
        )
    try:
        yield Worker(process, log)
    finally:
        if process.returncode is None:
            process.terminate()
        try:
            await asyncio.wait_for(process.wait(), _STOP_SECONDS)
        except TimeoutError:
            process.kill()
            await process.wait()

"""Bringing it up: everything on one machine, a worker, the schema, a benchmark."""

from __future__ import annotations

import asyncio
import importlib
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scripts.demo.cluster import FOLDER_VARIABLE, Cluster
from scripts.demo.stage import SCRIPTED_MODEL, TOOLS
from scripts.desk import guarded
from scripts.program import program
from scripts.render import Output
from scripts.workers import WorkerInfo, alive_workers
from shared.errors import ConfigurationError, QueueUnavailable
from shared.queues import connect_async
from shared.settings import Settings, load_settings
from shared.store import open_store

_BENCHES = Path(__file__).parent / "bench"


def up(*, demo: bool = False) -> int:
    """The embedded Redis and the schema as far as no URL is set, then a worker in this process until a signal; none
    where one runs already. ``demo``: a worker with the demo's model, tools and incident."""
    return guarded(lambda: _up(demo=demo))


def _up(*, demo: bool) -> int:
    from worker.main import run_worker as work

    settings, out = load_settings(), Output()
    if settings.store_kind != "supabase":  # it runs no SQL; opening it says what is missing
        migrate_store(settings)
    running = asyncio.run(_running_worker(settings))
    if running is not None and demo:
        raise ConfigurationError(
            f"A worker runs already ({running.name}), with its own model and tools; none was started.",
            hint="Stop it, or give the demo a TURNKEEPER_HOME of its own.",
        )
    if demo:
        settings = _with_the_demo(settings)
    _tell_where(settings, running, out)
    if running is not None:
        return 0
    if demo:
        out.note("Demo    a scripted model and an incident to play with; no API key is used, nothing real is touched")
    question = "checkout-api in production keeps returning 500. Why?" if demo else "What runs on this machine?"
    out.note(f"Ask     {program()} ask {question!r}   (in another terminal; Ctrl+C here stops)", "bold")
    _leave_with_the_terminal()
    work(settings)
    return 0


def _with_the_demo(settings: Settings) -> Settings:
    """The demo's model, tools and a fresh incident; in the environment, so that the worker's processes see them too."""
    cluster = Cluster.fresh(settings.home / "incident")
    os.environ.update(
        {"TURNKEEPER_MODEL": SCRIPTED_MODEL, "TURNKEEPER_TOOLS": str(TOOLS), FOLDER_VARIABLE: str(cluster.folder)}
    )
    return load_settings()


def _leave_with_the_terminal() -> None:
    """A closed terminal ends it in order, as SIGTERM does, and with it the embedded Redis. Until the worker has taken
    over SIGTERM, there is nothing to hand back."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup
        signal.signal(signal.SIGHUP, lambda *_: signal.raise_signal(signal.SIGTERM))


async def _running_worker(settings: Settings) -> WorkerInfo | None:
    """One that serves all our queues, if there is any. A Redis that is away is for the worker to start or to name."""
    client = connect_async(settings.effective_redis_url)
    try:
        workers = await alive_workers(client)
    except QueueUnavailable:
        return None
    finally:
        await client.aclose()
    return next((w for w in workers if not w.gone and all(w.serves(queue) for queue in settings.slots)), None)


def _tell_where(settings: Settings, running: WorkerInfo | None, out: Output) -> None:
    redis = f"embedded, {settings.effective_redis_url}" if settings.embedded_redis else "REDIS_URL"
    store = {"sqlite": str(settings.sqlite_path), "postgres": "DATABASE_URL", "supabase": "SUPABASE_URL"}
    out.note(f"Redis   {redis}")
    out.note(f"Store   {settings.store_kind}, {store[settings.store_kind]}")
    if running:
        out.note(f"Worker  {running.name} runs already, so none was started. One more: {program()} worker")
        return
    out.note(f"Model   {settings.model or 'none: set TURNKEEPER_MODEL, or ask with --model'}")
    out.note(f"Tools   {settings.tools or 'built in: shell and read_file; set TURNKEEPER_TOOLS for others'}")
    out.note(f"Queues  {', '.join(f'{queue}={slots}' for queue, slots in settings.slots.items())}")


def run_worker(queues: Sequence[str], *, burst: bool) -> int:
    """One worker process; ``queues``: ``NAME=SLOTS`` each, none for ``TURNKEEPER_SLOTS``."""
    from worker.main import main

    arguments = [part for queue in queues for part in ("--queue", queue)]
    return main([*arguments, *(["--burst"] if burst else [])])


def migrate(as_json: bool) -> int:
    """Apply what the schema lacks, and say which version it has."""

    def run() -> int:
        row = migrate_store(load_settings())
        applied = f"applied {', '.join(row['applied'])}" if row["applied"] else "nothing was missing"
        Output(as_json).row(row, text=f"Schema version {row['schema_version']} ({row['kind']}): {applied}.")
        return 0

    return guarded(run, as_json)


def migrate_store(settings: Settings) -> dict[str, Any]:
    """Apply missing migrations; the store's health, with the names of what was ``applied``."""
    from shared.store.migrate import migrate as apply_missing

    applied = apply_missing(settings)
    return {**asyncio.run(_health(settings)), "applied": applied}


async def _health(settings: Settings) -> dict[str, Any]:
    store = open_store(settings)
    try:
        await store.open()
        return await store.health()
    finally:
        await store.close()


def run_bench(name: str, arguments: Sequence[str]) -> int:
    """Run ``main(arguments)`` of a module of ``scripts/bench``."""
    return guarded(lambda: _bench(name, arguments))


def _bench(name: str, arguments: Sequence[str]) -> int:
    names = sorted(path.stem for path in _BENCHES.glob("[a-z]*.py"))
    if name not in names:
        raise ConfigurationError(f"There is no benchmark {name!r}.", hint=f"There are: {', '.join(names) or 'none'}.")
    status: int | None = importlib.import_module(f"scripts.bench.{name}").main(list(arguments))
    return status or 0

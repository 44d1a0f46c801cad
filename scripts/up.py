"""Bringing it up: everything on one machine, a worker, the schema, a benchmark."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scripts.desk import guarded
from scripts.render import Output
from shared.errors import ConfigurationError
from shared.settings import Settings, load_settings
from shared.store import open_store

_BENCHES = Path(__file__).parent / "bench"


def up() -> int:
    """The embedded Redis and the schema as far as no URL is set, then a worker in this process until a signal."""
    return guarded(lambda: _up(load_settings()))


def _up(settings: Settings) -> int:
    from worker.main import run_worker as work

    if settings.store_kind != "supabase":  # it runs no SQL; opening it says what is missing
        migrate_store(settings)
    _tell_where(settings)
    work(settings)
    return 0


def _tell_where(settings: Settings) -> None:
    out = Output()
    redis = f"embedded, {settings.socket_path}" if settings.embedded_redis else "REDIS_URL"
    store = {"sqlite": str(settings.sqlite_path), "postgres": "DATABASE_URL", "supabase": "SUPABASE_URL"}
    out.note(f"Redis   {redis}")
    out.note(f"Store   {settings.store_kind}, {store[settings.store_kind]}")
    out.note(f"Model   {settings.model or 'none: set TURNKEEPER_MODEL, or ask with --model'}")
    out.note(f"Tools   {settings.tools or 'built in: shell and read_file; set TURNKEEPER_TOOLS for others'}")
    out.note(f"Queues  {', '.join(f'{queue}={slots}' for queue, slots in settings.slots.items())}")
    out.note("Ask     turnkeeper ask 'What runs on this machine?'   (in another terminal; Ctrl+C here stops)", "bold")


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

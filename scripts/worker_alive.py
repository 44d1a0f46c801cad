"""``turnkeeper worker-alive``: has a worker of this host sent a heartbeat lately? It imports next to nothing, since a
container asks every few seconds. A worker sends heartbeats from its event loop, so one that hangs sends none.
"""

from __future__ import annotations

import asyncio
import socket

from scripts.desk import FAILED, guarded
from scripts.render import Output
from scripts.workers import alive_workers
from shared.queues import connect_async
from shared.settings import Settings, load_settings


def worker_alive(within_seconds: float, as_json: bool = False) -> int:
    """Exit status 0 if one is, 1 if not; 3 when Redis does not answer, which says nothing about the worker."""
    return guarded(lambda: asyncio.run(_look(load_settings(), within_seconds, Output(as_json))), as_json)


async def _look(settings: Settings, within_seconds: float, out: Output) -> int:
    client = connect_async(settings.effective_redis_url)
    try:
        workers = await alive_workers(client)
    finally:
        await client.aclose()
    host = socket.gethostname()
    ages = {worker.name: worker.silent_seconds for worker in workers if worker.hostname == host}
    name = min(ages, key=ages.__getitem__, default=None)
    alive = name is not None and ages[name] <= within_seconds
    age = round(ages[name], 1) if name is not None else None
    heard = f"worker {name} was heard {age:.1f} s ago" if name is not None else "no worker is registered"
    row = {"alive": alive, "worker": name, "heartbeat_age_seconds": age, "hostname": host}
    out.row(row, text=f"{'alive' if alive else 'not alive'}: on {host} {heard}")
    return 0 if alive else FAILED

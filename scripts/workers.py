"""The workers that are alive, as they register themselves in Redis (RQ's own keys, read only)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from shared.queues import RQ_PREFIX, redis_errors

if TYPE_CHECKING:
    from redis.asyncio import Redis

_FIELDS = ("queues", "hostname", "pid", "state", "last_heartbeat")


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """One registered worker. ``last_heartbeat``: RFC 3339, by the worker's clock."""

    name: str
    queues: tuple[str, ...]
    hostname: str
    pid: str
    state: str
    last_heartbeat: str

    def serves(self, queue: str) -> bool:
        return queue in self.queues


async def alive_workers(client: Redis) -> list[WorkerInfo]:
    """Workers whose registration has not expired. Raises ``QueueUnavailable``."""
    with redis_errors("looking for workers"):
        keys = sorted(_text(key) for key in await client.smembers(f"{RQ_PREFIX}:workers"))
        pipe = client.pipeline(transaction=False)
        for key in keys:
            pipe.hmget(key, _FIELDS)
        rows = await pipe.execute() if keys else []
    found = []
    for key, row in zip(keys, rows, strict=True):
        queues, hostname, pid, state, beat = (_text(value) for value in row)
        if queues:  # the hash of a dead worker has expired
            name = key.partition(":worker:")[2]
            found.append(WorkerInfo(name, tuple(queues.split(",")), hostname, pid, state, beat))
    return found


def _text(value: bytes | str | None) -> str:
    return value.decode() if isinstance(value, bytes) else value or ""

"""The workers that are alive, as they register themselves in Redis (RQ's own keys, read only)."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from shared.queues import RQ_PREFIX, redis_errors

if TYPE_CHECKING:
    from redis.asyncio import Redis

_SILENT_SECONDS = 20.0  # four heartbeats
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

    def runs_here(self) -> bool:
        """It is a process of this machine that has not ended; a killed one stays registered for a minute."""
        if self.hostname != socket.gethostname():
            return False
        try:
            os.kill(int(self.pid), 0)
        except ProcessLookupError:
            return False
        except PermissionError:  # another user's
            return True
        return True

    @property
    def silent_seconds(self) -> float:
        """Since its last heartbeat, by the clock of this host."""
        return (datetime.now(UTC) - datetime.fromisoformat(self.last_heartbeat)).total_seconds()

    @property
    def gone(self) -> bool:
        """It is still registered, and will never work again as far as that can be seen from here."""
        here = self.hostname == socket.gethostname()
        return not self.runs_here() if here else self.silent_seconds > _SILENT_SECONDS

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


async def tell_to_leave(client: Redis, worker: WorkerInfo) -> None:
    """RQ's ``shutdown`` command, which a worker takes as its first SIGTERM."""
    with redis_errors("telling a worker to leave"):
        await client.publish(f"{RQ_PREFIX}:pubsub:{worker.name}", '{"command": "shutdown"}')


def _text(value: bytes | str | None) -> str:
    return value.decode() if isinstance(value, bytes) else value or ""

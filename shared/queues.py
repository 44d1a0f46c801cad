"""The doorbell: ringing for a conversation on its queue, and what else Turnkeeper keeps in Redis.

A ring is an RQ job ``worker.jobs.turn(conversation_id=…)``. It is written here as the hash that RQ documents, not
through RQ's ``Queue``: all rings of all queues then travel in one pipeline on an asyncio client (RQ is synchronous,
two trips a job), and a client needs no RQ.
"""

from __future__ import annotations

import asyncio
import os
import uuid
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlencode

import orjson

from shared.errors import ConfigurationError, QueueUnavailable

if TYPE_CHECKING:  # redis costs 0.3 s to import, pydantic 0.2 s: a command that only prints help pays for neither
    from redis import Redis
    from redis.asyncio import Redis as AsyncRedis

    from shared.store.base import Ring

RQ_PREFIX = os.environ.get("RQ_KEY_PREFIX", "rq")  # RQ's own setting, read the same way
EPOCH_KEY = "turnkeeper:epoch"
"""Set once; when it is missing, Redis was emptied, and everything that is due is rung again."""

TURN_FUNCTION = "worker.jobs.turn"
RING_RESULT_SECONDS = 60
RING_FAILURE_SECONDS = 3_600

CONNECT_SECONDS = 2.0
SOCKET_SECONDS = 5.0
HEALTH_CHECK_SECONDS = 30
POOL_SECONDS = 20.0
MAX_CONNECTIONS = 16  # of one client
RETRIES = 2  # of a command on a fresh connection, 50 ms and 100 ms later
RING_SECONDS = 5.0  # for ringing, tries included: somebody waits, and what was recorded is rung later anyway


def live_key(conversation_id: str) -> str:
    """The Redis Stream from which live readers of a conversation are fed."""
    return f"turnkeeper:live:{conversation_id}"


def queue_key(queue: str) -> str:
    """RQ's list of waiting job ids."""
    return f"{RQ_PREFIX}:queue:{queue}"


def connect(url: str) -> Redis:
    """A synchronous client. Raises ``ConfigurationError`` for a URL that is none; connects on first use."""
    from redis import Redis

    return Redis.from_url(_checked(url), **_options(url))


def connect_async(url: str, *, max_connections: int = MAX_CONNECTIONS) -> AsyncRedis:
    """An asyncio client, to be closed with ``aclose()``; callers beyond ``max_connections`` wait for a free one.
    Raises ``ConfigurationError``."""
    from shared.redis_connection import async_client

    return async_client(_checked(url), max_connections=max_connections, pool_seconds=POOL_SECONDS, **_options(url))


def url_of(client: Redis) -> str:
    """The URL of a client that somebody else made, credentials included; ``url_of(connect(url))`` reaches ``url``.
    Raises ``ConfigurationError`` for a client that no URL describes (Sentinel, cluster)."""
    from redis.connection import Connection, SSLConnection, UnixDomainSocketConnection

    pool = client.connection_pool
    known: dict[str, Any] = dict(pool.connection_kwargs)
    schemes = {Connection: "redis", SSLConnection: "rediss", UnixDomainSocketConnection: "unix"}
    scheme = schemes.get(pool.connection_class)
    if scheme is None:
        raise ConfigurationError(
            f"A Redis connection of class {pool.connection_class.__name__} is not supported.", hint="Give a URL."
        )
    user, password = known.get("username"), known.get("password")
    login = f"{quote(user or '', safe='')}:{quote(password, safe='')}@" if password else ""
    options = {k: str(v) for k, v in known.items() if k.startswith("ssl_") and isinstance(v, str | bool)}
    options["db"] = str(known.get("db") or 0)
    if scheme == "unix":
        where = quote(str(known["path"]))
    else:
        host = str(known.get("host", "localhost"))
        where = f"{f'[{host}]' if ':' in host else host}:{known.get('port', 6379)}"
    return f"{scheme}://{login}{where}?{urlencode(options)}"


@contextmanager
def redis_errors(doing: str) -> Iterator[None]:
    """Turns what the client raises into ``QueueUnavailable``; ``doing`` says what did not happen."""
    from redis.exceptions import RedisError

    try:
        yield
    except (RedisError, OSError) as error:
        raise QueueUnavailable(
            f"Redis did not answer while {doing}: {error}.", hint="Check REDIS_URL and that the server runs."
        ) from error


async def queue_depths(client: AsyncRedis, queues: Iterable[str]) -> dict[str, int]:
    """How many jobs wait on each queue. Raises ``QueueUnavailable``."""
    names = list(queues)
    if not names:
        return {}
    with redis_errors("counting the waiting jobs"):
        pipe = client.pipeline(transaction=False)
        for name in names:
            pipe.llen(queue_key(name))
        return dict(zip(names, await pipe.execute(), strict=True))


class Ringer:
    """Rings for conversations. Give it a client to share, or a URL for one of its own."""

    def __init__(self, redis: AsyncRedis | str) -> None:
        self._owned = isinstance(redis, str)
        self._redis: AsyncRedis = connect_async(redis) if isinstance(redis, str) else redis

    async def ring(self, rings: Iterable[Ring]) -> None:
        """Enqueue one job per ring, all in one round trip. Raises ``QueueUnavailable``; ringing again is harmless."""
        jobs = [(ring.queue, str(uuid.uuid4()), ring_job(ring)) for ring in rings]
        if not jobs:
            return
        with redis_errors("ringing for a conversation; what was recorded is rung later"):
            pipe = self._redis.pipeline(transaction=False)
            pipe.sadd(f"{RQ_PREFIX}:queues", *{queue_key(queue) for queue, _, _ in jobs})
            for queue, job_id, job in jobs:
                pipe.hset(f"{RQ_PREFIX}:job:{job_id}", mapping=job)
                pipe.rpush(queue_key(queue), job_id)
            async with asyncio.timeout(RING_SECONDS):
                await pipe.execute()

    async def epoch_missing(self) -> bool:
        """Redis was emptied since ``set_epoch``. Raises ``QueueUnavailable``."""
        with redis_errors("looking for the epoch key"):
            return await self._redis.get(EPOCH_KEY) is None

    async def set_epoch(self) -> None:
        """The store knows that everything has to be rung for again. Raises ``QueueUnavailable``."""
        with redis_errors("setting the epoch key"):
            await self._redis.set(EPOCH_KEY, datetime.now(UTC).isoformat(), nx=True)

    async def close(self) -> None:
        if self._owned:
            await self._redis.aclose()


def ring_job(ring: Ring) -> dict[Any, Any]:
    """The hash of an RQ job that names a conversation: JSON serializer, no timeout, gone soon after its end."""
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    call: list[Any] = [TURN_FUNCTION, None, [], {"conversation_id": ring.conversation_id}]
    return {
        "status": "queued",
        "created_at": now,
        "enqueued_at": now,
        "origin": ring.queue,
        "data": zlib.compress(orjson.dumps(call)),
        "description": f"{TURN_FUNCTION}(conversation_id={ring.conversation_id!r})",
        "timeout": -1,
        "result_ttl": RING_RESULT_SECONDS,
        "failure_ttl": RING_FAILURE_SECONDS,
    }


def _checked(url: str) -> str:
    if not url.startswith(("redis://", "rediss://", "unix://")):
        raise ConfigurationError("REDIS_URL must begin with redis://, rediss:// or unix://.")
    return url


def _options(url: str) -> dict[str, Any]:
    from redis.backoff import ExponentialBackoff
    from redis.retry import Retry

    options: dict[str, Any] = {
        "socket_connect_timeout": CONNECT_SECONDS,
        "socket_timeout": SOCKET_SECONDS,
        "health_check_interval": HEALTH_CHECK_SECONDS,
        "retry": Retry(ExponentialBackoff(cap=0.2, base=0.05), RETRIES),
    }
    if not url.startswith("unix://"):
        options["socket_keepalive"] = True
    return options

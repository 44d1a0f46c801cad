"""What a container's health check asks: of no worker, of a live one, of one that has gone silent, of no Redis."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import pytest
from redis import Redis
from rq import Queue, Worker

from scripts.worker_alive import worker_alive
from tests.support.valkey import Valkey

HOUR = timedelta(hours=1)


@pytest.fixture
def registered(redis_client: Redis, redis_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Worker]:
    """A worker as RQ registers it, on this host."""
    monkeypatch.setenv("REDIS_URL", redis_url)
    worker = Worker([Queue("interactive", connection=redis_client)], connection=redis_client)
    worker.register_birth()  # type: ignore[no-untyped-call]
    yield worker
    worker.register_death()  # type: ignore[no-untyped-call]


def last_heard(worker: Worker, ago: timedelta) -> None:
    moment = datetime.now(UTC) - ago
    worker.connection.hset(worker.key, "last_heartbeat", moment.strftime("%Y-%m-%dT%H:%M:%S.%fZ"))


def test_alive(registered: Worker, capsys: pytest.CaptureFixture[str]) -> None:
    assert worker_alive(30, as_json=True) == 0
    row = json.loads(capsys.readouterr().out)
    assert (row["alive"], row["worker"], row["hostname"]) == (True, registered.name, socket.gethostname())
    assert 0 <= row["heartbeat_age_seconds"] < 30


def test_silent(registered: Worker, capsys: pytest.CaptureFixture[str]) -> None:
    last_heard(registered, HOUR)
    assert worker_alive(30) == 1
    assert "3600" in capsys.readouterr().out
    assert worker_alive(4_000) == 0


def test_one_of_several_is_enough(registered: Worker, redis_client: Redis) -> None:
    """A worker that died in this container does not hide the one that was started after it."""
    last_heard(registered, HOUR)
    successor = Worker([Queue("interactive", connection=redis_client)], connection=redis_client)
    successor.register_birth()  # type: ignore[no-untyped-call]
    assert worker_alive(30) == 0


def test_a_worker_elsewhere_does_not_count(registered: Worker) -> None:
    registered.connection.hset(registered.key, "hostname", "another-host")
    assert worker_alive(30) == 1


def test_nobody(redis_url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("REDIS_URL", redis_url)
    assert worker_alive(30) == 1
    assert "no worker is registered" in capsys.readouterr().out


def test_without_redis(valkey: Valkey, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REDIS_URL", valkey.url)
    valkey.stop()
    assert worker_alive(30) == 3

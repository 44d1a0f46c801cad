"""The embedded Redis: one a home, shared by processes, and nothing is lost when it stops."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from redis import Redis

from shared.embedded import EmbeddedRedis
from shared.errors import ConfigurationError, QueueUnavailable
from shared.queues import connect
from shared.settings import Settings
from tests.integration.worker.conftest import ROOT

OTHER = """
import sys
from shared.embedded import EmbeddedRedis
from shared.settings import Settings
redis = EmbeddedRedis.start(Settings(home=sys.argv[1]))
print(redis.owner, flush=True)
sys.stdin.readline()
redis.stop()
print("stopped", flush=True)
"""


@pytest.fixture
def settings() -> Iterator[Settings]:
    with tempfile.TemporaryDirectory(prefix="tk-") as home:
        settings = Settings(home=Path(home) / "deep" / "home")
        yield settings
        if settings.socket_path.exists():
            EmbeddedRedis.start(settings).stop()


def other_process(settings: Settings) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", OTHER, str(settings.home)]
    return subprocess.Popen(command, cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def end(process: subprocess.Popen[str]) -> str:
    out, _ = process.communicate("\n", timeout=20)
    return out.strip()


def test_what_was_written_is_there_after_a_restart(settings: Settings) -> None:
    redis = EmbeddedRedis.start(settings)
    assert redis.url == settings.effective_redis_url
    with connect(redis.url) as client:
        client.rpush("queue", "job")
        config = client.config_get("appendonly", "port", "maxmemory-policy")
    assert config == {"appendonly": "yes", "port": "0", "maxmemory-policy": "noeviction"}
    redis.stop()
    redis.stop()
    assert not settings.socket_path.exists()
    again = EmbeddedRedis.start(settings)
    with connect(again.url) as client:
        assert client.lrange("queue", 0, -1) == [b"job"]
    again.stop()


def test_several_processes_share_one_and_the_last_one_stops_it(settings: Settings) -> None:
    owner = other_process(settings)
    assert line(owner) == "True"
    guest, here = other_process(settings), EmbeddedRedis.start(settings)
    assert (line(guest), here.owner) == ("False", False)
    with connect(here.url) as client:
        pid = client.info("server")["process_id"]
        assert end(guest) == "stopped"
        assert end(owner) == "stopped"
        assert client.info("server")["process_id"] == pid
        heir = other_process(settings)
        assert line(heir) == "True"  # a server without an owner is adopted
        here.stop()
        assert client.info("server")["process_id"] == pid
    assert end(heir) == "stopped"
    assert not settings.socket_path.exists()


def test_a_guest_of_a_killed_owner_stops_the_server(settings: Settings) -> None:
    owner = other_process(settings)
    assert line(owner) == "True"
    here = EmbeddedRedis.start(settings)
    owner.kill()
    owner.communicate()
    with connect(here.url) as client:
        assert client.ping()
    here.stop()
    assert not settings.socket_path.exists()


def test_two_that_start_at_once_agree(settings: Settings) -> None:
    processes = [other_process(settings) for _ in range(2)]
    assert sorted(line(p) for p in processes) == ["False", "True"]
    assert [end(p) for p in processes] == ["stopped", "stopped"]


def test_a_killed_owner_leaves_a_server_that_is_adopted(settings: Settings) -> None:
    owner = other_process(settings)
    assert line(owner) == "True"
    with connect(settings.effective_redis_url) as client:
        client.set("key", "kept")
        pid = client.info("server")["process_id"]
        owner.kill()
        owner.communicate()
        heir = EmbeddedRedis.start(settings)
        assert heir.owner
        assert client.info("server")["process_id"] == pid
    heir.stop()
    again = EmbeddedRedis.start(settings)
    with connect(again.url) as client:
        assert client.get("key") == b"kept"
    again.stop()


def test_interrupting_the_terminal_does_not_reach_the_server(settings: Settings) -> None:
    redis = EmbeddedRedis.start(settings)
    with Redis.from_url(redis.url) as client:
        assert os.getpgid(client.info("server")["process_id"]) != os.getpgid(0)
        assert os.getsid(client.info("server")["process_id"]) != os.getsid(0)
    redis.stop()


def test_a_server_that_was_killed_is_replaced(settings: Settings) -> None:
    redis = EmbeddedRedis.start(settings)
    with Redis.from_url(redis.url) as client:
        client.set("key", "kept")
        os.kill(client.info("server")["process_id"], signal.SIGKILL)
    redis.stop()
    again = EmbeddedRedis.start(settings)
    with connect(again.url) as client:
        assert client.get("key") == b"kept"
    again.stop()


def test_a_broken_append_only_file_is_named(settings: Settings) -> None:
    folder = settings.home / "valkey" / "appendonlydir"
    folder.mkdir(parents=True)
    (folder / "appendonly.aof.manifest").write_text("nonsense\n")
    with pytest.raises(QueueUnavailable, match=r"valkey\.log"):
        EmbeddedRedis.start(settings)


def test_a_platform_without_it_is_told_what_to_do(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.system", lambda: "Windows")
    with pytest.raises(ConfigurationError, match="Set REDIS_URL"):
        EmbeddedRedis.start(settings)

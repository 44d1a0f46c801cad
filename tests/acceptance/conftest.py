"""The product as its users run it: worker processes, the command line, a strict model server, each store in turn."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from redis import Redis

from scripts.bench.kit.llm_server import MODEL, LlmServer
from scripts.bench.kit.parts import WorkerProcess
from shared.settings import Settings

REPOSITORY = Path(__file__).parents[2]
SECONDS = 60.0  # for one command; far more than it takes
_OURS = ("TURNKEEPER_", "REDIS_", "DATABASE_", "SUPABASE_")

TOOLS = """
python: ["tests.acceptance.gadgets"]
shell: {enabled: true}
"""


@dataclass
class Installation:
    """One Redis, one store, one model server, and the workers that a test starts."""

    settings: Settings
    redis_url: str
    llm: LlmServer
    folder: Path
    workers: list[WorkerProcess] = field(default_factory=list)

    @property
    def journal(self) -> Path:
        """What ``gadgets.restart`` really did: a line a time."""
        return self.folder / "journal"

    @property
    def effects(self) -> list[str]:
        return self.journal.read_text().splitlines() if self.journal.exists() else []

    def environment(self, **more: str) -> dict[str, str]:
        settings = self.settings
        environment = {k: v for k, v in os.environ.items() if not k.startswith(_OURS)}
        environment |= {
            "PYTHONPATH": str(REPOSITORY),
            "TURNKEEPER_HOME": str(settings.home),
            "REDIS_URL": self.redis_url,
            "TURNKEEPER_MODEL": f"openai/{MODEL}",
            "TURNKEEPER_TOOLS": str(self.folder / "tools.yaml"),
            "GADGETS_JOURNAL": str(self.journal),
            "COLUMNS": "200",
            **self.llm.environment,
        }
        if settings.database_url is not None:
            environment["DATABASE_URL"] = settings.database_url.get_secret_value()
        if settings.supabase_url is not None and settings.supabase_key is not None:
            environment["SUPABASE_URL"] = settings.supabase_url
            environment["SUPABASE_KEY"] = settings.supabase_key.get_secret_value()
        return environment | more

    def start_worker(self, **environment: str) -> WorkerProcess:
        worker = WorkerProcess("worker", self.environment(**environment))
        self.workers.append(worker)
        return worker

    def turnkeeper(self, *arguments: str, status: int = 0) -> list[dict[str, Any]]:
        """The JSON lines of a command, which must end with ``status``."""
        done = subprocess.run(
            [sys.executable, "-m", "scripts.cli", *arguments, "--json"],
            env=self.environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            cwd=self.folder,
        )
        assert done.returncode == status, f"{arguments}: {done.returncode}\n{done.stdout}{done.stderr}"
        return [json.loads(line) for line in done.stdout.splitlines()]

    def redis(self) -> Redis:
        return Redis.from_url(self.redis_url)

    def stop(self) -> None:
        for worker in self.workers:
            worker.stop()


@pytest.fixture(params=["sqlite", "postgres", "supabase"])
def installation(
    request: pytest.FixtureRequest, redis_url: str, llm: LlmServer, tmp_path: Path
) -> Iterator[Installation]:
    """Everything but a worker, on each store in turn."""
    if request.param == "sqlite":
        settings = Settings(home=tmp_path / "home")
    else:
        settings = request.getfixturevalue(f"{request.param}_settings")
    (tmp_path / "tools.yaml").write_text(TOOLS)
    made = Installation(settings, redis_url, llm, tmp_path)
    yield made
    made.stop()

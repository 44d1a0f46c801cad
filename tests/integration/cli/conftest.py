"""A home of its own for each test, and one ``turnkeeper up`` for those that need a worker: all real, all embedded."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from scripts.demo.cluster import FOLDER_VARIABLE, Cluster
from scripts.demo.stage import SCRIPTED_MODEL, TOOLS

REPOSITORY = Path(__file__).parents[3]
COMMAND = [sys.executable, "-m", "scripts.cli"]
_OURS = ("TURNKEEPER_", "REDIS_", "DATABASE_", "SUPABASE_")
Done = subprocess.CompletedProcess[str]
SECONDS = 60.0  # for a command; far more than it takes


@dataclass(frozen=True, slots=True)
class CommandLine:
    """Runs ``turnkeeper`` in a process of its own, in ``home``."""

    home: Path
    variables: dict[str, str]

    def environment(self, **more: str | None) -> dict[str, str]:
        """The command's environment; None takes a variable out."""
        own = {
            k: v for k, v in os.environ.items() if not k.startswith(("TURNKEEPER_", "REDIS_", "DATABASE_", "SUPABASE_"))
        }
        given = {
            **own,
            "PYTHONPATH": str(REPOSITORY),
            "TURNKEEPER_HOME": str(self.home),
            "COLUMNS": "200",
            **self.variables,
            **more,
        }
        return {name: value for name, value in given.items() if value is not None}

    def run(
        self, *arguments: str, input: str | None = None, **environment: str | None
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*COMMAND, *arguments],
            env=self.environment(**environment),
            input=input,
            stdin=subprocess.DEVNULL if input is None else None,
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )

    def start(self, *arguments: str, **environment: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*COMMAND, *arguments],
            env=self.environment(**environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def text(self, *arguments: str, status: int = 0) -> str:
        """What the command prints; it must end with ``status``."""
        done = self.run(*arguments)
        assert done.returncode == status, done.stdout + done.stderr
        return done.stdout

    def rows(self, *arguments: str, status: int = 0) -> list[dict[str, Any]]:
        """The JSON lines of the command; every line of its output must be one."""
        return [json.loads(line) for line in self.text(*arguments, "--json", status=status).splitlines()]


@pytest.fixture
def alone() -> Iterator[CommandLine]:
    """A home in which nothing runs."""
    with tempfile.TemporaryDirectory(prefix="tk-cli-") as folder:
        yield CommandLine(Path(folder), {})


@dataclass(frozen=True, slots=True)
class Up:
    """A running ``turnkeeper up --demo``."""

    cli: CommandLine
    process: subprocess.Popen[bytes]
    cluster: Cluster
    log: Path


@pytest.fixture(scope="module")
def up() -> Iterator[Up]:
    with tempfile.TemporaryDirectory(prefix="tk-cli-") as folder:
        cluster = Cluster(Path(folder) / "home" / "incident")
        variables = {
            "TURNKEEPER_MODEL": SCRIPTED_MODEL,
            "TURNKEEPER_TOOLS": str(TOOLS),
            FOLDER_VARIABLE: str(cluster.folder),
        }
        cli = CommandLine(Path(folder) / "home", variables)
        log = Path(folder) / "up.log"
        with log.open("wb") as sink:
            process = subprocess.Popen(
                [*COMMAND, "up", "--demo"],
                env=cli.environment(**dict.fromkeys(variables)),  # it sets them itself
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=sink,
            )
        try:
            yield Up(cli, process, cluster, log)
        finally:
            process.send_signal(signal.SIGTERM)
            status = process.wait(SECONDS)
        assert status == 0, log.read_text()


@pytest.fixture
def cli(up: Up) -> CommandLine:
    """A home in which a worker runs."""
    assert up.process.poll() is None, up.log.read_text()
    return up.cli

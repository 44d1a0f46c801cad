"""``Dockerfile`` and ``docker-compose.yml`` do what ``docs/production.md`` says; no engine is needed to see it."""

from __future__ import annotations

import fnmatch
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from shared.settings import Settings

ROOT = Path(__file__).parents[2]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
ONE_SHOT = {"migrate"}
LONG_RUNNING = sorted(SERVICES.keys() - ONE_SHOT)
WORKERS = ("worker-1", "worker-2")
INSTRUCTIONS = [
    line.split(None, 1)
    for line in (ROOT / "Dockerfile").read_text().replace("\\\n", " ").splitlines()
    if line and not line.startswith("#")
]
PINNED = re.compile(r"[\w./-]+:(v?\d+\.\d+\.\d+[\w.-]*|v\d+\.\d+)")
SECRET = re.compile(r"PASSWORD|SECRET|AUTH|_KEY$|_URL$|_URI$")
LEAVING_SECONDS = 30  # of a worker after its hard deadline: leases, bookkeeping, threads


def argument(instruction: str) -> list[str]:
    return [rest for name, rest in INSTRUCTIONS if name == instruction]


def seconds(duration: str) -> int:
    assert duration.endswith("s")
    return int(duration[:-1])


def test_the_services() -> None:
    assert {*LONG_RUNNING} == {"redis", "postgres", "postgrest", *WORKERS}


@pytest.mark.parametrize("name", LONG_RUNNING)
def test_a_long_running_service_is_watched_and_restarted(name: str) -> None:
    service = SERVICES[name]
    assert service["restart"] == "unless-stopped"
    assert service["healthcheck"]["test"][0] == "CMD"
    assert service["healthcheck"].keys() >= {"interval", "timeout", "retries"}


@pytest.mark.parametrize("name", sorted(SERVICES))
def test_tags_are_pinned(name: str) -> None:
    assert PINNED.fullmatch(SERVICES[name]["image"])


@pytest.mark.parametrize("name", sorted(SERVICES))
def test_no_secret_has_a_value_or_a_default(name: str) -> None:
    """It comes from the environment, and one that is needed stops ``docker compose`` when it is missing."""
    environment = SERVICES[name]["environment"]
    assert isinstance(environment, dict)
    for variable, value in environment.items():
        if value is not None and SECRET.search(variable):
            variables = re.findall(r"\$\{([^}]*)\}", value)
            assert variables
            assert all(re.fullmatch(r"\w+:\?set \w+", given) for given in variables), (variable, value)
    assert ":-" not in json.dumps(SERVICES[name])


def test_data_is_in_named_volumes() -> None:
    for name, folder in (("postgres", "/var/lib/postgresql/data"), ("redis", "/data")):
        assert f"{name}:{folder}" in SERVICES[name]["volumes"]
        assert name in COMPOSE["volumes"]


def test_nothing_is_published_beyond_this_machine() -> None:
    ports = [port for service in SERVICES.values() for port in service.get("ports", ())]
    assert all(port.startswith("127.0.0.1:") for port in ports)


def test_redis_keeps_what_it_is_given() -> None:
    command = SERVICES["redis"]["command"]
    given = dict(zip(command[1::2], command[2::2], strict=True))
    assert given["--appendonly"] == "yes"
    assert given["--maxmemory-policy"] == "noeviction"


@pytest.mark.parametrize("name", WORKERS)
def test_a_worker_has_the_time_to_leave(name: str) -> None:
    hard = Settings.model_fields["hard_deadline_seconds"].default
    assert seconds(SERVICES[name]["stop_grace_period"]) >= hard + LEAVING_SECONDS


@pytest.mark.parametrize("name", [*WORKERS, "migrate"])
def test_who_waits_for_whom(name: str) -> None:
    waits = {other: how["condition"] for other, how in SERVICES[name]["depends_on"].items()}
    migrated = {"migrate": "service_completed_successfully", "redis": "service_healthy"}
    assert waits == ({"postgres": "service_healthy"} if name == "migrate" else migrated)


def test_commands_exist() -> None:
    """What containers run is on the command line, as it is written there."""
    health = json.loads(argument("HEALTHCHECK")[0].split(" CMD ", 1)[1])
    commands = [health, json.loads(argument("CMD")[0]), SERVICES["migrate"]["command"]]
    assert [SERVICES[name]["healthcheck"]["test"][1:] for name in WORKERS] == [health, health]
    for program, command, *rest in commands:
        assert (program, rest) == ("turnkeeper", [])
        shown = subprocess.run([sys.executable, "-m", "scripts.cli", command, "--help"], cwd=ROOT, capture_output=True)
        assert shown.returncode == 0, command


def test_the_health_check_is_light() -> None:
    """It runs every few seconds beside a worker that uses one core."""
    code = "import sys, scripts.worker_alive; sys.exit('litellm' in sys.modules or 'rq' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_the_image() -> None:
    assert all(PINNED.fullmatch(source.split()[0]) for source in argument("FROM"))
    assert len({source.split()[0] for source in argument("FROM")}) == 1, "the environment moves between the stages"
    user = argument("USER")[-1]
    assert int(user) >= 1_000
    names = [name for name, _ in INSTRUCTIONS]
    assert names.index("USER") < names.index("CMD")
    assert "--require-hashes" in " ".join(argument("RUN"))


def test_the_image_gets_the_code_and_nothing_else() -> None:
    """Everything that is copied passes ``.dockerignore``, which lets through only what is named."""
    rules = (ROOT / ".dockerignore").read_text().split()
    assert rules[0] == "*"
    let_through = {rule[1:] for rule in rules if rule.startswith("!")}
    copied = {part for copy in argument("COPY") if "--from" not in copy for part in copy.split()[:-1]}
    assert copied == let_through
    assert all((ROOT / name).exists() for name in copied)
    assert any(fnmatch.fnmatch("worker/__pycache__", rule) for rule in rules[1:])


def test_the_version_is_that_of_the_package() -> None:
    version = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert version is not None
    assert {SERVICES[name]["image"] for name in (*WORKERS, "migrate")} == {f"turnkeeper:{version[1]}"}

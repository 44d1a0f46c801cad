"""The demo from end to end: the product's own worker, Valkey and SQLite, in a home of the test's own."""

from __future__ import annotations

import json
import re
import shlex

from shared.settings import load_settings
from shared.store.sqlite import SqliteStore
from tests.integration.cli.conftest import CommandLine


async def test_the_incident_is_played_to_its_end(alone: CommandLine) -> None:
    text = _play(alone)
    story = [
        "scripted one, registered with litellm",
        '→ get_pods(namespace="production", app="checkout-api")',
        "approval required",
        'deployment = "checkout-api"',
        "> lee approves",
        '→ restart_deployment(namespace="production", deployment="checkout-api")',
        "I restarted the deployment once",
        "> dana: How many times did it restart?",
        "6 times",
        "approval required",
        "> lee denies: Do not restart production; check last night's image first.",
        "→ get_rollout_history(",
        "2.14.0 in place of 2.13.4",
        "Restarts that really happened: 1",
        "Try next:",
    ]
    positions = []
    for part in story:
        positions.append(text.index(part, positions[-1] if positions else 0))
    assert positions == sorted(positions)

    journal = (alone.home / "demo" / "incident" / "journal.jsonl").read_text().splitlines()
    assert [json.loads(line)["deployment"] for line in journal] == ["checkout-api"]

    store = await SqliteStore(load_settings(home=alone.home / "demo")).open()
    try:
        (conversation,) = await store.conversations()
        calls = await store.calls(conversation["conversation_id"])
    finally:
        await store.close()
    assert conversation["status"] == "completed"
    restarts = [(c["state"], c["decided_by"]) for c in calls if c["tool_name"] == "restart_deployment"]
    assert restarts == [("done", "lee"), ("denied", "lee")]

    commands = re.findall(r"^  TURNKEEPER_HOME=(\S+) turnkeeper (.+)$", text, re.MULTILINE)
    assert len(commands) == 3
    for home, command in commands:
        shown = alone.run(*shlex.split(command), TURNKEEPER_HOME=home)
        assert shown.returncode == 0, shown.stderr
        assert "checkout-api" in shown.stdout

    assert "Restarts that really happened: 1 " in _play(alone)  # the second demo has an incident of its own


def _play(cli: CommandLine) -> str:
    done = cli.run("demo", "--yes", "--fast")
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_decisions_come_from_the_keyboard(alone: CommandLine) -> None:
    done = alone.run("demo", "--fast", input="d\nnot today\n\n")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "> lee denies: not today" in done.stdout
    assert "Restarts that really happened: 0" in done.stdout


def test_without_anybody_to_decide_it_says_so(alone: CommandLine) -> None:
    done = alone.run("demo", "--fast")
    assert done.returncode == 2
    assert "--yes" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_model_without_its_key_is_replaced_and_that_is_said(alone: CommandLine) -> None:
    done = alone.run("demo", "--fast", TURNKEEPER_MODEL="openai/gpt-4.1", OPENAI_API_KEY=None)
    assert "The key of openai/gpt-4.1 is not set." in done.stdout


def test_a_model_that_no_provider_has_is_refused(alone: CommandLine) -> None:
    done = alone.run("demo", "--yes", "--fast", TURNKEEPER_MODEL="nonsense")
    assert done.returncode == 2
    assert "provider" in done.stderr

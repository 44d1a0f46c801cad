"""The demo from end to end: the product's own worker, Valkey and SQLite, in a home of the test's own."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import termios
import time
from collections.abc import Iterable
from pathlib import Path

import pytest

from shared.settings import load_settings
from shared.store.sqlite import SqliteStore
from tests.integration.cli.conftest import COMMAND, SECONDS, CommandLine, Done

WAITING = "it is your decision"


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

    commands = re.findall(r"^  (TURNKEEPER_HOME=.+)$", text, re.MULTILINE)
    assert len(commands) == 3
    for command in commands:
        shown = _typed(alone, command)
        assert shown.returncode == 0, shown.stderr
        assert "checkout-api" in shown.stdout

    assert "Restarts that really happened: 1 " in _play(alone)  # the second demo has an incident of its own


def _typed(cli: CommandLine, command: str) -> Done:
    return subprocess.run(command, shell=True, env=cli.environment(), capture_output=True, text=True, timeout=SECONDS)


def _play(cli: CommandLine) -> str:
    done = cli.run("demo", "--yes", "--fast")
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_decisions_come_from_the_keyboard(alone: CommandLine) -> None:
    done = alone.run("demo", "--fast", input="d\nnot today\n\n")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "> lee denies: not today" in done.stdout
    assert "Restarts that really happened: 0" in done.stdout


def test_the_end_of_the_input_is_a_reason_left_out(alone: CommandLine) -> None:
    done = alone.run("demo", "--fast", input="a\nd\n")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "> lee denies: Do not restart production; check last night's image first." in done.stdout


def test_ctrl_d_ends_it_in_order(alone: CommandLine) -> None:
    ours, theirs = pty.openpty()
    demo = subprocess.Popen(
        [*COMMAND, "demo", "--fast"], env=alone.environment(), stdin=theirs, stdout=subprocess.PIPE, text=True
    )
    os.close(theirs)
    with demo:
        assert demo.stdout is not None
        for line in demo.stdout:
            if WAITING in line:
                while termios.tcgetattr(ours)[3] & termios.ICANON:  # it throws away what was typed before
                    time.sleep(0.01)
                os.write(ours, b"\x04")
            last = line
    os.close(ours)
    assert demo.returncode == 0
    assert "replay" in last
    assert alone.run("approvals", "--json", TURNKEEPER_HOME=str(alone.home / "demo")).stdout == ""


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGKILL])
def test_however_it_ends_it_leaves_nothing_running(alone: CommandLine, number: signal.Signals) -> None:
    demo, children = _waiting_demo(alone)
    with demo:
        demo.send_signal(number)
    assert demo.returncode == (-number if number == signal.SIGKILL else 130)
    _gone(children)


def test_what_a_killed_demo_left_behind_is_not_used(alone: CommandLine) -> None:
    demo, children = _waiting_demo(alone)
    [tether] = [pid for pid, command in children.items() if command == "sh"]
    os.kill(tether, signal.SIGKILL)
    with demo:
        demo.kill()
    _gone([tether])
    assert len(_alive(children)) == 2
    assert "Restarts that really happened: 1 " in _play(alone)
    _gone(children)


def _waiting_demo(cli: CommandLine) -> tuple[subprocess.Popen[str], dict[int, str]]:
    """A demo that waits for a decision, and the processes that it has started: tether, Valkey, worker."""
    demo = subprocess.Popen(
        [*COMMAND, "demo", "--fast"],
        env=cli.environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert demo.stdout is not None
    for line in demo.stdout:
        if WAITING in line:
            break
    listed = subprocess.run(["ps", "-A", "-o", "pid=,ppid=,comm="], capture_output=True, text=True, check=True)
    rows = [line.split(None, 2) for line in listed.stdout.splitlines()]
    children = {int(pid): Path(command).name for pid, parent, command in rows if int(parent) == demo.pid}
    assert len(children) == 3, children
    return demo, children


def _alive(processes: Iterable[int]) -> list[int]:
    return [pid for pid in processes if Path(f"/proc/{pid}").exists() and not _zombie(pid)]


def _zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def _gone(processes: Iterable[int]) -> None:
    deadline = time.monotonic() + SECONDS
    while left := _alive(processes):
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


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

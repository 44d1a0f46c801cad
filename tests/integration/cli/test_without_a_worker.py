"""The command line where nothing runs yet, or where something is wrong: exit statuses, and no traceback ever."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import pytest
from redis import Redis

from tests.integration.cli.conftest import CommandLine
from tests.support.valkey import Valkey

HEAVY = ("litellm", "rq", "supabase", "psycopg", "mcp", "redis", "pydantic", "structlog")
COMMANDS = (
    *("demo", "up", "doctor", "ask", "decide", "stop", "retry"),
    *("conversations", "show", "events", "approvals", "replay", "usage"),
    *("feedback", "rename", "delete", "requeue", "worker", "migrate", "bench"),
)
NOBODY = "11111111-1111-4111-8111-111111111111"


def test_help_imports_nothing_heavy(alone: CommandLine) -> None:
    code = (
        "import sys; sys.argv = ['turnkeeper', '--help']\n"
        "from scripts.cli import main\n"
        "try: main()\n"
        "except SystemExit: print(','.join(sys.modules), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], env=alone.environment(), capture_output=True, text=True)
    loaded = {name.split(".")[0] for name in done.stderr.strip().split(",")}
    assert "typer" in loaded, done.stderr
    assert loaded.isdisjoint(HEAVY)


def test_help_names_every_command(alone: CommandLine, capsys: pytest.CaptureFixture[str]) -> None:
    started = time.monotonic()
    text = alone.text("--help")
    with capsys.disabled():
        print(f"\nturnkeeper --help: {time.monotonic() - started:.2f} s (budget 0.4 s on an idle machine)")
    for command in COMMANDS:
        assert f" {command} " in text
        alone.text(command, "--help")


def test_a_question_is_recorded_without_any_worker(alone: CommandLine) -> None:
    (asked,) = alone.rows("ask", "anybody?", "--user", "dana", "--no-wait")
    assert asked["status"] == "pending"
    (conversation,) = alone.rows("conversations")
    assert conversation["conversation_id"] == asked["conversation_id"]
    (event,) = alone.rows("events", asked["conversation_id"])
    assert event["data"]["ask"] == "anybody?"
    (show,) = alone.rows("show", asked["conversation_id"])
    assert show["turns"][0]["request_id"] == asked["request_id"]
    assert alone.rows("approvals") == []


def test_a_question_from_stdin_with_a_target(alone: CommandLine) -> None:
    target = {"mode": "kubernetes", "cluster_name": "prod", "namespace": "shop"}
    done = alone.run("ask", "-", "--target", json.dumps(target), "--no-wait", "--json", input="why?\n")
    conversation = json.loads(done.stdout)["conversation_id"]
    (row,) = alone.rows("show", conversation)
    assert row["target"]["namespace"] == "shop"
    assert row["target_id"] == "kubernetes/prod/shop"


@pytest.mark.parametrize(
    "arguments",
    [
        ["show", NOBODY],
        ["events", NOBODY],
        ["replay", NOBODY],
        ["stop", NOBODY],
        ["retry", NOBODY],
        ["rename", NOBODY, "title"],
        ["delete", NOBODY, "--yes"],
        ["decide", NOBODY, "--approve", "all"],
        ["decide", NOBODY],
        ["feedback", "no-such-request", "--up"],
        ["requeue", "7"],
        ["show", "not-a-uuid"],
        ["ask", "x", "--target", "{"],
        ["ask", "x", "--target", '{"mode": "moon"}'],
        ["ask", ""],
        ["ask", "x", "--queue", "no queue"],
        ["usage", "--by", "colour"],
        ["bench", "no-such-benchmark"],
        ["no-such-command"],
    ],
)
def test_wrong_usage_is_status_2_in_a_few_lines(alone: CommandLine, arguments: list[str]) -> None:
    done = alone.run(*arguments)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.strip()


def test_an_error_in_json_has_its_code(alone: CommandLine) -> None:
    done = alone.run("show", NOBODY, "--json")
    assert done.returncode == 2
    assert done.stdout == ""
    assert json.loads(done.stderr)["error"]["code"] == "conversation_unknown"


@pytest.mark.parametrize("arguments", [["show", "x"], ["conversations", "--status", "bogus"], ["no-such-command"]])
def test_wrong_usage_is_json_too(alone: CommandLine, arguments: list[str]) -> None:
    done = alone.run(*arguments, "--json")
    assert (done.returncode, done.stdout) == (2, "")
    assert json.loads(done.stderr)["error"]["code"] == "usage"


def test_a_status_that_does_not_exist_is_refused_with_those_that_do(alone: CommandLine) -> None:
    done = alone.run("conversations", "--status", "bogus", "--json")
    assert "awaiting_approval" in json.loads(done.stderr)["error"]["description"]
    assert "yet" in alone.text("conversations")
    assert "yet" not in alone.text("conversations", "--status", "failed")


def test_the_version(alone: CommandLine) -> None:
    assert alone.text("--version").startswith("turnkeeper")


def test_doctor_changes_nothing(alone: CommandLine) -> None:
    home = alone.home / "not yet"
    done = alone.run("doctor", TURNKEEPER_HOME=str(home))
    assert done.returncode == 1
    assert done.stdout.count("turnkeeper up") >= 2
    assert not home.exists()


@pytest.mark.parametrize(("key", "told"), [("sk-…", "ASCII"), ("sk-your-key", "placeholder"), (" ", "empty")])
def test_doctor_looks_at_the_key(alone: CommandLine, key: str, told: str) -> None:
    done = alone.run("doctor", "--json", TURNKEEPER_MODEL="openai/gpt-4.1", OPENAI_API_KEY=key)
    (model,) = [f for f in map(json.loads, done.stdout.splitlines()) if f["check"] == "model"]
    assert model["status"] == "fail"
    assert told in model["detail"]


def test_hints_name_up_where_redis_is_embedded(alone: CommandLine) -> None:
    done = alone.run("worker-alive")
    assert done.returncode == 3
    assert "turnkeeper up" in done.stderr
    assert "REDIS_URL" not in done.stderr


def test_another_owner_is_refused(alone: CommandLine) -> None:
    (asked,) = alone.rows("ask", "mine", "--user", "dana", "--no-wait")
    done = alone.run("ask", "mine too", "-c", asked["conversation_id"], "--user", "eve", "--no-wait")
    assert done.returncode == 2
    assert len(alone.rows("events", asked["conversation_id"])) == 1


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("TURNKEEPER_LEASE_SECONDS", "soon"),
        ("TURNKEEPER_SLOTS", "interactive=none"),
        ("REDIS_URL", "http://localhost"),
        ("SUPABASE_URL", "http://127.0.0.1:1"),
    ],
)
def test_a_wrong_setting_is_named(alone: CommandLine, variable: str, value: str) -> None:
    done = alone.run("ask", "x", "--no-wait", **{variable: value})
    assert done.returncode == 2
    assert variable in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("command", [["up"], ["ask", "hi", "--no-wait"], ["worker", "--burst"]], ids=lambda c: c[0])
@pytest.mark.parametrize("below", ["/proc/nothing", "a file"])
def test_a_home_that_cannot_be_used_is_named(alone: CommandLine, command: list[str], below: str) -> None:
    (alone.home / "a file").touch()
    done = alone.run(*command, TURNKEEPER_HOME=str(alone.home / below))
    assert done.returncode == 2, done.stderr
    assert "TURNKEEPER_HOME: nothing can be kept in" in done.stderr
    assert len(done.stderr.splitlines()) <= 2


def test_an_unreachable_redis_is_status_3_and_the_turn_is_kept(alone: CommandLine) -> None:
    done = alone.run("ask", "x", REDIS_URL="redis://127.0.0.1:1/0")
    assert done.returncode == 3, done.stderr
    assert "is recorded" in done.stderr
    assert len(alone.rows("conversations")) == 1


def test_an_unreachable_database_is_status_3(alone: CommandLine) -> None:
    done = alone.run("conversations", DATABASE_URL="postgresql://127.0.0.1:1/none?connect_timeout=1")
    assert done.returncode == 3, done.stdout + done.stderr
    assert "Traceback" not in done.stderr


def test_doctor_names_what_is_missing_and_what_to_do(alone: CommandLine) -> None:
    done = alone.run("doctor")
    assert done.returncode == 1
    assert "turnkeeper up" in done.stdout
    findings = {f["check"]: f for f in alone.rows("doctor", status=1)}
    assert findings["redis"]["status"] == "fail"
    assert findings["store"]["status"] == "warn"  # it is made by whoever writes first


def test_doctor_sees_a_redis_that_forgets(alone: CommandLine, forgetful: str) -> None:
    done = alone.run("doctor", "--json", REDIS_URL=forgetful)
    findings = {f["check"]: f for f in map(json.loads, done.stdout.splitlines())}
    assert findings["eviction"]["status"] == "warn"
    assert "noeviction" in findings["eviction"]["hint"]
    assert findings["persistence"]["status"] == "ok"


def test_doctor_says_which_key_is_missing_and_never_shows_one(alone: CommandLine) -> None:
    without = alone.run("doctor", "--json", TURNKEEPER_MODEL="openai/gpt-4.1", OPENAI_API_KEY=None)
    assert "OPENAI_API_KEY" in without.stdout
    having = alone.run("doctor", "--json", TURNKEEPER_MODEL="openai/gpt-4.1", OPENAI_API_KEY="sk-secret-1")
    (model,) = [f for f in map(json.loads, having.stdout.splitlines()) if f["check"] == "model"]
    assert model["status"] == "ok"
    assert "sk-secret-1" not in having.stdout + having.stderr


def test_doctor_names_a_broken_tools_file(alone: CommandLine) -> None:
    path = alone.home / "tools.yaml"
    path.write_text("python: [no.such.module]\n")
    done = alone.run("doctor", "--json", TURNKEEPER_TOOLS=str(path))
    (tools,) = [f for f in map(json.loads, done.stdout.splitlines()) if f["check"] == "tools"]
    assert tools["status"] == "fail"
    assert "no.such.module" in tools["detail"]


def test_migrate_says_what_it_did(alone: CommandLine) -> None:
    (first,) = alone.rows("migrate")
    (second,) = alone.rows("migrate")
    assert first["schema_version"] == second["schema_version"] >= 1
    assert first["applied"]
    assert second["applied"] == []


def test_ask_says_that_nobody_works_on_it(alone: CommandLine) -> None:
    asking = alone.start("ask", "anybody?")
    assert asking.stderr is not None
    lines = asking.stderr.readline() + asking.stderr.readline()
    asking.terminate()
    asking.communicate()
    assert "nobody works on it" in lines
    assert "turnkeeper up" in lines


@pytest.fixture
def forgetful(valkey: Valkey) -> str:
    """A Redis that evicts."""
    with Redis.from_url(valkey.url) as client:
        client.config_set("maxmemory-policy", "allkeys-lru")
    return valkey.url

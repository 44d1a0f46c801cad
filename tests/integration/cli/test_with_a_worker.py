"""The command line against a running ``turnkeeper up``: ask, approve, deny, stop, follow, inspect."""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
from typing import Any

import pytest
from redis import Redis
from rq import Queue
from rq.serializers import JSONSerializer

from shared.settings import load_settings
from tests.integration.cli.conftest import SECONDS, CommandLine, Up

INCIDENT = "checkout-api in production keeps returning 500."
COUNT = "How many times did it restart?"

Row = dict[str, Any]


def paused(cli: CommandLine, *options: str) -> tuple[str, Row]:
    """A conversation that waits for the approval of its restart, and the approval's row."""
    events = cli.rows("ask", INCIDENT, *options)
    conversation = events[0]["conversation_id"]
    (approval,) = [row for row in cli.rows("approvals") if row["conversation_id"] == conversation]
    return conversation, approval


def test_ask_approve_and_ask_again(cli: CommandLine, up: Up) -> None:
    journal = len(up.cluster.journal())
    events = cli.rows("ask", INCIDENT, "--user", "dana")
    assert events[0]["event"] == "user_message"
    assert events[-1]["event"] == "approval_required"
    assert [e["seq"] for e in events] == list(range(1, len(events) + 1))
    assert set(events[0]) == {"conversation_id", "seq", "turn", "attempt", "event", "data", "created_at"}
    conversation = events[0]["conversation_id"]
    (pending,) = events[-1]["data"]["pending_approvals"]
    assert pending["params"] == {"namespace": "production", "deployment": "checkout-api"}
    assert "approval_token" not in pending
    assert len(up.cluster.journal()) == journal

    decided = cli.rows("decide", conversation, "--approve", pending["tool_call_id"], "--user", "lee")
    assert decided[-1]["event"] == "answer_end"
    assert {e["turn"] for e in decided} == {2}
    assert len(up.cluster.journal()) == journal + 1

    (show,) = cli.rows("show", conversation)
    (call,) = [c for c in show["tool_calls"] if c["tool_name"] == "restart_deployment"]
    assert (call["state"], call["decided_by"]) == ("done", "lee")
    assert [t["status"] for t in show["turns"]] == ["completed", "completed"]
    assert "lease_token" not in show["turns"][0]

    text = cli.text("ask", COUNT, "-c", conversation)
    assert text.startswith("6 times")
    assert "→" not in text  # from the history, by no tool


def test_deny_with_feedback_changes_the_course(cli: CommandLine, up: Up) -> None:
    journal = len(up.cluster.journal())
    conversation, approval = paused(cli)
    text = cli.text("decide", conversation, "--deny", approval["tool_call_id"], "--feedback", "Look at the image first")
    assert "Tool execution was denied by the user. User feedback: Look at the image first" in text
    assert "get_rollout_history(" in text
    assert len(up.cluster.journal()) == journal


def test_an_approval_tells_how_to_decide_and_the_command_works(cli: CommandLine) -> None:
    text = cli.text("ask", INCIDENT)
    (command,) = [line for line in text.splitlines() if " decide " in line and "--approve" in line]
    done = subprocess.run(shlex.split(command), env=cli.environment(), capture_output=True, text=True, timeout=SECONDS)
    assert "I restarted the deployment once" in done.stdout, done.stderr


def test_approve_all_and_a_second_decision_finds_nothing_to_decide(cli: CommandLine) -> None:
    conversation, approval = paused(cli)
    cli.text("decide", conversation, "--approve", "all")
    refused = cli.run("decide", conversation, "--deny", approval["tool_call_id"])
    assert refused.returncode == 2
    assert "nothing was decided" in refused.stderr
    assert "Traceback" not in refused.stderr


def test_decisions_from_a_file(cli: CommandLine) -> None:
    conversation, approval = paused(cli)
    path = cli.home / "decisions.json"
    path.write_text(json.dumps([{"tool_call_id": approval["tool_call_id"], "approved": False}]))
    assert "was denied" in cli.text("decide", conversation, "--file", str(path))


def test_stop_closes_what_waits(cli: CommandLine) -> None:
    conversation, _ = paused(cli)
    (stopped,) = cli.rows("stop", conversation)
    assert stopped["effect"] == "stopped"
    assert [a for a in cli.rows("approvals") if a["conversation_id"] == conversation] == []
    (again,) = cli.rows("stop", conversation)
    assert again["effect"] == "none"


def test_a_failed_turn_is_status_1_and_says_why(cli: CommandLine) -> None:
    failed = cli.run("ask", "x", "--model", "scripted/none")
    assert failed.returncode == 1, failed.stderr
    assert "failed:" in failed.stdout
    assert "Traceback" not in failed.stdout + failed.stderr
    events = cli.rows("ask", "x", "--model", "scripted/none", status=1)
    assert events[-1]["event"] == "error"
    refused = cli.run("retry", events[0]["conversation_id"])
    assert refused.returncode == 2
    assert "Traceback" not in refused.stderr


def test_asking_twice_under_one_id_asks_once(cli: CommandLine) -> None:
    first = cli.rows("ask", COUNT, "--request-id", "once")
    second = cli.rows("ask", COUNT, "--request-id", "once")
    assert [e["seq"] for e in second] == [e["seq"] for e in first]
    conflict = cli.run("ask", "Something else?", "--request-id", "once")
    assert conflict.returncode == 2


def test_follow_shows_what_happens_from_now_on(cli: CommandLine) -> None:
    (asked,) = cli.rows("ask", INCIDENT, "--no-wait")
    following = cli.start("events", asked["conversation_id"], "--follow", "--json")
    assert following.stdout is not None
    assert following.stderr is not None
    seen = []
    for line in following.stdout:
        seen.append(json.loads(line))
        if seen[-1]["event"] == "approval_required":
            break
    following.send_signal(signal.SIGINT)
    _, errors = following.communicate(timeout=SECONDS)
    assert following.returncode == 130
    assert "Traceback" not in errors
    assert [e["seq"] for e in seen] == list(range(1, len(seen) + 1))


def test_events_and_replay_tell_the_same_story(cli: CommandLine) -> None:
    conversation, approval = paused(cli)
    cli.text("decide", conversation, "--approve", approval["tool_call_id"])
    rows = cli.rows("events", conversation)
    assert cli.rows("replay", conversation) == rows
    assert cli.rows("events", conversation, "--after", "5") == rows[5:]
    assert "messages" not in rows[-1]["data"]
    full = cli.rows("events", conversation, "--full")
    assert full[-1]["data"]["messages"][0]["role"] == "system"
    text = cli.text("replay", conversation)
    assert f"> {INCIDENT}" in text
    assert f"> approved {approval['tool_call_id']}" in text
    assert text.count("→ restart_deployment(") == 1


def test_feedback_usage_rename_and_delete(cli: CommandLine) -> None:
    events = cli.rows("ask", COUNT)
    conversation, request_id = events[0]["conversation_id"], events[-1]["data"]["request_id"]
    (rated,) = cli.rows("feedback", request_id, "--down", "--category", "wrong", "--comment", "no")
    assert (rated["rating"], rated["category"]) == ("down", "wrong")
    assert sum(row["thumbs_down"] for row in cli.rows("usage")) >= 1
    assert {"day", "turns"} <= set(cli.rows("usage", "--by", "day")[0])
    (renamed,) = cli.rows("rename", conversation, "Checkout, once more")
    assert renamed["title"] == "Checkout, once more"
    assert "Checkout, once more" in cli.text("conversations")
    assert cli.run("delete", conversation, input="n\n").returncode == 1
    unasked = cli.run("delete", conversation, "--json")
    assert (unasked.returncode, unasked.stdout) == (2, "")
    assert "--yes" in json.loads(unasked.stderr)["error"]["description"]
    cli.text("delete", conversation, "--yes")
    assert cli.run("delete", conversation, "--yes").returncode == 2


def test_doctor_finds_everything_in_order(cli: CommandLine) -> None:
    findings = cli.rows("doctor")
    assert {f["status"] for f in findings} <= {"ok", "warn"}
    by_check = {f["check"]: f for f in findings}
    for check in ("redis", "persistence", "eviction", "store", "clock", "model", "tools", "workers"):
        assert by_check[check]["status"] == "ok", by_check[check]


def test_a_dead_letter_is_shown_and_can_be_sent_again(cli: CommandLine) -> None:
    settings = load_settings(home=cli.home, redis_url=None)
    with Redis.from_url(settings.effective_redis_url) as redis:
        queue = Queue("interactive", connection=redis, serializer=JSONSerializer)
        job = queue.enqueue("worker.jobs.ask", ask=COUNT, colour="blue")
        while job.get_status(refresh=True) not in ("finished", "failed"):
            job.connection.blpop(["never"], timeout=0.05)
    findings = [f for f in cli.rows("doctor") if f["check"] == "dead letter"]
    assert len(findings) == 1
    assert "colour" in findings[0]["detail"]
    letter = findings[0]["detail"].split(":")[0]
    refused = cli.run("requeue", letter)
    assert refused.returncode == 2
    assert "colour" in refused.stderr
    assert f"requeue {letter} --discard" in findings[0]["hint"]
    assert len([f for f in cli.rows("doctor") if f["check"] == "dead letter"]) == 1  # it is still there
    cli.text("requeue", letter, "--discard")
    assert cli.run("requeue", "4711").returncode == 2


@pytest.mark.parametrize("command", ["conversations", "approvals", "usage"])
def test_lists_are_tables_for_people(cli: CommandLine, command: str) -> None:
    cli.rows("ask", COUNT)
    assert cli.text(command).strip()


def test_ctrl_c_leaves_the_turn_alone(cli: CommandLine) -> None:
    asking = cli.start("ask", "checkout-api?", "--queue", "nobody")
    assert asking.stderr is not None
    assert "nobody works on it" in asking.stderr.readline()
    asking.send_signal(signal.SIGINT)
    out, errors = asking.communicate(timeout=SECONDS)
    assert asking.returncode == 130
    assert "turnkeeper stop" in out
    assert "Traceback" not in errors


def test_up_once_more_starts_no_second_worker(cli: CommandLine) -> None:
    (worker,) = [f["detail"].split()[0] for f in cli.rows("doctor") if f["check"] == "workers"]
    text = cli.text("up")
    assert f"{worker} runs already" in text
    assert " worker" in text.splitlines()[-1]
    refused = cli.run("up", "--demo")
    assert refused.returncode == 2
    assert worker in refused.stderr
    assert [f["detail"].split()[0] for f in cli.rows("doctor") if f["check"] == "workers"] == [worker]


def test_without_a_model_the_turn_says_where_to_set_one(cli: CommandLine) -> None:
    (asked,) = cli.rows("ask", "x", "--queue", "modelless", "--no-wait")
    cli.run("worker", "--queue", "modelless=1", "--burst", TURNKEEPER_MODEL=None)
    error = cli.rows("events", asked["conversation_id"])[-1]["data"]
    assert error["code"] == "model_request_rejected"
    assert "TURNKEEPER_MODEL where the worker runs" in error["hint"]


def test_every_event_has_one_line_that_ends_at_the_edge(cli: CommandLine) -> None:
    conversation, _ = paused(cli)
    lines = cli.text("events", conversation).splitlines()
    assert len(lines) == 1 + len(cli.rows("events", conversation))
    assert max(map(len, lines)) <= 160
    assert any(line.rstrip().endswith("…") for line in lines)


def test_a_reader_that_has_seen_enough_ends_it_quietly(cli: CommandLine) -> None:
    (asked,) = cli.rows("ask", COUNT, "--no-wait")
    conversation = asked["conversation_id"]
    for options in ([], ["--json"]):
        reading = cli.start("events", conversation, "--follow", *options)
        assert reading.stdout is not None
        assert reading.stderr is not None
        reading.stdout.readline()
        reading.stdout.close()
        cli.rows("ask", COUNT, "-c", conversation)  # something more to print
        assert reading.stderr.read() == ""
        reading.stderr.close()
        assert reading.wait(SECONDS) == 141


def test_a_worker_in_burst_mode_ends_when_nothing_waits(cli: CommandLine) -> None:
    (asked,) = cli.rows("ask", COUNT, "--queue", "extra", "--no-wait")
    done = cli.run("worker", "--queue", "extra=2", "--burst")
    assert done.returncode == 0, done.stderr
    (show,) = cli.rows("show", asked["conversation_id"])
    assert show["status"] == "completed"

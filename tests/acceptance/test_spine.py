"""A conversation from the queue to an answer, through an approval, to the next turn: on every store, end to end."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import uuid
from typing import Any

from rq import Queue
from rq.job import Job
from rq.serializers import JSONSerializer

from scripts.bench.kit.llm_server import Call, Reply
from tests.acceptance.conftest import Installation


def _events(rows: list[dict[str, Any]]) -> list[str]:
    return [row["event"] for row in rows if row["seq"] is not None]


def test_ask_approvals_decide_ask(installation: Installation) -> None:
    installation.start_worker()
    installation.llm.script(
        [
            Reply("I look first.", calls=[Call("pods", {"namespace": "production"}, "call_a")]),
            Reply("A restart helps.", calls=[Call("restart", {"deployment": "checkout-api"}, "call_b")]),
            Reply("Restarted once."),
            Reply("6 times."),
        ]
    )

    asked = installation.turnkeeper("ask", "checkout-api returns 500", "--user", "ana")
    assert _events(asked)[0] == "user_message"
    assert _events(asked)[-1] == "approval_required"
    conversation = asked[0]["conversation_id"]
    assert installation.effects == []

    [waiting] = installation.turnkeeper("approvals")
    assert waiting["tool_name"] == "restart"
    assert json.loads(waiting["arguments"]) == {"deployment": "checkout-api"}
    assert "approval_token" not in waiting

    decided = installation.turnkeeper("decide", conversation, "--approve", "call_b", "--user", "bo")
    assert _events(decided)[-1] == "answer_end"
    assert decided[-1]["data"]["content"] == "Restarted once."
    assert installation.effects == ["checkout-api"]
    [shown] = installation.turnkeeper("show", conversation)
    [row] = [r for r in shown["tool_calls"] if r["tool_call_id"] == "call_b"]
    assert (row["state"], row["decided_by"]) == ("done", "bo")

    again = installation.turnkeeper("ask", "How often did it restart?", "--conversation", conversation)
    assert again[-1]["data"]["content"] == "6 times."
    assert installation.turnkeeper("approvals") == []

    sent = installation.llm.requests[-1].messages
    assert [m["role"] for m in sent] == [
        "system",
        "user",
        "assistant",
        "tool",
        "assistant",
        "tool",
        "assistant",
        "user",
    ]
    assert "restartCount" in sent[3]["content"]
    assert sent[5]["content"] == "restarted checkout-api"
    assert sent[-1]["content"] == "How often did it restart?"
    assert installation.effects == ["checkout-api"]


def test_a_denial_with_feedback_changes_the_next_step(installation: Installation) -> None:
    installation.start_worker()
    installation.llm.script(
        [
            Reply(calls=[Call("restart", {"deployment": "web"}, "call_a")]),
            Reply("I look at the pods instead.", calls=[Call("pods", {"namespace": "web"}, "call_b")]),
            Reply("Three pods run."),
        ]
    )
    asked = installation.turnkeeper("ask", "web is slow")
    decided = installation.turnkeeper(
        "decide", asked[0]["conversation_id"], "--deny", "call_a", "--feedback", "Look at the pods first"
    )
    assert decided[-1]["data"]["content"] == "Three pods run."
    assert installation.effects == []
    told = installation.llm.requests[1].messages[-1]
    assert told["content"] == "Tool execution was denied by the user. User feedback: Look at the pods first"


def test_plain_rq_producers_without_our_package(installation: Installation) -> None:
    installation.start_worker()
    installation.llm.script([Reply(calls=[Call("restart", {"deployment": "web"}, "call_a")]), Reply("Done.")])
    conversation = str(uuid.uuid4())
    with installation.redis() as redis:
        queue = Queue("interactive", connection=redis, serializer=JSONSerializer)
        asked = _result(queue.enqueue("worker.jobs.ask", conversation_id=conversation, ask="restart web"))
        assert (asked["status"], asked["turn"]) == ("awaiting_approval", 1)
        [event] = [e for e in installation.turnkeeper("events", conversation, "--full") if "approval" in e["event"]]
        [pending] = event["data"]["pending_approvals"]
        decision = {"tool_call_id": "call_a", "approved": True, "approval_token": pending["approval_token"]}
        job = queue.enqueue("worker.jobs.tool_decisions", conversation_id=conversation, tool_decisions=[decision])
        assert _result(job)["status"] == "completed"
        again = queue.enqueue("worker.jobs.tool_decisions", conversation_id=conversation, tool_decisions=[decision])
        late = _result(again)
        assert (late["status"], late["error"]["code"]) == ("failed", "approval_stale")
        refused = _result(queue.enqueue("worker.jobs.ask", conversation_id=conversation, ask=7))
        assert refused["error"]["code"] == "request_invalid"
    assert installation.effects == ["web"]
    assert "request_invalid" in str(installation.turnkeeper("doctor"))


def _result(job: Job, seconds: float = 30) -> dict[str, Any]:
    """The job's own result; RQ's ``latest_result`` waits for it."""
    result = job.latest_result(timeout=int(seconds))
    assert result is not None, job.get_status()
    assert result.type in (result.Type.SUCCESSFUL, result.Type.STOPPED), result.exc_string
    value: dict[str, Any] = result.return_value
    return value


def test_rq_s_own_command_line_runs_the_same_worker(installation: Installation) -> None:
    installation.llm.script([Reply("All is well.")])
    with installation.redis() as redis:
        queue = Queue("interactive", connection=redis, serializer=JSONSerializer)
        job = queue.enqueue("worker.jobs.ask", ask="How are you?")
        worker = [sys.executable, "-m", "rq.cli", "worker", "-w", "worker.rq_worker.ConversationWorker"]
        done = subprocess.run(
            [*worker, "interactive", "background", "-u", installation.redis_url, "--burst"],
            env=installation.environment(),
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        assert _result(job)["status"] == "completed"


def test_stop_command_of_rq_stops_that_turn_and_only_that(installation: Installation) -> None:
    from rq.command import send_stop_job_command

    from scripts.bench.kit.llm_server import Gate

    installation.start_worker()
    gate = Gate()
    installation.llm.script(
        lambda request: (
            Reply("Some words that are shown. The rest waits.", gate=gate, gate_at=3)
            if request.messages[-1]["content"] == "slow"
            else Reply("Quick.", gate=gate)
        )
    )
    with installation.redis() as redis:
        queue = Queue("interactive", connection=redis, serializer=JSONSerializer)
        slow = queue.enqueue("worker.jobs.ask", ask="slow")
        other = queue.enqueue("worker.jobs.ask", ask="other")
        _until(lambda: len(installation.llm.requests) == 2)
        send_stop_job_command(redis, slow.id, serializer=JSONSerializer)
        assert _result(slow)["status"] == "stopped"
        gate.open()
        assert _result(other)["status"] == "completed"


def _until(condition: Any, seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_sigterm_hands_the_turn_over_and_nobody_sees_an_error(installation: Installation) -> None:
    from scripts.bench.kit.llm_server import Gate

    first = installation.start_worker(TURNKEEPER_DRAIN_SECONDS="0.5")
    gate = Gate()
    replies = iter([Reply("Never shown whole.", gate=gate), Reply("The answer.")])
    installation.llm.script(lambda request: next(replies))
    [receipt] = installation.turnkeeper("ask", "How are you?", "--no-wait")
    _until(lambda: len(installation.llm.requests) == 1)
    installation.start_worker()
    first.stop()
    assert first.process.returncode == 0
    _until(lambda: installation.turnkeeper("conversations")[0]["status"] == "completed")
    events = installation.turnkeeper("events", receipt["conversation_id"])
    assert _events(events) == ["user_message", "turn_resumed", "ai_message", "answer_end"]
    assert events[-1]["data"]["content"] == "The answer."
    gate.open()

"""The scripted model: a function of the history. Other facts in the history make other answers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from scripts.demo.cluster import Cluster
from scripts.demo.script import script
from worker.agent.scripted import ScriptedCall

INCIDENT = "checkout-api in production keeps returning 500."
COUNT = "How many times did it restart?"
AGAIN = "checkout-api in production is failing again. Restart it once more."
FEEDBACK = "Do not restart production; check last night's image first."
NAMES = ("get_pods", "get_logs", "get_deployment", "get_rollout_history", "get_image", "restart_deployment")
TOOLS = [{"type": "function", "function": {"name": name}} for name in NAMES]

Message = dict[str, Any]
Run = Callable[[str, dict[str, Any]], str]


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster.fresh(tmp_path / "incident")


def run_on(cluster: Cluster) -> Run:
    """Runs a call on the incident's files; its result as the model reads it."""
    functions: dict[str, Callable[..., Any]] = {
        "get_pods": cluster.pods,
        "get_logs": cluster.logs,
        "get_deployment": cluster.deployment,
        "get_rollout_history": cluster.rollouts,
        "get_image": cluster.image,
        "restart_deployment": lambda **arguments: cluster.restart(**arguments, idempotency_key="k"),
    }

    def run(name: str, arguments: dict[str, Any]) -> str:
        result = functions[name](**arguments)
        return result if isinstance(result, str) else json.dumps(result)

    return run


def ask(messages: list[Message], question: str, run: Run, tools: list[Message] = TOOLS) -> tuple[str, list[str]]:
    """Ask, run what is called, until the answer; it, and the names of the calls."""
    messages.append({"role": "user", "content": question})
    called: list[str] = []
    for _ in range(10):
        reply = script(ScriptedCall(messages, tools))
        calls = [call.as_dict() for call in reply.tool_calls]
        messages.append({"role": "assistant", "content": reply.text, **({"tool_calls": calls} if calls else {})})
        if not calls:
            return reply.text, called
        for call in calls:
            name, arguments = call["function"]["name"], json.loads(call["function"]["arguments"])
            called.append(name)
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": run(name, arguments)})
    raise AssertionError("the script does not come to an answer")


def test_the_incident_is_looked_into_before_anything_is_changed(cluster: Cluster) -> None:
    answer, called = ask([], INCIDENT, run_on(cluster))
    assert called == ["get_pods", "get_logs", "get_deployment", "restart_deployment", "get_pods"]
    assert "java.lang.OutOfMemoryError" in answer
    assert "512Mi" in answer
    assert len(cluster.journal()) == 1


def test_the_count_comes_from_the_history_and_no_tool(cluster: Cluster) -> None:
    messages: list[Message] = []
    ask(messages, INCIDENT, run_on(cluster))
    answer, called = ask(messages, COUNT, run_on(cluster))
    assert called == []
    assert answer.startswith("6 times")
    assert "once ourselves" in answer


def test_another_history_gives_another_count(cluster: Cluster) -> None:
    path = cluster.folder / "pods.json"
    path.write_text(path.read_text().replace('"restartCount": 6', '"restartCount": 11'))
    messages: list[Message] = []
    ask(messages, INCIDENT, run_on(cluster))
    assert ask(messages, COUNT, run_on(cluster))[0].startswith("11 times")


def test_without_a_history_the_count_is_unknown(cluster: Cluster) -> None:
    answer, _ = ask([], f"{COUNT} I mean checkout-api.", run_on(cluster))
    assert "cannot say" in answer


def test_a_denial_with_a_reason_changes_the_course(cluster: Cluster) -> None:
    run = run_on(cluster)
    messages: list[Message] = []
    ask(messages, INCIDENT, run)
    cluster.worsen("checkout-api")

    def denied(name: str, arguments: dict[str, Any]) -> str:
        if name == "restart_deployment":
            return f"Tool execution was denied by the user. User feedback: {FEEDBACK}"
        return run(name, arguments)

    answer, called = ask(messages, AGAIN, denied)
    assert called == ["get_pods", "restart_deployment", "get_rollout_history", "get_image", "get_image"]
    assert "did not restart" in answer
    assert "2.14.0 in place of 2.13.4" in answer
    assert "revision 41" in answer
    assert len(cluster.journal()) == 1


@pytest.mark.parametrize(
    "result",
    ["Tool execution was denied by the user.", "Outcome unknown: the call had begun.", "Not executed: superseded."],
)
def test_a_restart_that_did_not_happen_is_not_claimed(cluster: Cluster, result: str) -> None:
    run = run_on(cluster)
    messages: list[Message] = []
    answer, _ = ask(messages, INCIDENT, lambda n, a: result if n == "restart_deployment" else run(n, a))
    assert "I restarted" not in answer
    assert "ourselves" not in ask(messages, COUNT, run)[0]


def test_a_tool_that_is_not_offered_is_not_called(cluster: Cluster) -> None:
    answer, called = ask([], INCIDENT, run_on(cluster), tools=[])
    assert called == []
    assert "get_pods" in answer


def test_what_it_does_not_know_it_says(cluster: Cluster) -> None:
    answer, called = ask([], "Sing a song", run_on(cluster))
    assert called == []
    assert "scripted model" in answer


def test_a_restart_renews_the_pods_and_the_incident_can_go_on(cluster: Cluster) -> None:
    before = {pod["name"] for pod in cluster.pods("production", "checkout-api")}
    cluster.restart("production", "checkout-api", "key")
    after = cluster.pods("production", "checkout-api")
    assert before.isdisjoint(pod["name"] for pod in after)
    assert [pod["restartCount"] for pod in after] == [0, 0]
    assert cluster.journal()[0]["idempotency_key"] == "key"
    cluster.worsen("checkout-api")
    worst = max(cluster.pods("production", "checkout-api"), key=lambda pod: int(pod["restartCount"]))
    assert not worst["ready"]
    assert "OutOfMemoryError" in cluster.logs("production", worst["name"])


@pytest.mark.parametrize(
    "look",
    [
        lambda c: c.pods("staging"),
        lambda c: c.logs("production", "../pods"),
        lambda c: c.deployment("production", "cart-api"),
        lambda c: c.rollouts("staging", "checkout-api"),
        lambda c: c.image("nginx"),
        lambda c: c.restart("staging", "checkout-api", "k"),
    ],
)
def test_what_is_not_there_is_said_in_a_sentence(cluster: Cluster, look: Callable[[Cluster], Any]) -> None:
    with pytest.raises(LookupError, match=r"^No .+\.$"):
        look(cluster)
    assert cluster.journal() == []

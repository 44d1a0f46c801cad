"""The demo's scripted model: the next answer as a function of messages and tools.

It plays an agent that knows one kind of incident (a service that keeps failing) and works out its next step from what
the history holds: pods, then logs and deployment, then a restart; a question about restarts it answers without a tool;
a denial with a reason makes it look at what was deployed instead.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Any

from scripts.demo.scene import Scene, Seen
from worker.agent.base import Usage
from worker.agent.scripted import ScriptedCall, ScriptedReply, ToolCall

PAUSE_VARIABLE = "TURNKEEPER_DEMO_PAUSE_SECONDS"  # between words; not set: none

_SERVICE = re.compile(r"\b[a-z0-9]+(?:-[a-z0-9]+)+\b")
_COUNT = re.compile(r"how (many times|often)", re.IGNORECASE)
_EXCEPTION = re.compile(r"\b[\w.]+(?:Error|Exception)\b")
_NAMESPACE = "production"
_CHARACTERS_PER_TOKEN = 4


@dataclass(frozen=True, slots=True)
class Step:
    """What the agent says, and the calls it makes with it; without calls it is the answer."""

    text: str
    calls: tuple[ToolCall, ...] = ()


def script(call: ScriptedCall) -> ScriptedReply:
    """The next answer; the entry point for ``scripted/scripts.demo.script``."""
    scene = Scene.of(call.messages, call.tools)
    step = _step(scene)
    missing = [c.name for c in step.calls if c.name not in scene.offered]
    if missing:
        step = Step(f"I would call {', '.join(missing)} now, but there is no such tool here.")
    pause = float(os.environ.get(PAUSE_VARIABLE, "0"))
    return ScriptedReply(step.text, step.calls, usage=_usage(call, step), delay_seconds=5 * pause, pause_seconds=pause)


def _usage(call: ScriptedCall, step: Step) -> Usage:
    """An estimate, as no provider counts."""
    prompt = sum(len(str(m.get("content") or "")) for m in call.messages)
    return Usage(prompt // _CHARACTERS_PER_TOKEN, len(step.text) // _CHARACTERS_PER_TOKEN)


def _step(scene: Scene) -> Step:
    named = [name for q in scene.questions for name in _SERVICE.findall(q.lower())]
    if not named:
        return Step(
            "I am the demo's scripted model and know one incident only. Try: "
            "checkout-api in production keeps returning 500."
        )
    service = named[-1]
    denied = next((s for s in scene.now if s.denied), None)
    if denied is not None:
        return _other_course(scene, service, denied)
    if _COUNT.search(scene.question):
        return _count(scene, service)
    return _investigate(scene, service)


def _investigate(scene: Scene, service: str) -> Step:
    where = {"namespace": _NAMESPACE}
    pods = scene.latest("get_pods")
    if pods is None:
        return Step(f"I look at the pods of {service} first.", (ToolCall("get_pods", {**where, "app": service}),))
    if pods.data is None:
        return Step(f"I cannot see the pods of {service}: {pods.text}")
    worst = max(pods.data, key=lambda pod: int(pod["restartCount"]))
    if scene.latest("get_deployment", everywhere=True) is None:
        return Step(
            f"{worst['name']} has restarted {worst['restartCount']} times. Its log and the deployment should say why.",
            (
                ToolCall("get_logs", {**where, "pod": worst["name"]}),
                ToolCall("get_deployment", {**where, "deployment": service}),
            ),
        )
    restart = scene.latest("restart_deployment")
    if restart is None:
        return Step(_why_restart(scene, service), (ToolCall("restart_deployment", {**where, "deployment": service}),))
    if restart.data is None:
        return Step(f"The restart did not come through: {restart.text} I leave {service} as it is.")
    if scene.now[-1].name != "get_pods":
        return Step("Restarted. I check the new pods.", (ToolCall("get_pods", {**where, "app": service}),))
    return Step(_restarted(scene, service, pods.data))


def _why_restart(scene: Scene, service: str) -> str:
    if scene.latest("get_deployment") is None:
        return f"{service} is down again, as before. A restart would bring it back for a while."
    return f"{_cause(scene)} A restart brings {service} back while we look for the cause."


def _cause(scene: Scene) -> str:
    logs, deployment = (scene.latest(name, everywhere=True) for name in ("get_logs", "get_deployment"))
    errors = _EXCEPTION.findall(logs.text) if logs else []
    limit = deployment.data["resources"]["limits"]["memory"] if deployment and deployment.data else "unknown"
    return f"The log ends with {errors[-1] if errors else 'no error'}, and the memory limit is {limit}."


def _restarted(scene: Scene, service: str, pods: list[dict[str, Any]]) -> str:
    ready = sum(1 for pod in pods if pod["ready"])
    return (
        f"{service} kept failing because it ran out of memory: {_restarts_before(scene)[1]} "
        f"{_cause(scene)} I restarted the deployment once; {ready} of {len(pods)} pods are ready. "
        "The limit is what it was, so this is relief and not a cure."
    )


def _count(scene: Scene, service: str) -> Step:
    count, sentence = _restarts_before(scene)
    if count is None:
        return Step(f"I have not looked at {service} in this conversation yet, so I cannot say.")
    ours = sum(1 for s in scene.seen if s.name == "restart_deployment" and s.data is not None)
    after = f" After that we restarted the deployment {_times(ours)} ourselves." if ours else ""
    return Step(f"{_times(count).capitalize()}: {sentence}{after}")


def _restarts_before(scene: Scene) -> tuple[int | None, str]:
    """Restarts of the worst pod as last seen before any restart of ours, and a sentence that says so."""
    count, sentence = None, ""
    for seen in scene.seen:
        if seen.name == "restart_deployment" and seen.data is not None:
            break
        if seen.name == "get_pods" and seen.data is not None:
            pod = max(seen.data, key=lambda p: int(p["restartCount"]))
            count = int(pod["restartCount"])
            sentence = f"{pod['name']} had a restartCount of {count} when I looked."
    return count, sentence


def _times(count: int) -> str:
    return {1: "once", 2: "twice"}.get(count, f"{count} times")


def _other_course(scene: Scene, service: str, denied: Seen) -> Step:
    if not denied.feedback:
        return Step(f"The call of {denied.name} was denied, so I changed nothing.")
    rollouts = scene.latest("get_rollout_history")
    if rollouts is None:
        return Step(
            "Understood, no restart. I look at what was deployed instead.",
            (ToolCall("get_rollout_history", {"namespace": _NAMESPACE, "deployment": service}),),
        )
    if not rollouts.data:
        return Step(f"I did not restart {service}, and its rollout history tells nothing: {rollouts.text}")
    revisions = sorted(rollouts.data, key=lambda r: int(r["revision"]))[-2:]
    images = {s.arguments.get("image"): s for s in scene.now if s.name == "get_image"}
    unknown = [r["image"] for r in revisions if r["image"] not in images]
    if unknown:
        return Step("", tuple(ToolCall("get_image", {"image": image}) for image in unknown))
    return Step(_about_images(service, revisions, images[revisions[-1]["image"]], _cause(scene)))


def _about_images(service: str, revisions: list[dict[str, Any]], newest: Seen, cause: str) -> str:
    before, now = revisions[0], revisions[-1]
    changes = "; ".join(newest.data["changes"]) if newest.data else "unknown"
    options = newest.data["javaOptions"] if newest.data else "unknown options"
    return (
        f"I did not restart {service}. Revision {now['revision']}, deployed {now['deployedAt']}, runs image "
        f"{_tag(now)} in place of {_tag(before)}, and what changed in it is: {changes}. It still starts with "
        f"{options}. {cause} So the new image needs more memory than it gets, and a restart only buys "
        f"time. I suggest to roll back to revision {before['revision']}, or to raise heap and limit together."
    )


def _tag(revision: dict[str, Any]) -> str:
    return str(revision["image"]).rpartition(":")[2]

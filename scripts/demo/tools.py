"""The demo's tools: they read the files of the incident, and one of them restarts a deployment in them."""

from __future__ import annotations

from typing import Any

from scripts.demo.cluster import Cluster
from worker.agent.base import ToolContext
from worker.agent.tools import tool


@tool(risk="read_only")
def get_pods(namespace: str, app: str | None = None) -> list[dict[str, Any]]:
    """List pods with their readiness, restart count and last state."""
    return Cluster.of_environment().pods(namespace, app)


@tool(risk="read_only")
def get_logs(namespace: str, pod: str) -> str:
    """Read the end of a pod's log."""
    return Cluster.of_environment().logs(namespace, pod)


@tool(risk="read_only")
def get_deployment(namespace: str, deployment: str) -> dict[str, Any]:
    """Read a deployment: image, revision, time of deployment, resources."""
    return Cluster.of_environment().deployment(namespace, deployment)


@tool(risk="read_only")
def get_rollout_history(namespace: str, deployment: str) -> list[dict[str, Any]]:
    """List the revisions of a deployment with their images and reasons."""
    return Cluster.of_environment().rollouts(namespace, deployment)


@tool(risk="read_only")
def get_image(image: str) -> dict[str, Any]:
    """Look an image up in the registry: when it was built, how it starts, what changed."""
    return Cluster.of_environment().image(image)


@tool(risk="side_effect", approval="always")
def restart_deployment(namespace: str, deployment: str, context: ToolContext) -> dict[str, Any]:
    """Restart every pod of a deployment."""
    return Cluster.of_environment().restart(namespace, deployment, context.idempotency_key)

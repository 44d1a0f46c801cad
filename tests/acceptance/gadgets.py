"""Tools whose side effects can be counted: ``restart`` writes a line into the journal."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from worker.agent.tools import tool


@tool(risk="read_only")
def pods(namespace: str) -> dict[str, object]:
    """Count the pods of a namespace."""
    return {"namespace": namespace, "count": 3, "restartCount": 6}


@tool(risk="side_effect")
def restart(deployment: str) -> str:
    """Restart a deployment."""
    with Path(os.environ["GADGETS_JOURNAL"]).open("a") as journal:
        journal.write(f"{deployment}\n")
    return f"restarted {deployment}"


@tool(risk="side_effect", approval="never")
def bump(counter: str) -> str:
    """Add one to a counter."""
    with Path(os.environ["GADGETS_JOURNAL"]).open("a") as journal:
        journal.write(f"{counter}\n")
    return f"bumped {counter}"


@tool(risk="read_only")
def noise(seed: str) -> dict[str, object]:
    """Look at something that databases and providers do not like."""
    return {"seed": seed, "nul\x00": "a\x00b", "half": "\ud83d end", "latency": float("nan"), "literal": "a\\u0000b"}


@tool(risk="read_only")
def die() -> str:
    """Kill the process that this runs in."""
    os.kill(os.getpid(), signal.SIGKILL)
    return "never"

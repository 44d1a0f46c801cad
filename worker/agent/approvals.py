"""Approvals: what a pause tells the people who decide, and the tokens that bind their decisions.

A pending approval shows the exact arguments: nothing is cut or invisible, and only secrets are masked. Its token is
random; the database keeps only the hash. A call that waits through several pauses keeps its first token and expiry.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from shared.events import CallAwait
from shared.redaction import Redactor
from shared.requests import token_sha256
from worker.agent.base import Toolbox
from worker.agent.ledger import Call
from worker.agent.run import Paused, Run
from worker.agent.tools.arguments import parse_arguments
from worker.agent.tools.rules import needs_prefix
from worker.agent.visible import describe_call, make_visible


def pause_for(
    waiting: Sequence[Call], run: Run, toolbox: Toolbox, redactor: Redactor, approval_seconds: float
) -> Paused:
    """The pause for the calls that wait. Calls that only a later turn decided are not listed again."""
    earlier = {_key(a): a for a in run.earlier_approvals}
    elapsed = asyncio.get_running_loop().time() - run.claimed_at
    expires_at = (run.now + timedelta(seconds=elapsed + approval_seconds)).isoformat()
    approvals: list[dict[str, Any]] = []
    frontend: list[dict[str, Any]] = []
    awaits: list[CallAwait] = []
    for call in waiting:
        if call.state != "pending" or call.key is None:
            continue
        turn, step, index = call.key
        arguments = parse_arguments(call.arguments).value
        shown = redactor.value(arguments)
        entry: dict[str, Any] = {
            "tool_call_id": call.tool_call_id,
            "tool_name": call.tool_name,
            "description": describe_call(call.tool_name, shown),
            "params": make_visible(shown),
            "turn": turn,
            "step": step,
            "call_index": index,
        }
        if call.kind == "frontend":
            frontend.append({**entry, "params": arguments})  # what the client runs
            continue
        known = earlier.get(call.key)
        token = known["approval_token"] if known else secrets.token_urlsafe(32)
        expiry = known["expires_at"] if known else expires_at
        spec = toolbox.get(call.tool_name)
        by_rule = spec is not None and spec.approval == "by_rule"
        entry.update(
            risk=call.risk,
            tool_description=spec.description if spec else "",
            can_remember=by_rule,
            remember_needs_prefix=by_rule and spec is not None and needs_prefix(spec),
            approval_token=token,
            expires_at=expiry,
        )
        approvals.append(entry)
        awaits.append(
            {
                "op": "await",
                "turn": turn,
                "step": step,
                "call_index": index,
                "approval_token_sha256": token_sha256(token),
                "expires_at": expiry,
            }
        )
    return Paused(approvals, frontend, tuple(awaits))


def _key(approval: Any) -> tuple[int, int, int] | None:
    if not all(name in approval for name in ("turn", "step", "call_index", "approval_token", "expires_at")):
        return None
    return (approval["turn"], approval["step"], approval["call_index"])

"""Talking to a conversation: record a request, ring, and show the turn until it ends or stops for a decision."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, cast

from scripts.decisions import Choice
from scripts.desk import FAILED, Desk, require_conversation
from scripts.turn_view import TurnView, totals_line
from scripts.workers import WorkerInfo, alive_workers
from shared.client import Receipt
from shared.errors import QueueUnavailable
from shared.queues import connect_async

if TYPE_CHECKING:
    from redis.asyncio import Redis

Row = dict[str, Any]

_NOBODY = (
    "turnkeeper: nobody works on it: no worker takes from the queue {queue!r}. It is recorded and waits.\n"
    "Start a worker in another terminal with: turnkeeper up (Ctrl+C here loses nothing)"
)
_STARTING_SECONDS = 15.0  # a worker imports its model library first
_AWAY_SECONDS = 3.0  # the same for the embedded Redis
_LOOK_SECONDS = 0.5
_TOOK_EFFECT = frozenset({"approved", "denied", "result_recorded"})
_VERDICTS = {
    "already_resolved": "somebody else decided first",
    "unknown": "no call waits under that id",
    "stale": "the call is not wanted any more: a newer question took its place",
    "expired": "the decision came too late",
}


async def ask(desk: Desk, fields: Row, *, wait: bool) -> int:
    """Record a question; see ``shared.requests.Ask`` for ``fields`` (None: left out)."""
    return await submit_and_watch(desk, "ask", fields, wait=wait)


async def decide(desk: Desk, conversation_id: str, choice: Choice, *, user: str | None, wait: bool) -> int:
    """Decide about waiting calls; their tokens are looked up."""
    decisions = choice.decisions(await desk.client.approvals(conversation_id))
    fields = {"conversation_id": conversation_id, "user_id": user, "tool_decisions": decisions}
    return await submit_and_watch(desk, "tool_decisions", fields, wait=wait)


async def retry(desk: Desk, conversation_id: str, *, wait: bool) -> int:
    return await submit_and_watch(desk, "retry", {"conversation_id": conversation_id}, wait=wait)


async def stop(desk: Desk, conversation_id: str, turn: int | None) -> None:
    await require_conversation(desk, conversation_id)
    stopped = await desk.client.stop(conversation_id, turn)
    texts = {
        "flagged": f"Turn {stopped.turn} was asked to stop.",
        "stopped": f"Turn {stopped.turn} is stopped; the calls that waited are closed.",
        "none": "Nothing runs or waits there; nothing changed.",
    }
    row = {"conversation_id": conversation_id, "turn": stopped.turn, "effect": stopped.effect}
    desk.out.row(row, text=texts[stopped.effect])


async def submit(desk: Desk, kind: str, fields: Row) -> Receipt:
    """Record a request and ring; ``fields`` that are None are left out."""
    given = {k: v for k, v in fields.items() if v is not None}
    if kind == "ask":
        return await desk.client.ask(given.pop("ask"), **given)
    conversation_id = given.pop("conversation_id")
    if kind == "retry":
        return await desk.client.retry(conversation_id, **given)
    decisions, results = given.pop("tool_decisions", ()), given.pop("frontend_tool_results", ())
    return await desk.client.decide(conversation_id, decisions, results=results, **given)


async def submit_and_watch(desk: Desk, kind: str, fields: Row, *, wait: bool) -> int:
    """Record and ring, then watch the turn unless told otherwise; the exit status."""
    seen = await _last_seq(desk, fields.get("conversation_id"))
    receipt = await submit(desk, kind, fields)
    for tool_call_id, verdict in receipt.decisions.items():
        if verdict not in _TOOK_EFFECT:
            desk.out.note(f"{tool_call_id}: {_VERDICTS[verdict]}", "yellow")
    if not receipt.rung and not desk.settings.embedded_redis:
        raise QueueUnavailable(
            f"Redis does not answer. Turn {receipt.turn} of conversation {receipt.conversation_id} is recorded and "
            "is rung for once Redis is back.",
            hint="Check REDIS_URL and that the server runs.",
        )
    if not wait:
        row = {name: value for name, value in asdict(receipt).items() if name != "rung"}
        desk.out.row(row, text=f"Recorded as turn {receipt.turn} of conversation {receipt.conversation_id}.")
        return 0
    looking = asyncio.create_task(_tell_if_nobody_works(desk, receipt.queue))
    try:
        return await watch(desk, receipt.conversation_id, receipt.turn, after=seen if receipt.created else 0)
    finally:
        looking.cancel()
        await asyncio.gather(looking, return_exceptions=True)


async def watch(desk: Desk, conversation_id: str, turn: int, *, after: int = 0) -> int:
    """Show the events of a turn until it has ended; 1 if it failed, else 0."""
    view = TurnView(desk.out, conversation_id)
    following = desk.client.follow(conversation_id, after=after, until=turn)
    try:
        async with aclosing(cast("AsyncGenerator[Row, None]", following)) as rows:
            async for row in rows:
                if row["turn"] == turn:
                    view.show(row)
    except asyncio.CancelledError:  # Ctrl+C
        desk.out.note(f"\nThe turn goes on without you. Stop it: turnkeeper stop {conversation_id}", "dim")
        raise
    ended = next(t for t in await desk.store.turns(conversation_id) if t["turn"] == turn)
    desk.out.note(f"conversation {conversation_id}, turn {turn} {ended['status']}: {totals_line(ended)}", "dim")
    return FAILED if ended["status"] == "failed" else 0


async def _last_seq(desk: Desk, conversation_id: Any) -> int:
    """Where the new turn's events begin, at the earliest."""
    row = await desk.store.conversation(str(conversation_id)) if conversation_id else None
    return int(row["last_seq"]) if row else 0


async def _tell_if_nobody_works(desk: Desk, queue: str) -> None:
    """Say so, at once where workers run that leave this queue alone; else after a while, as one may be starting."""
    redis, clock = connect_async(desk.settings.effective_redis_url), asyncio.get_running_loop().time
    began = clock()
    try:
        while not (workers := await _workers(redis)):
            if clock() - began > (_STARTING_SECONDS if workers is not None else _AWAY_SECONDS):
                break
            await asyncio.sleep(_LOOK_SECONDS)
    finally:
        await redis.aclose()
    if not any(worker.serves(queue) for worker in workers or ()):
        print(_NOBODY.format(queue=queue), file=sys.stderr, flush=True)


async def _workers(redis: Redis) -> list[WorkerInfo] | None:
    """None: Redis is away."""
    try:
        return [worker for worker in await alive_workers(redis) if not worker.gone]
    except QueueUnavailable:
        return None

"""Inspection: what the store holds of a conversation, for people and as JSON lines. Nothing here writes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from scripts.desk import Desk, require_conversation
from scripts.render import event_line, print_json
from scripts.turn_view import TurnView
from worker.agent.tools.arguments import parse_arguments
from worker.agent.visible import make_visible

Row = dict[str, Any]

_PAGE = 500  # events
_TURN_SECRETS = frozenset({"lease_token", "claim_id"})  # who has them writes as the worker
_CALL_SECRETS = frozenset({"approval_token_sha256"})
_OF_NO_USE = frozenset({"ring_backoff_seconds"})  # to people
_EVENT_COLUMNS = ("seq", "turn", "attempt", "event", "created_at", "says")
_TURN_COLUMNS = ("turn", "kind", "status", "attempt", "rounds", "tool_calls", "model", "duration_ms", "request_id")
_CALL_COLUMNS = ("turn", "step", "tool_name", "arguments", "risk", "state", "decided_by", "duration_ms")


async def stored_events(desk: Desk, conversation_id: str, *, after: int = 0, full: bool = False) -> AsyncIterator[Row]:
    """All events later than ``after``, read in pages."""
    while True:
        page = await desk.store.events(conversation_id, after=after, limit=_PAGE, full=full)
        for event in page:
            yield desk.client.redactor.shown(event)
        if len(page) < _PAGE:
            return
        after = page[-1]["seq"]


async def show_conversation(desk: Desk, conversation_id: str) -> None:
    """The conversation's row; for people also its turns, calls and waiting approvals."""
    row = await require_conversation(desk, conversation_id)
    turns = await desk.store.turns(conversation_id)
    calls = [_masked(desk, call) for call in await desk.store.calls(conversation_id)]
    if desk.out.as_json:
        row["turns"] = [_without(turn, _TURN_SECRETS) for turn in turns]
        row["tool_calls"] = [_without(call, _CALL_SECRETS) for call in calls]
        print_json(row)
        return
    desk.out.row(_without(row, _OF_NO_USE))
    desk.out.note("\nTurns", "bold")
    desk.out.rows(turns, _TURN_COLUMNS, empty="none")
    for turn in turns:
        if turn["error"]:
            code, description = turn["error"].get("code"), turn["error"].get("description")
            desk.out.note(f"turn {turn['turn']}: {code}: {description}", "red")
    if calls:
        desk.out.note("\nTool calls", "bold")
        desk.out.rows(calls, _CALL_COLUMNS, empty="")
    for approval in await desk.client.approvals(conversation_id):
        desk.out.approval(approval, conversation_id)


def _masked(desk: Desk, row: Row) -> Row:
    """A call whose arguments show no secret; what runs is the stored row."""
    return {**row, "arguments": desk.client.redactor.text(row["arguments"])}


def _without(row: Row, secrets: frozenset[str]) -> Row:
    return {k: v for k, v in row.items() if k not in secrets}


async def show_events(desk: Desk, conversation_id: str, *, follow: bool, after: int, full: bool) -> None:
    """Stored events; with ``follow``, then those to come, until interrupted."""
    await require_conversation(desk, conversation_id)
    rows = [event async for event in stored_events(desk, conversation_id, after=after, full=full)]
    if full and not desk.out.as_json:
        for event in rows:
            desk.out.row(event)
            desk.out.note("")
    else:
        shown = rows if desk.out.as_json else [{**e, "says": _short(event_line(e))} for e in rows]
        desk.out.rows(shown, _EVENT_COLUMNS, empty="No events.", cut="says")
    if follow:
        last = rows[-1]["seq"] if rows else after
        async for event in desk.client.follow(conversation_id, after=last):
            if event["seq"] is None:  # text on its way to an event
                continue
            if desk.out.as_json:
                print_json(event)
            else:
                place = f"{event['seq']:>4}  {event['turn']:>3}  {event['event']:<20}"
                desk.out.line(f"{place} {_short(event_line(event))}")


async def show_approvals(desk: Desk, account: str | None) -> None:
    rows = [_masked(desk, row) for row in await desk.store.approvals(account_id=account)]
    columns = ("conversation_id", "tool_call_id", "tool_name", "arguments", "risk", "user_id", "title", "expires_at")
    if desk.out.as_json or not rows:
        desk.out.rows(rows, columns, empty="Nobody has to decide anything.")
        return
    for row in rows:
        desk.out.note(f"{row['title']}  {row['user_id'] or ''}", "bold")
        approval = {**row, "params": make_visible(parse_arguments(row["arguments"]).value)}
        desk.out.approval(approval, row["conversation_id"])


async def replay_conversation(desk: Desk, conversation_id: str) -> None:
    """The whole conversation as it was seen, from its events."""
    await require_conversation(desk, conversation_id)
    view = TurnView(desk.out, conversation_id, questions=True, commands=False)
    async for event in stored_events(desk, conversation_id):
        view.show(event)


def _short(text: str, characters: int = 1_000) -> str:
    """One line, longer than any terminal is wide."""
    return " ".join(text[: 2 * characters].split())[:characters]

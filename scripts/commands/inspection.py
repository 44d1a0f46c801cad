"""Inspection: conversations, their turns, their events, and what waits for a decision."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

import typer

from scripts.commands.options import Account, AsJson, Conversation

if TYPE_CHECKING:
    from scripts.desk import Desk

Status = Literal["pending", "running", "awaiting_approval", "completed", "failed", "stopped"]


def conversations(
    account: Account = None,
    status: Annotated[Status | None, typer.Option(help="Only those with this status", show_default=False)] = None,
    limit: Annotated[int, typer.Option(min=1, max=1_000)] = 50,
    before: Annotated[
        str | None, typer.Option(help="Page on: updated_at,conversation_id of the last row", show_default=False)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List conversations, newest activity first."""
    from scripts.desk import at_desk

    async def work(desk: Desk) -> None:
        rows = await desk.store.conversations(account_id=account, status=status, limit=limit, before=before)
        columns = ("conversation_id", "status", "title", "user_id", "last_turn", "updated_at")
        chosen = account or status or before
        empty = "No such conversations." if chosen else "No conversations yet. Try: turnkeeper ask 'What runs here?'"
        desk.out.rows(rows, columns, empty=empty)

    at_desk(work, as_json)


def show(conversation: Conversation, as_json: AsJson = False) -> None:
    """Show a conversation: its row, its turns, and its tool calls."""
    from scripts.desk import at_desk
    from scripts.inspection import show_conversation

    at_desk(lambda desk: show_conversation(desk, str(conversation)), as_json)


def events(
    conversation: Conversation,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with what happens from now on")] = False,
    after: Annotated[int, typer.Option(min=0, help="Only events with a higher seq")] = 0,
    full: Annotated[bool, typer.Option("--full", help="With the messages of snapshots, every column whole")] = False,
    as_json: AsJson = False,
) -> None:
    """Show a conversation's events."""
    from scripts.desk import at_desk
    from scripts.inspection import show_events

    at_desk(lambda desk: show_events(desk, str(conversation), follow=follow, after=after, full=full), as_json)


def approvals(account: Account = None, as_json: AsJson = False) -> None:
    """List the calls that wait for a decision, over all conversations."""
    from scripts.desk import at_desk
    from scripts.inspection import show_approvals

    at_desk(lambda desk: show_approvals(desk, account), as_json)


def replay(conversation: Conversation, as_json: AsJson = False) -> None:
    """Play a conversation again from its events. Calls neither the model nor any tool."""
    from scripts.desk import at_desk
    from scripts.inspection import replay_conversation

    at_desk(lambda desk: replay_conversation(desk, str(conversation)), as_json)


def usage(
    by: Annotated[Literal["model", "account", "day"], typer.Option(help="What to sum by")] = "model",
    account: Account = None,
    as_json: AsJson = False,
) -> None:
    """Sum tokens, cost and rounds."""
    from scripts.desk import at_desk

    async def work(desk: Desk) -> None:
        rows = await desk.store.usage(by=by, account_id=account)
        columns = list(rows[0]) if rows else []
        desk.out.rows(rows, columns, empty="No such turns." if account else "No turns yet.")

    at_desk(work, as_json)

"""Upkeep: feedback, titles, removal, dead letters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from scripts.commands.options import Account, AsJson, Conversation, Yes

if TYPE_CHECKING:
    from scripts.desk import Desk


def feedback(
    request_id: Annotated[str, typer.Argument(help="request_id of the answer (answer_end carries it)")],
    up: Annotated[bool, typer.Option("--up/--down", help="Thumbs up or down", show_default=False)],
    category: Annotated[str | None, typer.Option(show_default=False)] = None,
    comment: Annotated[str | None, typer.Option(show_default=False)] = None,
    account: Account = None,
    as_json: AsJson = False,
) -> None:
    """Rate an answer. The model never sees it."""
    from scripts.desk import at_desk

    async def work(desk: Desk) -> None:
        row = await desk.store.record_feedback(
            request_id, "up" if up else "down", category=category, comment=comment, account_id=account
        )
        desk.out.row(row, text=f"Recorded thumbs {row['rating']} for {request_id}.")

    at_desk(work, as_json)


def rename(
    conversation: Conversation, title: Annotated[str, typer.Argument(help="New title")], as_json: AsJson = False
) -> None:
    """Give a conversation another title."""
    from scripts.desk import at_desk

    async def work(desk: Desk) -> None:
        row = await desk.store.rename(str(conversation), title)
        desk.out.row(row, text=f"Renamed to {row['title']}.")

    at_desk(work, as_json)


def delete(conversation: Conversation, yes: Yes = False, as_json: AsJson = False) -> None:
    """Remove a conversation with everything that belongs to it."""
    from scripts.desk import at_desk, unknown_conversation

    identifier = str(conversation)
    if not yes and as_json:
        raise typer.BadParameter("nobody is asked with --json; add --yes", param_hint="--yes")
    if not yes:
        typer.confirm(f"Remove conversation {identifier} for good?", abort=True, err=True)

    async def work(desk: Desk) -> None:
        if not await desk.client.delete(identifier):
            raise unknown_conversation(identifier)
        desk.out.row({"conversation_id": identifier, "deleted": True}, text=f"Removed {identifier}.")

    at_desk(work, as_json)


def requeue(
    letter: Annotated[int, typer.Argument(help="letter_id, as doctor shows it", show_default=False)],
    discard: Annotated[bool, typer.Option("--discard", help="Remove it without sending it again.")] = False,
    as_json: AsJson = False,
) -> None:
    """Give a dead letter to the queue again, or remove it."""
    from scripts.dead_letters import discard as remove
    from scripts.dead_letters import requeue as send_again
    from scripts.desk import at_desk

    at_desk(lambda desk: remove(desk, letter) if discard else send_again(desk, letter), as_json)

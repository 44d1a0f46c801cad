"""Turns: ask, decide, stop, retry."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated
from uuid import UUID

import typer

from scripts.commands.options import AsJson, Conversation, NoWait, User


def ask(
    text: Annotated[str, typer.Argument(help="The question; - reads it from stdin", show_default=False)],
    conversation: Annotated[
        UUID | None, typer.Option("--conversation", "-c", help="Go on with this one", show_default=False)
    ] = None,
    account: Annotated[str | None, typer.Option(help="Account of a new conversation", show_default=False)] = None,
    user: User = None,
    team: Annotated[str | None, typer.Option(help="Team of a new conversation", show_default=False)] = None,
    model: Annotated[str | None, typer.Option(help="litellm model name", show_default=False)] = None,
    target: Annotated[str | None, typer.Option(help="What it is about, as JSON", show_default=False)] = None,
    queue: Annotated[str | None, typer.Option(help="Queue to ring on", show_default=False)] = None,
    request_id: Annotated[str | None, typer.Option(help="Makes asking twice ask once", show_default=False)] = None,
    no_wait: NoWait = False,
    as_json: AsJson = False,
) -> None:
    """Ask, and watch the answer come. Stops where a call needs a decision."""
    from scripts.desk import at_desk
    from scripts.talk import ask as work

    fields = {
        "ask": typer.get_text_stream("stdin").read() if text == "-" else text,
        "conversation_id": conversation,
        "account_id": account,
        "user_id": user,
        "team_id": team,
        "model": model,
        "target": _json_object(target, "--target"),
        "queue": queue,
        "request_id": request_id,
    }
    at_desk(lambda desk: work(desk, fields, wait=not no_wait), as_json)


def decide(
    conversation: Conversation,
    approve: Annotated[
        list[str] | None, typer.Option(help="tool_call_id to approve, or 'all'", show_default=False)
    ] = None,
    deny: Annotated[list[str] | None, typer.Option(help="tool_call_id to deny, or 'all'", show_default=False)] = None,
    feedback: Annotated[
        list[str] | None,
        typer.Option(help="Why; the model reads it. One for all denials, or one for each in order", show_default=False),
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="JSON list of decisions instead", show_default=False),
    ] = None,
    remember: Annotated[
        str | None,
        typer.Option(
            metavar="SCOPE[:PREFIX]",
            help="Don't ask again for what is approved here, where the tool approves by rule (shell takes a PREFIX); "
            "scope: conversation, user or account",
            show_default=False,
        ),
    ] = None,
    user: User = None,
    no_wait: NoWait = False,
    as_json: AsJson = False,
) -> None:
    """Approve or deny the calls that wait, and watch the turn go on."""
    from scripts.decisions import Choice
    from scripts.desk import at_desk
    from scripts.talk import decide as work

    choice = Choice(tuple(approve or ()), tuple(deny or ()), tuple(feedback or ()), file, remember)
    at_desk(lambda desk: work(desk, str(conversation), choice, user=user, wait=not no_wait), as_json)


def stop(
    conversation: Conversation,
    turn: Annotated[int | None, typer.Option(min=1, help="This turn, and no other", show_default=False)] = None,
    as_json: AsJson = False,
) -> None:
    """Stop the running or waiting turn; what was shown is kept."""
    from scripts.desk import at_desk
    from scripts.talk import stop as work

    at_desk(lambda desk: work(desk, str(conversation), turn), as_json)


def retry(conversation: Conversation, no_wait: NoWait = False, as_json: AsJson = False) -> None:
    """Try a failed turn again, from where it failed."""
    from scripts.desk import at_desk
    from scripts.talk import retry as work

    at_desk(lambda desk: work(desk, str(conversation), wait=not no_wait), as_json)


def _json_object(text: str | None, option: str) -> dict[str, object] | None:
    import json

    if text is None:
        return None
    try:
        value = json.loads(text)
    except ValueError as error:
        raise typer.BadParameter(f"not JSON: {error}", param_hint=option) from None
    if not isinstance(value, dict):
        raise typer.BadParameter("not a JSON object", param_hint=option)
    return value

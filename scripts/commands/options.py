"""Arguments and options that several commands share."""

from __future__ import annotations

from typing import Annotated
from uuid import UUID

import typer

Conversation = Annotated[UUID, typer.Argument(help="Conversation id", metavar="CONVERSATION", show_default=False)]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object a line on stdout")]
Account = Annotated[str | None, typer.Option("--account", help="Account; all when left out", show_default=False)]
User = Annotated[str | None, typer.Option("--user", help="Who asks or decides", show_default=False)]
NoWait = Annotated[bool, typer.Option("--no-wait", help="Record it, print the ids, and do not wait for the answer")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask")]

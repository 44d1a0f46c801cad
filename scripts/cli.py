"""``turnkeeper``: the command line. Exit status: 0 success (also when a turn stops for an approval), 1 a failed turn,
2 wrong usage or a refused request, 3 an unreachable service.

With ``--json`` errors are JSON on stderr too, those of usage included.
"""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import typer
import typer.main

from scripts.commands import health, inspection, running, turns, upkeep

app = typer.Typer(
    name="turnkeeper",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

_GROUPS = {
    "Start here": (running.demo, running.up, running.doctor),
    "Conversations": (turns.ask, turns.decide, turns.stop, turns.retry),
    "Inspection": (
        inspection.conversations,
        inspection.show,
        inspection.events,
        inspection.approvals,
        inspection.replay,
        inspection.usage,
    ),
    "Upkeep": (upkeep.feedback, upkeep.rename, upkeep.delete, upkeep.requeue),
    "Operation": (running.worker, health.worker_alive, running.migrate),
}

for _panel, _commands in _GROUPS.items():
    for _command in _commands:
        app.command(rich_help_panel=_panel)(_command)

app.command(rich_help_panel="Operation", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(
    running.bench
)


_UsageError: Any = typer.BadParameter.__mro__[1]  # click's, which typer does not export


def _version(asked: bool) -> None:
    if asked:
        from importlib.metadata import PackageNotFoundError, version

        try:
            print(f"turnkeeper {version('turnkeeper')}")
        except PackageNotFoundError:
            print("turnkeeper, from a folder of sources that is not installed")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """LLM agent conversations from a queue: durable turns, approvals, and the log of what happened."""


def main() -> None:
    """Entry point of the ``turnkeeper`` script."""
    if "--json" not in sys.argv:
        app()
        return
    command = typer.main.get_command(app)
    try:
        status = command.main(standalone_mode=False)
    except _UsageError as error:
        print(json.dumps({"error": {"code": "usage", "description": error.format_message()}}), file=sys.stderr)
        status = error.exit_code
    raise SystemExit(status)


if __name__ == "__main__":
    main()

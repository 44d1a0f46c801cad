"""``turnkeeper``: the command line. Exit status: 0 success (also when a turn stops for an approval), 1 a failed turn,
2 wrong usage or a refused request, 3 an unreachable service.
"""

from __future__ import annotations

import typer

from scripts.commands import health, inspection, running, turns, upkeep

app = typer.Typer(
    name="turnkeeper",
    help="LLM agent conversations from a queue: durable turns, approvals, and the log of what happened.",
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


def main() -> None:
    """Entry point of the ``turnkeeper`` script."""
    app()


if __name__ == "__main__":
    main()

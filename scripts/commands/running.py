"""Running it: the demo, everything on one machine, a worker, migrations, the diagnosis, benchmarks."""

from __future__ import annotations

from typing import Annotated

import typer

from scripts.commands.options import AsJson


def demo(
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Decide as the story does, without a key press")] = False,
    fast: Annotated[bool, typer.Option("--fast", help="Without human-like pauses")] = False,
) -> None:
    """Watch an incident from the first question to its end. Needs no API key."""
    from scripts.demo.play import play

    raise typer.Exit(play(yes=yes, fast=fast))


def up(
    demo: Annotated[
        bool, typer.Option("--demo", help="With the demo's scripted model and its incident: no key")
    ] = False,
) -> None:
    """Start everything that is not running yet: Redis, the store, one worker. (A second one: turnkeeper worker.)"""
    from scripts.up import up as start

    raise typer.Exit(start(demo=demo))


def worker(
    queue: Annotated[
        list[str] | None, typer.Option(metavar="NAME=SLOTS", help="Queue and its turns at once", show_default=False)
    ] = None,
    burst: Annotated[bool, typer.Option("--burst", help="Leave when the queues are empty")] = False,
) -> None:
    """Run one worker process."""
    from scripts.up import run_worker

    raise typer.Exit(run_worker(queue or [], burst=burst))


def migrate(as_json: AsJson = False) -> None:
    """Bring the store's schema up to date."""
    from scripts.up import migrate as work

    raise typer.Exit(work(as_json))


def doctor(as_json: AsJson = False) -> None:
    """Check everything that a worker depends on, and say what to do."""
    from scripts.doctor import doctor as diagnose

    raise typer.Exit(diagnose(as_json))


def bench(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="Name of the benchmark", show_default=False)],
) -> None:
    """Run a benchmark; its own options follow its name."""
    from scripts.up import run_bench

    raise typer.Exit(run_bench(name, context.args))

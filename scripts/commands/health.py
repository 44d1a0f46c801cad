"""For whoever keeps the worker running: Docker, Kubernetes, systemd."""

from __future__ import annotations

from typing import Annotated

import typer

from scripts.commands.options import AsJson


def worker_alive(
    within: Annotated[float, typer.Option(min=1, help="Age of the heartbeat, at most, in seconds")] = 30,
    as_json: AsJson = False,
) -> None:
    """Say whether a worker of this machine is alive: 0 if so, 1 if not, 3 if Redis does not answer."""
    from scripts.worker_alive import worker_alive as look

    raise typer.Exit(look(within, as_json))

"""Chaos: real workers, people, Redis and a store, while processes are killed at random, Redis is emptied, and the
database goes away. Then the invariants, checked from the tables and from what the tools themselves recorded.

Exit status 1 when one is violated. ``docs/chaos.md`` says what is done, what is checked, and what came out.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args

from scripts.bench.kit.chaos.check import Findings, Left, check
from scripts.bench.kit.chaos.fleet import Fleet
from scripts.bench.kit.chaos.installation import Installation, StoreName, installed
from scripts.bench.kit.chaos.journal import PATH_VARIABLE, read_journal
from scripts.bench.kit.chaos.pickup import Watch
from scripts.bench.kit.chaos.plan import Plan, plan_of
from scripts.bench.kit.chaos.report import add_pickups, print_report
from scripts.bench.kit.chaos.rows import Tables
from scripts.bench.kit.chaos.storm import Storm
from scripts.bench.kit.parts import median

PEOPLE = "scripts.bench.kit.chaos.people"
QUIET_SECONDS = 30.0  # for turns whose person does not wait, after everybody has left
POLL_SECONDS = 0.1


def main(arguments: Sequence[str]) -> int:
    options = _parser().parse_args(arguments)
    plan = plan_of(seed=options.seed, turns=options.turns, turn_seconds=options.turn_seconds, seconds=options.seconds)
    with installed(options.store, options.away_seconds) as (installation, folder):
        try:
            run, findings = _run(installation, folder, plan, options)
        finally:
            if options.keep is not None:
                _keep(folder, options.keep)
    print_report(run, findings, as_json=options.json)
    return 1 if findings.violations else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="turnkeeper bench chaos", description=__doc__)
    parser.add_argument("--turns", type=int, default=500)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--turn-seconds", type=float, default=5.0, help="what a turn takes undisturbed, about")
    parser.add_argument("--kill-every", type=float, default=2.0, help="seconds between two signals, on average")
    parser.add_argument("--seconds", type=float, default=120.0, help="how long the storm goes on")
    parser.add_argument("--settle-seconds", type=float, default=120.0, help="time for all turns to end after it")
    parser.add_argument("--away-seconds", type=float, default=6.0, help="how long the database is away")
    parser.add_argument("--pickup-limit", type=float, default=15.0, help="seconds from SIGKILL to pick-up, at most")
    parser.add_argument("--store", choices=get_args(StoreName), default="sqlite")
    parser.add_argument("--seed", type=int, default=1, help="of the plan and of the storm")
    parser.add_argument("--keep", type=Path, help="a folder to copy tables, journals and logs to")
    parser.add_argument("--json", action="store_true")
    return parser


def _run(
    installation: Installation, folder: Path, plan: Plan, options: argparse.Namespace
) -> tuple[dict[str, Any], Findings]:
    plan.write(folder / "plan.json")
    (folder / "logs").mkdir()
    started = time.monotonic()
    fleet = Fleet(
        options.workers, installation.environment(**{PATH_VARIABLE: str(folder / "work.journal")}), folder / "logs"
    )
    watch = Watch(installation.query)
    people = _people(installation, folder, options.seconds + options.settle_seconds)
    try:
        storm = Storm(
            installation, fleet, watch, seed=options.seed, kill_every=options.kill_every, seconds=options.seconds
        )
        storm.rage()
        people.wait(options.settle_seconds + QUIET_SECONDS)
        _until_quiet(watch)
    finally:
        people.kill()
        people.wait()
        interruptions = watch.close()
        fleet.close(installation.settings.hard_deadline_seconds)
    tables = Tables.read(installation.query)
    (folder / "tables.json").write_text(json.dumps(asdict(tables), default=str))
    findings = check(
        Left(
            tables,
            read_journal(folder / "people.journal"),
            read_journal(folder / "work.journal"),
            storm.record.flushed_at,
        )
    )
    nobody = [*storm.record.absences, *fleet.service.gaps]
    add_pickups(findings, interruptions, nobody, options.pickup_limit)
    findings.zero("workers that did not end when told to", fleet.stuck)
    run = {
        "store": options.store,
        "seed": options.seed,
        "turns planned": plan.turns,
        "workers": options.workers,
        "lease seconds": installation.settings.lease_seconds,
        "seconds": round(time.monotonic() - started, 1),
        **{name: storm.record.signals[name] for name in ("SIGKILL", "SIGTERM", "SIGSTOP")},
        "worker processes started": fleet.starts,
        "seconds until a worker was ready, median": round(median(fleet.seconds_to_ready), 1),
        "seconds without any worker at work": round(sum(end - begin for begin, end in fleet.service.gaps), 1),
        "Redis emptied": int(storm.record.flushed_at is not None),
        "database away": len(storm.record.absences),
        "of those, SQLite's lock in a paused worker": storm.record.paused_with_lock,
    }
    return run, findings


def _people(installation: Installation, folder: Path, seconds: float) -> subprocess.Popen[bytes]:
    arguments = [str(folder / "plan.json"), str(folder / "people.journal"), str(seconds)]
    with (folder / "logs" / "people.log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", PEOPLE, *arguments],
            env=installation.environment(),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )


def _until_quiet(watch: Watch) -> None:
    """Until no turn is unfinished, or for ``QUIET_SECONDS``: what is unfinished then is reported as lost."""
    deadline = time.monotonic() + QUIET_SECONDS
    while watch.unfinished != 0 and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)


def _keep(folder: Path, target: Path) -> None:
    target.mkdir(parents=True, exist_ok=True)
    for path in [*folder.glob("*.journal"), folder / "plan.json", folder / "tables.json"]:
        if path.exists():
            shutil.copy2(path, target)
    shutil.copytree(folder / "logs", target / "logs", dirs_exist_ok=True)

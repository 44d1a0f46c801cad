"""Cold start: the command line's help, and a worker until it is ready."""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence

from scripts.bench.kit.parts import WorkerProcess, environment_of, measured_settings, median, show


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="turnkeeper bench start", description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    help_seconds, ready_seconds = [], []
    for _ in range(options.runs):
        started = time.perf_counter()
        subprocess.run([sys.executable, "-m", "scripts.cli", "--help"], check=True, stdout=subprocess.DEVNULL)
        help_seconds.append(time.perf_counter() - started)
    with measured_settings(postgres=False, model="openai/test") as settings:
        for _ in range(options.runs):
            worker = WorkerProcess("worker", environment_of(settings, TURNKEEPER_MODEL="openai/test"))
            ready_seconds.append(worker.seconds_to_ready)
            worker.stop()
    rows = [
        {"what": "turnkeeper --help", "median_seconds": median(help_seconds), "best_seconds": min(help_seconds)},
        {"what": "worker ready", "median_seconds": median(ready_seconds), "best_seconds": min(ready_seconds)},
    ]
    show("cold start", rows, as_json=options.json)
    return 0

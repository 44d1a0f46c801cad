"""The chaos run in small: workers die, Redis is emptied, Postgres crashes; every promise is kept."""

from __future__ import annotations

import json
import os
import subprocess
import sys

SECONDS = 120.0  # far more than it takes
CHAOS = ["--turns", "40", "--workers", "3", "--turn-seconds", "1.5", "--kill-every", "1", "--seconds", "12"]
PATIENT = ["--settle-seconds", "60", "--away-seconds", "1", "--pickup-limit", "60"]  # machines of tests are busy
QUICK = {
    "TURNKEEPER_LEASE_SECONDS": "3",
    "TURNKEEPER_REAP_SECONDS": "0.5",
    "TURNKEEPER_MAX_CRASHES": "20",  # with so much dying, a turn may be unlucky more than 4 times
}


def test_nothing_is_lost_and_nothing_is_done_twice() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "scripts.cli", "bench", "chaos", "--store", "postgres", "--json", *CHAOS, *PATIENT],
        env={**os.environ, **QUICK},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.stdout, done.stderr
    report = json.loads(done.stdout)
    assert report["violations"] == {}
    assert done.returncode == 0
    assert (report["Redis emptied"], report["database away"]) == (1, 1)
    assert report["SIGKILL"] > 0
    assert report["worker processes started"] > 3
    excused = report["plain RQ jobs that the emptied Redis took with it"]
    assert report["turns accepted"] == report["turns planned"] - excused
    assert (
        sum(report[f"turns ended by {name}"] for name in ("answer_end", "approval_required", "turn_stopped"))
        == (report["turns accepted"])
    )
    assert report["side effects executed once"] > 10

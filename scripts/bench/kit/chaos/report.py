"""The report of a run: one table, or one JSON object."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from scripts.bench.kit.chaos.check import Findings
from scripts.bench.kit.chaos.pickup import LOOK_SECONDS, Interruption
from scripts.bench.kit.parts import median, show

Span = tuple[float, float]  # from, to; ``time.time()``
LINES_SHOWN = 20  # of each kind of violation


def add_pickups(
    findings: Findings, interruptions: Sequence[Interruption], nobody: Sequence[Span], limit_seconds: float
) -> None:
    """How long interrupted turns waited. Late is what waited longer than ``limit_seconds`` after a SIGKILL, unless in a
    part of that time there was ``nobody`` who could have picked it up: the database away, or no worker at work."""
    figures = findings.figures
    killed = [found for found in interruptions if found.why == "SIGKILL" and found.resumed]
    calm = [found for found in killed if not any(_overlap(found, span) for span in nobody)]
    figures["turns interrupted by SIGKILL"] = len(killed)
    figures["seconds from SIGKILL to pick-up, median"] = _median([_seconds(f) for f in killed])
    figures["seconds from SIGKILL to pick-up, worst"] = _worst([_seconds(f) for f in calm])
    figures["seconds from SIGKILL to pick-up, worst while nobody was there"] = _worst(
        [_seconds(f) for f in killed if f not in calm]
    )
    findings.zero(
        f"turns picked up later than {limit_seconds:g} s after SIGKILL",
        (f"{f.conversation_id[:8]} {f.turn}: {_seconds(f):.1f} s" for f in calm if _seconds(f) > limit_seconds),
    )
    handed = _handed_over(interruptions)
    figures["turns handed over after SIGTERM"] = len(handed)
    figures["seconds from SIGTERM to pick-up, median"] = _median([_seconds(f) for f in handed])
    figures["seconds from hand-back to pick-up, worst"] = _worst([_idle_seconds(f) for f in handed])
    figures["turns taken from a paused worker"] = sum(f.why == "SIGSTOP" and f.resumed for f in interruptions)


def _handed_over(interruptions: Sequence[Interruption]) -> list[Interruption]:
    """Turns that a draining worker gave away; not those that it was killed with."""
    killed = {(f.conversation_id, f.turn, f.attempt) for f in interruptions if f.why == "SIGKILL"}
    return [
        f for f in interruptions
        if f.why == "SIGTERM" and f.resumed and (f.conversation_id, f.turn, f.attempt) not in killed
    ]  # fmt: skip


def _idle_seconds(found: Interruption) -> float:
    """Between a hand-back and the next claim; what nobody saw waiting waited for less than a look."""
    if found.resumed_at is None or found.released_at is None:
        return LOOK_SECONDS
    return found.resumed_at - found.released_at


def _seconds(found: Interruption) -> float:
    assert found.seconds is not None
    return found.seconds


def _overlap(found: Interruption, span: Span) -> bool:
    resumed_at = found.resumed_at or found.at
    return found.at <= span[1] and resumed_at >= span[0]


def _median(seconds: Sequence[float]) -> float | None:
    return round(median(seconds), 2) if seconds else None


def _worst(seconds: Sequence[float]) -> float | None:
    return round(max(seconds), 2) if seconds else None


def print_report(run: Mapping[str, Any], findings: Findings, *, as_json: bool) -> None:
    """``run``: what the run was and what was done in it."""
    if as_json:
        print(json.dumps({"bench": "chaos", **run, **findings.figures, "violations": dict(findings.violations)}))
        return
    rows = [{"figure": name, "value": _text(value), "": ""} for name, value in run.items()]
    for name, value in findings.figures.items():
        rows.append({"figure": name, "value": _text(value), "": "VIOLATED" if name in findings.violations else ""})
    show("chaos", rows, as_json=False)
    for name, lines in findings.violations.items():
        print(f"\n{name}:")
        for line in lines[:LINES_SHOWN]:
            print(f"  {line}")
        if len(lines) > LINES_SHOWN:
            print(f"  and {len(lines) - LINES_SHOWN} more")


def _text(value: Any) -> str:
    return "-" if value is None else str(value)

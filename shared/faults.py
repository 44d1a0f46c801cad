"""Fault points: named places in the life of a turn where a test makes its worker die, freeze, leave or lose a reply.

``TURNKEEPER_FAULT="after_claim"`` kills the process where it passes that point first, ``"after_tool:2"`` at its second
passing, ``"after_tool:2=stop"`` freezes it there; several are separated by commas. Points, in the order of a turn:

==================  ====================================================================================
after_claim         a turn was claimed; nothing of it has run
before_model        the model is about to be asked
after_model         its answer is whole; nobody has heard of it
after_ai_message    its event was emitted, and is usually not stored
before_executing    a side effect wants to start; ``executing`` was emitted and is not awaited yet
after_executing     ``executing`` is committed; our own clock has not been looked at
before_tool         the last instruction before any tool runs, behind that look at the clock
after_tool          a tool has run; its result was not emitted
before_flush        a batch is about to be stored; every try passes
after_flush         it is stored; the worker has not heard of it
before_end          the batch with the terminal event is about to be stored
after_end           the turn has ended; its worker has not heard of it
before_release      a turn that is handed back is flushed and about to be released
after_release       it is released; nobody was rung for
before_finalise     the job has its result; RQ's books do not say so
==================  ====================================================================================

Actions: ``kill`` (SIGKILL, the default), ``stop`` (SIGSTOP), ``term`` (SIGTERM, the process goes on), ``exit`` (ends
without any clean-up) and, at points behind a call to the store, ``drop``: the call has landed and raises
``StoreUnavailable`` in place of its answer. Signals go to the process itself. While nothing is armed, a point costs
the call of an empty function.
"""

from __future__ import annotations

import os
import re
import signal
from collections import Counter
from collections.abc import Iterator
from typing import Any, Final, Literal, cast

from shared.errors import StoreUnavailable

POINTS: Final = (
    "after_claim",
    "before_model",
    "after_model",
    "after_ai_message",
    "before_executing",
    "after_executing",
    "before_tool",
    "after_tool",
    "before_flush",
    "after_flush",
    "before_end",
    "after_end",
    "before_release",
    "after_release",
    "before_finalise",
)
REPLIES: Final = frozenset({"after_claim", "after_flush", "after_end", "after_release"})
"""Points where the answer of the store has just come, so that it can be dropped."""
EXIT_STATUS: Final = 70  # of the action ``exit``

Action = Literal["kill", "stop", "term", "exit", "drop"]
Plan = dict[tuple[str, int], Action]

_FAULT: Final = re.compile(r"(?P<point>\w+)(:(?P<passing>[1-9]\d*))?(=(?P<action>kill|stop|term|exit|drop))?")
_SIGNALS: Final = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "term": signal.SIGTERM}

_plan: Plan = {}
_passings: Counter[str] = Counter()


def plan_of(text: str) -> Plan:
    """What ``TURNKEEPER_FAULT`` asks for: an action for a point and its passing. Raises ``ValueError``."""
    return dict(_faults(text))


def arm(plan: Plan) -> None:
    """From now on, passings are counted and the plan is carried out; an empty one disarms."""
    _plan.clear()
    _plan.update(plan)
    _passings.clear()


def reach(point: str) -> None:
    """The process passes a point. Raises ``StoreUnavailable`` where the plan drops a reply."""
    if _plan:
        _pass(point)


def _pass(point: str) -> None:
    _passings[point] += 1
    match _plan.get((point, _passings[point])):
        case None:
            return
        case "exit":
            os._exit(EXIT_STATUS)
        case "drop":
            raise StoreUnavailable(f"The reply was dropped at {point}. The call has landed.")
        case action:
            os.kill(os.getpid(), _SIGNALS[action])


def _faults(text: str) -> Iterator[tuple[tuple[str, int], Action]]:
    for part in filter(None, (p.strip() for p in text.split(","))):
        fault = _FAULT.fullmatch(part)
        if fault is None or fault["point"] not in POINTS:
            raise ValueError(f"{part!r} is no fault: POINT[:PASSING][=ACTION], points: {', '.join(POINTS)}")
        action = cast(Any, fault["action"] or "kill")
        if action == "drop" and fault["point"] not in REPLIES:
            raise ValueError(f"{part!r}: no reply of the store comes at this point")
        yield (fault["point"], int(fault["passing"] or 1)), action

"""Fault points: what may be asked for, and that each named place exists exactly where it is documented."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from shared import faults
from shared.errors import ConfigurationError, StoreUnavailable
from shared.settings import load_settings

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def disarmed() -> Iterator[None]:
    yield
    faults.arm({})


def test_a_plan_names_points_passings_and_actions() -> None:
    assert faults.plan_of("") == {}
    assert faults.plan_of("after_claim, after_tool:2=stop,after_end=drop") == {
        ("after_claim", 1): "kill",
        ("after_tool", 2): "stop",
        ("after_end", 1): "drop",
    }


@pytest.mark.parametrize("text", ["after_lunch", "after_tool:0", "after_tool=burn", "before_model=drop", "after_tool:"])
def test_what_is_no_fault_stops_the_start_with_a_line_that_names_it(text: str) -> None:
    with pytest.raises(ConfigurationError, match="TURNKEEPER_FAULT.*" + re.escape(text)):
        load_settings(fault=text)


def test_the_action_comes_at_its_passing_only() -> None:
    faults.arm(faults.plan_of("after_flush:2=drop"))
    faults.reach("after_flush")
    faults.reach("after_end")
    with pytest.raises(StoreUnavailable, match="has landed"):
        faults.reach("after_flush")
    faults.reach("after_flush")


def test_nothing_happens_unless_it_is_armed() -> None:
    for point in faults.POINTS:
        faults.reach(point)


def test_every_point_is_documented_and_passed_once_in_the_code() -> None:
    assert faults.__doc__ is not None
    assert tuple(re.findall(r"^([a-z]+_[a-z_]+) {2,}\S", faults.__doc__, re.MULTILINE)) == faults.POINTS
    passed: list[str] = []
    for folder in ("worker", "publisher", "shared"):
        for file in (REPOSITORY / folder).rglob("*.py"):
            for call in re.findall(r"faults\.reach\((.*)\)", file.read_text()):
                passed += re.findall(r'"(\w+)"', call)
    assert sorted(passed) == sorted(faults.POINTS)

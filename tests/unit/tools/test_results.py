"""Measuring, cutting and summarising results."""

from __future__ import annotations

import datetime as dt
import json
import random
import uuid
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from worker.agent.base import ToolResult
from worker.agent.tools.results import estimate_tokens, fit_result, raw_of, result_of, summary_of


def test_estimate_is_on_the_safe_side() -> None:
    """True counts are cl100k's, taken once."""
    numbers = random.Random(1)
    dense = json.dumps(
        [
            {"id": str(uuid.UUID(int=numbers.getrandbits(128))), "ts": numbers.randint(10**9, 2 * 10**9)}
            for _ in range(200)
        ],
        separators=(",", ":"),
    )
    prose = "The checkout service keeps returning errors because its database pool is exhausted. " * 40
    chinese = "数据库连接超时，请检查生产环境中的结账服务日志，并确认部署是否正常运行。" * 40
    assert 1.0 <= estimate_tokens(dense) / 6_582 <= 1.6
    assert 1.0 <= estimate_tokens(prose) / 521 <= 2.0
    assert 1.0 <= estimate_tokens(chinese) / 1_200 <= 2.5


def test_what_fits_is_untouched() -> None:
    assert fit_result("short", 100) == ("short", False)


def test_a_cut_text_keeps_head_and_tail_and_says_so() -> None:
    lines = [f"{number:05} something happened here" for number in range(5_000)]
    text, cut = fit_result("\n".join(lines), 1_000)
    assert cut
    head, note, tail = text.partition("[… ")[0], *text.partition("[… ")[1:]
    assert note
    assert head.startswith(lines[0])
    assert tail.endswith(lines[-1])
    shown = [line for line in text.split("\n") if "[…" not in line]
    assert set(shown) <= set(lines)  # whole lines only
    left_out = int(text.split("[… ")[1].split(" characters")[0].replace(",", ""))
    assert left_out == len("\n".join(lines)) - sum(
        len(part) for part in text.split(f"\n[… {left_out:,} characters left out …]\n")
    )


@given(st.text(min_size=1, max_size=3_000), st.integers(min_value=50, max_value=400))
def test_a_cut_text_is_within_the_limit(text: str, limit: int) -> None:
    fitted, cut = fit_result(text, limit)
    assert estimate_tokens(fitted) <= limit
    assert cut == (estimate_tokens(text) > limit)


def test_an_uneven_text_is_within_the_limit() -> None:
    text = "!@#$%^&*()" * 3_000 + "word " * 100_000
    fitted, cut = fit_result(text, 8_000)
    assert cut
    assert 4_000 < estimate_tokens(fitted) <= 8_000


def test_summary() -> None:
    data = {"status": "ok", "count": 3, "items": [1, 2], "message": "all\nwell", "error": None}
    assert summary_of(ToolResult("done", json.dumps(data), data)) == "status: ok, count: 3, message: all well"
    assert summary_of(ToolResult("done", "a\n b", {"items": []})) == "a b"
    assert summary_of(ToolResult("done", "x" * 5_000)) == "x" * 200
    assert len(summary_of(ToolResult("done", "", {"error": "e" * 5_000}))) == 200
    assert raw_of(ToolResult("done", "y" * 5_000)) == "y" * 2_000


class Model(BaseModel):
    at: dt.datetime


@dataclass
class Point:
    x: int
    y: float


@pytest.mark.parametrize(
    ("value", "content", "data"),
    [
        ("text", "text", None),
        (b"bytes", "bytes", None),
        ({"a": [1, True, None]}, '{"a":[1,true,null]}', {"a": [1, True, None]}),
        ([1, "é"], '[1,"é"]', [1, "é"]),
        (3, "3", 3),
        (Point(1, float("inf")), '{"x":1,"y":null}', {"x": 1, "y": None}),
        (
            Model(at=dt.datetime(2026, 1, 2, tzinfo=dt.UTC)),
            '{"at":"2026-01-02T00:00:00Z"}',
            {"at": "2026-01-02T00:00:00Z"},
        ),
        ("nul\x00 and \ud83d", "nul and \ufffd", None),
    ],
)
def test_python_values(value: object, content: str, data: object) -> None:
    assert result_of(value) == ToolResult("done", content, data)


def test_nothing_does_not_read_as_an_empty_output() -> None:
    assert result_of(None).content
    ready = ToolResult("failed", "no", images=("i",))
    assert result_of(ready) is ready

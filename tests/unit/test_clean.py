"""Cleaning: what no database, provider or parser would take goes, everything else stays as it is."""

from __future__ import annotations

import math
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.clean import clean, clean_text

REPLACEMENT = "\ufffd"


@pytest.mark.parametrize(
    ("dirty", "right"),
    [
        ("a\x00b", "ab"),
        ("smile \ud83d end", f"smile {REPLACEMENT} end"),
        ("end \ud83d", f"end {REPLACEMENT}"),
        ("\ude00 start", f"{REPLACEMENT} start"),
        ("\ud83d\ud83d\ude00", f"{REPLACEMENT}😀"),
        ("\ud83d\ude00", "😀"),
        ("\ufeff\x00bom", "\ufeffbom"),
        ("\x00", ""),
    ],
)
def test_bad_characters(dirty: str, right: str) -> None:
    assert clean_text(dirty) == right


@pytest.mark.parametrize("text", ["", "plain", "\\u0000 as text", "\\ud83d", "日本語 😀", "a\tb\r\n", "\x01\x7f"])
def test_everything_else_is_the_same_object(text: str) -> None:
    assert clean_text(text) is text
    assert clean(text) is text


def test_a_batch_with_a_nul_a_surrogate_and_a_nan() -> None:
    events = [
        {"event": "tool_call_result", "data": {"out": "a\x00b", "key": 1}},
        {"event": "tool_call_result", "data": {"out": "smile \ud83d end"}},
        {"event": "tool_call_result", "data": {"latency": math.nan, "worst": -math.inf}},
        {"event": "answer_end", "data": {"messages": ["..."]}},
    ]
    assert clean(events) == [
        {"event": "tool_call_result", "data": {"out": "ab", "key": 1}},
        {"event": "tool_call_result", "data": {"out": f"smile {REPLACEMENT} end"}},
        {"event": "tool_call_result", "data": {"latency": None, "worst": None}},
        {"event": "answer_end", "data": {"messages": ["..."]}},
    ]


def test_keys_are_cleaned_too() -> None:
    assert clean({"k\x00": {"\ud800": 1}, 7: "seven"}) == {"k": {REPLACEMENT: 1}, "7": "seven"}
    assert clean({"k": 1, "k\x00": 2}) == {"k": 2}


def test_clean_parts_are_shared_and_dirty_ones_copied() -> None:
    good = {"messages": [{"content": "x" * 100}]}
    value = {"good": good, "bad": "\x00"}
    cleaned = clean(value)
    assert cleaned["good"] is good
    assert value["bad"] == "\x00", "the caller's value is not changed"
    assert clean(good) is good


@pytest.mark.parametrize(
    ("odd", "right"),
    [
        ((1, 2), [1, 2]),
        (b"ab\xff\x00", f"ab{REPLACEMENT}"),
        (2**64, str(2**64)),
        (-(2**63) - 1, str(-(2**63) - 1)),
        (True, True),
        (None, None),
    ],
)
def test_values_that_are_not_json(odd: Any, right: Any) -> None:
    assert clean(odd) == right


texts = st.text(st.characters(codec=None, categories=None, exclude_categories=()), max_size=8) | st.sampled_from(
    ["\x00", "\ud83d", "\ude00"]
)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | texts | st.binary(max_size=4),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts | st.integers(), inner, max_size=4),
    max_leaves=12,
)


@given(values)
def test_what_comes_out_can_be_encoded_and_is_clean(value: Any) -> None:
    cleaned = clean(value)
    assert orjson.loads(orjson.dumps(cleaned)) == cleaned
    assert clean(cleaned) == cleaned
    assert "\x00" not in repr(cleaned)

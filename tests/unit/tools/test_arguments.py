"""What a model may send as arguments, and what becomes of it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.agent.tools.arguments import UNPARSED_CHARACTERS, UNPARSED_KEY, arguments_digest, parse_arguments

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@pytest.mark.parametrize("raw", [None, "", "  ", "\n"])
def test_nothing_is_an_empty_object(raw: str | None) -> None:
    parsed = parse_arguments(raw)
    assert (parsed.value, parsed.text, parsed.error) == ({}, "{}", None)


def test_valid_text_is_stored_as_it_came() -> None:
    raw = '{"b":1,   "a": [1.0, "\\u00e9"]}'
    parsed = parse_arguments(raw)
    assert (parsed.value, parsed.text, parsed.error) == ({"b": 1, "a": [1.0, "é"]}, raw, None)


def test_a_decoded_object_is_encoded() -> None:
    parsed = parse_arguments({"a": "é"})
    assert (parsed.value, parsed.text, parsed.error) == ({"a": "é"}, '{"a": "é"}', None)


@pytest.mark.parametrize(
    "raw",
    ['{"path":"/etc/app.yaml","body":"a: 1\\nb:', '{"path":', '{"path"', "{", '{"a": [1, 2', '{"a": 1,', '{"a": tru'],
)
def test_cut_arguments_are_incomplete(raw: str) -> None:
    parsed = parse_arguments(raw)
    assert parsed.error is not None
    assert parsed.error.startswith("Arguments incomplete, nothing was executed")
    assert json.loads(parsed.text) == {UNPARSED_KEY: raw}


@pytest.mark.parametrize(
    ("raw", "word"),
    [
        ("{}{}", "more than one JSON value"),
        ('{"a": 1} {"a": 2}', "more than one JSON value"),
        ("[1]", "not an array"),
        ('"{}"', "not a string"),
        ("3", "not a number"),
        ("true", "not a boolean"),
        ("null", "not null"),
        ("<a>1</a>", "not valid JSON"),
        ("{'a': 1}", "not valid JSON"),
        ('{"a": 1, "a": 2}', "'a' is given more than once"),
        ('{"a": {"b": 1, "b": 1}}', "'b' is given more than once"),
        ('{"a": NaN}', "NaN"),
        ('{"a": -Infinity}', "-Infinity"),
        ('{"a": 1e999}', "out of range"),
        ("[" * 100_000, "too large or too deep"),
        ('{"a": ' * 900 + "1" + "}" * 900, "too large or too deep"),
        ('{"a": ' + "1" * 5_000 + "}", "too large or too deep"),
    ],
)
def test_what_has_no_clear_meaning_is_refused(raw: str, word: str) -> None:
    parsed = parse_arguments(raw)
    assert parsed.error is not None
    assert "nothing was executed" in parsed.error
    assert word in parsed.error
    stored = json.loads(parsed.text)
    assert stored == {UNPARSED_KEY: raw[:UNPARSED_CHARACTERS]}
    assert parse_arguments(parsed.text).error is None


def test_what_is_cleaned_is_stored_as_it_runs() -> None:
    parsed = parse_arguments('{"a\\u0000": "x\\u0000y", "s": "\\ud83d"}')
    assert parsed.value == {"a": "xy", "s": "\ufffd"}
    assert json.loads(parsed.text) == parsed.value


@pytest.mark.parametrize("kind", [list, dict])
def test_a_decoded_value_of_any_depth_is_refused(kind: type[Any]) -> None:
    raw: Any = 1
    for _ in range(900):
        raw = [raw] if kind is list else {"a": raw}
    parsed = parse_arguments(raw)
    assert parsed.error is not None
    assert "too deep" in parsed.error
    assert json.loads(parsed.text) == {UNPARSED_KEY: ""}


@given(st.dictionaries(st.text(), JSON, max_size=4))
def test_stored_text_and_value_agree(value: dict[str, Any]) -> None:
    raw = json.dumps(value)
    parsed = parse_arguments(raw)
    assert parsed.error is None
    assert json.loads(parsed.text) == parsed.value
    assert parse_arguments(parsed.text) == parsed


@given(st.text())
def test_any_text_gets_a_storable_object(raw: str) -> None:
    parsed = parse_arguments(raw)
    assert isinstance(json.loads(parsed.text), dict)
    assert "\x00" not in parsed.text
    assert parse_arguments(parsed.text).error is None


def test_digest_tells_texts_apart() -> None:
    assert arguments_digest("{}") == "44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a"
    assert arguments_digest("{ }") != arguments_digest("{}")

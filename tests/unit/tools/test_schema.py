"""Definitions that providers would refuse, and arguments that do not fit."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from shared.errors import ToolDefinitionError
from worker.agent.tools.schema import check_name, checked_parameters, invalid_arguments


def obj(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties}


@pytest.mark.parametrize("name", ["", "a b", "a.b", "é", "x" * 65, "a/b", "a\n"])
def test_names_that_providers_refuse(name: str) -> None:
    with pytest.raises(ToolDefinitionError):
        check_name(name)


@pytest.mark.parametrize(
    ("schema", "word"),
    [
        ([], "type object"),
        ({"type": "array"}, "type object"),
        ({"type": "object", "properties": {"a": {"type": "strin"}}}, "properties/a/type"),
        ({"type": "object", "properties": {"a": {"minimum": "x"}}}, "properties/a/minimum"),
        ({"type": "object", "oneOf": [{"required": ["a"]}]}, "'oneOf' at the top"),
        ({"type": "object", "allOf": []}, "wrong at allOf"),
        ({"anyOf": [obj(), obj()]}, "'anyOf' at the top"),
        (obj(a={"$ref": "http://example.com/x"}), "outside itself"),
        (obj(a={"items": {"$ref": "file:///etc/passwd"}}), "outside itself"),
        (obj(a={"$ref": "#/$defs/none"}), "does not have"),
        (obj(a={"$dynamicRef": "#x"}), "$dynamicRef"),
        (obj(a={"patternProperties": {"(": {}}}), "pattern '('"),
        (obj(**{"a b": {}}), "'a b'"),
        (obj(a=obj(ä={})), "'ä' at /properties/a"),
        (obj(**{"x" * 65: {}}), "name that providers refuse"),
        ({**obj(a={}), "required": ["b"]}, "requires 'b'"),
    ],
)
def test_schemas_that_providers_refuse(schema: Any, word: str) -> None:
    with pytest.raises(ToolDefinitionError) as caught:
        checked_parameters("bad_tool", schema)
    assert "bad_tool" in str(caught.value)
    assert word in str(caught.value)


def test_what_providers_insist_on_is_filled_in() -> None:
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", "properties": {"a": {"type": "array"}}}
    assert checked_parameters("t", schema) == obj(a={"type": "array", "items": {}})
    assert checked_parameters("t", {}) == {"type": "object", "properties": {}}
    assert checked_parameters("t", {"properties": {"type": {"enum": ["array"]}}}) == obj(type={"enum": ["array"]})


def test_references_are_resolved() -> None:
    schema = {
        "$ref": "#/$defs/Args",
        "$defs": {
            "Args": obj(
                p={"$ref": "#/$defs/P", "description": "mine"}, q={"type": "array", "items": {"$ref": "#/$defs/P"}}
            ),
            "P": {"type": "string", "description": "theirs"},
        },
    }
    assert checked_parameters("t", schema) == obj(
        p={"type": "string", "description": "mine"},
        q={"type": "array", "items": {"type": "string", "description": "theirs"}},
    )


def test_a_recursive_schema_keeps_its_references() -> None:
    schema = {**obj(tree={"$ref": "#/$defs/T"}), "$defs": {"T": obj(child={"$ref": "#/$defs/T"})}}
    checked = checked_parameters("t", schema)
    assert invalid_arguments(checked, {"tree": {"child": {"child": {}}}}) is None
    assert invalid_arguments(checked, {"tree": {"child": {"child": 1}}}) is not None


def test_hostile_schemas_cost_little() -> None:
    doubling: dict[str, Any] = {
        f"D{n}": obj(a={"$ref": f"#/$defs/D{n + 1}"}, b={"$ref": f"#/$defs/D{n + 1}"}) for n in range(40)
    }
    schema = {**obj(a={"$ref": "#/$defs/D0"}), "$defs": {**doubling, "D40": {"type": "string"}}}
    checked = checked_parameters("t", schema)
    assert invalid_arguments(checked, {"a": {"a": 1}}) is not None
    deep: dict[str, Any] = {}
    for _ in range(5_000):
        deep = obj(a=deep)
    with pytest.raises(ToolDefinitionError, match="nested too deeply"):
        checked_parameters("t", deep)


def test_a_pattern_that_only_javascript_reads_is_left_to_the_tool() -> None:
    checked = checked_parameters("t", obj(a={"type": "string", "pattern": r"^\p{L}+$"}, b={"pattern": "^x"}))
    assert invalid_arguments(checked, {"a": "word"}) is None
    assert "b: expected pattern" in str(invalid_arguments(checked, {"a": "word", "b": "y"}))


@pytest.mark.parametrize(
    ("schema", "arguments", "told"),
    [
        ({**obj(a={}), "required": ["a"]}, {}, "a is required"),
        (obj(a={"type": "string"}), {"a": 1}, "a: expected string, got integer"),
        (obj(a={"type": ["integer", "null"]}), {"a": "1"}, "a: expected integer or null, got string"),
        (obj(a={"anyOf": [{"type": "string"}, {"type": "null"}]}), {"a": 1}, "a: expected string or null, got 1"),
        (obj(a={"enum": ["x", "y"]}), {"a": "z"}, 'a: expected one of ["x","y"], got "z"'),
        ({**obj(a={}), "additionalProperties": False}, {"b": 1}, "'b' is not known; the parameters are a"),
        ({**obj(), "additionalProperties": False}, {"b": 1}, "the tool takes no parameters"),
        (obj(a={"minimum": 1}), {"a": 0}, "a: expected minimum 1, got 0"),
        (obj(a={"items": {"type": "string"}}), {"a": ["x", 2]}, "a.1: expected string, got integer"),
        (obj(a={**obj(b={}), "required": ["b"]}), {"a": {}}, "a.b is required"),
        (obj(a={"type": "integer"}), {"a": True}, "a: expected integer, got boolean"),
    ],
)
def test_what_is_wrong_names_field_and_expectation(schema: Any, arguments: Any, told: str) -> None:
    text = invalid_arguments(schema, arguments)
    assert text is not None
    assert told in text
    assert "nothing was executed" in text
    assert "\n" not in text


def test_several_errors_are_told_at_once_and_shortly() -> None:
    schema = obj(**{f"p{n}": {"type": "string"} for n in range(9)})
    text = invalid_arguments(schema, {f"p{n}": n for n in range(9)})
    assert text is not None
    assert "p0:" in text
    assert "and 4 more" in text
    long = invalid_arguments(obj(a={"enum": ["x"]}), {"a": "y\n" * 100_000})
    assert long is not None
    assert len(long) < 600
    assert "\n" not in long


PROPERTY = st.text("abcXYZ019_.-", min_size=1, max_size=8)
NODES = st.recursive(
    st.fixed_dictionaries(
        {"type": st.sampled_from(["string", "integer", "number", "boolean", "null", "array", "object"])}
    )
    | st.just({}),
    lambda inner: (
        st.builds(lambda items: {"type": "array", "items": items}, inner)
        | st.builds(lambda props: {"type": "object", "properties": props}, st.dictionaries(PROPERTY, inner, max_size=3))
        | st.builds(lambda options: {"anyOf": options}, st.lists(inner, min_size=1, max_size=3))
    ),
    max_leaves=8,
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(PROPERTY, inner, max_size=2),
    max_leaves=5,
)


@given(st.dictionaries(PROPERTY, NODES, max_size=4), st.dictionaries(PROPERTY, VALUES, max_size=4))
def test_checking_keeps_the_meaning(properties: dict[str, Any], arguments: dict[str, Any]) -> None:
    schema = {"type": "object", "properties": properties}
    checked = checked_parameters("t", schema)
    Draft202012Validator.check_schema(checked)
    assert checked_parameters("t", checked) == checked
    assert (invalid_arguments(checked, arguments) is None) == Draft202012Validator(schema).is_valid(arguments)

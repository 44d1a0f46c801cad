"""Tool definitions and arguments against JSON Schema (2020-12), as providers take it.

Providers refuse more than the standard does, and refuse the whole request for one bad tool; so a definition is checked
when it is loaded. The rules: names of ``[A-Za-z0-9_-]{1,64}``; an object at the top without combinators (OpenAI,
Anthropic); property names of ``[A-Za-z0-9_.-]{1,64}`` (Anthropic); ``items`` on arrays (OpenAI); ``required`` naming
only known properties (Gemini).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, Final

import orjson
from jsonschema import Draft202012Validator, FormatChecker, validators
from jsonschema.exceptions import SchemaError, ValidationError
from referencing import Registry

from shared.clean import clean
from shared.errors import ToolDefinitionError

NAME_PATTERN: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")
_PROPERTY_PATTERN: Final = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_NOT_AT_TOP: Final = ("oneOf", "anyOf", "allOf", "not", "enum", "const", "if", "$ref", "$dynamicRef")
_ERRORS_TOLD: Final = 5
_SHOWN_CHARACTERS: Final = 200
_VALIDATORS_KEPT: Final = 1_024
_INLINED_NODES: Final = 5_000  # of one schema without references; references to references grow exponentially

# Where schemas stand inside a schema: under these keys directly, in a list, or as the values of an object.
_DIRECT: Final = ("items", "additionalProperties", "contains", "not", "if", "then", "else", "propertyNames")
_LISTS: Final = ("anyOf", "oneOf", "allOf", "prefixItems")
_OBJECTS: Final = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")


def check_name(name: str) -> None:
    """Raises ``ToolDefinitionError`` for a name that providers refuse."""
    if not NAME_PATTERN.fullmatch(name):
        raise _refused(name, "its name must be 1 to 64 of the characters A-Z, a-z, 0-9, _ and -")


def checked_parameters(name: str, schema: Any) -> dict[str, Any]:
    """The parameters of tool ``name`` as a schema that providers accept: local references resolved, what providers
    insist on filled in where the meaning stays. Raises ``ToolDefinitionError`` where it would not."""
    if not isinstance(schema, dict) or schema.get("type", "object") != "object":
        raise _refused(name, "its parameters must be a JSON Schema of type object")
    try:
        return _checked(name, clean({k: v for k, v in schema.items() if k != "$schema"}))
    except RecursionError:
        raise _refused(name, "its schema is nested too deeply") from None


def _checked(name: str, schema: dict[str, Any]) -> dict[str, Any]:
    try:
        # Without formats: a regular expression may be JavaScript's, which is no reason to lose a tool.
        Draft202012Validator.check_schema(schema, format_checker=FormatChecker(()))
    except SchemaError as error:
        place = "/".join(map(str, error.absolute_path)) or "the top"
        raise _refused(name, f"its schema is wrong at {place}: {error.message[:_SHOWN_CHARACTERS]}") from None
    _check_references(name, schema, "")
    schema = _inlined(name, schema)
    wrong = next((key for key in _NOT_AT_TOP if key in schema), None)
    if wrong is not None:
        raise _refused(name, f"its schema has {wrong!r} at the top, which providers refuse")
    return _filled(name, {**schema, "type": "object", "properties": schema.get("properties", {})}, "")


def invalid_arguments(parameters: dict[str, Any], arguments: dict[str, Any]) -> str | None:
    """What is wrong, in one line for a model: each wrong field and what was expected there; or None."""
    validator = _validator(orjson.dumps(parameters, option=orjson.OPT_NON_STR_KEYS))
    errors = sorted(validator.iter_errors(arguments), key=lambda e: [str(p) for p in e.absolute_path])
    if not errors:
        return None
    told = "; ".join(dict.fromkeys(_explain(error) for error in errors[:_ERRORS_TOLD]))
    more = f"; and {len(errors) - _ERRORS_TOLD} more" if len(errors) > _ERRORS_TOLD else ""
    return f"Arguments do not fit the tool, nothing was executed: {told}{more}."


def _pattern(validator: Any, pattern: str, instance: Any, schema: Any) -> Iterator[ValidationError]:
    """``pattern`` as the standard has it, but one that only JavaScript can read is left to the tool."""
    try:
        matches = not isinstance(instance, str) or re.search(pattern, instance)
    except re.error:
        return
    if not matches:
        yield ValidationError(f"{instance!r} does not match {pattern!r}")


_Validator: Final[Any] = validators.extend(  # type: ignore[no-untyped-call]
    Draft202012Validator, {"pattern": _pattern}
)


@lru_cache(maxsize=_VALIDATORS_KEPT)
def _validator(parameters: bytes) -> Any:
    # An empty registry: a reference must never be fetched from anywhere.
    return _Validator(orjson.loads(parameters), registry=Registry())


def _refused(name: str, reason: str) -> ToolDefinitionError:
    return ToolDefinitionError(f"Tool {name!r} was refused: {reason}.", tool=name)


def _children(schema: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for key in _DIRECT:
        if key in schema:
            yield key, schema[key]
    for key in _LISTS:
        yield from ((f"{key}/{i}", child) for i, child in enumerate(schema.get(key, ())))
    for key in _OBJECTS:
        yield from ((f"{key}/{k}", child) for k, child in schema.get(key, {}).items())


def _check_references(name: str, schema: Any, place: str) -> None:
    """No reference may lead out of the schema, or depend on who reads it; keys that are patterns must be readable."""
    if not isinstance(schema, dict):
        return
    if not str(schema.get("$ref", "#")).startswith("#"):
        raise _refused(name, f"its schema refers to {schema['$ref']!r} at {place or 'the top'}, outside itself")
    if "$dynamicRef" in schema:
        raise _refused(name, f"its schema uses $dynamicRef at {place or 'the top'}")
    for pattern in schema.get("patternProperties", ()):
        try:
            re.compile(pattern)
        except re.error:
            raise _refused(name, f"the pattern {pattern!r} at {place or 'the top'} cannot be read") from None
    for key, child in _children(schema):
        _check_references(name, child, f"{place}/{key}")


def _inlined(name: str, schema: dict[str, Any]) -> dict[str, Any]:
    """``schema`` without ``$defs`` and local references; unchanged where it is recursive or would grow without
    measure."""
    budget = iter(range(_INLINED_NODES))
    try:
        inlined = _resolve(name, schema, schema, (), budget)
    except _NoPlainForm:
        return schema
    return {k: v for k, v in inlined.items() if k not in ("$defs", "definitions")}


class _NoPlainForm(Exception):
    """A schema that cannot be written without references."""


def _resolve(name: str, node: Any, root: dict[str, Any], seen: tuple[str, ...], budget: Iterator[int]) -> Any:
    if not isinstance(node, dict):
        return node
    if next(budget, None) is None:
        raise _NoPlainForm
    out = dict(node)
    reference = out.pop("$ref", None)
    if reference is not None:
        if reference in seen:
            raise _NoPlainForm
        target = _resolve(name, _target(name, root, reference), root, (*seen, reference), budget)
        out = {**target, **out} if isinstance(target, dict) else out
    for key in _DIRECT:
        if key in out:
            out[key] = _resolve(name, out[key], root, seen, budget)
    for key in _LISTS:
        if key in out:
            out[key] = [_resolve(name, child, root, seen, budget) for child in out[key]]
    for key in ("properties", "patternProperties", "dependentSchemas"):
        if key in out:
            out[key] = {k: _resolve(name, child, root, seen, budget) for k, child in out[key].items()}
    return out


def _target(name: str, root: dict[str, Any], reference: str) -> Any:
    node: Any = root
    for part in filter(None, reference.removeprefix("#").split("/")):
        key = part.replace("~1", "/").replace("~0", "~")
        if not isinstance(node, dict) or key not in node:
            raise _refused(name, f"its schema refers to {reference!r}, which it does not have")
        node = node[key]
    return node


def _filled(name: str, schema: dict[str, Any], place: str) -> dict[str, Any]:
    out = dict(schema)
    types = out.get("type")
    if "array" in (types if isinstance(types, list) else [types]) and not {"items", "prefixItems"} & out.keys():
        out["items"] = {}
    properties = out.get("properties", {})
    for key in properties:
        if not _PROPERTY_PATTERN.fullmatch(key):
            raise _refused(name, f"the property {key!r} at {place or 'the top'} has a name that providers refuse")
    unknown = [key for key in out.get("required", ()) if key not in properties] if types == "object" else []
    if unknown:
        raise _refused(name, f"{place or 'the top'} requires {unknown[0]!r}, which is not one of its properties")
    for key in _DIRECT:
        if isinstance(out.get(key), dict):
            out[key] = _filled(name, out[key], f"{place}/{key}")
    for key in _LISTS:
        if key in out:
            out[key] = [_filled(name, c, f"{place}/{key}") if isinstance(c, dict) else c for c in out[key]]
    for key in _OBJECTS:
        if key in out:
            out[key] = {
                k: _filled(name, c, f"{place}/{key}/{k}") if isinstance(c, dict) else c for k, c in out[key].items()
            }
    return out


_KINDS: Final = {dict: "object", list: "array", str: "string", bool: "boolean", int: "integer", float: "number"}


def _explain(error: ValidationError) -> str:
    field = ".".join(str(part) for part in error.absolute_path) or "arguments"
    expected: Any = error.validator_value
    instance: Any = error.instance
    match error.validator:
        case "required":
            missing = next(n for n in expected if n not in instance)
            prefix = "" if field == "arguments" else f"{field}."
            return f"{prefix}{missing} is required"
        case "additionalProperties" if expected is False and isinstance(error.schema, dict):
            known = error.schema.get("properties", {})
            extra = [k for k in instance if k not in known]
            return f"{', '.join(map(repr, extra))[:_SHOWN_CHARACTERS]} is not known; {_known(known)}"
        case "type":
            kinds = expected if isinstance(expected, list) else [expected]
            return f"{field}: expected {' or '.join(map(str, kinds))}, got {_kind(instance)}"
        case "enum":
            return f"{field}: expected one of {_json(expected)}, got {_json(instance)}"
        case "anyOf" | "oneOf" if all(isinstance(s, dict) and isinstance(s.get("type"), str) for s in expected):
            either = " or ".join(s["type"] for s in expected)
            return f"{field}: expected {either}, got {_json(instance)}"
        case "pattern" | "format" | "minimum" | "maximum" | "exclusiveMinimum" | "exclusiveMaximum" | "minLength":
            return f"{field}: expected {error.validator} {_json(expected)}, got {_json(instance)}"
        case _:
            return f"{field}: {' '.join(error.message.split())[:_SHOWN_CHARACTERS]}"


def _known(properties: dict[str, Any]) -> str:
    return f"the parameters are {', '.join(properties)}" if properties else "the tool takes no parameters"


def _kind(value: Any) -> str:
    return "null" if value is None else _KINDS.get(type(value), "another type")


def _json(value: Any) -> str:
    text = orjson.dumps(value, default=str, option=orjson.OPT_PASSTHROUGH_SUBCLASS).decode()
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}…"

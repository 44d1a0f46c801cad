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
from jsonschema import Draft202012Validator
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
    schema = clean({k: v for k, v in schema.items() if k != "$schema"})
    try:
        Draft202012Validator.check_schema(schema)
    except SchemaError as error:
        place = "/".join(map(str, error.absolute_path)) or "the top"
        raise _refused(name, f"its schema is wrong at {place}: {error.message[:_SHOWN_CHARACTERS]}") from None
    for place, reference in _references(schema, ""):
        if not reference.startswith("#"):
            raise _refused(name, f"its schema refers to {reference!r} at {place}, outside itself")
    schema = _inlined(name, schema)
    wrong = next((key for key in _NOT_AT_TOP if key in schema), None)
    if wrong is not None:
        raise _refused(name, f"its schema has {wrong!r} at the top, which providers refuse")
    schema = {**schema, "type": "object", "properties": schema.get("properties", {})}
    return _filled(name, schema, "")


def invalid_arguments(parameters: dict[str, Any], arguments: dict[str, Any]) -> str | None:
    """What is wrong, in one line for a model: each wrong field and what was expected there; or None."""
    validator = _validator(orjson.dumps(parameters, option=orjson.OPT_NON_STR_KEYS))
    errors = sorted(validator.iter_errors(arguments), key=lambda e: [str(p) for p in e.absolute_path])
    if not errors:
        return None
    told = "; ".join(dict.fromkeys(_explain(error) for error in errors[:_ERRORS_TOLD]))
    more = f"; and {len(errors) - _ERRORS_TOLD} more" if len(errors) > _ERRORS_TOLD else ""
    return f"Arguments do not fit the tool, nothing was executed: {told}{more}."


@lru_cache(maxsize=_VALIDATORS_KEPT)
def _validator(parameters: bytes) -> Draft202012Validator:
    # An empty registry: a reference must never be fetched from anywhere.
    return Draft202012Validator(orjson.loads(parameters), registry=Registry())


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


def _references(schema: Any, place: str) -> Iterator[tuple[str, str]]:
    if not isinstance(schema, dict):
        return
    if isinstance(schema.get("$ref"), str):
        yield place or "the top", schema["$ref"]
    for key, child in _children(schema):
        yield from _references(child, f"{place}/{key}")


def _inlined(name: str, schema: dict[str, Any]) -> dict[str, Any]:
    """``schema`` without ``$defs`` and local references; unchanged where it is recursive and has no other form."""
    try:
        inlined = _resolve(name, schema, schema, ())
    except RecursionError:
        return schema
    return {k: v for k, v in inlined.items() if k not in ("$defs", "definitions")}


def _resolve(name: str, node: Any, root: dict[str, Any], seen: tuple[str, ...]) -> Any:
    if not isinstance(node, dict):
        return node
    out = dict(node)
    reference = out.pop("$ref", None)
    if reference is not None:
        if reference in seen:
            raise RecursionError(reference)
        target = _resolve(name, _target(name, root, reference), root, (*seen, reference))
        out = {**target, **out} if isinstance(target, dict) else out
    for key in _DIRECT:
        if key in out:
            out[key] = _resolve(name, out[key], root, seen)
    for key in _LISTS:
        if key in out:
            out[key] = [_resolve(name, child, root, seen) for child in out[key]]
    for key in ("properties", "patternProperties", "dependentSchemas"):
        if key in out:
            out[key] = {k: _resolve(name, child, root, seen) for k, child in out[key].items()}
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

"""Prints ``docs/settings.md``: every field of ``shared/settings.py`` with its variable, type, default and meaning.

``python -m scripts.settings_table > docs/settings.md`` after a change; a test compares the two.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import SecretStr
from pydantic.fields import FieldInfo

from shared.settings import Settings

INTRODUCTION = """\
# Settings

Everything is set by environment variables, read once when a process starts; a wrong value ends the start with one line
that names it. An empty `REDIS_URL`, `DATABASE_URL`, `SUPABASE_URL` or `SUPABASE_KEY` counts as unset; with none of them
set, Redis and the store are embedded under `TURNKEEPER_HOME`. `DATABASE_URL` and `SUPABASE_URL` exclude each other.
Producers that use our client or command line read the same settings as workers: give them the same values.

Durations are in seconds, sizes in bytes. Keys of model providers have the names that litellm reads (`OPENAI_API_KEY`).
"""
FOOT = """
`RQ_KEY_PREFIX` is RQ's own setting and is heeded: every producer and worker needs the same.

This page is printed by `python -m scripts.settings_table`.
"""
LONG_DEFAULT = 60  # characters; a longer text is described instead

_NAMES: dict[Any, str] = {
    str: "text",
    SecretStr: "text, secret",
    int: "integer",
    float: "number",
    bool: "boolean",
    Path: "path",
    dict[str, int]: "`name=count` pairs",
}


def page() -> str:
    """The whole Markdown page."""
    tables = "".join(f"\n## {heading}\n\n{_table(names)}" for heading, names in sections())
    return f"{INTRODUCTION}{tables}{FOOT}"


def variable(name: str, field: FieldInfo) -> str:
    """The environment variable of a field."""
    return str(field.validation_alias or f"TURNKEEPER_{name.upper()}")


def sections() -> Iterator[tuple[str, list[str]]]:
    """The fields under the comments that group them in the source, all of them and in its order."""
    heading = ""
    names: list[str] = []
    for line in inspect.getsource(Settings).splitlines():
        comment, field = re.fullmatch(r"    # (.+)", line), re.match(r"    (\w+): ", line)
        if comment is not None:
            if names:
                yield heading, names
            heading, names = comment[1], []
        elif field is not None and field[1] in Settings.model_fields:
            names.append(field[1])
    yield heading, names


def _table(names: list[str]) -> str:
    rows = "".join(_row(name, Settings.model_fields[name]) for name in names)
    return f"| variable | type | default | meaning |\n|---|---|---|---|\n{rows}"


def _row(name: str, field: FieldInfo) -> str:
    type_ = f"{_type(field.annotation)}{_bounds(field)}"
    return f"| `{variable(name, field)}` | {type_} | {_default(field.default)} | {field.description} |\n"


def _type(annotation: Any) -> str:
    if get_origin(annotation) is Literal:
        return ", ".join(f"`{choice}`" for choice in get_args(annotation))
    if get_origin(annotation) in (Union, UnionType):
        return " or ".join(_type(part) for part in get_args(annotation) if part is not NoneType)
    return _NAMES[annotation]


def _bounds(field: FieldInfo) -> str:
    """What pydantic checks: ``, at least 1``."""
    words = []
    for limit in field.metadata:
        if getattr(limit, "ge", None) is not None:
            words.append(f", at least {limit.ge:,}")
        if getattr(limit, "gt", None) is not None:
            words.append(f", more than {limit.gt:,}")
        if getattr(limit, "min_length", None) is not None:
            words.append(", not empty")
        if getattr(limit, "pattern", None) is not None:
            words.append(", a plain identifier")
    return "".join(words)


def _default(value: Any) -> str:
    if value is None or value == "":
        return "unset"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, int | float):
        return f"`{value:g}`" if isinstance(value, float) else f"`{value}`"
    if isinstance(value, dict):
        return f"`{','.join(f'{name}={count}' for name, count in value.items())}`"
    text = str(value)
    return f"`{text}`" if len(text) <= LONG_DEFAULT else "a general one, in `shared/settings.py`"


if __name__ == "__main__":
    print(page(), end="")

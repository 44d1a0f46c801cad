"""The YAML file of ``TURNKEEPER_TOOLS``, read and checked as a whole before anything starts."""

from __future__ import annotations

import difflib
import os
import re
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic_core import ErrorDetails

from shared.errors import ConfigurationError
from shared.events import Risk
from worker.agent.base import ApprovalPolicy

_VARIABLE: Final = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
_SERVER_NAME: Final = r"^[A-Za-z0-9]+([_-][A-Za-z0-9]+)*$"  # no "__", which parts server from tool

Seconds = Annotated[float, Field(gt=0)]
ServerName = Annotated[str, Field(pattern=_SERVER_NAME, max_length=32)]


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


Megabytes = Annotated[int, Field(ge=64)]
MEMORY_MB = 4_096  # of each process of a command or server; null in the file: no limit


class ShellOptions(_Section):
    """``cwd`` is relative to the file; ``env`` is added to ``PATH``, ``HOME``, ``LANG`` and ``TMPDIR``."""

    enabled: bool = True
    cwd: Path = Path()
    timeout_seconds: Seconds | None = None
    memory_mb: Megabytes | None = MEMORY_MB
    env: dict[str, str] = Field(default_factory=dict, repr=False)


class ReadFileOptions(_Section):
    """``roots``: folders whose files may be read, relative to the file."""

    enabled: bool = True
    roots: Annotated[tuple[Path, ...], Field(min_length=1)] = (Path(),)


class ToolOptions(_Section):
    """What overrides a server's own word about one of its tools."""

    risk: Risk | None = None
    approval: ApprovalPolicy | None = None
    timeout_seconds: Seconds | None = None


class McpServerOptions(_Section):
    """A server: ``command`` (stdio) or ``url`` (streamable HTTP). Names in ``allow``, ``deny`` and ``tools`` are the
    server's own; ``deny`` beats ``allow``. ``trust_annotations: false`` takes every tool as side-effecting unless
    ``tools`` says otherwise."""

    command: str | None = None
    args: tuple[str, ...] = Field((), repr=False)
    env: dict[str, str] = Field(default_factory=dict, repr=False)
    cwd: Path | None = None
    memory_mb: Megabytes | None = MEMORY_MB
    url: str | None = Field(None, pattern=r"^https?://")
    headers: dict[str, str] = Field(default_factory=dict, repr=False)
    allow: tuple[str, ...] | None = None
    deny: tuple[str, ...] = ()
    tools: dict[str, ToolOptions] = Field(default_factory=dict)
    trust_annotations: bool = True
    timeout_seconds: Seconds | None = None

    @model_validator(mode="after")
    def _one_transport(self) -> Self:
        if (self.command is None) == (self.url is None):
            raise ValueError("needs either command or url")
        if self.url is not None and (self.args or self.env or self.cwd):
            raise ValueError("args, env and cwd belong to command, not to url")
        if self.command is not None and self.headers:
            raise ValueError("headers belong to url, not to command")
        return self

    @property
    def transport(self) -> Literal["stdio", "http"]:
        return "stdio" if self.command is not None else "http"

    def offers(self, tool_name: str) -> bool:
        return tool_name not in self.deny and (self.allow is None or tool_name in self.allow)


class ToolsFile(_Section):
    """The whole file. ``folder`` is where it stands, and what its relative paths start from."""

    folder: Path = Path()
    python: tuple[str, ...] = ()
    shell: ShellOptions = ShellOptions()
    read_file: ReadFileOptions = Field(default_factory=ReadFileOptions)
    mcp_servers: dict[ServerName, McpServerOptions] = Field(default_factory=dict)

    @field_validator("python")
    @classmethod
    def _module_names(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            if not all(part.isidentifier() for part in name.split(".")):
                raise ValueError(f"{name!r} is not the name of a Python module")
        return names


def read_tools_file(path: Path | None) -> ToolsFile:
    """The file's content, with ``${VARIABLE}`` replaced from the environment in every text; no file means defaults and
    the current folder. Raises ``ConfigurationError`` naming file and key; values are not repeated, they may be secret.
    """
    if path is None:
        return ToolsFile(folder=Path.cwd())
    try:
        content = yaml.load(path.read_text("utf-8"), _UniqueKeys)  # noqa: S506 - a SafeLoader
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"The tools file {path} cannot be read: {error}.") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{path}:{mark.line + 1}" if mark else str(path)
        raise ConfigurationError(f"{place}: not valid YAML: {getattr(error, 'problem', error)}.") from None
    if content is None:
        content = {}
    if not isinstance(content, dict) or "folder" in content:
        raise ConfigurationError(f"{path}: expected keys among python, shell, read_file and mcp_servers.")
    filled = _filled(path, content, "")
    try:
        return ToolsFile.model_validate({**filled, "folder": path.parent})
    except ValidationError as error:
        wrong = "; ".join(
            f"{'.'.join(str(part) for part in e['loc'])}: {_words(e)}"
            for e in error.errors(include_input=False, include_url=False)
        )
        raise ConfigurationError(f"{path}: {wrong}.") from None


def _words(error: ErrorDetails) -> str:
    """What pydantic found, as somebody who writes YAML would say it."""
    match error["type"]:
        case "extra_forbidden":
            close = difflib.get_close_matches(str(error["loc"][-1]), _KEYS, 1)
            return f"unknown key{f', did you mean {close[0]}' if close else ''}"
        case "tuple_type":
            return "expected a list"
        case "dict_type" | "model_type" | "model_attributes_type":
            return "expected keys and values"
    return error["msg"].removeprefix("Value error, ")


_KEYS: Final = sorted(
    {
        name
        for section in (ToolsFile, ShellOptions, ReadFileOptions, McpServerOptions, ToolOptions)
        for name in section.model_fields
        if name != "folder"
    }
)


def _filled(path: Path, value: Any, key: str) -> Any:
    if isinstance(value, dict):
        return {name: _filled(path, child, f"{key}.{name}" if key else str(name)) for name, child in value.items()}
    if isinstance(value, list):
        return [_filled(path, child, f"{key}.{index}") for index, child in enumerate(value)]
    if not isinstance(value, str):
        return value

    def variable(match: re.Match[str]) -> str:
        name = match.group(1)
        if name not in os.environ:
            raise ConfigurationError(f"{path}: {key}: the environment variable {name} is not set.")
        return os.environ[name]

    return _VARIABLE.sub(variable, value)


class _UniqueKeys(yaml.SafeLoader):
    """YAML in which a key given twice is an error, where the standard loader lets the last one win unseen."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, str | int | float | bool | None) and key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} is given twice", key_node.start_mark
                )
            seen.add(key if isinstance(key, str | int | float | bool | None) else id(key_node))
        return super().construct_mapping(node, deep)

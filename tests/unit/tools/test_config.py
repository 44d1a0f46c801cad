"""The tools file: what it may say, and one line for what it may not."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from shared.errors import ConfigurationError, ToolDefinitionError
from shared.settings import load_settings
from worker.agent.tools import ToolRegistry, load_toolbox
from worker.agent.tools.config import read_tools_file


@pytest.fixture(autouse=True)
def _import_path() -> Iterator[None]:
    before = list(sys.path)
    yield
    sys.path[:] = before
    for name in ("my_tools", "more_tools", "no_tools", "broken_tools", "bad_tools"):
        sys.modules.pop(name, None)


def load(folder: Path, text: str) -> ToolRegistry:
    path = folder / "tools.yaml"
    path.write_text(text)
    return load_toolbox(load_settings(tools=path))


def names(registry: ToolRegistry) -> list[str]:
    return [spec.name for spec in registry.specs()]


def test_without_a_file_the_built_in_tools_are_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    registry = load_toolbox(load_settings(tools=None))
    assert names(registry) == ["shell", "read_file", "read_artifact"]
    shell = registry.get("shell")
    assert shell is not None
    assert (shell.risk, shell.approval) == ("side_effect", "by_rule")
    assert str(tmp_path) in shell.description


def test_an_empty_file_is_like_none(tmp_path: Path) -> None:
    assert names(load(tmp_path, "# nothing\n")) == ["shell", "read_file", "read_artifact"]


def test_built_in_tools_can_be_switched_off(tmp_path: Path) -> None:
    assert names(load(tmp_path, "shell: {enabled: false}\nread_file: {enabled: false}\n")) == ["read_artifact"]


def test_python_modules_beside_the_file(tmp_path: Path) -> None:
    (tmp_path / "my_tools.py").write_text(
        "from worker.agent.tools import tool\n"
        "@tool(risk='read_only')\ndef zeta(x: int) -> int:\n    'Z.'\n    return x\n"
        "@tool\ndef alpha() -> None:\n    'A.'\n"
        "def helper() -> None:\n    'H.'\n"
    )
    (tmp_path / "more_tools.py").write_text("from my_tools import zeta\n")
    registry = load(tmp_path, "python: [my_tools, more_tools]\n")
    assert names(registry)[3:] == ["zeta", "alpha"]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("shell: [1", ":1: not valid YAML"),
        ("- a\n", "expected keys among"),
        ("shel: {}\n", "shel: unknown key, did you mean shell."),
        ("pytho: [a]\n", "pytho: unknown key, did you mean python."),
        ("colour: {}\n", "colour: unknown key."),
        ("python: my_tools\n", "python: expected a list."),
        ("mcp_servers: [a]\n", "mcp_servers: expected keys and values."),
        ("shell: true\n", "shell: expected keys and values."),
        ("shell: {enabeld: true}\n", "shell.enabeld"),
        ("shell: {timeout_seconds: 0}\n", "shell.timeout_seconds"),
        ("shell: {cwd: /no/such/folder}\n", "shell.cwd: there is no folder /no/such/folder"),
        ("read_file: {roots: []}\n", "read_file.roots"),
        ("read_file: {roots: [nowhere]}\n", "read_file.roots"),
        ("shell: {}\nshell: {enabled: false}\n", ":2: not valid YAML: the key 'shell' is given twice"),
        ("mcp_servers: {a: {}}\n", "mcp_servers.a: needs either command or url"),
        ("mcp_servers: {a: {command: x, url: 'http://y'}}\n", "mcp_servers.a: needs either"),
        ("mcp_servers: {a: {url: 'ftp://y'}}\n", "mcp_servers.a.url"),
        ("mcp_servers: {a: {url: 'http://y', env: {A: b}}}\n", "belong to command"),
        ("mcp_servers: {a: {command: x, headers: {A: b}}}\n", "headers belong to url"),
        ("mcp_servers: {a__b: {command: x}}\n", "mcp_servers.a__b"),
        ("mcp_servers: {a: {command: x, tools: {t: {risk: none}}}}\n", "mcp_servers.a.tools.t.risk"),
        ("mcp_servers: {a: {command: x, env: {K: '${NOT_SET_ANYWHERE}'}}}\n", "mcp_servers.a.env.K"),
        ("python: ['not a module']\n", "python"),
        ("python: [no_such_module_here]\n", "importing no_such_module_here failed: ModuleNotFoundError"),
        ("folder: /\n", "expected keys among"),
    ],
)
def test_a_wrong_file_is_named_with_its_key(tmp_path: Path, text: str, told: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        load(tmp_path, text)
    assert str(tmp_path / "tools.yaml") in str(caught.value)
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="cannot be read"):
        load_toolbox(load_settings(tools=tmp_path / "none.yaml"))


def test_modules_that_fail_or_declare_nothing(tmp_path: Path) -> None:
    (tmp_path / "broken_tools.py").write_text("raise RuntimeError('half')\n")
    (tmp_path / "no_tools.py").write_text("x = 1\n")
    (tmp_path / "bad_tools.py").write_text(
        "from worker.agent.tools import tool\n@tool\ndef shapeless(x) -> None:\n    'S.'\n"
    )
    with pytest.raises(ConfigurationError, match="broken_tools failed: RuntimeError: half"):
        load(tmp_path, "python: [broken_tools]\n")
    with pytest.raises(ConfigurationError, match="no_tools declares no tool"):
        load(tmp_path, "python: [no_tools]\n")
    with pytest.raises(ToolDefinitionError, match="shapeless"):
        load(tmp_path, "python: [bad_tools]\n")


def test_secrets_come_from_the_environment_and_are_not_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("A_SECRET", "s3cret")
    path = tmp_path / "tools.yaml"
    path.write_text("mcp_servers: {a: {url: 'http://h/${A_SECRET}', headers: {Authorization: 'Bearer ${A_SECRET}'}}}")
    file = read_tools_file(path)
    assert file.mcp_servers["a"].headers == {"Authorization": "Bearer s3cret"}
    assert file.mcp_servers["a"].url == "http://h/s3cret"
    path.write_text("mcp_servers: {a: {command: x, headers: {Authorization: 'Bearer ${A_SECRET}'}}}")
    with pytest.raises(ConfigurationError) as caught:
        read_tools_file(path)
    assert "s3cret" not in str(caught.value)


def test_paths_are_relative_to_the_file(tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    registry = load(tmp_path, "shell: {cwd: work}\nread_file: {roots: [work]}\n")
    shell = registry.get("shell")
    assert shell is not None
    assert str(tmp_path / "work") in shell.description

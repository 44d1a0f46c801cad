"""What README and ``docs/`` tell a newcomer to type works as it stands there, beside a running ``up --demo``."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.cli.conftest import COMMAND, REPOSITORY, SECONDS, CommandLine

README = (REPOSITORY / "README.md").read_text()
TOOLS = (REPOSITORY / "docs" / "tools.md").read_text()


def blocks(page: str, section: str, language: str) -> list[str]:
    """The code blocks of a section, in order."""
    (text,) = re.findall(rf"^## {section}\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL)
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def environment(cli: CommandLine) -> dict[str, str]:
    """A newcomer's: neither a model nor tools are set."""
    return {k: v for k, v in cli.environment().items() if k not in cli.variables}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where the newcomer stands: a virtual environment that puts ``turnkeeper`` on the path."""
    programs = tmp_path / ".venv" / "bin"
    programs.mkdir(parents=True)
    (programs / "turnkeeper").write_text(f'#!/bin/sh\nexec {shlex.join(COMMAND)} "$@"\n')
    (programs / "turnkeeper").chmod(0o755)
    (programs / "activate").write_text(f"PATH={shlex.quote(f'{programs}:{Path(sys.executable).parent}')}:$PATH\n")
    return tmp_path


def test_the_commands_of_the_readme(cli: CommandLine, folder: Path) -> None:
    _, commands, _ = blocks(README, "Ask, approve, ask on", "sh")
    done = subprocess.run(
        ["bash", "-euc", commands], cwd=folder, env=environment(cli), capture_output=True, text=True, timeout=SECONDS
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for told in ("approval required", "I restarted the deployment once", "6 times", "answer_end"):
        assert told in done.stdout


@pytest.mark.parametrize("program", blocks(README, "Producers", "python"), ids=["client", "rq"])
def test_the_programs_of_the_readme(cli: CommandLine, folder: Path, program: str) -> None:
    (folder / "program.py").write_text(program)
    done = subprocess.run(
        [sys.executable, "program.py"],
        cwd=folder,
        env=environment(cli),
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stderr
    if "follow" in program:
        assert "approval_required" in done.stdout
        assert "'denied'" in done.stdout
    else:
        assert "'status': 'awaiting_approval'" in done.stdout


def tools_finding(cli: CommandLine, folder: Path) -> dict[str, str]:
    found = cli.run(
        "doctor",
        "--json",
        TURNKEEPER_TOOLS=str(folder / "tools.yaml"),
        PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    )
    (finding,) = [row for row in map(json.loads, found.stdout.splitlines()) if row["check"] == "tools"]
    return finding


def test_the_first_tool_of_the_tools_page(cli: CommandLine, folder: Path) -> None:
    (module,) = blocks(TOOLS, "From nothing to a tool that runs", "python")
    (entry,) = blocks(TOOLS, "From nothing to a tool that runs", "yaml")
    (folder / "local_tools.py").write_text(module)
    (folder / "tools.yaml").write_text(entry)
    finding = tools_finding(cli, folder)
    assert finding["status"] == "ok"
    assert finding["detail"].startswith("5 tools, 2 of them")  # three are built in, and shell asks


def test_the_server_of_the_tools_page(cli: CommandLine, folder: Path) -> None:
    server, *_ = blocks(TOOLS, "MCP servers", "python")
    entry, *_ = blocks(TOOLS, "MCP servers", "yaml")
    (folder / "disk_server.py").write_text(server)
    (folder / "tools.yaml").write_text(entry)
    finding = tools_finding(cli, folder)
    assert finding["status"] == "ok"
    assert finding["detail"].startswith("5 tools, 2 of them")  # usage is read-only

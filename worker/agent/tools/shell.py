"""``shell``: one command line, in a process group of its own, with a clean environment."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from shared.clean import clean_text
from worker.agent.base import ToolContext, ToolResult, ToolSpec
from worker.agent.tools.outcome import given_up
from worker.agent.tools.process import clean_environment, limited, run_group
from worker.agent.tools.rules import COMMAND, SHELL

OUTPUT_BYTES: Final = 1_000_000  # of a command's output that are kept, head and tail
_MARGIN_SECONDS: Final = 0.1  # of the call's time, left for collecting the output


class ShellTool:
    """``command`` runs under bash, or sh where there is none. The result names the exit status; any other than 0 is a
    failure. Output above ``OUTPUT_BYTES`` loses its middle."""

    def __init__(
        self,
        *,
        cwd: Path,
        timeout_seconds: float | None,
        environment: Mapping[str, str],
        memory_mb: int | None = None,
    ) -> None:
        self._memory_mb = memory_mb
        self._cwd = cwd
        self._environment = dict(environment)
        self._shell = shutil.which("bash") or "/bin/sh"
        self.spec = ToolSpec(
            name=SHELL,
            description=(
                f"Run a command line with {Path(self._shell).name} in {cwd} and return its output and exit status. "
                "There is no terminal and no input. Processes that are still running when the command ends are killed."
            ),
            parameters={
                "type": "object",
                "properties": {COMMAND: {"type": "string", "minLength": 1, "description": "The command line to run"}},
                "required": [COMMAND],
                "additionalProperties": False,
            },
            risk="side_effect",
            approval="by_rule",
            timeout_seconds=timeout_seconds,
            source="builtin",
        )

    async def run(self, arguments: dict[str, Any], context: ToolContext, seconds: float) -> ToolResult:
        """Run ``arguments["command"]``; see ``Runner``."""
        ended = await run_group(
            limited([self._shell, "-c", arguments[COMMAND]], self._memory_mb),
            environment=clean_environment(self._environment),
            cwd=self._cwd,
            seconds=max(seconds - _MARGIN_SECONDS, seconds / 2),
            output_bytes=OUTPUT_BYTES,
        )
        output = clean_text(ended.output).rstrip("\n")
        if ended.status is None:
            return given_up(self.spec, seconds, f"All its processes were killed. Output until then:\n{output}")
        told = f"exit status {ended.status}" if ended.status >= 0 else f"killed by signal {-ended.status}"
        content = f"{told}\n{output}" if output else f"{told}, no output"
        data = {"status": told, "exit_status": ended.status}
        return ToolResult("done" if ended.status == 0 else "failed", content, data)

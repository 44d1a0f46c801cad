"""A rule is only as good as our reading of a command: it must be the shell's own."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys

import pytest

from worker.agent.tools.rules import plain_words

SHOW = f"{shlex.quote(sys.executable)} -c 'import sys, json; print(json.dumps(sys.argv[1:]))'"


@pytest.mark.parametrize("shell", ["sh", "bash"])
@pytest.mark.parametrize(
    "command",
    ["kubectl get pods", "a  'b c' \"d e\"", "a'b'c \"\" ''", "x=1 y,z 50% u@h:1/2 +3 --k=v", "-- -a 'it'\"'\"'s'"],
)
def test_words_are_the_shells(shell: str, command: str) -> None:
    words = plain_words(f"prog {command}")
    ran = subprocess.run([shell, "-c", f"{SHOW} {command}"], capture_output=True, text=True, check=True)
    assert words is not None
    assert words[1:] == json.loads(ran.stdout)

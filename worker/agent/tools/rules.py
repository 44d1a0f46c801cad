"""Who decides about a call: the tool's policy, a stored rule ("don't ask again"), or a person.

A rule for ``shell`` is a prefix of whole words that a person saw and allowed. It is applied to commands of one plain
program only: anything by which a shell could run or rewrite something else (operators, expansions, redirections,
globs, escapes, line breaks) goes to a person, also inside quotes, so that there is no grammar to get wrong. What a rule
cannot know is what the allowed program does with its further arguments: many run other programs through a flag
(``find -exec``, ``git -c core.pager=``, ``kubectl --kubeconfig``), so a prefix should be as long as it can.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any, Final

from worker.agent.base import ToolSpec

SHELL: Final = "shell"
COMMAND: Final = "command"

# Characters that mean nothing but themselves to a POSIX shell, and the two quotes.
_PLAIN_COMMAND: Final = re.compile(r"""[A-Za-z0-9 _./:=,@+%'"-]+""")

# Programs whose arguments are programs: as a whole prefix they would allow everything.
_RUNNERS: Final = frozenset(
    {
        "sh",
        "bash",
        "dash",
        "zsh",
        "ksh",
        "fish",
        "busybox",
        "env",
        "sudo",
        "doas",
        "su",
        "nohup",
        "nice",
        "timeout",
        "time",
        "xargs",
        "watch",
        "exec",
        "eval",
        "command",
        "builtin",
        "source",
        ".",
        "python",
        "python3",
        "perl",
        "ruby",
        "node",
        "php",
        "awk",
        "gawk",
        "lua",
        "ssh",
        "docker",
        "podman",
        "make",
        "setsid",
        "stdbuf",
        "strace",
    }
)


def decided_by_policy(spec: ToolSpec, arguments: dict[str, Any], rules: Sequence[Mapping[str, Any]]) -> str | None:
    """None: a person decides. Else who did: ``policy:<risk>`` for a harmless tool that needs no approval,
    ``policy:never`` for a side effect whose tool never asks, ``rule:<rule_id>`` for a stored rule."""
    if spec.approval == "never":
        return "policy:never" if spec.risk == "side_effect" else f"policy:{spec.risk}"
    if spec.approval == "by_rule":
        for rule in rules:
            if rule.get("tool_name") == spec.name and _matches(spec, arguments, rule.get("prefix")):
                return f"rule:{rule['rule_id']}"
    return None


def validate_rule(spec: ToolSpec, prefix: str | None) -> str | None:
    """Why a rule for this tool and prefix would be refused, or None. ``shell`` takes a prefix; other tools that
    approve by rule take none, and the rule covers the tool as a whole."""
    if spec.approval != "by_rule":
        return f"{spec.name} does not approve by rule: its approval is {spec.approval!r}."
    if needs_prefix(spec):
        return wrong_prefix(spec.name, prefix)
    return None if prefix is None else unwanted_prefix(spec.name)


def needs_prefix(spec: ToolSpec) -> bool:
    """Whether a rule for this tool says which of its calls it covers."""
    return spec.name == SHELL


def unwanted_prefix(name: str) -> str:
    return f"A rule for {name} covers the tool as a whole and takes no prefix."


def wrong_prefix(name: str, prefix: str | None) -> str | None:
    """What is wrong with the prefix of a rule that needs one, or None."""
    if prefix is None:
        return f"A rule for {name} needs a prefix, such as 'kubectl get'."
    words = plain_words(prefix)
    if words is None:
        return "The prefix must be the beginning of one plain command, without operators, expansions or globs."
    if words[0].rsplit("/", 1)[-1] in _RUNNERS and all(word.startswith("-") for word in words[1:]):
        return f"{words[0]} runs other programs: a rule for it would allow everything. Name what it runs."
    return None


def plain_words(command: str) -> list[str] | None:
    """The words of a command that a shell takes as one plain program call, or None if it may be anything else."""
    if not _PLAIN_COMMAND.fullmatch(command):
        return None
    try:
        words = shlex.split(command)
    except ValueError:  # a quote that does not end
        return None
    if not words or "=" in words[0]:  # an assignment changes what the words after it mean
        return None
    return words


def _matches(spec: ToolSpec, arguments: dict[str, Any], prefix: str | None) -> bool:
    if validate_rule(spec, prefix) is not None:
        return False
    if not needs_prefix(spec):
        return True
    command = arguments.get(COMMAND)
    words = plain_words(command) if isinstance(command, str) else None
    allowed = plain_words(prefix or "")
    return words is not None and allowed is not None and words[: len(allowed)] == allowed

"""Who decides: policies and stored rules."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.agent.base import ApprovalPolicy, ToolSpec
from worker.agent.tools.rules import decided_by_policy, plain_words, validate_rule

SHELL = ToolSpec("shell", "d", {}, "side_effect", "by_rule")
RULE = {"rule_id": 17, "tool_name": "shell", "prefix": "kubectl get", "scope": "account"}


def decide(command: Any, *rules: dict[str, Any]) -> str | None:
    return decided_by_policy(SHELL, {"command": command}, rules or (RULE,))


@pytest.mark.parametrize(
    ("risk", "approval", "expected"),
    [
        ("read_only", "never", "policy:read_only"),
        ("idempotent", "never", "policy:idempotent"),
        ("side_effect", "never", "policy:never"),
        ("side_effect", "always", None),
        ("read_only", "always", None),
        ("side_effect", "by_rule", None),
    ],
)
def test_policies(risk: Any, approval: ApprovalPolicy, expected: str | None) -> None:
    assert decided_by_policy(ToolSpec("t", "d", {}, risk, approval), {}, ()) == expected


def test_no_rule_overrides_always() -> None:
    spec = ToolSpec("shell", "d", {}, "side_effect", "always")
    assert decided_by_policy(spec, {"command": "kubectl get pods"}, (RULE,)) is None


@pytest.mark.parametrize(
    "command",
    [
        "kubectl get",
        "kubectl get pods",
        "kubectl  get   pods -n production -o=wide",
        "kubectl get 'pods'",
        'kubectl "get" pods/web-1,web-2 user@host:80 50%',
        "'kubectl' get",
    ],
)
def test_a_prefix_allows_longer_commands(command: str) -> None:
    assert decide(command) == "rule:17"


@pytest.mark.parametrize(
    "command",
    [
        "kubectl getx",
        "kubectl gett pods",
        "kubectl delete pods",
        "kubectl",
        "kubectl -n x get",
        "xkubectl get",
        "KUBECTL get",
        "kubectl get; rm -rf /",
        "kubectl get pods | sh",
        "kubectl get & rm x",
        "kubectl get && rm x",
        "kubectl get $(rm x)",
        "kubectl get `rm x`",
        "kubectl get $HOME",
        'kubectl get "$(rm x)"',
        "kubectl get '; rm x'",  # harmless in quotes, but then nobody needs it without being asked
        "kubectl get > /etc/passwd",
        "kubectl get < /etc/passwd",
        "kubectl get\nrm x",
        "kubectl get\rrm x",
        "kubectl get \\\nrm",
        "kubectl get \\; rm",
        "kubectl get *",
        "kubectl get ?",
        "kubectl get [a]",
        "kubectl get {a,b}",
        "kubectl get ~",
        "kubectl get # x",
        "kubectl get !x",
        "kubectl get (x)",
        "kubectl get 'unfinished",
        "PATH=/evil kubectl get",
        "kubectl\u00a0get pods",
        "kubectl get \u202epods",
        "kubectl get\tpods",
        "kubectl get pods\x00",
        "",
        " ",
        None,
        ["kubectl", "get"],
    ],
)
def test_everything_else_goes_to_a_person(command: Any) -> None:
    assert decide(command) is None


@pytest.mark.parametrize(
    "prefix", [None, "", "bash", "bash -c", "sudo", "/usr/bin/env", "kubectl get |", "A=1 kubectl"]
)
def test_rules_that_would_allow_too_much_never_match(prefix: str | None) -> None:
    assert validate_rule(SHELL, prefix) is not None
    for command in ("bash -c id", "sudo id", "/usr/bin/env id", "kubectl get | x", "A=1 kubectl", "id"):
        assert decide(command, {**RULE, "prefix": prefix}) is None


@pytest.mark.parametrize("prefix", ["kubectl get", "bash deploy.sh", "sudo systemctl status", "ls"])
def test_rules_for_a_named_program_are_fine(prefix: str) -> None:
    assert validate_rule(SHELL, prefix) is None
    assert decide(f"{prefix} x", {**RULE, "prefix": prefix}) == "rule:17"


def test_other_tools_take_rules_as_a_whole() -> None:
    spec = ToolSpec("deploy", "d", {}, "side_effect", "by_rule")
    rule = {"rule_id": "r1", "tool_name": "deploy", "prefix": None}
    assert validate_rule(spec, None) is None
    assert decided_by_policy(spec, {"x": 1}, (RULE, rule)) == "rule:r1"
    assert decided_by_policy(spec, {}, ({**rule, "prefix": "x"},)) is None
    assert "no prefix" in str(validate_rule(spec, "x"))
    assert validate_rule(ToolSpec("t", "d", {}, "side_effect", "always"), None) is not None


@given(st.lists(st.text("abz/-.:@%+,_=0'\" ;|&$`<>(){}\\*?[]~#!\n", max_size=8), max_size=5))
def test_a_plain_command_is_read_as_a_shell_reads_it(parts: list[str]) -> None:
    command = " ".join(parts)
    words = plain_words(command)
    if words is not None:
        assert not set(";|&$`<>(){}\\*?[]~#!\n") & set(command)
        assert "=" not in words[0]

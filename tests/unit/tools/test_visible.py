"""What a person reads before deciding."""

from __future__ import annotations

import re
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.agent.visible import describe_call, make_visible, visible_text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain text, {json} and \\n backslash", "plain text, {json} and \\n backslash"),
        ("line\n\tindented", "line\n\tindented"),
        ("Grüße 世界 العربية 😀 ❤️", "Grüße 世界 العربية 😀 ❤️"),
        ("rm \u202egpj.exe", "rm \\u{202E}gpj.exe"),
        ("a\x1b[2Kb\r", "a\\u{001B}[2Kb\\u{000D}"),
        ("zero\u200bwidth\ufeff", "zero\\u{200B}width\\u{FEFF}"),
        ("no\u00a0break\u3000wide", "no\\u{00A0}break\\u{3000}wide"),
        ("tag\U000e0041", "tag\\u{E0041}"),
        ("sep\u2028\u2029", "sep\\u{2028}\\u{2029}"),
        ("fill\u3164er\u2800", "fill\\u{3164}er\\u{2800}"),
        ("a\ufe0fb\ufe01\U000e0100", "a\\u{FE0F}b\\u{FE01}\\u{E0100}"),
        ("\ufe0f", "\\u{FE0F}"),
        ("soft\u00adhyphen", "soft\\u{00AD}hyphen"),
        ("literal \\u{202E}", "literal \\u{5C}u{202E}"),
    ],
)
def test_deceptive_characters_are_shown(text: str, shown: str) -> None:
    assert visible_text(text) == shown


def test_values_keys_and_lists() -> None:
    value = {"k\u200b": ["\u202e", 1, None, True, 1.5], "n": {"x": "\x07"}}
    assert make_visible(value) == {"k\\u{200B}": ["\\u{202E}", 1, None, True, 1.5], "n": {"x": "\\u{0007}"}}


@given(st.text())
def test_nothing_is_lost_and_nothing_stays_hidden(text: str) -> None:
    shown = visible_text(text)
    assert re.sub(r"\\u\{([0-9A-F]+)\}", lambda m: chr(int(m[1], 16)), shown) == text
    hidden = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp", "Zs"}
    assert not [c for c in shown if unicodedata.category(c) in hidden and c not in " \n\t"]


def test_description_is_one_line() -> None:
    text = describe_call("restart_deployment", {"namespace": "production", "deployment": "checkout-api"})
    assert text == 'restart_deployment(namespace="production", deployment="checkout-api")'
    assert describe_call("list_pods", {}) == "list_pods()"
    tricky = describe_call("shell", {"command": "ls\nrm -rf /", "odd\nkey": "\u202e"})
    assert tricky == 'shell(command="ls\\nrm -rf /", odd\\nkey="\\u{202E}")'


def test_description_says_what_it_abbreviates() -> None:
    text = describe_call("write", {"body": "x" * 10_000})
    assert text.endswith("(+9,802 characters))")
    assert len(text) < 260

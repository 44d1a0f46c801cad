"""What is a secret and what is not, in whole texts and in pieces."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.redaction import Redactor
from shared.redaction.detectors import MARKER, WINDOW
from tests.unit.redaction import samples

REDACTOR = Redactor(b"key")


def markers(text: str) -> list[str]:
    return MARKER.findall(text)


def in_pieces(redactor: Redactor, pieces: list[str]) -> str:
    stream = redactor.stream()
    return "".join(stream.feed(piece) for piece in pieces) + stream.end()


@pytest.mark.parametrize(("kind", "token"), [(kind, t) for kind, all_ in samples.TOKENS.items() for t in all_])
@pytest.mark.parametrize(
    "around", ["{}", "before {} behind.", "(`{}`)", '{{"a": "{}"}}', "TOKEN={}\n", "x:\\n{}\\ny", "{},{}"]
)
def test_a_token_is_replaced_wherever_it_stands(kind: str, token: str, around: str) -> None:
    text = around.format(token, token)
    redacted = REDACTOR.text(text)
    [marker] = set(markers(redacted))
    assert marker.startswith(f"[redacted:{kind}:")
    assert redacted == text.replace(token, marker)


@pytest.mark.parametrize(("text", "secret", "kind"), samples.IN_CONTEXT)
def test_a_value_is_replaced_by_what_announces_it(text: str, secret: str, kind: str) -> None:
    redacted = REDACTOR.text(text)
    assert secret not in redacted
    [marker] = markers(redacted)
    assert marker.startswith(f"[redacted:{kind}:")
    assert redacted.startswith(text[: text.index(secret)])


@pytest.mark.parametrize("text", samples.HARMLESS)
def test_output_of_operations_is_left_alone(text: str) -> None:
    assert REDACTOR.output(text) is text


def test_a_private_key_that_is_cut_off_or_long() -> None:
    cut = samples.PEM[: samples.PEM.index("-----END") - 40]
    assert re.fullmatch(r"see \[redacted:private_key:\w+\]", REDACTOR.text("see " + cut))
    head, _, foot = samples.PEM.partition("\n")
    long = head + "\n" + "\n".join(["QUJD" * 16] * 400) + "\n" + foot.rpartition("\n")[2]
    assert len(long) > 5 * WINDOW
    assert re.fullmatch(r"see \[redacted:private_key:\w+\], and", REDACTOR.text(f"see {long}, and"))


@pytest.mark.parametrize("text", [samples.SECRET_YAML, samples.SECRET_YAML.replace("\n", "\r\n")])
def test_kubernetes_secrets_in_yaml(text: str) -> None:
    redacted = REDACTOR.output(text)
    assert not [value for value in samples.SECRET_VALUES if value in redacted]
    assert "mode: cHJvZHVjdGlvbg==" in redacted
    assert redacted.count("db-host") == 2
    assert len(set(re.findall(r"db-host\W+(\[redacted:kubernetes_secret:\w+\])", redacted))) == 1
    assert REDACTOR.output(redacted) == redacted


def test_kubernetes_secrets_in_json() -> None:
    for text in (samples.SECRET_JSON, samples.SECRET_JSON.replace('"', '\\"')):
        redacted = REDACTOR.output(text)
        assert "cG9zdGdyZXMuc3Zj" not in redacted
        assert "cHJvZHVjdGlvbg==" in redacted
        assert len(markers(redacted)) == 1


def test_the_same_secret_has_the_same_marker_and_another_key_another() -> None:
    token = samples.TOKENS["github_token"][0]
    text = f"{token} password={token} https://u:{token}@github.com Authorization: Bearer {token} {{'token': '{token}'}}"
    assert len(markers(REDACTOR.text(text))) == 5
    [marker] = set(markers(REDACTOR.text(text)))
    assert marker == Redactor(b"key").text(token)
    assert marker != Redactor(b"other").text(token)
    assert REDACTOR.text("password=hunter2 pwd: hunter2 redis://:hunter2@c") == (
        "password={0} pwd: {0} redis://:{0}@c".format(REDACTOR.text("password=hunter2").removeprefix("password="))
    )


def test_json_values_by_their_keys() -> None:
    value = {
        "user": "ana",
        "password": "hunter2",
        "deep": [{"apiKey": "Zx81kq02mmVv", "n": 7}],
        "note": "password=x1y2",
    }
    redacted = REDACTOR.value(value)
    assert redacted["user"] == "ana"
    assert redacted["deep"][0]["n"] == 7
    assert "hunter2" not in str(redacted)
    assert "Zx81" not in str(redacted)
    assert redacted["password"] == REDACTOR.text("password=hunter2").removeprefix("password=")
    assert REDACTOR.value(redacted) is redacted
    plain = {"a": [1, None, True, "x"], "token": "none", "nextPageToken": "a1B2c3D4e5F6g7H8"}
    assert REDACTOR.value(plain) is plain


def test_signed_blocks_are_dropped_whole_and_calls_are_left() -> None:
    token = samples.TOKENS["github_token"][0]
    call = {"id": "c", "function": {"name": "f", "arguments": f'{{"token": "{token}"}}'}, "type": "function"}
    message = {
        "role": "assistant",
        "content": f"use {token}",
        "reasoning_content": f"I saw {token}",
        "thinking_blocks": [
            {"type": "thinking", "thinking": f"about {token}", "signature": "c2ln"},
            {"type": "thinking", "thinking": "harmless", "signature": "c2ln"},
        ],
        "provider_specific_fields": {"thought_signatures": ["c2ln"], "seen": token},
        "other": {"signature": "c2ln"},
        "tool_calls": [call],
    }
    redacted = REDACTOR.message(message)
    assert redacted["tool_calls"] == [call]
    assert redacted["thinking_blocks"] == [message["thinking_blocks"][1]]
    assert "provider_specific_fields" not in redacted
    assert redacted["other"] == {"signature": "c2ln"}
    del redacted["tool_calls"]
    assert token not in str(redacted)
    assert redacted["content"].startswith("use [redacted:github_token:")


def test_off_changes_nothing() -> None:
    token = samples.TOKENS["github_token"][0]
    off = Redactor.off()
    assert off.text(token) == off.value(token) == in_pieces(off, [token[:9], token[9:]]) == token


# Pieces

_PARTS = st.one_of(
    st.sampled_from([t for all_ in samples.TOKENS.values() for t in all_]),
    st.sampled_from([text for text, _, _ in samples.IN_CONTEXT]),
    st.sampled_from(samples.HARMLESS),
    st.sampled_from(
        [
            " ",
            "\n",
            "=",
            ":",
            '"',
            "'",
            "\\",
            "\\n",
            "-",
            "_",
            "[",
            "]",
            ".",
            "é😀",
            "[redacted:token:012345]",
            "[redacted:",
            "bearer ",
        ]
    ),
    st.sampled_from(
        ["password", "token", "secret", "api_key", "://", "@", "-----BEGIN", "-----END", "PRIVATE KEY-----"]
    ),
    st.text(alphabet="ab1 =:\"'\\-_/[]@\n", max_size=8),
)
_TEXTS = st.lists(_PARTS, max_size=6).map("".join)
_CUSTOM = {"ticket": r"CASE-\d{4,}(?:-[a-z]+)?", "word": r"\bab+1\b"}


def cut(text: str, places: list[int]) -> list[str]:
    ends = sorted({place % (len(text) + 1) for place in places} | {len(text)})
    return [text[a:b] for a, b in zip([0, *ends], ends, strict=False)]


@given(_TEXTS, st.lists(st.integers(0, 10_000), max_size=12))
@settings(max_examples=400, deadline=None)
def test_however_a_text_is_cut_the_stream_is_the_redacted_text(text: str, places: list[int]) -> None:
    assert in_pieces(REDACTOR, cut(text, places)) == REDACTOR.text(text)


@given(_TEXTS)
@settings(max_examples=300, deadline=None)
def test_redacting_twice_changes_nothing(text: str) -> None:
    once = REDACTOR.text(text)
    assert REDACTOR.text(once) == once
    whole = REDACTOR.output(text)
    assert REDACTOR.output(whole) == whole


@given(
    st.lists(st.integers(0, 30_000), max_size=12),
    st.sampled_from("AQ=\\ "),
    st.sampled_from(["", "-----END X PRIVATE KEY-----"]),
)
@settings(max_examples=60, deadline=None)
def test_secrets_longer_than_the_window_in_pieces(places: list[int], filler: str, closer: str) -> None:
    for head in (
        "-----BEGIN PRIVATE KEY-----\nABCDEFGHIJKLMNOPQR",
        'password="',
        "password=",
        "gh" + "p_" + samples.ALNUM,
    ):
        text = f'a {head}{filler * 3 * WINDOW}{closer}" b'
        assert in_pieces(REDACTOR, cut(text, places)) == REDACTOR.text(text)


@pytest.mark.parametrize(
    "text", [*(t for t, _, _ in samples.IN_CONTEXT), *(all_[0] for all_ in samples.TOKENS.values())]
)
def test_every_single_cut(text: str) -> None:
    text = f"x {text} y"
    whole = REDACTOR.text(text)
    for place in range(len(text)):
        assert in_pieces(REDACTOR, [text[:place], text[place:]]) == whole
    assert in_pieces(REDACTOR, list(text)) == whole


def test_text_is_held_back_only_while_it_is_open() -> None:
    stream = REDACTOR.stream()
    assert stream.feed("The pass") == "The "  # of "password"
    assert stream.feed("enger arrived. ") == "passenger arrived. "
    assert stream.feed("password is wro") == "password is wro"
    assert stream.feed("ng, gh") == "ng, "
    assert stream.feed("p_") == ""
    assert stream.feed("short.") == ""
    assert stream.feed(" so") == "ghp_short. so"
    assert stream.end() == ""
    stream, fed, shown = REDACTOR.stream(), 0, ""
    for piece in ['password="', *("q" for _ in range(2 * WINDOW))]:
        fed += len(piece)
        shown += stream.feed(piece)
        assert shown or fed <= 4_096
    assert re.fullmatch(r'password="\[redacted:password:\w+\]', shown)


def test_custom_patterns_in_pieces() -> None:
    from shared.redaction.custom import CustomPattern

    redactor = Redactor(b"key", [CustomPattern(name, pattern) for name, pattern in _CUSTOM.items()])
    text = "CASE-12345-abc CASE-123 abb1 xabb1 password=CASE-99999 CASE-77777"
    whole = redactor.text(text)
    assert [m.split(":")[1] for m in markers(whole)] == ["ticket", "word", "ticket", "ticket"]
    assert redactor.text(whole) == whole
    for place in range(len(text)):
        assert in_pieces(redactor, [text[:place], text[place:]]) == whole
    assert in_pieces(redactor, list(text)) == whole


def test_a_pattern_that_takes_too_long_hides_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    from shared.redaction import custom

    monkeypatch.setattr(custom, "MATCH_SECONDS", 0.05)
    redactor = Redactor(b"key", [custom.CustomPattern("slow", r"(?:a|a|ab?)+(?:b|bc)+X")])
    assert re.fullmatch(r"\[redacted:slow:\w+\]", redactor.text("a" * 5_000 + "b" * 50))


@pytest.mark.parametrize(
    "unit",
    [
        "password=",
        "eyJ",
        "a:",
        "://a:",
        "-----BEGIN ",
        "x@",
        '"',
        "\\",
        "bearer ",
        "kind: Secret\ndata:\n  a: b\n",
        "sk-",
        "-",
    ],
)
def test_hostile_text_takes_linear_time(unit: str) -> None:
    text = unit * (400_000 // len(unit))
    started = time.perf_counter()
    REDACTOR.output(text)
    assert time.perf_counter() - started < 5

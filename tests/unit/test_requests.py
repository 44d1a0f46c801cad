"""Requests: checked once, recorded clean, with tokens hashed and images apart."""

from __future__ import annotations

import base64
import uuid
from typing import Any

import pytest
from pydantic import ValidationError

from shared.errors import RequestInvalid, RequestTooLarge
from shared.requests import Artifact, Ask, RequestRecord, Retry, ToolDecisions, parse_request, record_of, token_sha256

CONVERSATION = "0e0f5f7e-7a55-4f0b-8f3c-0d6a4a6f2a11"


def recorded(kind: str = "ask", **arguments: Any) -> RequestRecord:
    return record_of(parse_request(kind, {"conversation_id": CONVERSATION, **arguments}))


def decision(call_id: str = "c1", approved: bool = True, **fields: Any) -> dict[str, Any]:
    return {"tool_call_id": call_id, "approved": approved, **fields}


# What is accepted


def test_kinds() -> None:
    assert isinstance(parse_request("ask", {"ask": "why?"}), Ask)
    decided = parse_request("tool_decisions", {"conversation_id": CONVERSATION, "tool_decisions": [decision()]})
    assert isinstance(decided, ToolDecisions)
    assert isinstance(parse_request("retry", {"conversation_id": CONVERSATION}), Retry)


@pytest.mark.parametrize(
    ("kind", "arguments", "named"),
    [
        ("shout", {}, "shout"),
        ("ask", {}, "ask"),
        ("ask", {"ask": ""}, "ask"),
        ("ask", {"ask": "x", "conversation_id": "nonsense"}, "conversation_id"),
        ("ask", {"ask": "x", "conversation_history": []}, "conversation_history"),
        ("ask", {"ask": "x", "queue": "two words"}, "queue"),
        ("ask", {"ask": "x", "request_id": ""}, "request_id"),
        ("ask", {"ask": "x", "request_id": "r" * 201}, "request_id"),
        ("ask", {"ask": "x", "account_id": ""}, "account_id"),
        ("ask", {"ask": "x", "supersede": "no"}, "supersede"),
        ("ask", {"ask": "x", "target": {"mode": "moon"}}, "target.mode"),
        ("ask", {"ask": "x", "images": [{}]}, "images"),
        ("ask", {"ask": "x", "images": [{"url": "u", "data": "d"}]}, "images"),
        ("ask", {"ask": "x", "frontend_tools": [{"name": "no spaces"}]}, "frontend_tools"),
        ("ask", {"ask": "x", "approval_mode": "never"}, "approval_mode"),
        ("tool_decisions", {"tool_decisions": [decision()]}, "conversation_id"),
        ("tool_decisions", {"conversation_id": CONVERSATION}, "tool_decisions"),
        ("tool_decisions", {"conversation_id": CONVERSATION, "tool_decisions": [{"tool_call_id": "c1"}]}, "approved"),
        (
            "tool_decisions",
            {"conversation_id": CONVERSATION, "tool_decisions": [decision(approved="yes")]},  # type: ignore[arg-type]
            "approved",
        ),
        ("retry", {}, "conversation_id"),
        ("retry", {"conversation_id": CONVERSATION, "ask": "x"}, "ask"),
    ],
)
def test_a_wrong_request_is_one_line_that_names_the_field(kind: str, arguments: dict[str, Any], named: str) -> None:
    with pytest.raises(RequestInvalid) as caught:
        parse_request(kind, arguments)
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_refusal_never_repeats_what_was_sent() -> None:
    with pytest.raises(RequestInvalid) as caught:
        parse_request("ask", {"ask": {"secret": "hunter2"}})
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (decision(approval_token="t"), decision(approved=False, approval_token="t")),
        (decision(), decision(approved=False)),
        (decision(approval_token="t"), decision(approved=False)),
        (decision(approval_token="t", feedback="a"), decision(approval_token="t", feedback="b")),
        (decision(turn=1, step=1, call_index=0), decision(approved=False, turn=1, step=1, call_index=0)),
        (decision(approval_token="t"), decision(approved=False, turn=1, step=1, call_index=0)),
    ],
)
def test_deciding_a_call_in_two_ways_is_refused(first: dict[str, Any], second: dict[str, Any]) -> None:
    with pytest.raises(RequestInvalid, match="two ways"):
        parse_request("tool_decisions", {"conversation_id": CONVERSATION, "tool_decisions": [first, second]})


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (decision(approval_token="t"), decision(approval_token="t")),
        (decision("c1"), decision("c2", approved=False)),
        (decision(approval_token="t"), decision(approved=False, approval_token="u")),  # ids repeat, tokens do not
        (decision(turn=1, step=1, call_index=0), decision(approved=False, turn=1, step=1, call_index=1)),
    ],
)
def test_the_same_twice_and_other_calls_under_one_id_are_fine(first: dict[str, Any], second: dict[str, Any]) -> None:
    parse_request("tool_decisions", {"conversation_id": CONVERSATION, "tool_decisions": [first, second]})


def test_a_frontend_call_is_answered_once() -> None:
    results = [{"tool_call_id": "f", "content": 1}, {"tool_call_id": "f", "content": 1}]
    with pytest.raises(RequestInvalid, match="twice"):
        parse_request("tool_decisions", {"conversation_id": CONVERSATION, "frontend_tool_results": results})


# What is recorded


def test_a_record_is_the_request_with_its_defaults() -> None:
    document = recorded(ask="  why is\n web   down? ", user_id="u", target={"mode": "host", "server_id": "s"}).document
    assert document["kind"] == "ask"
    assert document["ask"] == "  why is\n web   down? "
    assert document["title"] == "why is web down?"
    assert document["target_id"] == "host/s"
    assert (document["queue"], document["default_account"], document["account_id"]) == ("interactive", "default", None)
    assert document["supersede"] is True
    assert "images" not in document
    assert "metadata" not in document
    assert uuid.UUID(document["request_id"])


def test_a_request_overrides_the_defaults_of_the_queue() -> None:
    given = parse_request("ask", {"ask": "x", "request_id": "mine", "queue": "background"})
    document = record_of(given, request_id="job", queue="interactive").document
    assert (document["request_id"], document["queue"]) == ("mine", "background")
    document = record_of(parse_request("ask", {"ask": "x"}), request_id="job", queue="chat").document
    assert (document["request_id"], document["queue"]) == ("job", "chat")


def test_tokens_are_hashed_and_call_keys_marked_only_by_setting() -> None:
    sent = [decision("a", approval_token="secret"), decision("b", turn=1, step=2, call_index=3)]
    request = parse_request("tool_decisions", {"conversation_id": CONVERSATION, "tool_decisions": sent})
    with_token, by_key = record_of(request).document["tool_decisions"]
    assert with_token["approval_token_sha256"] == token_sha256("secret")
    assert "approval_token" not in with_token
    assert "by_key" not in by_key
    with_token, by_key = record_of(request, accept_call_keys=True).document["tool_decisions"]
    assert "by_key" not in with_token
    assert (by_key["by_key"], by_key["turn"], by_key["step"], by_key["call_index"]) == (True, 1, 2, 3)
    assert "secret" not in repr(request)
    assert "secret" not in str(record_of(request).document)


def test_a_new_conversation_is_named_by_its_request() -> None:
    first, again, other, elsewhere = (
        record_of(parse_request("ask", {"ask": "x", "request_id": request, "account_id": account})).conversation_id
        for request, account in (("r", "a"), ("r", "a"), ("q", "a"), ("r", "b"))
    )
    assert first == again
    assert len({first, other, elsewhere}) == 3
    implied = record_of(parse_request("ask", {"ask": "x", "request_id": "r"}), default_account="a")
    assert implied.conversation_id == first


def test_the_digest_tells_content_from_circumstances() -> None:
    base = recorded(ask="x", request_id="r1").document["digest"]
    assert recorded(ask="x", request_id="r2", queue="background").document["digest"] == base
    assert recorded(ask="x", account_id="a").document["digest"] == base
    for other in (
        {"ask": "y"},
        {"ask": "x", "model": "m"},
        {"ask": "x", "metadata": {"k": 1}},
        {"ask": "x", "user_id": "u"},
    ):
        assert recorded(**other).document["digest"] != base
    one = recorded("tool_decisions", tool_decisions=[decision(approval_token="t")]).document["digest"]
    two = recorded("tool_decisions", tool_decisions=[decision(approval_token="u")]).document["digest"]
    assert one != two


def test_a_record_is_clean() -> None:
    document = recorded(ask="a\x00b \ud83d", metadata={"k\x00": float("nan")}).document
    assert (document["ask"], document["metadata"]) == ("ab \ufffd", {"k": None})


def test_images_become_artifacts_once_each() -> None:
    data = base64.b64encode(b"picture").decode()
    record = recorded(ask="x", images=[{"data": data}, {"data": data}, {"url": "https://example.org/x.png"}])
    [artifact] = record.artifacts
    assert artifact == Artifact.of(CONVERSATION, "image", "image/png", b"picture")
    stored = {"artifact_id": artifact.artifact_id, "media_type": "image/png"}
    assert record.document["images"] == [stored, stored, {"url": "https://example.org/x.png"}]
    assert data not in str(record.document)


def test_an_image_that_is_not_base64_is_refused() -> None:
    with pytest.raises(RequestInvalid, match="base64"):
        recorded(ask="x", images=[{"data": "not base64!"}])


def test_artifact_ids_depend_on_content_and_conversation() -> None:
    other = str(uuid.uuid4())
    ids = {Artifact.of(c, "n", "t", content).artifact_id for c in (CONVERSATION, other) for content in (b"1", b"2")}
    assert len(ids) == 4


def test_a_request_over_the_limit_is_refused_and_its_images_do_not_count() -> None:
    with pytest.raises(RequestTooLarge, match="1,000"):
        record_of(parse_request("ask", {"ask": "x" * 1_000}), max_bytes=1_000)
    image = {"data": base64.b64encode(b"x" * 10_000).decode()}
    record_of(parse_request("ask", {"ask": "x", "images": [image]}), max_bytes=1_000)


@pytest.mark.parametrize("content", [None, "", 0, [], {"a": [1]}, "text"])
def test_a_frontend_result_may_be_anything(content: Any) -> None:
    record = recorded("tool_decisions", frontend_tool_results=[{"tool_call_id": "f", "content": content}])
    [result] = record.document["frontend_tool_results"]
    assert result == {"tool_call_id": "f", "content": content, "is_error": False}


def test_targets_of_the_same_place_share_an_id() -> None:
    def target_id(**target: str) -> Any:
        return recorded(ask="x", target=target).document["target_id"]

    place = {"mode": "kubernetes", "cluster_id": "k", "namespace": "shop"}
    assert target_id(**place, pod="a") == target_id(**place, pod="b") == "kubernetes/k/shop"
    assert target_id(mode="host", server_id="1", server_name="db") == "host/1"
    assert target_id(mode="host", server_name="db") == "host/db"


def test_only_the_start_of_a_long_question_is_the_title() -> None:
    assert recorded(ask="word " * 100).document["title"] == ("word " * 16).strip() + "…"
    assert recorded(ask="x" * 81).document["title"] == "x" * 79 + "…"
    assert recorded(ask="x" * 80).document["title"] == "x" * 80


@pytest.mark.parametrize("url", ["artifact:mine;image/png", "file:///etc/passwd", "javascript:1", "data:text/html,x"])
def test_an_image_by_another_scheme_is_refused(url: str) -> None:
    with pytest.raises(RequestInvalid, match="images"):
        parse_request("ask", {"ask": "x", "images": [{"url": url}]})


def test_an_inline_image_is_an_artifact_like_one_given_as_data() -> None:
    inline = recorded(ask="x", images=[{"url": "data:image/jpeg;base64,AAAA"}])
    as_data = recorded(ask="x", images=[{"data": "AAAA", "media_type": "image/jpeg"}])
    assert inline.artifacts == as_data.artifacts
    assert inline.document["images"] == as_data.document["images"]


def _nested(levels: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(levels):
        value = {"deeper": value}
    return value


@pytest.mark.parametrize("levels", [100, 5_000])
def test_what_is_nested_too_deeply_is_refused_and_not_a_crash(levels: int) -> None:
    with pytest.raises(RequestInvalid, match="deeper than 64"):
        parse_request("ask", {"ask": "x", "metadata": _nested(levels)})
    with pytest.raises(ValidationError, match="deeper than 64"):
        Ask(ask="x", metadata=_nested(levels))


def test_what_is_nested_reasonably_is_fine() -> None:
    assert recorded(ask="x", metadata=_nested(40)).document["metadata"] == _nested(40)


def test_many_decisions_are_refused_before_they_cost_anything() -> None:
    many = [decision(f"c{n}", approval_token=str(n)) for n in range(20_000)]
    with pytest.raises(RequestInvalid, match="at most 256"):
        parse_request("tool_decisions", {"conversation_id": CONVERSATION, "tool_decisions": many})
    assert len(recorded("tool_decisions", tool_decisions=many[:256]).document["tool_decisions"]) == 256


@pytest.mark.parametrize("image", [{"data": "é"}, {"data": "AAAA", "media_type": "text/html\n"}])
def test_what_is_no_image_is_refused(image: dict[str, Any]) -> None:
    with pytest.raises(RequestInvalid, match="images"):
        recorded(ask="x", images=[image])


def test_a_job_id_that_cannot_be_a_request_id_is_refused() -> None:
    with pytest.raises(RequestInvalid, match="request_id"):
        record_of(parse_request("ask", {"ask": "x"}), request_id="j" * 9_000)


@pytest.mark.parametrize("turn", [-1, 2**31, 2**70])
def test_a_place_that_no_call_can_have_is_refused(turn: int) -> None:
    with pytest.raises(RequestInvalid, match="turn"):
        recorded("tool_decisions", tool_decisions=[decision(turn=turn)])

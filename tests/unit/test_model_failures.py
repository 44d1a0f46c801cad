"""Which error of ours a provider's error becomes, and how long to wait."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

import pytest

from shared.errors import ContextTooLong, ModelRequestRejected, ModelUnavailable, RateLimited
from worker.agent.failures import understand


class Refusal(Exception):
    def __init__(self, message: str, status: int | None = None, body: Any = None, headers: Any = None) -> None:
        super().__init__(message)
        self.status_code, self.body, self.headers = status, body, headers


@pytest.mark.parametrize(
    ("raised", "kind", "again"),
    [
        (Refusal("slow down", 429), RateLimited, True),
        (Refusal("insufficient_quota", 429), RateLimited, False),
        (Refusal("oops", 500), ModelUnavailable, True),
        (Refusal("overloaded", 529), ModelUnavailable, True),
        (Refusal("timed out", 408), ModelUnavailable, True),
        (ConnectionResetError("reset"), ModelUnavailable, True),
        (Refusal("bad key", 401), ModelRequestRejected, False),
        (Refusal("not for you", 403), ModelRequestRejected, False),
        (Refusal("no such model", 404), ModelRequestRejected, False),
        (Refusal("unknown field", 400), ModelRequestRejected, False),
        (Refusal("This model's maximum context length is 8192 tokens", 400), ContextTooLong, False),
        (Refusal("prompt is too long: 209000 tokens > 200000 maximum", 400), ContextTooLong, False),
        (Refusal("in the stream", 200, {"code": 429}), RateLimited, True),
        (Refusal("in the stream", 200, {"code": "503"}), ModelUnavailable, True),
        (Refusal("in the stream", 500, {"code": 400}), ModelRequestRejected, False),
    ],
)
def test_the_kind_of_an_error_and_whether_to_try_again(raised: Exception, kind: type, again: bool) -> None:
    failure = understand(raised)
    assert type(failure.error) is kind
    assert failure.again is again
    assert str(raised) in failure.error.description


@pytest.mark.parametrize(
    "raised",
    [
        Refusal("Missing credentials. Please pass an `api_key`, or set the `OPENAI_API_KEY`", 500),
        Refusal("Missing Anthropic API Key - A call is being made", 401),
        Refusal("Missing Gemini API key. Set the GEMINI_API_KEY\nTraceback (most recent call last):", 500),
        Refusal("OpenAIException - 'ascii' codec can't encode character '\\u2026' in position 10", 500),
    ],
)
def test_a_key_that_is_missing_or_no_key_is_not_tried_again(raised: Exception) -> None:
    failure = understand(raised)
    assert type(failure.error) is ModelRequestRejected
    assert not failure.again
    assert "worker's environment" in failure.error.hint
    assert "Traceback" not in failure.error.description


def test_the_innermost_error_counts() -> None:
    outer = Refusal("stream failed", 503)
    outer.original_exception = Refusal("bad key", 401)  # type: ignore[attr-defined]
    assert type(understand(outer).error) is ModelRequestRejected


@pytest.mark.parametrize(
    ("headers", "text", "seconds"),
    [
        ({"retry-after": "12"}, "", 12),
        ({"retry-after-ms": "250", "retry-after": "12"}, "", 0.25),
        ({}, 'quota {"retryDelay": "37s"}', 37),
        ({}, "Please retry in 37.5s.", 37.5),
        ({}, "Please try again in 20ms.", 0.02),
        ({}, "Please try again in 2m", 120),
        ({"retry-after": "12"}, "Please try again in 20ms.", 12),
        ({"retry-after": "soon"}, "", None),
        ({}, "no word of it", None),
    ],
)
def test_the_wait_is_read_from_headers_and_words(headers: dict[str, str], text: str, seconds: float | None) -> None:
    failure = understand(Refusal(text, 429, headers=headers))
    assert failure.wait_seconds == seconds
    assert failure.error.details["retry_after_seconds"] == seconds


def test_the_wait_may_be_a_date() -> None:
    date = format_datetime(datetime.now(UTC) + timedelta(seconds=30), usegmt=True)
    wait = understand(Refusal("", 503, headers={"retry-after": date})).wait_seconds
    assert wait is not None
    assert 25 < wait <= 30


def test_long_words_of_a_provider_are_cut() -> None:
    assert len(understand(Refusal("x" * 10_000, 400)).error.description) < 600

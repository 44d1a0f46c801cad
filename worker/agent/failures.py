"""What a provider's error means: which error of ours, whether another try may help, and when.

Errors are told apart by HTTP status and by class name, since the same refusal arrives as an exception of the call, as
an event in a stream under status 200, or wrapped in an error of the library.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any, Final

from shared.errors import ContextTooLong, ModelError, ModelRequestRejected, ModelUnavailable, RateLimited

_TEXT_LIMIT: Final = 500  # characters of the provider's words in a description
_TOO_LONG: Final = re.compile(
    r"context[ _]length|context[ _]window|maximum context|too long|too many (input )?tokens|exceeds? .{0,40}tokens"
    r"|reduce the length|input is longer|token limit",
    re.IGNORECASE,
)
_NO_KEY: Final = re.compile(r"missing (credentials|.{0,30}api[ _]key)|api[_ ]key .{0,40}must be set", re.IGNORECASE)
_BAD_KEY: Final = re.compile(r"'(ascii|latin-1)' codec can't encode")  # of the header that carries the key
_KEY_HINT: Final = "Set the provider's API key in the worker's environment and start the worker again"
_NO_QUOTA: Final = re.compile(r"insufficient_quota|exceeded your current quota|billing|credit balance", re.IGNORECASE)
_DELAY: Final = re.compile(
    r"(?:retry_?delay\W+|(?:retry|try again) (?:in|after) )(\d+(?:\.\d+)?) ?(ms|s|m\b)?", re.IGNORECASE
)
_UNIT_SECONDS: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "": 1.0}


@dataclass(frozen=True, slots=True)
class Failure:
    """``error`` is what to raise when there is no further try; ``wait_seconds`` is the provider's word, or None."""

    error: ModelError
    again: bool
    wait_seconds: float | None = None


def understand(raised: BaseException) -> Failure:
    """The meaning of an exception of the model library."""
    cause = _innermost(raised)
    names = {kind.__name__ for kind in type(cause).__mro__}
    status, words = _status(cause), _words(cause)
    if "ContextWindowExceededError" in names or (status in (400, 413, 422, 500, None) and _TOO_LONG.search(words)):
        return Failure(
            ContextTooLong(f"The messages do not fit the model's window: {words}", hint="Compact the history."), False
        )
    if _NO_KEY.search(words):
        first = words.splitlines()[0]
        return Failure(
            ModelRequestRejected(f"The worker has no key for the model: {first}", hint=f"{_KEY_HINT}."), False
        )
    if isinstance(cause, UnicodeEncodeError) or _BAD_KEY.search(words):
        text = "The API key in the worker's environment holds characters that no key has, so nothing was asked."
        return Failure(ModelRequestRejected(text, hint=f"{_KEY_HINT}."), False)
    if status == 429 or "RateLimitError" in names:
        return _rate_limited(cause, words)
    if status in (401, 403):
        hint = f"{_KEY_HINT}, and check that it may use this model."
        return Failure(ModelRequestRejected(f"The provider refused the API key: {words}", hint=hint), False)
    if status == 404:
        hint = "Check TURNKEEPER_MODEL, or the request's model: it is a litellm name such as openai/gpt-4.1."
        return Failure(ModelRequestRejected(f"The provider does not know the model: {words}", hint=hint), False)
    if status is not None and 400 <= status < 500 and status not in (408, 409, 425):
        return Failure(ModelRequestRejected(f"The provider refused the request: {words}", status=status), False)
    unavailable, wait = ModelUnavailable(f"The model's provider failed: {words}"), retry_after_seconds(cause)
    if wait is not None:
        unavailable.details["retry_after_seconds"] = wait
    return Failure(unavailable, True, wait)


def _rate_limited(cause: BaseException, words: str) -> Failure:
    wait = retry_after_seconds(cause)
    if _NO_QUOTA.search(words):
        spent = RateLimited(f"The account's quota is used up: {words}", hint="Check plan and billing at the provider.")
        return Failure(spent, False)
    limited = RateLimited(f"The provider limits the rate of requests: {words}", retry_after_seconds=wait)
    return Failure(limited, True, wait)


def retry_after_seconds(error: BaseException) -> float | None:
    """How long the provider asks to wait: from the headers of its answer, or from its words, as Gemini does it."""
    for headers in _headers(error):
        milliseconds = headers.get("retry-after-ms")
        if milliseconds is not None and (value := _number(milliseconds)) is not None:
            return value / 1000
        after = headers.get("retry-after")
        if after is not None and (value := _after(after)) is not None:
            return value
    said = _DELAY.search(f"{error} {getattr(error, 'body', '')}")
    return float(said[1]) * _UNIT_SECONDS[(said[2] or "").lower()] if said else None


def _headers(error: BaseException) -> list[Any]:
    candidates = (
        getattr(getattr(error, "response", None), "headers", None),
        getattr(error, "headers", None),
        getattr(error, "litellm_response_headers", None),
    )
    return [headers for headers in candidates if headers]


def _after(value: str) -> float | None:
    """Seconds, or an HTTP date."""
    seconds = _number(value)
    if seconds is not None:
        return seconds
    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
    except ValueError:
        return None


def _number(value: str) -> float | None:
    try:
        return max(0.0, float(value))
    except ValueError:
        return None


def _innermost(error: BaseException) -> BaseException:
    inner = getattr(error, "original_exception", None)
    return _innermost(inner) if isinstance(inner, BaseException) and inner is not error else error


def _status(error: BaseException) -> int | None:
    """The status that the provider meant. An error inside a stream has its code in the body, under status 200."""
    body = getattr(error, "body", None)
    code = body.get("code") or body.get("status") if isinstance(body, dict) else None
    for value in (code, getattr(error, "status_code", None)):
        try:
            number = int(str(value))
        except ValueError:
            continue
        if 400 <= number < 600:
            return number
    return None


def _words(error: BaseException) -> str:
    text = re.sub(r"^(litellm\.\w+: )+", "", str(error)) or type(error).__name__
    return text if len(text) <= _TEXT_LIMIT else f"{text[:_TEXT_LIMIT]} …"

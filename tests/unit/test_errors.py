"""Errors: stable codes, and what programs and people are told."""

from __future__ import annotations

import re

import pytest

from shared import errors
from shared.errors import (
    BY_CODE,
    ContentRefused,
    LeaseLost,
    ModelError,
    RequestRefused,
    StoreError,
    StoreUnavailable,
    TurnkeeperError,
    from_code,
)


def classes() -> list[type[TurnkeeperError]]:
    return [c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, TurnkeeperError)]


def test_every_error_has_a_code_of_its_own() -> None:
    codes = [c.code for c in classes()]
    assert len(codes) == len(set(codes))
    assert all(re.fullmatch(r"[a-z_]+", code) for code in codes)
    assert {c.code: c for c in classes()} == BY_CODE


def test_the_docstring_is_the_tree() -> None:
    drawn = set(re.findall(r"[├└]── (\w+)", errors.__doc__ or "")) | {"TurnkeeperError"}
    assert drawn == {c.__name__ for c in classes()}


def test_an_error_survives_its_journey_as_a_code() -> None:
    error = from_code("lease_lost", "Another attempt owns the turn.", turn=3)
    assert isinstance(error, LeaseLost)
    assert (error.description, error.details) == ("Another attempt owns the turn.", {"turn": 3})


def test_an_unknown_code_is_a_store_error_that_names_it() -> None:
    error = from_code("brand_new", "From a newer schema.")
    assert type(error) is StoreError
    assert "brand_new" in str(error)


def test_an_error_as_data() -> None:
    error = StoreUnavailable("The database is away.", hint="Start it.", host="db")
    assert error.as_dict() == {
        "code": "store_unavailable",
        "description": "The database is away.",
        "retryable": True,
        "hint": "Start it.",
        "details": {"host": "db"},
    }
    assert str(error) == "The database is away. Start it."
    assert LeaseLost("Gone.").as_dict() == {"code": "lease_lost", "description": "Gone.", "retryable": False}
    assert str(LeaseLost("Gone.")) == "Gone."


@pytest.mark.parametrize("error", [c for c in classes() if issubclass(c, RequestRefused)])
def test_a_wrong_request_never_succeeds_later(error: type[TurnkeeperError]) -> None:
    assert not error.retryable


def test_what_may_be_tried_again() -> None:
    assert StoreUnavailable.retryable
    assert ModelError.retryable
    assert not ContentRefused.retryable
    assert not TurnkeeperError.retryable


def test_words_of_others_may_end_a_sentence_themselves() -> None:
    assert TurnkeeperError("It failed: No space left..").description == "It failed: No space left."
    assert TurnkeeperError("It goes on ...").description == "It goes on ..."

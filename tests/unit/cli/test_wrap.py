"""Streamed text breaks between words, whatever the pieces are."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from scripts.wrap import Wrapper

TEXTS = st.text(alphabet="ab漢 \n", max_size=80)


def streamed(pieces: list[str], width: int) -> str:
    wrapper = Wrapper(width)
    return "".join(map(wrapper.feed, pieces)) + wrapper.end()


def test_a_line_breaks_before_the_word_that_does_not_fit() -> None:
    assert streamed(["one two thr", "ee four"], 9) == "one two \nthree \nfour"


def test_a_space_at_the_edge_becomes_the_break() -> None:
    assert streamed(["abc def"], 3) == "abc\ndef"


def test_a_word_longer_than_a_line_is_left_to_the_terminal() -> None:
    assert streamed(["a ", "bbbbbbbb", " c"], 4) == "a \nbbbbbbbb\nc"


def test_wide_characters_count_twice() -> None:
    assert streamed(["漢漢 漢漢"], 5) == "漢漢 \n漢漢"


@given(st.lists(TEXTS, max_size=6), st.integers(1, 20))
def test_how_it_comes_in_does_not_matter_and_no_word_is_lost(pieces: list[str], width: int) -> None:
    whole = "".join(pieces)
    assert streamed(pieces, width) == streamed([whole], width)
    assert streamed(pieces, width).split() == whole.split()

"""A message as a person reads it: its place, and its place once."""

from __future__ import annotations

import pytest

from smelt.core.errors import combined_error
from smelt.core.messages import Message, error_message


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("too few.", "r.yaml:3: too few."),
        ("r.yaml:3: too few.", "r.yaml:3: too few."),
        ("r.yaml:30: too few.", "r.yaml:3: r.yaml:30: too few."),
    ],
)
def test_the_place_of_a_message_is_shown_once(text: str, shown: str) -> None:
    assert str(Message("few", text, file="r.yaml", line=3)) == shown


def test_a_message_without_a_place_is_its_text() -> None:
    assert str(Message("few", "too few.")) == "too few."
    assert str(Message("few", "too few.", step="small")) == "small: too few."


def test_an_error_of_one_error_has_its_place_and_one_of_several_has_none() -> None:
    first = error_message("few", "too few.", setting="rows", file="r.yaml", line=3)
    alone = combined_error([first])
    assert (alone.code, alone.setting, alone.file, alone.line) == ("few", "rows", "r.yaml", 3)
    both = combined_error([first, error_message("few", "too few.", setting="limit", file="r.yaml", line=4)])
    assert (both.code, both.setting, both.file, both.line) == ("few", None, None, None)

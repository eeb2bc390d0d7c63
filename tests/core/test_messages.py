"""A message as a person reads it: its place, and its place once."""

from __future__ import annotations

import pytest

from smelt.core.errors import combined_error
from smelt.core.messages import Message, error_message


@pytest.mark.parametrize(("text", "shown"), [
    ("too few.", "r.yaml:3: too few."), ("r.yaml:3: too few.", "r.yaml:3: too few."),
    ("r.yaml:30: too few.", "r.yaml:3: r.yaml:30: too few."),
])  # fmt: skip
def test_message_location_is_shown_once(text: str, shown: str) -> None:
    assert str(Message("few", text, file="r.yaml", line=3)) == shown


def test_message_without_location_is_text() -> None:
    assert str(Message("few", "too few.")) == "too few."
    assert str(Message("few", "too few.", step="small")) == "small: too few."


def test_single_error_keeps_location_and_combined_error_has_none() -> None:
    first = error_message("few", "too few.", setting="rows", file="r.yaml", line=3)
    single = combined_error([first])
    assert (single.code, single.setting, single.file, single.line) == ("few", "rows", "r.yaml", 3)
    both = combined_error([first, error_message("few", "too few.", setting="limit", file="r.yaml", line=4)])
    assert (both.code, both.setting, both.file, both.line) == ("few", None, None, None)

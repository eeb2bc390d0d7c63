"""Messages are data: every one has a code, and only the pages in `messages/` depend on their words."""

from __future__ import annotations

from functools import cache

import pytest

from tools.list_messages import PACKAGES, PAGES, ROOT, messages_in, pages

pages_of_source = cache(pages)


@pytest.mark.parametrize("name", [f"{package}.txt" for package in PACKAGES])
def test_message_pages_are_up_to_date(name: str) -> None:
    """Run `make messages` after a change of words, and read the difference."""
    assert pages_of_source()[name] == (PAGES / name).read_text(encoding="utf-8")


def test_every_message_has_a_code() -> None:
    messages = [
        message
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        for message in messages_in(path)
    ]
    assert [
        f"{message.place}: {message.text[:60]}"
        for message in messages
        if message.code is None and message.kind != "ValueError"
    ] == []

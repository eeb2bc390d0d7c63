"""Messages are data: every one has a code, and only the pages in `messages/` depend on their words."""

from __future__ import annotations

from functools import cache

import pytest

from tools.list_messages import PACKAGES, PAGES, ROOT, messages_in, pages

pages_of_source = cache(pages)


@pytest.mark.parametrize("name", [f"{package}.txt" for package in PACKAGES])
def test_the_page_of_a_package_has_its_messages_as_they_are(name: str) -> None:
    """Run `make messages` after a change of words, and read the difference."""
    assert pages_of_source()[name] == (PAGES / name).read_text(encoding="utf-8")


def test_every_message_has_a_code() -> None:
    found = [
        one for package in PACKAGES for path in (ROOT / package).rglob("*.py") for one in messages_in(path)
    ]
    assert [
        f"{one.place}: {one.text[:60]}" for one in found if one.code is None and one.kind != "ValueError"
    ] == []

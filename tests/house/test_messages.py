"""Messages are data: every one has a code, and only the pages in `messages/` depend on their words."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

from tools.list_messages import PACKAGES, PAGES, ROOT, messages_in, pages

TESTS = ROOT / "tests"
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


def test_no_test_compares_the_words_of_an_error() -> None:
    assert [place for path in sorted(TESTS.rglob("*.py")) for place in _matches(path)] == []


def _matches(path: Path) -> list[str]:
    """Return where a file expects an error, or a warning, with certain words."""
    calls = [
        node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Call)
    ]
    return [
        f"{path.relative_to(ROOT)}:{call.lineno}"
        for call in calls
        if getattr(call.func, "attr", "") in ("raises", "warns")
        and any(word.arg == "match" for word in call.keywords)
    ]

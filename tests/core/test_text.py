"""What strangers write is shown as it is, but for what could move the cursor or turn the order."""

import pytest

from smelt.core.messages import count_text, escape_controls, find_lone_surrogate

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(("text", "shown"), [
    ("plain text, süß, 你好", None), ("مرحبا שלום", None), ("family: \U0001f468\u200d\U0001f469", None),
    ("two\nlines\tand a tab", None), ("\x1b[2Jgone", "\\x1b[2Jgone"),
    ("a\rb\x00\x7f\x9b", "a\\x0db\\x00\\x7f\\x9b"),
    ("user\u202enimda\u202c \u2066x\u2069", "user\\u202enimda\\u202c \\u2066x\\u2069"),
    ("half \ud800", "half \\ud800"), ("line\u2028end", "line\\u2028end"),
])  # fmt: skip
def test_escape_controls_escapes_only_controls(text, shown):
    assert escape_controls(text) == (text if shown is None else shown)
    assert escape_controls(escape_controls(text)) == escape_controls(text)


@pytest.mark.parametrize(
    ("text", "half"), [("", None), ("süß \U0001f600", None), ("a\udc00b", "\udc00"), ("\ud83d", "\ud83d")]
)
def test_lone_surrogate_is_found(text, half):
    assert find_lone_surrogate(text) == half


def test_count_text_has_plural_unless_one():
    assert [count_text(n, "sample") for n in (0, 1, 1_000)] == ["0 samples", "1 sample", "1,000 samples"]

"""What strangers write is shown as it is, but for what could move the cursor or turn the order."""

import pytest

from smelt.core.messages import escape_controls, find_lone_surrogate, with_article, with_count

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain text, süß, 你好", None),
        ("مرحبا שלום", None),
        ("family: \U0001f468\u200d\U0001f469", None),
        ("two\nlines\tand a tab", None),
        ("\x1b[2Jgone", "\\x1b[2Jgone"),
        ("a\rb\x00\x7f\x9b", "a\\x0db\\x00\\x7f\\x9b"),
        ("user\u202enimda\u202c \u2066x\u2069", "user\\u202enimda\\u202c \\u2066x\\u2069"),
        ("half \ud800", "half \\ud800"),
        ("line\u2028end", "line\\u2028end"),
    ],
)
def test_printable_escapes_controls_only(text, shown):
    assert escape_controls(text) == (text if shown is None else shown)
    assert escape_controls(escape_controls(text)) == escape_controls(text)


@pytest.mark.parametrize(
    ("text", "half"), [("", None), ("süß \U0001f600", None), ("a\udc00b", "\udc00"), ("\ud83d", "\ud83d")]
)
def test_half_a_pair_is_found(text, half):
    assert find_lone_surrogate(text) == half


def test_an_article_is_as_a_word_is_spoken():
    an = "onnx albert electra Embedding mpnet mbart m2m_100 mt5 xlm nllb fsmt int8 unlimited"
    assert [with_article(word) for word in an.split()] == [f"an {word}" for word in an.split()]
    a = "torch tensorrt bert roberta marian modernbert mistral llama gpt2 unigram uint8 unet hubert None"
    assert [with_article(word) for word in a.split()] == [f"a {word}" for word in a.split()]


def test_one_of_a_thing_has_no_s():
    assert [with_count(n, "text") for n in (0, 1, 2, 4321)] == ["0 texts", "1 text", "2 texts", "4,321 texts"]

"""Words, tags and entities."""

import random

import pytest
from seqeval.metrics.sequence_labeling import get_entities
from seqeval.scheme import BILOU, Entities

from smelt.data.splits import Example
from smelt.data.tags import example_words, read_spans, split_words, tag_scheme, tags_of_entities
from tests.support.expected_errors import raises_code

pytestmark = pytest.mark.quick


def spans(text, **options):
    return [tuple(span) for span in read_spans(text.split(), **options)]


@pytest.mark.parametrize("prefixes", ["BI", "BIES"])
def test_spans_of_random_tags_equal_seqeval(prefixes):
    draw = random.Random(0)
    choices = ["O", *(f"{prefix}-{kind}" for prefix in prefixes for kind in ("PER", "LOC"))]
    for _ in range(2000):
        tags = draw.choices(choices, k=draw.randint(1, 9))
        expected = [(start, last + 1, kind) for kind, start, last in get_entities(tags)]
        assert [tuple(span) for span in read_spans(tags)] == expected, tags


def test_valid_bilou_tags_give_the_spans_of_seqeval():
    tags = ["B-A", "I-A", "L-A", "U-A", "O", "U-B", "B-B", "L-B", "B-A", "L-A", "U-A"]
    (expected,) = Entities([tags], BILOU).entities
    assert spans(" ".join(tags)) == [(e.start, e.end, e.tag) for e in expected]


@pytest.mark.parametrize(("tags", "expected"), [
    ("I-A I-A O I-A", [(0, 2, "A"), (3, 4, "A")]),  # IOB1: the first begins without B-
    ("I-A B-A I-A", [(0, 1, "A"), (1, 3, "A")]), ("B-A I-B", [(0, 1, "A"), (1, 2, "B")]),
    ("I-A U-A", [(0, 1, "A"), (1, 2, "A")]), ("B-A L-A I-A", [(0, 2, "A"), (2, 3, "A")]),  # BILOU
    ("B-A-1 I-A-1", [(0, 2, "A-1")]), ("O O", []), ("", []),
    ("EMAIL EMAIL O EMAIL NAME", [(0, 2, "EMAIL"), (3, 4, "EMAIL"), (4, 5, "NAME")]),
])  # fmt: skip
def test_spans_of_schemes(tags, expected):
    assert spans(tags) == expected


def test_each_part_of_speech_is_a_span():
    scheme = tag_scheme({"NOUN", "VERB"})
    assert spans("NOUN NOUN VERB", scheme=scheme) == [(0, 1, "NOUN"), (1, 2, "NOUN"), (2, 3, "VERB")]
    assert tag_scheme({"EMAIL", "O"}).joins
    assert tag_scheme({"B-A", "I-A"}).joins


@pytest.mark.parametrize(("names", "prefixes"), [
    ("O NAME E-MAIL", "BI"), ("O U-BOAT S-BAHN L-X", "BI"), ("E-MAIL NAME", "BI"),
    ("O B-E-MAIL I-E-MAIL", "BI"), ("O B-A I-A E-MAIL", "BI"),
    ("O B-A I-A E-A S-A", "BIES"), ("O B-A E-A S-B", "BIES"), ("O B-A I-A L-A U-B", "BILU"),
])  # fmt: skip
def test_prefix_of_ends_is_read_where_a_type_also_has_a_begin(names, prefixes):
    assert tag_scheme(names.split()).prefixes == prefixes


def test_types_that_look_prefixed_are_types():
    scheme = tag_scheme(["O", "NAME", "E-MAIL"])
    assert spans("E-MAIL E-MAIL O NAME", scheme=scheme) == [(0, 2, "E-MAIL"), (3, 4, "NAME")]


def test_words_are_split_as_by_bert_and_at_characters_without_spaces():
    assert [w.text for w in split_words("I'm at a.b@c.de, ok\u00a0\n東京に")] == [
        "I", "'", "m", "at", "a", ".", "b", "@", "c", ".", "de", ",", "ok", "東", "京", "に",
    ]  # fmt: skip
    text = "हिन्दी  naïve \U0001f600 café"
    words = split_words(text)
    assert [text[w.start : w.end] for w in words] == [w.text for w in words]
    assert [w.text for w in words] == ["हिन्दी", "naïve", "\U0001f600", "café"]
    assert split_words(" ") == []


def test_words_of_split_sample_are_found_in_its_text():
    example = Example("New York , USA", words=("New York", ",", "USA"))
    assert [example.text[w.start : w.end] for w in example_words(example)] == ["New York", ",", "USA"]


def test_entities_become_iob2_tags():
    text = "Ada Lovelace (London)."
    tags = tags_of_entities([(14, 20, "LOC"), (0, 12, "PER")], text, "f:1", "entities")
    assert tags == ("B-PER", "I-PER", "O", "B-LOC", "O", "O")
    assert tags_of_entities([(0, 4, "PER")], text, "f:1", "entities")[:2] == ("B-PER", "O")  # with its space
    adjacent = tags_of_entities([(0, 3, "PER"), (4, 12, "PER")], text, "f:1", "entities")
    assert adjacent[:2] == ("B-PER", "B-PER")


@pytest.mark.parametrize(("entities", "code"), [
    ([(0, 23, "X")], "entity-outside-text"), ([(-1, 3, "X")], "entity-outside-text"),
    ([(3, 3, "X")], "entity-outside-text"), ([(5, 4, "X")], "entity-outside-text"),
    ([(0, 12, "X"), (4, 12, "Y")], "overlapping-entities"), ([(0, 2, "X")], "entity-within-word"),
    ([(1, 3, "X")], "entity-within-word"), ([(3, 4, "X")], "empty-entity"),
])  # fmt: skip
def test_wrong_entities_are_refused(entities, code):
    with raises_code(code):
        tags_of_entities(entities, "Ada Lovelace (London).", "f:1", "entities")

"""The package reads tags as smelt does."""

import random

import pytest

from smelt.data.tags import read_spans, tag_scheme
from smelt.export.package.standalone.token_classification import tag_prefixes, tagged_spans

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(
    "names",
    [
        "O NAME E-MAIL", "NOUN VERB S-X", "O B-A I-A B-B I-B", "O B-A I-A E-A S-A S-B", "O B-A I-A L-A U-A",
        "B-A I-A X", "O B-A I-A E-MAIL",
    ],
)  # fmt: skip
def test_spans_of_package_equal_spans_of_smelt(names):
    labels, draw = names.split(), random.Random(0)
    prefixes = tag_prefixes(labels)
    for _ in range(300):
        tags = draw.choices(labels, k=draw.randint(1, 8))
        expected = [tuple(span) for span in read_spans(tags, tag_scheme(labels))]
        assert tagged_spans(tags, prefixes, "O" in labels or bool(prefixes)) == expected, tags

"""Which words may come in a row, and files that do not say it."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from smelt.core.errors import InputError
from smelt.generation.backend import Batch
from smelt.generation.config import (
    ALWAYS_TENSOR,
    TABLE_TENSOR,
    make_shortlist,
    read_shortlist,
    vocabulary_sizes,
    write_shortlist,
)
from smelt.models.text_rules import SHORTLIST_FILE
from tests.support.expected_errors import raises_code

pytestmark = pytest.mark.quick

CONFIG = {"vocab_size": 4, "decoder_vocab_size": 6}
TABLE_OF = np.array([[0, 0], [1, 4], [2, 2], [5, 1]])
LIST = make_shortlist(TABLE_OF, np.array([3, 0, 3]), 6)


def test_a_row_may_say_what_its_words_bring_and_what_always_may_come():
    batch = Batch(np.array([[1, 2], [3, 1]]), np.array([[1, 1], [1, 0]]))  # the last token is padding
    allowed = LIST.allowed_tokens(batch, 6)
    assert [np.flatnonzero(row).tolist() for row in allowed] == [[0, 1, 2, 3, 4], [0, 1, 3, 5]]


def test_words_have_the_smallest_type_that_holds_them():
    assert LIST.table.dtype == np.uint16
    assert LIST.always.tolist() == [0, 3]
    assert make_shortlist(TABLE_OF, np.array([0]), 2**16).table.dtype == np.uint16
    assert make_shortlist(TABLE_OF, np.array([0]), 2**16 + 1).table.dtype == np.int32


def test_what_was_written_is_read(tmp_path: Path):
    write_shortlist(LIST, tmp_path)
    found = read_shortlist(tmp_path, CONFIG)
    assert found is not None
    assert np.array_equal(found.table, TABLE_OF)
    assert found.always.tolist() == [0, 3]


OTHER = "does-not-fit-model"


def test_most_models_have_none(tmp_path: Path):
    assert read_shortlist(tmp_path, CONFIG) is None
    assert vocabulary_sizes({"vocab_size": 7}) == (7, 7)


@pytest.mark.parametrize(("tensors", "code", "values"), [
    ({TABLE_TENSOR: TABLE_OF.astype(np.uint16)}, "damaged-file", ("KeyError",)),
    (
        {TABLE_TENSOR: TABLE_OF[:3].astype(np.uint16), ALWAYS_TENSOR: LIST.always},
        OTHER,
        ("[3, 2]", "int64 [2]"),
    ),
    ({TABLE_TENSOR: TABLE_OF.astype(np.int32) + 1, ALWAYS_TENSOR: LIST.always}, OTHER, ()),
    ({TABLE_TENSOR: TABLE_OF.astype(np.int32) - 1, ALWAYS_TENSOR: LIST.always}, OTHER, ()),
    ({TABLE_TENSOR: TABLE_OF.astype(np.int64), ALWAYS_TENSOR: LIST.always}, OTHER, (" 4 ", " 6 ")),
    ({TABLE_TENSOR: TABLE_OF.astype(np.uint16), ALWAYS_TENSOR: np.array([6, 0])}, OTHER, ()),
    ({TABLE_TENSOR: TABLE_OF.astype(np.uint16), ALWAYS_TENSOR: np.array([0])}, OTHER, ()),
])  # fmt: skip
def test_a_list_of_another_model_is_refused(tensors, code, values, tmp_path):
    save_file(tensors, tmp_path / SHORTLIST_FILE)
    with raises_code(code, InputError) as caught:
        read_shortlist(tmp_path, CONFIG)
    assert all(value in str(caught.value) for value in values)


def test_a_damaged_file_is_an_error_in_words(tmp_path: Path):
    (tmp_path / SHORTLIST_FILE).write_bytes(b"\0" * 20)
    with raises_code("damaged-file", InputError):
        read_shortlist(tmp_path, CONFIG)

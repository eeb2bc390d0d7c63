"""Arrays are made fit for a graph where nothing is lost, and refused with the reason where it would be."""

from pathlib import Path

import numpy as np
import pytest
from refusals import refused

from smelt.core.errors import InputError
from smelt.core.rows.arrays import Arrays, Shape, rows_of
from smelt.runtime.foreign.signature import Signature, Value, read_signature, write_signature

MADE = Signature(
    inputs=(
        Value(name="x", dtype="float32", shape=("N", 3)),
        Value(name="scale", dtype="float32", shape=()),
    ),
    outputs=(Value(name="y", dtype="float32", shape=None),),
)


@pytest.mark.parametrize(
    ("shapes", "said"),
    [
        ({"x": Shape("float64", (5, 3)), "scale": Shape("float64", ())}, None),
        ({"x": Shape("int64", (5, 3)), "scale": Shape("float32", ())}, "array.astype('float32')"),
        ({"x": Shape("float32", (5, 4)), "scale": Shape("float32", ())}, "the graph takes x float32 [N, 3]."),
        ({"x": Shape("float32", (5,)), "scale": Shape("float32", ())}, "the graph takes x float32 [N, 3]."),
        ({"x": Shape("float32", (5, 3)), "scael": Shape("float32", ())}, "Did you mean 'scael'?"),
    ],
)
def test_what_does_not_fit_is_said(shapes: dict[str, Shape], said: str | None) -> None:
    found = list(MADE.problems(shapes))
    assert (found == []) if said is None else (len(found) == 1 and said in found[0])


def test_a_fixed_batch_takes_any_number_of_rows() -> None:
    fixed = Signature(inputs=(Value(name="x", dtype="float32", shape=(4, 3)),), outputs=())
    assert fixed.batch == 4
    assert list(fixed.problems({"x": Shape("float32", (9, 3))})) == []


def test_rows_are_cut_and_what_belongs_to_all_stays_whole() -> None:
    rows = Arrays({"x": np.arange(15.0).reshape(5, 3), "scale": np.array(2.0), "label": np.arange(5)}, 5)
    fed = MADE.feeds(rows, 1, 3)
    assert sorted(fed) == ["scale", "x"]
    assert fed["x"].dtype == np.float32
    np.testing.assert_array_equal(fed["x"], np.arange(15.0).reshape(5, 3)[1:3])
    assert fed["scale"].shape == ()


def test_it_is_read_as_it_was_written(tmp_path: Path) -> None:
    write_signature(tmp_path, MADE)
    assert read_signature(tmp_path) == MADE
    (tmp_path / "signature.json").write_text('{"inputs": 3}')
    with refused("damaged-file", InputError):
        read_signature(tmp_path)


def test_rows_that_a_name_counts_are_not_said_to_be_the_same_for_all() -> None:
    signature = Signature(
        inputs=(
            Value(name="x", dtype="float32", shape=("batch", 16)),
            Value(name="mask", dtype="float32", shape=("batch", 16)),
            Value(name="k", dtype="float32", shape=("n", 16)),
        ),
        outputs=(),
    )
    assert signature.by_name == {"x", "mask"}
    shapes = {"x": Shape("float32", (40, 16)), "mask": Shape("float32", (39, 16))}
    for more, advised in (
        ({}, True),
        ({"by_name": signature.by_name}, False),
        ({"of_artifact": True}, False),
    ):
        with refused("unequal-rows", InputError) as caught:
            rows_of(shapes, "r.npz", **more)
        assert ("null" in str(caught.value)) == advised


def test_an_artifact_reads_no_recipe_so_none_is_to_be_written() -> None:
    shapes = {"x": Shape("float32", (40, 16)), "state": Shape("float32", (1, 40, 8))}
    for of_artifact in (False, True):
        with refused("unequal-rows", InputError) as caught:
            rows_of(shapes, "r.npz", of_artifact=of_artifact)
        assert ("{axes: {state: 1}}" in str(caught.value)) != of_artifact

"""Arrays are made fit for a graph where nothing is lost, and refused with the reason where it would be."""

from pathlib import Path

import numpy as np
import pytest

from smelt.core.errors import InputError
from smelt.data.npz_arrays import ArrayHeader, SampleArrays, count_array_samples
from smelt.runtimes.onnx_import.signature import GraphSignature, TensorSpec, read_signature, write_signature
from tests.support.expected_errors import raises_code

pytestmark = pytest.mark.quick

MADE = GraphSignature(
    inputs=(
        TensorSpec(name="x", dtype="float32", shape=("N", 3)),
        TensorSpec(name="scale", dtype="float32", shape=()),
    ),
    outputs=(TensorSpec(name="y", dtype="float32", shape=None),),
)


@pytest.mark.parametrize(("shapes", "expected"), [
    ({"x": ArrayHeader("float64", (5, 3)), "scale": ArrayHeader("float64", ())}, None),
    ({"x": ArrayHeader("int64", (5, 3)), "scale": ArrayHeader("float32", ())}, "array.astype('float32')"),
    ({"x": ArrayHeader("float32", (5, 4)), "scale": ArrayHeader("float32", ())},
     "the graph takes x float32 [N, 3]."),
    ({"x": ArrayHeader("float32", (5,)), "scale": ArrayHeader("float32", ())},
     "the graph takes x float32 [N, 3]."),
    ({"x": ArrayHeader("float32", (5, 3)), "scael": ArrayHeader("float32", ())}, "Did you mean 'scael'?"),
])  # fmt: skip
def test_mismatches_are_reported(shapes: dict[str, ArrayHeader], expected: str | None) -> None:
    problems = list(MADE.shape_problems(shapes))
    assert (problems == []) if expected is None else (len(problems) == 1 and expected in problems[0])


def test_fixed_batch_accepts_any_number_of_rows() -> None:
    fixed = GraphSignature(inputs=(TensorSpec(name="x", dtype="float32", shape=(4, 3)),), outputs=())
    assert fixed.fixed_batch_size == 4
    assert list(fixed.shape_problems({"x": ArrayHeader("float32", (9, 3))})) == []


def test_rows_are_sliced_and_inputs_shared_by_all_rows_are_not() -> None:
    rows = SampleArrays(
        {"x": np.arange(15.0).reshape(5, 3), "scale": np.array(2.0), "label": np.arange(5)}, 5
    )
    feeds = MADE.make_feeds(rows, 1, 3)
    assert sorted(feeds) == ["scale", "x"]
    assert feeds["x"].dtype == np.float32
    np.testing.assert_array_equal(feeds["x"], np.arange(15.0).reshape(5, 3)[1:3])
    assert feeds["scale"].shape == ()


def test_saved_signature_is_loaded(tmp_path: Path) -> None:
    write_signature(tmp_path, MADE)
    assert read_signature(tmp_path) == MADE
    (tmp_path / "signature.json").write_text('{"inputs": 3}')
    with raises_code("damaged-file", InputError):
        read_signature(tmp_path)


def test_rows_counted_by_a_named_axis_are_not_shared() -> None:
    signature = GraphSignature(
        inputs=(
            TensorSpec(name="x", dtype="float32", shape=("batch", 16)),
            TensorSpec(name="mask", dtype="float32", shape=("batch", 16)),
            TensorSpec(name="k", dtype="float32", shape=("n", 16)),
        ),
        outputs=(),
    )
    assert signature.shared_batch_inputs == {"x", "mask"}
    shapes = {"x": ArrayHeader("float32", (40, 16)), "mask": ArrayHeader("float32", (39, 16))}
    for extra, advised in (
        ({}, True),
        ({"by_name": signature.shared_batch_inputs}, False),
        ({"of_artifact": True}, False),
    ):
        with raises_code("unequal-rows", InputError) as caught:
            count_array_samples(shapes, "r.npz", **extra)
        assert ("null" in str(caught.value)) == advised


def test_error_for_an_artifact_does_not_suggest_a_recipe_setting() -> None:
    shapes = {"x": ArrayHeader("float32", (40, 16)), "state": ArrayHeader("float32", (1, 40, 8))}
    for of_artifact in (False, True):
        with raises_code("unequal-rows", InputError) as caught:
            count_array_samples(shapes, "r.npz", of_artifact=of_artifact)
        assert ("{axes: {state: 1}}" in str(caught.value)) != of_artifact

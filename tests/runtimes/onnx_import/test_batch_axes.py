"""The axis of the rows follows the names of dimensions, and is asked for where these leave it open."""

from typing import Any

import pytest

from smelt.runtimes.onnx_import.signature import GraphSignature, TensorSpec


def signature(inputs: dict[str, Any], outputs: dict[str, Any] | None = None) -> GraphSignature:
    return GraphSignature(
        inputs=tuple(TensorSpec(name=n, dtype="float32", shape=s) for n, s in inputs.items()),
        outputs=tuple(TensorSpec(name=n, dtype="float32", shape=s) for n, s in (outputs or {}).items()),
    )


def axes(signature: GraphSignature) -> dict[str, int | None]:
    return {value.name: value.axis for value in (*signature.inputs, *signature.outputs)}


@pytest.mark.parametrize(
    ("inputs", "outputs", "expected"),
    [
        # one name, at two places
        (
            {"x": ("batch", "time", 8), "state": ("layers", "batch", 16)},
            {"y": ("time", "batch", 4), "new": ("layers", "batch", 16)},
            {"x": 0, "state": 1, "y": 1, "new": 1},
        ),
        # a name that says nothing, in all inputs and outputs
        (
            {"x": ("B", "T", 8), "state": ("L", "B", 16)},
            {"y": ("B", "T", 8), "new": ("L", "B", 16)},
            {"x": 0, "state": 1, "y": 0, "new": 1},
        ),
        ({"x": ("time", "batch_size", 8)}, {"y": ("batch_size", 3)}, {"x": 1, "y": 0}),
        # each exporter has its own names, which share nothing
        ({"x": ("unk__1", 4), "y": ("unk__2", "unk__3")}, {"z": ("unk__4", 2)}, {"x": 0, "y": 0, "z": 0}),
        ({"image": ("image_batch", 3), "ids": ("text_batch", "n")}, {}, {"image": 0, "ids": 0}),
        # a number for all rows is of none of them; nor is an axis that an input has for something else
        ({"x": ("N", "T"), "k": ()}, {"y": ("T", "N"), "z": ("T", 3), "s": ()},
         {"x": 0, "k": None, "y": 1, "z": None, "s": None}),
        ({"x": None}, {"y": None}, {"x": 0, "y": 0}),
    ],
)  # fmt: skip
def test_batch_is_the_axis_of_that_name(inputs: Any, outputs: Any, expected: Any) -> None:
    resolved = signature(inputs, outputs).with_batch_axes({})
    assert axes(resolved) == expected
    assert list(resolved.ambiguous_axes({})) == []


@pytest.mark.parametrize(("inputs", "expected", "user_axes"), [
    ({"x": (None, None, 4), "state": (2, None, 8)}, "{state: 1}", {"state": 1}),
    ({"x": (4, 16), "state": (2, 4, 16)}, "{x: 0, state: 1}", {"x": 0, "state": 1}),
    ({"ids": ("batch", "seq"), "places": ("seq",)}, "{places: null}", {"places": None}),
    ({"x": ("T", "B", 8), "state": ("L", "B", 16)}, "{x: 1, state: 1}", {"x": 1, "state": 1}),
])  # fmt: skip
def test_conflicting_first_axes_require_a_setting(inputs: Any, expected: str, user_axes: Any) -> None:
    resolved = signature(inputs).with_batch_axes({})
    problems = list(resolved.ambiguous_axes({}))
    assert len(problems) == 1
    assert expected in problems[0]
    with_axes = resolved.with_batch_axes(user_axes)
    assert list(with_axes.ambiguous_axes(user_axes)) == []
    assert axes(with_axes) == {**axes(resolved), **user_axes}


def test_user_axes_take_precedence_and_others_follow_their_name() -> None:
    resolved = signature({"x": ("T", "B", 8), "state": ("L", "B", 16)}, {"y": ("B", 3)}).with_batch_axes(
        {"x": 1}
    )
    assert axes(resolved) == {"x": 1, "state": 1, "y": 0}


def test_invalid_names_and_axes_are_errors() -> None:
    resolved = signature({"x": ("N", 4), "k": ()}, {"y": None})
    assert list(resolved.invalid_axes({"x": 1, "y": 7})) == []
    assert "Did you mean 'state'" in next(signature({"state": ("N",)}).invalid_axes({"stat": 0}))
    assert len(list(resolved.invalid_axes({"x": 2, "k": 0}))) == 2


def test_unnamed_output_shaped_like_an_input_has_its_axis() -> None:
    resolved = signature({"x": (None, 4), "state": (1, None, 8)}, {"new": (1, None, 8)}).with_batch_axes(
        {"state": 1}
    )
    assert axes(resolved)["new"] == 1


def test_batch_size_is_fixed_if_the_row_axis_is() -> None:
    resolved = signature({"x": ("batch", 4), "state": (2, "batch", 8)})
    assert resolved.fixed_batch_size == 2
    assert resolved.with_batch_axes({}).fixed_batch_size is None

"""When a quantized graph is too far from the float one, and when not."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from smelt.core.errors import ParityError
from smelt.core.messages import message_codes
from smelt.export.onnx_models import quantize_onnx
from smelt.export.onnx_models.output_comparison import OutputComparison
from smelt.export.onnx_models.quantize_onnx import QuantizeOnnx, QuantizeOnnxSettings
from smelt.quantization.schemes.registry import GRAPH_SCHEMES, find_scheme
from tests.support import harness
from tests.support.graphs import imported_graphs as graphs

RANDOM = np.random.default_rng(0)


def compared(
    got: NDArray[Any], wanted: NDArray[Any], name: str = "y", mask: Any = None, calls: int = 4
) -> Any:
    """Compare arrays [n, ...], as outputs of some calls."""
    made = OutputComparison()
    masks = [None] * calls if mask is None else np.array_split(mask, calls)
    for one, other, seen in zip(
        np.array_split(got, calls), np.array_split(wanted, calls), masks, strict=True
    ):
        feeds = {"x": one} if seen is None else {"attention_mask": seen}
        made.add(feeds, {name: one}, {name: other})
    return made


def test_the_error_is_that_of_numpy_over_all_calls() -> None:
    wanted = RANDOM.normal(3, 2, size=(40, 5)).astype(np.float32)
    got = wanted + RANDOM.normal(0, 0.3, size=wanted.shape).astype(np.float32)
    error = compared(got, wanted).outputs["y"].relative_rmse
    assert error == pytest.approx(np.sqrt(((got - wanted) ** 2).mean()) / wanted.std(), rel=1e-4)
    mean = np.full_like(wanted, wanted.mean())
    assert compared(mean, wanted).outputs["y"].relative_rmse == pytest.approx(1, rel=1e-4)


def test_values_that_are_not_finite_count_as_one_deviation_each() -> None:
    wanted = RANDOM.normal(size=(40, 5)).astype(np.float32)
    got = wanted.copy()
    got[:10] = np.nan
    assert compared(got, wanted).outputs["y"].relative_rmse == pytest.approx(0.5)
    assert compared(np.full_like(got, np.nan), wanted).outputs["y"].relative_rmse == pytest.approx(1)
    assert compared(got, got).outputs["y"].relative_rmse == 0


def test_padding_is_not_compared() -> None:
    wanted = RANDOM.normal(size=(8, 6, 5)).astype(np.float32)
    mask = (np.arange(6) < np.arange(1, 9)[:, None] % 6 + 1).astype(np.int64)
    got = np.where(mask[..., None] == 1, wanted, 100)
    assert compared(got, wanted, mask=mask).outputs["y"].relative_rmse == 0


@pytest.mark.parametrize(("share", "bad"), [(1.0, False), (0.6, False), (0.3, False), (0.0, True)])
def test_classes_that_agree_no_more_than_by_chance_are_too_far(share: float, bad: bool) -> None:
    """Four classes; each graph adds the same large number to one column, so that the error is small."""
    classes = RANDOM.integers(0, 4, size=400)
    others = np.where(np.arange(400) < share * 400, classes, RANDOM.permutation(classes))
    base = np.tile(np.float32([0, 100, 200, 300]), (400, 1))
    wanted, got = (np.concatenate([np.eye(4, dtype=np.float32)[c] * 301, base], 1) for c in (classes, others))
    found = compared(got, wanted)
    assert bool(list(found.exceeding(9.0, judge_classes=True))) == bad
    assert not list(found.exceeding(9.0, judge_classes=False))


def test_few_rows_and_one_class_prove_nothing() -> None:
    wanted = np.eye(2, dtype=np.float32)[[0, 1, 1]]
    assert not list(compared(wanted[::-1], wanted, calls=1).exceeding(9.0, judge_classes=True))
    always = np.tile(np.float32([1, 0]), (100, 1))
    assert not list(compared(always[:, ::-1], always).exceeding(9.0, judge_classes=True))


def test_whole_numbers_of_many_values_are_no_classes() -> None:
    wanted = np.arange(100)
    found = compared(wanted + 1, wanted)
    assert found.outputs["y"].top1_agreement is None
    labels = RANDOM.integers(0, 3, size=300)
    assert list(compared(RANDOM.permutation(labels), labels).exceeding(9.0, judge_classes=True))


def outliers() -> Any:
    """x [N, 8] -> y [N, 4], where one large input, which the output does not read, ruins the common scale."""
    weight = np.random.default_rng(0).normal(size=(9, 4)).astype(np.float32)
    weight[8] = 0
    tensors = {"w": weight, "shift": np.float32([[1, 0, 0, 0, 0, 0, 0, 0, 0]])}
    nodes = [
        helper.make_node("ReduceSum", ["x", "axis"], ["s"], keepdims=1),
        helper.make_node("Mul", ["s", "large"], ["l"]),
        helper.make_node("Concat", ["x", "l"], ["h"], axis=1),
        helper.make_node("MatMul", ["h", "w"], ["y"], "product"),
    ]
    weights = [numpy_helper.from_array(np.asarray(tensors["w"]), "w")]
    weights += [
        numpy_helper.from_array(np.array([1]), "axis"),
        numpy_helper.from_array(np.float32(500), "large"),
    ]
    return graphs.make_model(
        nodes, [graphs.value_info("x", ["N", 8])], [graphs.value_info("y", ["N", 4])], weights
    )


def run(folder: Path, model: Any, **settings: Any) -> Any:
    source = graphs.make_artifact(folder / "src", model)
    data = {"calibration": graphs.make_split()}
    return harness.run_stage(
        QuantizeOnnx(), QuantizeOnnxSettings(**settings), source, folder / "out", data=data
    )


@pytest.mark.parametrize("scheme", GRAPH_SCHEMES)
def test_a_step_beyond_the_limit_is_an_error_unless_the_recipe_sets_another(
    scheme: str, tmp_path: Path
) -> None:
    with pytest.raises(ParityError) as caught:
        run(tmp_path / "a", outliers(), scheme=scheme)
    assert caught.value.code == "quantization-error"
    assert "'y'" in str(caught.value)
    ctx = run(tmp_path / "b", outliers(), scheme=scheme, max_difference=50)
    error = ctx.details["parity"]["error"]
    assert error > find_scheme(scheme).max_graph_error > 0
    assert "large-quantization-error" not in message_codes(ctx.warnings)
    near = run(tmp_path / "n", outliers(), scheme=scheme, max_difference=1.5 * error)
    assert "large-quantization-error" in message_codes(near.warnings)
    ctx = run(tmp_path / "c", outliers(), scheme=scheme, exclude=["product"])
    assert ctx.details["parity"]["error"] == 0
    with pytest.raises(ParityError):
        run(tmp_path / "d", graphs.two_layer_classifier(), scheme=scheme, max_difference=1e-5)


def test_outputs_that_are_random_in_float_too_are_not_judged(tmp_path: Path) -> None:
    model = graphs.two_layer_classifier()
    model.graph.node[-1].output[0] = "sure"
    model.graph.node.append(helper.make_node("RandomNormalLike", ["sure"], ["noise"], scale=90.0))
    model.graph.node.append(helper.make_node("Add", ["sure", "noise"], ["logits"]))
    ctx = run(tmp_path, model, scheme="int8-static")
    assert len(ctx.warnings) == 1


def test_without_rows_of_the_recipe_nothing_is_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> None:
        raise AssertionError("judged")

    monkeypatch.setattr(quantize_onnx, "require_close", fails)
    source = graphs.make_artifact(tmp_path / "src", graphs.two_layer_classifier())
    ctx = harness.run_stage(QuantizeOnnx(), QuantizeOnnxSettings(), source, tmp_path / "out", data={})
    assert len(ctx.warnings) == 1


def test_nearly_equal_values_are_one_choice() -> None:
    """A sigmoid gives 1 at many places, a wave has many peaks: which of them is largest says nothing."""
    ones = (RANDOM.random((64, 100)) > 0.5).astype(np.float32)
    lower = ones * (1 - 1e-6 * RANDOM.random(ones.shape).astype(np.float32))
    waves = np.sin(np.arange(4000) / 5).astype(np.float32) + RANDOM.normal(0, 0.05, (64, 4000))
    for got, wanted in ((lower, ones), (waves + RANDOM.normal(0, 0.05, waves.shape), waves)):
        found = compared(got, wanted)
        assert found.outputs["y"].top1_agreement < 0.25
        assert not list(found.exceeding(0.3, judge_classes=True))

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
from smelt.export.onnx_models.quantize_onnx import QuantizeOnnx
from smelt.export.onnx_models.settings import QuantizeOnnxSettings
from smelt.quantization.schemes.registry import GRAPH_SCHEMES, find_scheme
from tests.support import harness
from tests.support.graphs import imported_graphs as graphs


def compared(
    got: NDArray[Any], wanted: NDArray[Any], name: str = "y", mask: Any = None, calls: int = 4
) -> Any:
    """Compare arrays [n, ...], as outputs of some calls."""
    comparison = OutputComparison()
    masks = [None] * calls if mask is None else np.array_split(mask, calls)
    for output, expected, seen in zip(
        np.array_split(got, calls), np.array_split(wanted, calls), masks, strict=True
    ):
        feeds = {"x": output} if seen is None else {"attention_mask": seen}
        comparison.add(feeds, {name: output}, {name: expected})
    return comparison


def test_error_equals_numpy_over_all_calls() -> None:
    random = np.random.default_rng(0)
    expected = random.normal(3, 2, size=(40, 5)).astype(np.float32)
    actual = expected + random.normal(0, 0.3, size=expected.shape).astype(np.float32)
    error = compared(actual, expected).outputs["y"].relative_rmse
    assert error == pytest.approx(np.sqrt(((actual - expected) ** 2).mean()) / expected.std(), rel=1e-4)
    mean = np.full_like(expected, expected.mean())
    assert compared(mean, expected).outputs["y"].relative_rmse == pytest.approx(1, rel=1e-4)


def test_non_finite_values_count_as_one_standard_deviation() -> None:
    expected = np.random.default_rng(0).normal(size=(40, 5)).astype(np.float32)
    actual = expected.copy()
    actual[:10] = np.nan
    assert compared(actual, expected).outputs["y"].relative_rmse == pytest.approx(0.5)
    assert compared(np.full_like(actual, np.nan), expected).outputs["y"].relative_rmse == pytest.approx(1)
    assert compared(actual, actual).outputs["y"].relative_rmse == 0


def test_padding_is_not_compared() -> None:
    expected = np.random.default_rng(0).normal(size=(8, 6, 5)).astype(np.float32)
    mask = (np.arange(6) < np.arange(1, 9)[:, None] % 6 + 1).astype(np.int64)
    actual = np.where(mask[..., None] == 1, expected, 100)
    assert compared(actual, expected, mask=mask).outputs["y"].relative_rmse == 0


@pytest.mark.parametrize(("share", "exceeds"), [(1.0, False), (0.6, False), (0.3, False), (0.0, True)])
def test_chance_level_class_agreement_is_rejected(share: float, exceeds: bool) -> None:
    """Four classes; each graph adds the same large number to one column, so that the error is small."""
    random = np.random.default_rng(0)
    classes = random.integers(0, 4, size=400)
    predicted_classes = np.where(np.arange(400) < share * 400, classes, random.permutation(classes))
    base = np.tile(np.float32([0, 100, 200, 300]), (400, 1))
    expected, actual = (
        np.concatenate([np.eye(4, dtype=np.float32)[c] * 301, base], 1) for c in (classes, predicted_classes)
    )
    comparison = compared(actual, expected)
    assert bool(list(comparison.exceeding(9.0, judge_classes=True))) == exceeds
    assert not list(comparison.exceeding(9.0, judge_classes=False))


def test_few_samples_or_one_class_are_not_judged() -> None:
    expected = np.eye(2, dtype=np.float32)[[0, 1, 1]]
    assert not list(compared(expected[::-1], expected, calls=1).exceeding(9.0, judge_classes=True))
    always = np.tile(np.float32([1, 0]), (100, 1))
    assert not list(compared(always[:, ::-1], always).exceeding(9.0, judge_classes=True))


def test_integers_with_many_values_are_not_classes() -> None:
    random = np.random.default_rng(0)
    expected = np.arange(100)
    comparison = compared(expected + 1, expected)
    assert comparison.outputs["y"].top1_agreement is None
    labels = random.integers(0, 3, size=300)
    assert list(compared(random.permutation(labels), labels).exceeding(9.0, judge_classes=True))


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
def test_error_above_limit_is_rejected_unless_recipe_raises_limit(scheme: str, tmp_path: Path) -> None:
    with pytest.raises(ParityError) as excinfo:
        run(tmp_path / "a", outliers(), scheme=scheme)
    assert excinfo.value.code == "quantization-error"
    assert "'y'" in str(excinfo.value)
    ctx = run(tmp_path / "b", outliers(), scheme=scheme, max_difference=50)
    error = ctx.details["parity"]["error"]
    assert error > find_scheme(scheme).max_graph_error > 0
    assert "large-quantization-error" not in message_codes(ctx.warnings)
    accepted_run = run(tmp_path / "n", outliers(), scheme=scheme, max_difference=1.5 * error)
    assert "large-quantization-error" in message_codes(accepted_run.warnings)
    ctx = run(tmp_path / "c", outliers(), scheme=scheme, exclude=["product"])
    assert ctx.details["parity"]["error"] == 0
    with pytest.raises(ParityError):
        run(tmp_path / "d", graphs.two_layer_classifier(), scheme=scheme, max_difference=1e-5)


def test_outputs_random_in_float_are_not_judged(tmp_path: Path) -> None:
    model = graphs.two_layer_classifier()
    model.graph.node[-1].output[0] = "sure"
    model.graph.node.append(helper.make_node("RandomNormalLike", ["sure"], ["noise"], scale=90.0))
    model.graph.node.append(helper.make_node("Add", ["sure", "noise"], ["logits"]))
    ctx = run(tmp_path, model, scheme="int8-static")
    assert len(ctx.warnings) == 1


def test_outputs_are_not_judged_without_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise AssertionError("judged")

    monkeypatch.setattr(quantize_onnx, "require_close", fails)
    source = graphs.make_artifact(tmp_path / "src", graphs.two_layer_classifier())
    ctx = harness.run_stage(QuantizeOnnx(), QuantizeOnnxSettings(), source, tmp_path / "out", data={})
    assert len(ctx.warnings) == 1


def test_nearly_equal_maxima_count_as_agreement() -> None:
    """A sigmoid gives 1 at many places, a wave has many peaks: which of them is largest says nothing."""
    random = np.random.default_rng(0)
    ones = (random.random((64, 100)) > 0.5).astype(np.float32)
    lower = ones * (1 - 1e-6 * random.random(ones.shape).astype(np.float32))
    waves = np.sin(np.arange(4000) / 5).astype(np.float32) + random.normal(0, 0.05, (64, 4000))
    for actual, expected in ((lower, ones), (waves + random.normal(0, 0.05, waves.shape), waves)):
        comparison = compared(actual, expected)
        assert comparison.outputs["y"].top1_agreement < 0.25
        assert not list(comparison.exceeding(0.3, judge_classes=True))

"""Ranges of activations: those of onnxruntime's calibrators on the same values, and by hand."""

import numpy as np
import pytest
import torch
from onnxruntime.quantization.calibrate import HistogramCollector
from onnxruntime.quantization.quant_utils import compute_scale_zp

from smelt.compress.quantize.ranges import Extremes, Histogram
from smelt.quantization.schemes.int8_static import activation_qparams

NUMBERS = np.random.default_rng(0)
VALUES = {
    "normal": NUMBERS.standard_normal((400, 30)),
    "with outliers": NUMBERS.standard_t(2, (400, 30)),
    "positive": np.maximum(NUMBERS.standard_normal((400, 30)) + 0.5, 0.1),
    "negative": -np.abs(NUMBERS.standard_normal((400, 30))) - 1,
    "one-sided": np.concatenate([NUMBERS.standard_normal((400, 30)), np.full((20, 30), 9.0)]),
    "one-sided and rare": np.concatenate([NUMBERS.standard_normal((400, 30)), np.full((1, 30), 30.0)]),
}
EACH = pytest.mark.parametrize("name", VALUES)


def smelts(values, method, percentile=99.9, bins=2048, parts=1, symmetric=False):
    pieces = torch.from_numpy(values.astype(np.float32)).chunk(parts)
    extremes = Extremes()
    for piece in pieces:
        extremes.update(piece)
    histogram = Histogram(method, extremes, symmetric, bins)
    for piece in pieces:
        histogram.update(piece)
    return tuple(histogram.activation_range(percentile))


def theirs(values, method, percentile=99.9, bins=2048, symmetric=False):
    collector = HistogramCollector(method, symmetric, bins, 128, percentile, "same")
    collector.collect({"x": values.astype(np.float32)})
    low, high = collector.compute_collection_result()["x"][:2]
    return float(low), float(high)


@EACH
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("percentile", [99.999, 99.0])
def test_percentile_range_equals_onnxruntime_calibrator(name, percentile, symmetric):
    activation_range = smelts(VALUES[name], "percentile", percentile, symmetric=symmetric)
    assert activation_range == theirs(VALUES[name], "percentile", percentile, symmetric=symmetric)


@pytest.mark.parametrize("name", [name for name in VALUES if name != "positive"])
def test_entropy_range_equals_onnxruntime_calibrator(name):
    assert smelts(VALUES[name], "entropy", bins=512) == theirs(VALUES[name], "entropy", bins=512)


def test_equal_divergences_choose_smallest_threshold():
    """The divergences of these two differ by a ten-millionth: rounding chooses in onnxruntime."""
    _, high = smelts(VALUES["positive"], "entropy", bins=512)
    _, reference = theirs(VALUES["positive"], "entropy", bins=512)
    assert 0.98 * reference < high < reference


@EACH
@pytest.mark.parametrize("method", ["percentile", "entropy", "mse"])
def test_range_does_not_depend_on_chunks(name, method):
    assert smelts(VALUES[name], method, parts=7) == smelts(VALUES[name], method)


@EACH
@pytest.mark.parametrize("symmetric", [True, False])
def test_mse_range_minimizes_error_of_values(name, symmetric):
    values = VALUES[name].astype(np.float32).ravel()
    low, high = (-np.abs(values).max(), np.abs(values).max()) if symmetric else (values.min(), values.max())

    def error(activation_range):
        lowest, highest = min(activation_range[0], 0), max(activation_range[1], 0)
        scale = max(-lowest, highest) / 127 if symmetric else (highest - lowest) / 255
        zero = 0 if symmetric else np.rint(-128 - lowest / scale)
        codes = np.clip(np.rint(values / scale) + zero, -128, 127)
        return float((((codes - zero) * scale - values) ** 2).mean())

    best = min(error((fraction * low, fraction * high)) for fraction in np.arange(16, 129) / 128)
    assert error(smelts(values, "mse", symmetric=symmetric)) <= best * 1.02


@EACH
def test_scale_and_zero_point_equal_onnxruntime_quantizer(name):
    low, high = np.float32(VALUES[name].min()), np.float32(VALUES[name].max())
    zero_point, scale = compute_scale_zp(low, high, np.array(-128), np.array(127))
    assert activation_qparams(float(low), float(high), symmetric=False) == (float(scale), int(zero_point))


def test_all_zero_values_have_zero_range():
    for method in ("percentile", "entropy", "mse"):
        assert smelts(np.zeros((4, 5)), method) == (0, 0)


@pytest.mark.parametrize("symmetric", [True, False])
def test_range_of_tiny_values_has_edges_where_subnormals_are_flushed(symmetric):
    inputs = torch.tensor([[-2.2e-36, 2.4e-36]])
    extremes = Extremes()
    extremes.update(inputs)
    torch.set_flush_denormal(True)
    try:
        histogram = Histogram("percentile", extremes, symmetric)
        histogram.update(inputs)
    finally:
        torch.set_flush_denormal(False)
    assert histogram.counts.sum() == 2
    assert histogram.activation_range(99.9).high == pytest.approx(2.4e-36, rel=0.02)


@pytest.mark.parametrize("values", [[0.01, np.nextafter(np.float32(0.01), np.float32(1))], [3.0, 3.0]])
@pytest.mark.parametrize("method", ["percentile", "entropy", "mse"])
@pytest.mark.parametrize("symmetric", [True, False])
def test_range_of_almost_equal_values_reaches_largest(values, method, symmetric):
    """Between them are fewer float32 numbers than bins."""
    inputs = torch.tensor([values], dtype=torch.float32)
    extremes = Extremes()
    extremes.update(inputs)
    histogram = Histogram(method, extremes, symmetric)
    histogram.update(inputs)
    assert histogram.activation_range(100.0).high == pytest.approx(float(inputs.max()), rel=1e-3)

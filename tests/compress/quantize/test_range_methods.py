"""Ranges of activations: those of onnxruntime's calibrators on the same values, and by hand."""

import numpy as np
import pytest
import torch
from onnxruntime.quantization.calibrate import HistogramCollector

from smelt.compress.quantize.ranges import Extremes, Histogram

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


def found(values, method, percentile=99.9, bins=2048, parts=1):
    pieces = torch.from_numpy(values.astype(np.float32)).chunk(parts)
    extremes = Extremes()
    for piece in pieces:
        extremes.update(piece)
    if method == "minmax":
        return float(extremes.largest)
    histogram = Histogram(method, extremes, bins)
    for piece in pieces:
        histogram.update(piece)
    return histogram.range_end(percentile)


def theirs(values, method, percentile=99.9, bins=2048):
    collector = HistogramCollector(method, True, bins, 128, percentile, "same")
    collector.collect({"x": values.astype(np.float32)})
    low, high = collector.compute_collection_result()["x"][:2]
    return float(max(abs(low), abs(high)))


@EACH
@pytest.mark.parametrize("percentile", [99.999, 99.0])
def test_percentile_range_equals_onnxruntime_calibrator(name, percentile):
    range_end = found(VALUES[name], "percentile", percentile)
    assert range_end == theirs(VALUES[name], "percentile", percentile)


@pytest.mark.parametrize("name", [name for name in VALUES if name != "positive"])
def test_entropy_range_equals_onnxruntime_calibrator(name):
    range_end = found(VALUES[name], "entropy", bins=512)
    assert range_end == theirs(VALUES[name], "entropy", bins=512)


def test_equal_divergences_choose_smallest_threshold():
    """The divergences of these two differ by a ten-millionth: rounding chooses in onnxruntime."""
    range_end = found(VALUES["positive"], "entropy", bins=512)
    reference = theirs(VALUES["positive"], "entropy", bins=512)
    assert 0.98 * reference < range_end < reference


@EACH
def test_minmax_range_is_largest_magnitude(name):
    assert found(VALUES[name], "minmax", parts=3) == float(np.abs(VALUES[name].astype(np.float32)).max())


@EACH
@pytest.mark.parametrize("method", ["percentile", "entropy", "mse"])
def test_range_does_not_depend_on_chunks(name, method):
    assert found(VALUES[name], method, parts=7) == found(VALUES[name], method)


@EACH
def test_mse_range_minimizes_error_of_values(name):
    values = VALUES[name].astype(np.float32).ravel()
    cuts = np.abs(values).max() * np.arange(16, 129) / 128

    def error(cut):
        step = cut / 127
        return float(((np.clip(np.rint(values / step), -128, 127) * step - values) ** 2).mean())

    best = min(map(error, cuts))
    assert error(found(VALUES[name], "mse")) <= best * 1.02


def test_all_zero_values_have_zero_range():
    for method in ("minmax", "percentile", "entropy", "mse"):
        assert found(np.zeros((4, 5)), method) == 0

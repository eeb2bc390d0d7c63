"""Ranges of activations, next to those of ONNX Runtime's own calibrators."""

from collections.abc import Sequence
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from onnx import helper, numpy_helper
from onnxruntime.quantization import CalibrationMethod, create_calibrator

from smelt.export.onnx_models.ort_quantizers import CalibrationMethodName, calibrate_activations
from tests.support.graphs import imported_graphs as graphs

METHODS: dict[CalibrationMethodName, Any] = {
    "minmax": CalibrationMethod.MinMax,
    "entropy": CalibrationMethod.Entropy,
    "percentile": CalibrationMethod.Percentile,
}


def tokens(folder: Path) -> Path:
    """Write a graph of tokens [N, T, 8] -> [N, T, 8]: a matrix multiplication and a ReLU."""
    weight = np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32)
    nodes = [helper.make_node("MatMul", ["x", "w"], ["h"]), helper.make_node("Relu", ["h"], ["y"])]
    x, y = (graphs.value_info(name, ["N", "T", 8]) for name in "xy")
    model = graphs.make_model(nodes, [x], [y], [numpy_helper.from_array(weight, "w")])
    return graphs.save_model(model, folder / "m.onnx")


def feeds(*lengths: int) -> list[dict[str, NDArray[Any]]]:
    random = np.random.default_rng(1)
    return [{"x": random.standard_t(4, size=(1, length, 8)).astype(np.float32)} for length in lengths]


def found(path: Path, method: CalibrationMethodName, samples: Sequence[Any], folder: Path) -> Any:
    folder.mkdir()
    return calibrate_activations(path, ["MatMul", "Relu"], method, samples, (), folder)


def of_onnxruntime(path: Path, method: CalibrationMethodName, samples: Sequence[Any], folder: Path) -> Any:
    class Reader:
        at = iter(samples)

        def get_next(self) -> Any:
            return next(self.at, None)

    with redirect_stdout(StringIO()):
        calibrator = create_calibrator(path, ["MatMul", "Relu"], str(folder / "a.onnx"), METHODS[method])
        calibrator.collect_data(Reader())
        return calibrator.compute_data()


def require_equal(ranges: Any, wanted: Any, method: CalibrationMethodName) -> None:
    assert set(ranges.keys()) == set(wanted.keys()) == {"x", "h", "y"}
    for name, expected_range in wanted.items():
        assert [float(np.squeeze(v)) for v in expected_range.range_value] == [
            float(v) for v in ranges[name].range_value
        ]
        if method != "minmax":
            assert np.array_equal(expected_range.hist, ranges[name].hist)
            assert np.array_equal(expected_range.bins, ranges[name].bins)


@pytest.mark.parametrize("method", METHODS)
def test_ranges_and_histograms_equal_onnxruntime(method: CalibrationMethodName, tmp_path: Path) -> None:
    path, samples = tokens(tmp_path), feeds(*[6] * 9)
    expected = of_onnxruntime(path, method, samples, tmp_path)
    require_equal(found(path, method, samples, tmp_path / "new").ranges, expected, method)


@pytest.mark.parametrize("method", METHODS)
def test_samples_of_different_lengths_equal_one_concatenated_sample(
    method: CalibrationMethodName, tmp_path: Path
) -> None:
    path, samples = tokens(tmp_path), feeds(3, 9, 1, 20)
    joined_samples = [{"x": np.concatenate([sample["x"] for sample in samples], axis=1)}]
    expected = of_onnxruntime(path, method, joined_samples, tmp_path)
    require_equal(found(path, method, samples, tmp_path / "new").ranges, expected, method)


@pytest.mark.parametrize("method", METHODS)
def test_larger_later_sample_does_not_add_bins(method: CalibrationMethodName, tmp_path: Path) -> None:
    """ONNX Runtime's own merge would make one bin for each 1e-4 up to 1e6."""
    samples = feeds(4, 4)
    samples[1]["x"] *= 1e6
    ranges = found(tokens(tmp_path), method, samples, tmp_path / "new").ranges
    assert float(ranges["x"].range_value[1]) > 1e5
    if method == "entropy":  # of a percentile onnxruntime keeps no histogram
        assert len(ranges["x"].hist) == 128


@pytest.mark.parametrize("method", METHODS)
def test_infinite_values_have_no_range_and_nan_is_ignored(
    method: CalibrationMethodName, tmp_path: Path
) -> None:
    samples = feeds(4, 4)
    samples[0]["x"][0, 0, 0] = np.nan
    calibration = found(tokens(tmp_path), method, samples, tmp_path / "new")
    assert (calibration.huge, np.isfinite(calibration.ranges["x"].range_value).all()) == (set(), True)
    samples[0]["x"][0, 0, 0] = -np.inf
    calibration = found(tokens(tmp_path), method, samples, tmp_path / "other")
    assert {"x", "h"} <= calibration.huge
    assert not {"x", "h"} & set(calibration.ranges.keys())


@pytest.mark.parametrize("method", METHODS)
def test_constant_values_keep_their_range(method: CalibrationMethodName, tmp_path: Path) -> None:
    constant_samples = [
        {"x": np.full((1, 2, 8), 4096, np.float32)},
        {"x": np.full((1, 3, 8), 4096.0005, np.float32)},
    ]
    ranges = found(tokens(tmp_path), method, constant_samples, tmp_path / "new").ranges
    assert float(ranges["x"].range_value[1]) == pytest.approx(4096, rel=1e-3)

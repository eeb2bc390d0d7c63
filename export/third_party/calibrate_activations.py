"""Calibrate the range of each activation on samples, as onnxruntime.quantization computes it.

onnxruntime keeps every activation of every sample until the last one, and requires all samples to have one
shape. Here samples are run twice: first for the minimum and maximum, then, if the method needs them, for
histograms of that range. That gives onnxruntime's histogram of all samples at once in the memory of one call.
The thresholds are computed by its own HistogramCollector.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from smelt.export.third_party.float_nodes import has_huge_values

CalibrationMethodName = Literal["minmax", "entropy", "percentile"]
Feeds = dict[str, NDArray[Any]]
# onnxruntime's own defaults (quantization/calibrate.py, create_calibrator).
_HISTOGRAM_BINS = {"entropy": 128, "percentile": 2048}
_LEVELS, _PERCENTILE = 128, 99.999


class ActivationCalibration:
    """The result of calibration.

    ranges: an onnxruntime TensorsData for the quantizer. huge: values without a range, because they were
    infinite or nearly so on the samples.
    """

    def __init__(self, ranges: Any, huge: set[str]) -> None:
        self.ranges, self.huge = ranges, huge


def calibrate_activations(
    path: Path,
    operators: Sequence[str],
    method: CalibrationMethodName,
    feeds: Sequence[Feeds],
    exclude: Collection[str],
    folder: Path,
) -> ActivationCalibration:
    """Return the calibration ranges of the inputs and outputs of nodes of `operators` in the graph `path`.

    Args:
        path: an ONNX file.
        operators: operator types.
        method: minmax, entropy or percentile.
        feeds: the samples, call by call; calls may have different shapes.
        exclude: values that need no range.
        folder: an empty one for files.
    """
    from onnxruntime.quantization import CalibrationMethod, TensorsData
    from onnxruntime.quantization.calibrate import HistogramCollector

    calls = _ActivationReader(path, operators, feeds, exclude, folder)
    ends: dict[str, tuple[Any, Any, Any]] = {}
    huge: set[str] = set()
    for name, values in calls:
        if has_huge_values(values):
            huge.add(name)
        elif values.size:
            ends[name] = _merge_ranges(ends.get(name), values)
    nothing = np.float32(0)
    pairs = {name: ends.get(name, (nothing,) * 3)[:2] for name in calls.names if name not in huge}
    kind = {
        "minmax": CalibrationMethod.MinMax, "entropy": CalibrationMethod.Entropy,
        "percentile": CalibrationMethod.Percentile,
    }[method]  # fmt: skip
    if method == "minmax" or not pairs:
        return ActivationCalibration(TensorsData(CalibrationMethod.MinMax, pairs), huge)
    absolute = method == "percentile"
    collector = HistogramCollector(method, absolute, _HISTOGRAM_BINS[method], _LEVELS, _PERCENTILE, "same")
    histograms = _histograms(calls, ends, _HISTOGRAM_BINS[method], absolute, huge)
    collector.histogram_dict = {
        name: (*histogram, *ends[name][:2], ends[name][2]) for name, histogram in histograms.items()
    }
    found: dict[str, Any] = {}
    if histograms:
        with redirect_stdout(StringIO()):
            found = collector.compute_collection_result()
    # constant values, and values too close to each other for bins, keep their minimum and maximum
    known = {name: found.get(name, (*pair, np.zeros(1), np.zeros(1))) for name, pair in pairs.items()}
    return ActivationCalibration(TensorsData(kind, known), huge)


class _ActivationReader:
    """Run the graph call by call and yield each value by its name; can be iterated more than once."""

    def __init__(
        self, path: Path, operators: Sequence[str], feeds: Sequence[Feeds], but: Collection[str], folder: Path
    ) -> None:
        from onnxruntime.quantization import CalibrationMethod, create_calibrator

        from smelt.export.graph_files import MAX_INLINE_BYTES, external_data_path

        size = sum(file.stat().st_size for file in (path, external_data_path(path)) if file.is_file())
        made = create_calibrator(
            path, list(operators), str(folder / "augmented.onnx"), CalibrationMethod.Percentile,
            use_external_data_format=size > MAX_INLINE_BYTES,
        )  # fmt: skip
        self.names = sorted(set(made.tensors_to_calibrate) - set(but))
        self._session = made.infer_session
        self._feeds = feeds

    def __iter__(self) -> Iterator[tuple[str, NDArray[Any]]]:
        from smelt.export.third_party.graph_samples import cast_feeds

        kinds = {item.name: item.type for item in self._session.get_inputs()}
        for one in self._feeds if self.names else ():
            fed = cast_feeds(one, kinds)
            for name, value in zip(self.names, self._session.run(self.names, fed), strict=True):
                yield name, value.ravel()


def _merge_ranges(before: tuple[Any, Any, Any] | None, values: NDArray[Any]) -> tuple[Any, Any, Any]:
    """Return the minimum, the maximum and the smallest magnitude; NaN is ignored."""
    if np.isnan(values).all():
        return before or (np.float32(0),) * 3
    low, high, least = np.nanmin(values), np.nanmax(values), np.nanmin(np.abs(values))
    return (
        (low, high, least) if before is None
        else (min(before[0], low), max(before[1], high), min(before[2], least))
    )  # fmt: skip


def _histograms(
    calls: _ActivationReader,
    ends: dict[str, tuple[Any, Any, Any]],
    bins: int,
    absolute: bool,
    huge: Collection[str],
) -> dict[str, tuple[NDArray[Any], NDArray[Any]]]:
    """Return counts and edges of the bins of each value, or of its magnitudes if `absolute`."""
    found: dict[str, tuple[NDArray[Any], NDArray[Any]]] = {}
    narrow: set[str] = set()
    for name, values in calls:
        if name in huge or name in narrow or name not in ends:
            continue
        low, high, least = ends[name]
        most = max(abs(low), abs(high))
        seen = values[~np.isnan(values)]
        try:
            counts, edges = np.histogram(
                np.abs(seen) if absolute else seen, bins, range=(least, most) if absolute else (-most, most)
            )
        except ValueError:  # numpy: too many bins for the range, so nearly all values are equal
            narrow.add(name)
            found.pop(name, None)
            continue
        found[name] = (counts + found[name][0] if name in found else counts, edges.astype(np.float32))
    return found

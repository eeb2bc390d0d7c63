"""The range of each activation on calibration samples, as onnxruntime.quantization computes it.

onnxruntime keeps every activation of every sample until the last one, and needs all samples to have one
shape. Here samples are run twice: first for the least and the greatest value, then, where the method needs
it, into histograms of that range. That gives onnxruntime's histogram of all samples at once in the memory of
one call. The thresholds are computed by its own HistogramCollector.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from smelt.export.foreign.float_nodes import is_huge

Method = Literal["minmax", "entropy", "percentile"]
Feeds = dict[str, NDArray[Any]]
# onnxruntime's own defaults (quantization/calibrate.py, create_calibrator).
_BINS = {"entropy": 128, "percentile": 2048}
_LEVELS, _PERCENTILE = 128, 99.999


class Calibration:
    """What calibration found.

    ranges: an onnxruntime TensorsData for the quantizer. huge: values without a range, since they were
    infinite or nearly so on the samples.
    """

    def __init__(self, ranges: Any, huge: set[str]) -> None:
        self.ranges, self.huge = ranges, huge


def calibrate(
    path: Path,
    operators: Sequence[str],
    method: Method,
    feeds: Sequence[Feeds],
    but: Collection[str],
    folder: Path,
) -> Calibration:
    """Return the ranges of what nodes of `operators` read and give in the graph `path`.

    Args:
        path: an ONNX file.
        operators: operator types.
        method: minmax, entropy or percentile.
        feeds: the samples, call by call; calls may have different shapes.
        but: values that need no range.
        folder: an empty one for files.
    """
    from onnxruntime.quantization import CalibrationMethod, TensorsData
    from onnxruntime.quantization.calibrate import HistogramCollector

    calls = _Calls(path, operators, feeds, but, folder)
    ends: dict[str, tuple[Any, Any, Any]] = {}
    huge: set[str] = set()
    for name, values in calls:
        if is_huge(values):
            huge.add(name)
        elif values.size:
            ends[name] = _merged(ends.get(name), values)
    nothing = np.float32(0)
    pairs = {name: ends.get(name, (nothing,) * 3)[:2] for name in calls.names if name not in huge}
    kind = {
        "minmax": CalibrationMethod.MinMax, "entropy": CalibrationMethod.Entropy,
        "percentile": CalibrationMethod.Percentile,
    }[method]  # fmt: skip
    if method == "minmax" or not pairs:
        return Calibration(TensorsData(CalibrationMethod.MinMax, pairs), huge)
    absolute = method == "percentile"
    collector = HistogramCollector(method, absolute, _BINS[method], _LEVELS, _PERCENTILE, "same")
    histograms = _histograms(calls, ends, _BINS[method], absolute, huge)
    collector.histogram_dict = {
        name: (*histogram, *ends[name][:2], ends[name][2]) for name, histogram in histograms.items()
    }
    found: dict[str, Any] = {}
    if histograms:
        with redirect_stdout(StringIO()):
            found = collector.compute_collection_result()
    # those of one value, or of values too near each other for bins, keep their ends
    known = {name: found.get(name, (*pair, np.zeros(1), np.zeros(1))) for name, pair in pairs.items()}
    return Calibration(TensorsData(kind, known), huge)


class _Calls:
    """Runs the graph call by call and gives each value by its name; may be gone through again."""

    def __init__(
        self, path: Path, operators: Sequence[str], feeds: Sequence[Feeds], but: Collection[str], folder: Path
    ) -> None:
        from onnxruntime.quantization import CalibrationMethod, create_calibrator

        from smelt.export.graph_files import LARGEST_INLINE, data_file

        size = sum(file.stat().st_size for file in (path, data_file(path)) if file.is_file())
        made = create_calibrator(
            path, list(operators), str(folder / "augmented.onnx"), CalibrationMethod.Percentile,
            use_external_data_format=size > LARGEST_INLINE,
        )  # fmt: skip
        self.names = sorted(set(made.tensors_to_calibrate) - set(but))
        self._session = made.infer_session
        self._feeds = feeds

    def __iter__(self) -> Iterator[tuple[str, NDArray[Any]]]:
        from smelt.export.foreign.rows import fitting

        kinds = {item.name: item.type for item in self._session.get_inputs()}
        for one in self._feeds if self.names else ():
            fed = fitting(one, kinds)
            for name, value in zip(self.names, self._session.run(self.names, fed), strict=True):
                yield name, value.ravel()


def _merged(before: tuple[Any, Any, Any] | None, values: NDArray[Any]) -> tuple[Any, Any, Any]:
    """Return the least value, the greatest and the least magnitude; NaN is left aside."""
    if np.isnan(values).all():
        return before or (np.float32(0),) * 3
    low, high, least = np.nanmin(values), np.nanmax(values), np.nanmin(np.abs(values))
    return (
        (low, high, least) if before is None
        else (min(before[0], low), max(before[1], high), min(before[2], least))
    )  # fmt: skip


def _histograms(
    calls: _Calls, ends: dict[str, tuple[Any, Any, Any]], bins: int, absolute: bool, huge: Collection[str]
) -> dict[str, tuple[NDArray[Any], NDArray[Any]]]:
    """Return counts and edges of the bins of each value, of its magnitudes if `absolute`."""
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
        except ValueError:  # numpy: too many bins for the range, that is, nearly all values are the same
            narrow.add(name)
            found.pop(name, None)
            continue
        found[name] = (counts + found[name][0] if name in found else counts, edges.astype(np.float32))
    return found

"""Graphs of a small ResNet beside `quantize-onnx`: python benchmarks/resnet_int8.py RUN DATA.

RUN: of benchmarks/recipes/resnet-cifar10-int8.yaml. DATA: the folder with train.npz and test.npz. Prints for
each graph its accuracy on all test images with Wilson's interval, what it gained over and lost against the
float graph (Tango's interval, per cent), its size, and the processor time of a call on one thread, graphs in
turns, as a ratio to the float graph's of the same round: the median, and the middle half of the rounds.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray

import smelt
from smelt.core.files import read_json_object
from smelt.data.examples import read_split
from smelt.data.splits import IMAGE_CLASSIFICATION, Columns, Split
from smelt.evaluate.significance import tango_interval, wilson_interval
from smelt.models.image_processor import read_processor
from smelt.runtimes.images import load_pixels
from smelt.runtimes.onnx_session import open_onnx_session

FLOAT = "onnx-float"
ARMS = (FLOAT, "onnx-int8", "onnx-int8-tuned", "onnx-channels", "onnx-channels-int8")
METHODS = ("minmax", "percentile", "entropy")
CALIBRATION_ROWS, ROUNDS, BATCHES = 128, 41, (1, 8)


def pixels(split: Split, folder: Path) -> NDArray[np.float32]:
    """Return float32 [n, 3, h, w] of a split, as the model in `folder` reads images."""
    processor = read_processor(folder)
    return np.stack([load_pixels(e.text, processor, str(n)) for n, e in enumerate(split.examples)])


def quantized(folder: Path, rows: NDArray[np.float32], test: NDArray[np.float32], space: Path) -> Any:
    """Return by method the file that `quantize-onnx` makes of the graph in `folder`."""
    np.savez(space / "calibration.npz", pixel_values=rows)
    np.savez(space / "test.npz", pixel_values=test)
    steps = "\n".join(
        f"  - quantize-onnx: {{scheme: int8-static, calibration_method: {m}, calibration_samples:"
        f" {len(rows)}}}\n"
        f"    from: model\n    name: {m}"
        for m in METHODS
    )
    (space / "recipe.yaml").write_text(
        f"model: {(folder / 'model.onnx').resolve()}\ntask: custom\nthreads: 1\nscore: {{latency: false}}\n"
        f"data: {{test: test.npz, calibration: calibration.npz}}\nstages:\n{steps}\n"
    )
    smelt.run(space / "recipe.yaml", out=space / "run")
    return {f"quantize-onnx, {m}": space / "run" / "artifacts" / m / "model.onnx" for m in METHODS}


def main(run: Path, data: Path) -> None:
    """Score and time all graphs."""
    folder = run / "artifacts" / FLOAT
    train, test = (
        read_split(str(data / f"{n}.npz"), IMAGE_CLASSIFICATION, Columns(), data) for n in ("train", "test")
    )
    few = train.select(sorted(np.random.default_rng(0).permutation(len(train))[:CALIBRATION_ROWS].tolist()))
    images = pixels(test, folder)
    config = read_json_object(folder / "config.json")
    labels = np.array([config["label2id"][str(e.label)] for e in test.examples])
    with TemporaryDirectory() as space:
        files = {name: run / "artifacts" / name / "model.onnx" for name in ARMS}
        files |= quantized(folder, pixels(few, folder), images[:100], Path(space))
        sessions = {name: open_onnx_session(path, threads=1) for name, path in files.items()}
        hits = {name: _logits(session, images).argmax(axis=1) == labels for name, session in sessions.items()}
        for name, path in files.items():
            right, n = int(hits[name].sum()), len(labels)
            gained, lost = (int((a & ~b).sum()) for a, b in _paired_differences(hits[name], hits[FLOAT]))
            size = sum(f.stat().st_size for f in path.parent.glob("model.onnx*")) / 1e6
            print(
                f"{name}: {100 * right / n:.2f} {_interval_text(wilson_interval(right, n))},"
                f" {100 * (gained - lost) / n:+.2f} {_interval_text(tango_interval(gained, lost, n))},"
                f" {size:.2f} MB"
            )
        for batch in BATCHES:
            _time(sessions, images[:batch])


def _paired_differences(
    one: NDArray[np.bool_], other: NDArray[np.bool_]
) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    return (one, other), (other, one)


def _interval_text(interval: tuple[float, float]) -> str:
    return f"[{interval[0]:.2f}, {interval[1]:.2f}]"


def _logits(session: Any, images: NDArray[np.float32]) -> NDArray[np.float32]:
    parts = [session.run(None, {"pixel_values": images[at : at + 50]})[0] for at in range(0, len(images), 50)]
    return np.concatenate(parts)


def _time(sessions: dict[str, Any], images: NDArray[np.float32]) -> None:
    calls = 200 // len(images)
    times: dict[str, list[float]] = {name: [] for name in sessions}
    for _ in range(ROUNDS):
        for name, session in sessions.items():
            began = time.process_time()
            for _ in range(calls):
                session.run(None, {"pixel_values": images})
            times[name].append(1000 * (time.process_time() - began) / calls)
    base = np.array(times[FLOAT][1:])
    for name, found in times.items():
        low, middle, high = np.percentile(base / np.array(found[1:]), [25, 50, 75])
        each = np.median(found[1:])
        print(f"batch {len(images)}, {name}: {each:.3f} ms, {middle:.2f} x [{low:.2f}, {high:.2f}]")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))

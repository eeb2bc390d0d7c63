"""ONNX Runtime beside OpenVINO in float32 and bf16, on graphs that smelt exports for each.

    python benchmarks/openvino_comparison.py --model MARIAN_FOLDER --data TEST.jsonl.gz

An encoder of BERT-base's size with random weights, and greedy translation of `--rows` texts by a real model.
One thread, one process, the process's own processor time, in rounds that go through all systems in turn:
medians, and all that they ranged over. Tokenizing is outside.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from smelt.core.artifact import Artifact, Manifest
from smelt.core.stage import Context
from smelt.data.batch import Batch
from smelt.data.examples import read_split
from smelt.data.splits import Columns, Split
from smelt.evaluate.environment import cpu_model, installed_versions
from smelt.export.onnx_stage import Onnx, OnnxSettings
from smelt.generation.config import GenerationSettings
from smelt.runtimes.predict_texts import generate_texts
from smelt.runtimes.registry import open_folder

SHAPES = ((1, 128), (8, 64))
SYSTEMS = (
    ("ONNX Runtime fp32", "ort-cpu", "fp32"),
    ("OpenVINO fp32", "openvino", "fp32"),
    ("OpenVINO bf16", "openvino", "bf16"),
)


def export(source: Path, task: Any, data: dict[str, Split], out: Path) -> None:
    """Export `source` for both runtimes, into out/TARGET."""
    manifest = Manifest(
        key="0" * 64, format="torch", task=task, stage="model", settings={}, seed=0, parent=None, versions={}
    )  # fmt: skip
    for target in ("ort-cpu", "openvino"):
        (out / target).mkdir(parents=True)
        root = Artifact(source, manifest)
        context = Context(
            out=out / target, task=task, data=data, seed=0, ancestors={"model": root},
            score=lambda _: {}, threads=1,
        )  # fmt: skip
        Onnx()(root, OnnxSettings(target=target), context)


def bert_base(tokenizer_of: Path, folder: Path) -> Path:
    """Write a classifier with BERT-base's config and random weights."""
    import torch
    from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    BertForSequenceClassification(BertConfig()).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tokenizer_of).save_pretrained(folder)
    return folder


def open_runners(folder: Path) -> dict[str, Any]:
    """Return a runner for each system, over the graphs of one model."""
    return {
        name: open_folder(folder / target, "onnx", target, 1, dtype=dtype) for name, target, dtype in SYSTEMS
    }


def time_interleaved(
    systems: Mapping[str, Callable[[], Any]], rounds: int
) -> tuple[dict[str, list[float]], dict[str, Any]]:
    """Return each system's processor times, ms, without its first call, and what it gave last."""
    results = {name: call() for name, call in systems.items()}
    times: dict[str, list[float]] = {name: [] for name in systems}
    for _ in range(rounds):
        for name, call in systems.items():
            begin = time.process_time()
            results[name] = call()
            times[name].append(1000 * (time.process_time() - begin))
    return times, results


def print_rows(title: str, times: dict[str, list[float]], versions: dict[str, str]) -> None:
    """Print a row of a table for each system; ratios are of the two times of a round."""
    first = next(iter(times.values()))
    for name, found in times.items():
        ratios = [mine / other for mine, other in zip(found, first, strict=True)]
        spread = f"{min(found):.1f} to {max(found):.1f}"
        ratio = f"{statistics.median(ratios):.2f} [{min(ratios):.2f}, {max(ratios):.2f}]"
        print(
            f"| {title} | {name} | {statistics.median(found):.1f} | {spread} | {ratio} | {versions[name]} |",
            flush=True,
        )


def time_encoder(folder: Path, rounds: int) -> None:
    """Time BERT-base on random ids."""
    runners = open_runners(folder)
    rng = np.random.default_rng(0)
    for rows, length in SHAPES:
        ids = rng.integers(1000, 30000, (rows, length))
        batch = Batch(ids, np.ones_like(ids))
        times, results = time_interleaved({n: partial(r.forward, batch) for n, r in runners.items()}, rounds)
        expected = results["ONNX Runtime fp32"]
        off = {n: f"{np.abs(r - expected).mean() / expected.std():.1g}" for n, r in results.items()}
        print_rows(f"BERT-base, {rows} x {length}", times, off)


def time_translator(folder: Path, texts: list[str], rounds: int, batch_size: int) -> None:
    """Time greedy translation, smelt's loop and the tokenizer included."""
    runners = open_runners(folder)
    wishes = GenerationSettings(max_new_tokens=128)
    calls = {n: partial(generate_texts, r, texts, wishes, batch_size) for n, r in runners.items()}
    times, results = time_interleaved(calls, rounds)
    each = {name: [value / len(texts) for value in found] for name, found in times.items()}
    expected = results["ONNX Runtime fp32"]
    other = {
        name: f"{sum(a != b for a, b in zip(found, expected, strict=True))} of {len(texts)} texts differ"
        for name, found in results.items()
    }
    print_rows(f"greedy, batch {batch_size}", each, other)


def main() -> None:
    """Measure; print rows of a table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True, help="of any BERT; for its files only")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    found = installed_versions()
    print(cpu_model(), {name: found.get(name) for name in ("onnxruntime", "onnxruntime-gpu", "openvino")})
    split = read_split(str(options.data), "translation", Columns(), Path.cwd()).take(options.rows)
    with tempfile.TemporaryDirectory() as name:
        space = Path(name)
        export(bert_base(options.tokenizer, space / "bert"), "text-classification", {}, space / "encoder")
        time_encoder(space / "encoder", options.rounds)
        export(options.model, "translation", {"validation": split}, space / "translator")
        for batch_size in (1, 32):
            time_translator(
                space / "translator", [e.text for e in split.examples], options.rounds, batch_size
            )


if __name__ == "__main__":
    main()

"""Runs with an export that has fixed shapes, made once for all tests."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import smelt
from tests.support.models import embedders, images, masked, taggers, tiny
from tests.support.shared_folders import make_once

LENGTH = 12
# kind: writer of the model, of the data, the task, metric
KINDS: dict[str, tuple[Callable[..., Any], Callable[..., Path], str, str]] = {
    "classifier": (tiny.write_bert, tiny.write_labeled, "text-classification", "accuracy"),
    "embedder": (embedders.write_embedder, embedders.write_rows, embedders.TASK, "spearman"),
    "tagger": (taggers.write_model, taggers.write_rows, taggers.TASK, "f1"),
    "masked": (masked.write_model, masked.write_lines, masked.TASK, "masked_accuracy"),
    "vit": (images.write_model, images.write_rows, images.TASK, "accuracy"),
    "resnet": (partial(images.write_model, family="resnet"), images.write_rows, images.TASK, "accuracy"),
}
RECIPE = """
model: m
task: {task}
data: {{test: {data}, validation: {data}{windows}}}
stages:
  - onnx: {{{settings}}}
score: {{latency: {latency}}}
"""
# its processes import torch, so one kind is timed
LATENCY = "{batch_sizes: [3], rounds: 3, min_round_ms: 1, time_limit_minutes: 0.1}"


def run_folder(kind: str, more: str = "") -> Path:
    """Return the folder of a run with a fixed export; `more`: its other settings."""

    sizes = "batch_size: 3" if KINDS[kind][2] == images.TASK else f"batch_size: 2, sequence_length: {LENGTH}"
    settings = ", ".join(filter(None, (sizes, more)))

    def make(home: Path) -> None:
        home.mkdir()
        write, write_data, task, _ = KINDS[kind]
        write(home / "m")
        data = write_data(home / ("data.txt" if kind == "masked" else "data.jsonl"))
        latency = LATENCY if kind == "classifier" else "false"
        windows = f", windows: {{length: {LENGTH}}}" if kind == "masked" else ""
        values = {"task": task, "data": data.name, "settings": settings, "latency": latency}
        (home / "recipe.yaml").write_text(RECIPE.format(**values, windows=windows))
        smelt.run(home / "recipe.yaml", out=home / "run", quiet=True)

    key = "".join(letter if letter.isalnum() else "-" for letter in settings)
    return make_once(f"fixed-{kind}-{key}", make) / "run"

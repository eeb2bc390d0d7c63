"""Loss of a translator after techniques that calibrate, at 128 samples and at the default number.

    python benchmarks/calibration_samples.py --rows 400 --seeds 3

Each arm runs one stage on the trained model and scores the mean cross-entropy per token of validation rows that
calibration does not see. Differences between two numbers of samples are paired over sentences, and the error that
the report states is the geometric mean over layers.
"""

from __future__ import annotations

import gzip
import itertools
import json
import math
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import click
import torch

import smelt
from smelt.data.splits import Example, Split
from smelt.models.checkpoint import load_model, load_tokenizer
from smelt.stage import Context
from smelt.tasks.encode_split import encode_split
from smelt.tasks.samples import IGNORE_INDEX, collate

SHARED = Path(__file__).parent.parent.parent / "shared"
ARMS: dict[str, tuple[str, dict[str, Any], str]] = {
    "2:4, sparsegpt": ("sparsify", {"pattern": "2:4"}, ""),
    "half of the neurons": ("prune", {"keep_ratio": 0.5}, "reconstruction_error"),
    "int2, gptq": ("quantize", {"scheme": "int2", "method": "gptq"}, "gptq_error"),
    "int4, gptq": ("quantize", {"scheme": "int4", "method": "gptq"}, "gptq_error"),
}


def read_rows(data: Path, split: str) -> list[dict[str, str]]:
    """Return the rows of a split."""
    with gzip.open(data / f"{split}.jsonl.gz", "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


@torch.inference_mode()
def sentence_losses(folder: Path, tokenizer: Path, rows: list[dict[str, str]]) -> torch.Tensor:
    """Return the summed cross-entropy and the tokens of each row's target, float64 [rows, 2]."""
    model = load_model(folder)[0].eval()
    split = Split("validation", tuple(Example(row["source"], (row["target"],)) for row in rows))
    ctx = Context(out=folder, task="translation", data={}, seed=0, ancestors={}, score=lambda *_: {})
    samples = encode_split(split, model.config, load_tokenizer(tokenizer), ctx)
    losses = []
    for chunk in itertools.batched(samples, 32) if hasattr(itertools, "batched") else _chunks(samples):
        batch = collate(chunk, model.config)
        labels = batch.pop("labels")
        logits = model(**batch, use_cache=False).logits.transpose(1, 2)
        loss = torch.nn.functional.cross_entropy(logits, labels, reduction="none", ignore_index=IGNORE_INDEX)
        losses.append(torch.stack([loss.sum(dim=1), (labels != IGNORE_INDEX).sum(dim=1)], dim=1))
    return torch.cat(losses).double()

"""Loss of a translator after techniques that calibrate, with 128 samples and with the default number.

    python benchmarks/calibration_samples.py --rows 400 --seeds 3

Each arm runs one stage on the trained model; its loss is the mean cross-entropy per token of validation rows.
Differences between two numbers of samples are paired over sentences. The error that the report states is the
geometric mean over layers.
"""

from __future__ import annotations

import gzip
import json
import math
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
MODEL, DATA = SHARED / "models" / "marian-small-en-de", SHARED / "data" / "multi30k_en_de"
# stage, settings, and the errors in its details
ARMS: dict[str, tuple[str, dict[str, Any], str]] = {
    "sparsegpt, 2:4": ("sparsify", {"pattern": "2:4"}, ""),
    "half of the neurons": ("prune", {"keep_ratio": 0.5}, "reconstruction_error"),
    "gptq, int2": ("quantize", {"scheme": "int2", "method": "gptq"}, "gptq_error"),
    "gptq, int4": ("quantize", {"scheme": "int4", "method": "gptq"}, "gptq_error"),
    "awq, int4": ("quantize", {"scheme": "int4", "method": "awq"}, "awq_error"),
    "whitened-svd, 0.8": ("factorize", {"keep_ratio": 0.8, "optimize_for": "size"}, "relative_error"),
}


@torch.inference_mode()
def sentence_losses(folder: Path, split: Split) -> torch.Tensor:
    """Return the summed cross-entropy of each target and its tokens, float64 [sentences, 2]."""
    model = load_model(folder)[0].eval()
    ctx = Context(out=folder, task="translation", data={}, seed=0, ancestors={}, score=lambda *_: {})
    samples = encode_split(split, model.config, load_tokenizer(MODEL), ctx)
    losses = []
    for start in range(0, len(samples), 32):
        batch = collate(samples[start : start + 32], model.config)
        labels = batch.pop("labels")
        logits = model(**batch, use_cache=False).logits.transpose(1, 2)
        loss = torch.nn.functional.cross_entropy(logits, labels, reduction="none", ignore_index=IGNORE_INDEX)
        losses.append(torch.stack([loss.sum(dim=1), (labels != IGNORE_INDEX).sum(dim=1)], dim=1))
    return torch.cat(losses).double()


def difference(a: torch.Tensor, b: torch.Tensor) -> str:
    """Return the difference of two mean losses per token, a - b, with its 95 % interval over sentences."""
    tokens = b[:, 1]
    mean = float((a - b)[:, 0].sum() / tokens.sum())
    residuals = (a - b)[:, 0] - mean * tokens  # of the ratio of two sums
    half = 1.96 * math.sqrt(len(b)) * float(residuals.std()) / float(tokens.sum())
    return f"{mean:+.4f} [{mean - half:+.4f}, {mean + half:+.4f}]"


@click.command()
@click.argument("arms", nargs=-1, type=click.Choice(list(ARMS)))
@click.option("--rows", default=400, show_default=True, help="validation rows that are scored")
@click.option("--seeds", default=3, show_default=True, help="draws of calibration samples")
def main(arms: tuple[str, ...], rows: int, seeds: int) -> None:
    """Print a line for each of ARMS (default: all), number of samples and seed."""
    torch.set_num_threads(1)
    with gzip.open(DATA / "validation.jsonl.gz", "rt", encoding="utf-8") as file:
        validation = [json.loads(line) for line in file][:rows]
    split = Split("validation", tuple(Example(row["source"], (row["target"],)) for row in validation))
    plain = sentence_losses(MODEL, split)
    for name in arms or ARMS:
        stage, settings, detail = ARMS[name]
        for seed in range(seeds):
            before: torch.Tensor | None = None
            for count in (128, None):
                with tempfile.TemporaryDirectory() as folder:
                    start = time.perf_counter()
                    artifact = smelt.apply(
                        stage, MODEL, out=Path(folder) / "out", data={"train": str(DATA / "train.jsonl.gz")},
                        task="translation", threads=1, seed=seed,
                        **settings | {"calibration_samples": count},
                    )  # fmt: skip
                    seconds = time.perf_counter() - start
                    losses = sentence_losses(Path(folder) / "out", split)
                details = artifact.manifest.details
                errors = torch.tensor(list(details.get(detail, {}).values()) or [float("nan")])
                click.echo(
                    f"{name}, seed {seed}, {details['calibration']}: {seconds:.0f} s, reported error"
                    f" {float(errors.log().mean().exp()):.3f}, against the model {difference(losses, plain)}"
                    + ("" if before is None else f", against 128 samples {difference(losses, before)}")
                )
                before = losses


if __name__ == "__main__":
    main()

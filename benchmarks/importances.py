"""Loss of a translator after `prune` by one importance and by another, at the same number of parameters.

    python benchmarks/importances.py --rows 1000

Losses are the mean cross-entropy per token of validation rows; differences are paired over sentences.
"""

from __future__ import annotations

import gzip
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import click
import torch
from calibration_samples import DATA, MODEL, difference, sentence_losses

import smelt
from smelt.data.splits import Example, Split

# settings, and the two importances that are compared
ARMS: dict[str, tuple[dict[str, Any], tuple[str, str]]] = {
    "half of the neurons": ({"keep_ratio": {"ffn": 0.5}}, ("taylor", "obs")),
    "half of the heads": ({"keep_ratio": {"heads": 0.5}}, ("taylor", "obs")),
    "0.8 of the parameters": ({"budget": {"parameters": 0.8}}, ("fisher", "obs")),
    "0.65 of the parameters": ({"budget": {"parameters": 0.65}}, ("fisher", "obs")),
}


@click.command()
@click.argument("arms", nargs=-1, type=click.Choice(list(ARMS)))
@click.option("--rows", default=1000, show_default=True, help="validation rows that are scored")
@click.option("--seed", default=0, show_default=True)
def main(arms: tuple[str, ...], rows: int, seed: int) -> None:
    """Print a line for each of ARMS (default: all) and importance."""
    torch.set_num_threads(1)
    with gzip.open(DATA / "validation.jsonl.gz", "rt", encoding="utf-8") as file:
        validation = [json.loads(line) for line in file][:rows]
    split = Split("validation", tuple(Example(row["source"], (row["target"],)) for row in validation))
    plain = sentence_losses(MODEL, split)
    click.echo(f"model: {float(plain[:, 0].sum() / plain[:, 1].sum()):.4f}")
    for name in arms or ARMS:
        settings, importances = ARMS[name]
        before: torch.Tensor | None = None
        for importance in importances:
            with tempfile.TemporaryDirectory() as folder:
                start, out = time.perf_counter(), Path(folder) / "out"
                artifact = smelt.apply(
                    "prune", MODEL, out=out, data={"train": str(DATA / "train.jsonl.gz")},
                    task="translation", threads=1, seed=seed, importance=importance, **settings,
                )  # fmt: skip
                seconds = time.perf_counter() - start
                losses = sentence_losses(out, split)
            click.echo(
                f"{name}, {importance}: {artifact.manifest.details['parameters_after']:,} parameters,"
                f" {seconds:.0f} s, loss {float(losses[:, 0].sum() / losses[:, 1].sum()):.4f}"
                + ("" if before is None else f", against {importances[0]} {difference(losses, before)}")
            )
            before = losses


if __name__ == "__main__":
    main()

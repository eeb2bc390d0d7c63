"""Loss of a model after `prune` by one importance and by another, at the same number of units or parameters.

    python benchmarks/importances.py --rows 1000
    python benchmarks/importances.py --model runs/llama/artifacts/trained

The model is the small translator, or a language model that is scored on windows of WikiText-2. Losses are the
mean cross-entropy per token of validation rows; differences are paired over sentences or windows.
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
from calibration_samples import DATA, MODEL, SHARED, difference, sentence_losses

import smelt
from smelt.data.splits import Example, Split
from smelt.data.tasks import Task

# settings, and the two importances that are compared
ARMS: dict[str, tuple[dict[str, Any], tuple[str, str]]] = {
    "half of the neurons": ({"keep_ratio": {"ffn": 0.5}}, ("taylor", "obs")),
    "half of the heads": ({"keep_ratio": {"heads": 0.5}}, ("taylor", "obs")),
    "0.8 of the parameters": ({"budget": {"parameters": 0.8}}, ("fisher", "obs")),
    "0.65 of the parameters": ({"budget": {"parameters": 0.65}}, ("fisher", "obs")),
}
WIKITEXT = SHARED / "data" / "wikitext2"


def validation_rows(task: Task, count: int) -> Split:
    """Return validation samples: sentences with their translations, or one running text of so many lines."""
    if task == "translation":
        with gzip.open(DATA / "validation.jsonl.gz", "rt", encoding="utf-8") as file:
            rows = [json.loads(line) for line in file][:count]
        return Split("validation", tuple(Example(row["source"], (row["target"],)) for row in rows))
    with gzip.open(WIKITEXT / "validation.txt.gz", "rt", encoding="utf-8") as file:
        return Split("validation", (Example("".join(list(file)[:count])),))


@click.command()
@click.argument("arms", nargs=-1, type=click.Choice(list(ARMS)))
@click.option("--model", type=click.Path(path_type=Path), default=MODEL, show_default=True)
@click.option("--rows", default=1000, show_default=True, help="validation rows that are scored")
@click.option("--seed", default=0, show_default=True)
def main(arms: tuple[str, ...], model: Path, rows: int, seed: int) -> None:
    """Print a line for each of ARMS (default: all) and importance."""
    torch.set_num_threads(1)
    task: Task = "translation" if model == MODEL else "language-modeling"
    train = DATA / "train.jsonl.gz" if task == "translation" else WIKITEXT / "train.txt.gz"
    split = validation_rows(task, rows)
    plain = sentence_losses(model, split, task)
    click.echo(f"model: {float(plain[:, 0].sum() / plain[:, 1].sum()):.4f}")
    for name in arms or ARMS:
        settings, importances = ARMS[name]
        before: torch.Tensor | None = None
        for importance in importances:
            with tempfile.TemporaryDirectory() as folder:
                start, out = time.perf_counter(), Path(folder) / "out"
                artifact = smelt.apply(
                    "prune", model, out=out, data={"train": str(train)}, task=task, threads=1, seed=seed,
                    importance=importance, **settings,
                )  # fmt: skip
                seconds = time.perf_counter() - start
                losses = sentence_losses(out, split, task)
            click.echo(
                f"{name}, {importance}: {artifact.manifest.details['parameters_after']:,} parameters,"
                f" {seconds:.0f} s, loss {float(losses[:, 0].sum() / losses[:, 1].sum()):.4f}"
                + ("" if before is None else f", against {importances[0]} {difference(losses, before)}")
            )
            before = losses


if __name__ == "__main__":
    main()

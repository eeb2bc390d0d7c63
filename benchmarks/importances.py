"""Loss of a model after `prune` in one way and in another, at the same number of parameters.

    python benchmarks/importances.py --rows 1000
    python benchmarks/importances.py "shape, 0.5" --task language-modeling --rows 600 --train train.txt \\
        --model runs/wikitext2-tiny/artifacts/trained --validation ../shared/data/wikitext2/validation.txt.gz

Losses are the mean cross-entropy per token of validation samples; differences are paired over sentences or
windows.
"""

from __future__ import annotations

import json
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import torch
from calibration_samples import DATA, MODEL, difference, sentence_losses

import smelt
from smelt.data.splits import Columns, Windows
from smelt.data.tasks import Task
from smelt.tasks.read_split import read_split

_SHAPE = ["layers", "width", "heads", "ffn"]
_WINDOWS = Windows(length=128)  # of running text


def _within(ratio: float, *arms: dict[str, Any]) -> tuple[dict[str, Any], ...]:
    return tuple({"budget": {"parameters": ratio}, **arm} for arm in arms)


# the settings that are compared; differences are from the first
ARMS: dict[str, tuple[dict[str, Any], ...]] = {
    "half of the neurons": tuple(
        {"keep_ratio": {"ffn": 0.5}, "importance": importance} for importance in ("taylor", "obs")
    ),
    "half of the heads": tuple(
        {"keep_ratio": {"heads": 0.5}, "importance": importance} for importance in ("taylor", "obs")
    ),
    "0.8 of the parameters": _within(0.8, {"importance": "fisher"}, {"importance": "obs"}),
    "0.65 of the parameters": _within(0.65, {"importance": "fisher"}, {"importance": "obs"}),
} | {f"shape, {ratio}": _within(ratio, {}, {"targets": _SHAPE}) for ratio in (0.8, 0.7, 0.65, 0.6, 0.5)}


@click.command()
@click.argument("arms", nargs=-1, type=click.Choice(list(ARMS)))
@click.option("--model", default=MODEL, type=Path, show_default=True)
@click.option("--task", default="translation", show_default=True)
@click.option("--train", default=str(DATA / "train.jsonl.gz"), show_default=True)
@click.option("--validation", default=str(DATA / "validation.jsonl.gz"), show_default=True)
@click.option("--rows", default=1000, show_default=True, help="validation samples that are scored")
@click.option("--seed", default=0, show_default=True)
def main(
    arms: tuple[str, ...], model: Path, task: Task, train: str, validation: str, rows: int, seed: int
) -> None:
    """Print a line for each of ARMS (default: all but shapes) and settings."""
    torch.set_num_threads(1)
    split = read_split(validation, task, Columns(), Path.cwd()).take(rows)
    data: dict[str, Any] = {"train": str(Path(train).resolve())}
    if task == "language-modeling":
        split = replace(split, windows=_WINDOWS)
        data |= {"windows": {"length": 128}}
    plain = sentence_losses(model, split, task)
    click.echo(f"model: {float(plain[:, 0].sum() / plain[:, 1].sum()):.4f}, {len(plain)} samples")
    for name in arms or [name for name in ARMS if not name.startswith("shape")]:
        reference: torch.Tensor | None = None
        for settings in ARMS[name]:
            with tempfile.TemporaryDirectory() as folder:
                start, out = time.perf_counter(), Path(folder) / "out"
                artifact = smelt.apply(
                    "prune", model, out=out, data=data, task=task, threads=1, seed=seed, **settings,
                )  # fmt: skip
                seconds = time.perf_counter() - start
                losses = sentence_losses(out, split, task)
            details = artifact.manifest.details
            for candidate in details.get("candidates", []):
                click.echo(f"  {json.dumps(candidate)}")
            click.echo(
                f"{name}, {settings.get('importance', settings.get('targets', ''))}:"
                f" {details['parameters_after']:,} parameters, {seconds:.0f} s,"
                f" loss {float(losses[:, 0].sum() / losses[:, 1].sum()):.4f}, from the model"
                f" {difference(losses, plain)}"
                + ("" if reference is None else f", from the first {difference(losses, reference)}")
            )
            reference = losses if reference is None else reference


if __name__ == "__main__":
    main()

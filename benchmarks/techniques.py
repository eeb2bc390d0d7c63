"""What each technique does to a model's loss: arms beside each other, scored on the same validation rows.

    .venv/bin/python benchmarks/techniques.py                      # all groups of arms
    .venv/bin/python benchmarks/techniques.py compensation         # one group
    .venv/bin/python benchmarks/techniques.py --list

A group of arms is one file of benchmarks/arms/: a table `ARMS` from an arm's name to the stages that it runs,
one after the other, on the untouched model. Rows for calibration and training are the training data, drawn by
the seed; validation rows are only scored. Needs the model and the data in ../shared (or --model and --data).
"""

from __future__ import annotations

import importlib.util
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import click

HERE = Path(__file__).parent
SHARED = HERE.parent.parent / "shared"
# The stages of an arm: the word in a recipe and the settings.
Stages: TypeAlias = Sequence[tuple[str, Mapping[str, Any]]]


def groups() -> dict[str, Any]:
    """Return the files of arms by name."""
    found = {}
    for path in sorted((HERE / "arms").glob("*.py")):
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None
        assert spec.loader is not None
        found[path.stem] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return found


def artifact(folder: Path, task: str) -> Any:
    """Return a model's folder as what stages take."""
    from smelt.core.artifact import Artifact, Manifest

    names = {"key": "0" * 64, "format": "torch", "task": task, "stage": "model"}
    return Artifact(
        folder, Manifest.model_validate({**names, "settings": {}, "seed": 0, "parent": None, "versions": {}})
    )


class Bench:
    """A model, its data, and how an arm is run and scored.

    rows: validation rows that are scored. threads: of torch. seed: of rows and training.
    """

    def __init__(self, model: Path, data: Path, task: str, rows: int, threads: int) -> None:
        from smelt.core.data import Columns, read_split

        self.model, self.task, self.threads = model, task, threads
        names = {"train": "train.jsonl.gz", "validation": "validation.jsonl.gz"}
        read: Any = read_split
        self.data = {split: read(str(data / name), task, Columns(), data) for split, name in names.items()}
        self.scored = self.data["validation"].head(rows)

    def run(self, stages: Stages, seed: int, space: Path) -> tuple[Path, float]:
        """Return the folder that an arm's stages leave, and the processor time that they took, seconds."""
        from smelt.core.stage import Context
        from smelt.recipe.stage_table import load_stage

        source, spent = artifact(self.model, self.task), 0.0
        ancestors = {"model": source}
        for number, (word, settings) in enumerate(stages):
            stage: Any = load_stage(word)
            out = space / f"{number}-{word}"
            out.mkdir(parents=True)
            task: Any = self.task
            ctx = Context(
                out, task, self.data, seed, ancestors, score=lambda *_: {}, threads=self.threads, device="cpu"
            )
            start = time.process_time()
            stage()(source, stage.settings_type.model_validate(settings), ctx)
            spent += time.process_time() - start
            source = artifact(out, self.task)
            ancestors[word] = source
        return Path(source.path), spent

    def loss(self, folder: Path) -> float:
        """Return the mean cross-entropy of a token (of a label) on the rows that are scored, nats."""
        import torch

        from smelt.compress.train.data import collate, encode_split, group_by_length
        from smelt.compress.train.loop import label_objective, mean_loss
        from smelt.core.stage import Context
        from smelt.runtime.models.checkpoint import load_model, load_tokenizer

        model, _ = load_model(folder)
        task: Any = self.task
        ctx = Context(folder, task, {}, 0, {}, score=lambda *_: {})
        rows = encode_split(self.scored, model.config, load_tokenizer(folder), ctx)
        groups = group_by_length(rows, 32, None, None)
        batches = [collate([rows[i] for i in group], model.config) for group in groups]
        return mean_loss(model, batches, label_objective(), "fp32", torch.device("cpu"))


@click.command()
@click.argument("names", nargs=-1)
@click.option("--model", type=click.Path(path_type=Path), default=SHARED / "models" / "marian-small-en-de")
@click.option("--data", type=click.Path(path_type=Path), default=SHARED / "data" / "multi30k_en_de")
@click.option("--task", default="translation", show_default=True)
@click.option("--rows", default=150, show_default=True, help="validation rows that are scored")
@click.option("--seeds", default=1, show_default=True, help="how many times each arm is run")
@click.option("--threads", default=1, show_default=True)
@click.option("--list", "only_list", is_flag=True, help="name the arms and end")
def main(
    names: tuple[str, ...], model: Path, data: Path, task: str, rows: int, seeds: int, threads: int,
    only_list: bool,
) -> None:  # fmt: skip
    """Print a row for each arm: parameters, loss on validation rows by seed, processor time of its stages."""
    known = groups()
    if odd := [name for name in names if name not in known]:
        raise click.UsageError(f"no arms '{odd[0]}'; known: {', '.join(known)}")
    chosen = {name: known[name].ARMS for name in names or known}
    if only_list:
        for name, arms in chosen.items():
            click.echo(f"{name}: {', '.join(arms)}")
        return
    from smelt.evaluate.environment import cpu_model
    from smelt.runtime.models.checkpoint import count_parameters

    bench = Bench(model, data, task, rows, threads)
    click.echo(f"{cpu_model()}; {threads} thread; {rows} validation rows")
    for name, arms in chosen.items():
        click.echo(f"\n| {name} | parameters | loss, nats a token | processor time, s |\n|:--|--:|--:|--:|")
        for arm, stages in arms.items():
            with tempfile.TemporaryDirectory() as space:
                found = [bench.run(stages, seed, Path(space) / str(seed)) for seed in range(seeds)]
                losses = ", ".join(f"{bench.loss(folder):.3f}" for folder, _ in found)
                size = count_parameters(found[0][0])
            click.echo(f"| {arm} | {size:,} | {losses} | {found[0][1]:.1f} |")


if __name__ == "__main__":
    main()

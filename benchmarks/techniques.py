"""What each technique does to a model's loss: arms beside each other, scored on the same rows.

    .venv/bin/python benchmarks/techniques.py                      # all groups of arms
    .venv/bin/python benchmarks/techniques.py compensation         # one group
    .venv/bin/python benchmarks/techniques.py --list
    .venv/bin/python benchmarks/techniques.py distillation --split test --results build/techniques.jsonl

A group of arms is one file of benchmarks/arms/: a table `ARMS` from an arm's name to the stages that it runs,
one after the other, on the untouched model. What a file may say besides:

    AGAINST = {"arm": "control"}       # what it is compared with; else with the group's first arm
    SEEDS = 3                          # how many times each arm is run, where --seeds does not say
    TRAIN = 7680                       # only the first so many rows are there to train and calibrate on
    TEXTS = {"arm": (1, 4)}            # with how many beams it also writes texts, for BLEU
    AS_RUN = True                      # manifests say which step made a model, as in a run

A stage that leaves torch (onnx) is a branch: the next one goes on from the last torch model, and may name it.
Rows to calibrate and train on are training data, drawn by the seed; on what is scored nothing is chosen,
unless a stage validates (`num_evals`) and `--split` is validation. With `--results` each arm and seed is
kept as soon as it is done, so that a run that was stopped goes on, and arms that are the same in two groups
are run once; `--known` prints what is there. Needs the model and the data in ../shared (or --model,
--data).
"""

from __future__ import annotations

import importlib.util
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
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


class Results:
    """What was measured, a JSON object a line, by the hash of what it depends on; None: nothing is kept."""

    def __init__(self, path: Path | None) -> None:
        self.path, self.known = path, dict[str, dict[str, Any]]()
        if path is not None and path.exists():
            for line in path.read_text(encoding="utf-8").splitlines():
                try:
                    found = json.loads(line)
                except json.JSONDecodeError:  # the last line of a run that was killed while it wrote
                    continue
                self.known[found["key"]] = found

    def add(self, key: str, found: Mapping[str, Any]) -> None:
        """Keep what was measured."""
        self.known[key] = {"key": key, **found}
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(self.known[key])
        torn = self.path.exists() and not self.path.read_bytes().endswith(b"\n")
        with self.path.open("a", encoding="utf-8") as file:
            file.write(f"{chr(10) if torn else ''}{text}\n")


def scale_updates(value: Any, share: float) -> Any:
    """Return stages, or a part of them, with so large a part of their updates (`max_steps`)."""
    if isinstance(value, Mapping):
        return {
            name: max(1, round(share * inner)) if name == "max_steps" else scale_updates(inner, share)
            for name, inner in value.items()
        }
    return [scale_updates(inner, share) for inner in value] if isinstance(value, list | tuple) else value


@dataclass(frozen=True)
class Job:
    """One arm with one seed, and what is known of it under which key."""

    group: str
    arm: str
    seed: int
    stages: Stages
    train: int | None
    beams: tuple[int, ...]


def jobs(names: Sequence[str], only: Sequence[str], seeds: int | None, share: float) -> list[Job]:
    """Return what is to be run, one seed after the other: a run that is stopped has as many of each arm."""
    found = []
    for name, file in ((name, groups()[name]) for name in names):
        train, texts = getattr(file, "TRAIN", None), getattr(file, "TEXTS", {})
        for arm, stages in file.ARMS.items():
            if only and not any(fnmatch(arm, pattern) for pattern in only):
                continue
            # the untouched model has no seed
            count = seeds or int(getattr(file, "SEEDS", 1))
            for seed in range(count if stages else 1):
                rows = None if train is None else round(share * train)
                found.append(
                    Job(name, arm, seed, scale_updates(stages, share), rows, tuple(texts.get(arm, ())))
                )
    return sorted(found, key=lambda job: job.seed)


def run_jobs(found: Sequence[Job], results: Results, bench: Any, known: bool) -> list[Any]:
    """Run what is not known yet, and return a `Group` for each group."""
    from techniques_table import Group

    files = groups()
    arms: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for job in found:
        runs = arms.setdefault(job.group, {}).setdefault(job.arm, [])
        as_run = bool(getattr(files[job.group], "AS_RUN", False))
        key = bench.key(job.stages, job.seed, job.train, job.beams, as_run)
        if key not in results.known and not known:
            click.echo(f"{job.group}: {job.arm}, seed {job.seed}", err=True)
            try:
                measures = bench.measure(job.stages, job.seed, job.train, job.beams, as_run)
            except Exception as error:  # of hours of arms, one that fails costs none but itself
                click.echo(f"{job.group}: {job.arm}, seed {job.seed} failed: {error}", err=True)
                continue
            results.add(key, {"group": job.group, "arm": job.arm, "seed": job.seed, **measures})
        if key in results.known:
            runs.append(results.known[key])
    return [Group(name, runs, getattr(files[name], "AGAINST", {})) for name, runs in arms.items()]


@click.command()
@click.argument("names", nargs=-1)
@click.option("--model", type=click.Path(path_type=Path), default=SHARED / "models" / "marian-small-en-de")
@click.option("--data", type=click.Path(path_type=Path), default=SHARED / "data" / "multi30k_en_de")
@click.option("--task", default="translation", show_default=True)
@click.option("--split", type=click.Choice(["validation", "test"]), default="validation", show_default=True)
@click.option("--rows", default=150, show_default=True, help="rows that are scored")
@click.option("--texts", default=None, type=int, help="rows that texts are written of  [default: --rows]")
@click.option(
    "--seeds", default=None, type=int, help="how many times each arm is run  [default: the file's, 1]"
)
@click.option(
    "--arm", "only", multiple=True, help="only arms whose name fits (* for anything); may be repeated"
)
@click.option(
    "--share", default=1.0, show_default=True, help="part of each arm's updates, and of the rows of TRAIN"
)
@click.option("--threads", default=1, show_default=True)
@click.option(
    "--results", type=click.Path(path_type=Path), default=None, help="JSON lines that a run goes on from"
)
@click.option("--known", is_flag=True, help="run nothing: what --results has")
@click.option("--json", "as_json", is_flag=True, help="print one JSON object instead of tables")
@click.option("--list", "only_list", is_flag=True, help="name the arms and end")
def main(
    names: tuple[str, ...], model: Path, data: Path, task: str, split: str, rows: int, texts: int | None,
    seeds: int | None, only: tuple[str, ...], share: float, threads: int, results: Path | None,
    known: bool, as_json: bool, only_list: bool,
) -> None:  # fmt: skip
    """Print, for each group, a row for each arm: its loss, and how far it is from its control."""
    there = groups()
    if odd := [name for name in names if name not in there]:
        raise click.UsageError(f"no arms '{odd[0]}'; known: {', '.join(there)}")
    if known and results is None:
        raise click.UsageError("--known prints what --results has; name that file")
    if only_list:
        for name in names or there:
            click.echo("\n".join([f"{name}:", *(f"  {arm}" for arm in there[name].ARMS)]))
        return
    from techniques_bench import ArmRunner
    from techniques_table import as_values, draw_table

    from smelt.evaluate.environment import cpu_model

    description: dict[str, Any] = {"processor": cpu_model(), "threads": threads, "split": split, "rows": rows}
    with tempfile.TemporaryDirectory() as space:
        shelf = Path(space) if results is None else results.with_suffix(".kept")
        bench = ArmRunner(model, data, task, split, (rows, texts or rows), threads, shelf)
        if not as_json:
            click.echo(f"{cpu_model()}; {threads} thread; {rows} rows of {split}")
        found = jobs(names or list(there), only, seeds, share)
        values = {}
        for group in run_jobs(found, Results(results), bench, known):
            values[group.name] = as_values(group)
            if not as_json:
                click.echo("\n" + draw_table(group, values[group.name]))
    if as_json:
        click.echo(json.dumps({**description, "groups": values}, indent=2))


if __name__ == "__main__":
    sys.path.insert(0, str(HERE))
    main()

"""Recipes with a search space, of the included translator's first rows, and a formula instead of runs."""

import gzip
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import smelt.configs
from smelt.pipeline.search.space import SearchSpace, read_space
from smelt.pipeline.search.study import Search, SearchOptions
from smelt.pipeline.search.trials import TrialResult
from tests.support.processes.postgres_server import postgres_server
from tests.support.shared_folders import make_once

ROWS = 300


def _write_quickstart(folder: Path) -> None:
    """Each plan reads all rows: thousands would take a second a point."""
    quickstart = Path(smelt.configs.__file__).parent / "quickstart"
    (folder / "data").mkdir(parents=True)
    (folder / "model").symlink_to(quickstart / "model")
    for path in (quickstart / "data").iterdir():
        with gzip.open(path, "rt") as rows, gzip.open(folder / "data" / path.name, "wt") as shortened:
            shortened.writelines(itertools.islice(rows, ROWS))


QUICKSTART = make_once("quickstart-rows", _write_quickstart)
RECIPE = f"""\
model: {QUICKSTART}/model
task: translation
data:
  train: {QUICKSTART}/data/train.jsonl.gz
  validation: {QUICKSTART}/data/validation.jsonl.gz
  test: {QUICKSTART}/data/test.jsonl.gz
stages:
  - prune: {{targets: [ffn], keep_ratio: {{search: [0.5, 0.9]}}}}
    optional: search
  - drop-layers: {{keep: {{search: {{choices: [[0, 1], [0, 2]]}}}}}}
  - quantize: {{scheme: {{search: {{choices: [int8-dynamic, int4]}}}}}}
  - onnx
score: {{quality: [bleu, chrf]}}
search:
  minimize: [latency, size]
  maximize: quality
  order: {{cut: [prune, drop-layers]}}
gates: {{bleu: {{max_degradation: 1.0}}}}
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "space.yaml"
    path.write_text(text)
    return path


def small(**changes: str) -> str:
    """The recipe with one parameter, or with some lines replaced."""
    text = RECIPE
    for old, new in {
        "  - drop-layers: {keep: {search: {choices: [[0, 1], [0, 2]]}}}\n": "",
        "  order: {cut: [prune, drop-layers]}\n": "",
        "\n    optional: search": "",
        **changes,
    }.items():
        assert old in text, old
        text = text.replace(old, new)
    return text


def size_space(
    folder: Path, keep: str = "[0.5, 0.9]", sampler: str = "", optional: bool = False, **changes: str
) -> SearchSpace:
    """One range and one choice; size is minimized while BLEU may fall by 1.

    keep: range of prune's keep_ratio. optional: prune may be absent. changes: as of `small`.
    """
    goal = f"size\n  sampler: {sampler}" if sampler else "size"
    changes |= {"[latency, size]\n  maximize: quality": goal, "[0.5, 0.9]": keep}
    if optional:
        changes["\n    optional: search"] = "\n    optional: search"
    return read_space(write(folder, small(**changes)))


@contextmanager
def study_url(kind: str, folder: Path) -> Iterator[str | None]:
    """The URL of a database that is sqlite or postgresql; None for that of a search's folder."""
    if kind == "postgresql":
        with postgres_server() as server:
            yield server.url
    else:
        yield f"sqlite:///{folder}/study.db" if kind == "sqlite" else None


def formula(params):
    """The result of a point: what keeps more is larger and loses less; int4 is half the size."""
    keep, four = params["prune.keep_ratio"], params["quantize.scheme"] == "int4"
    drop = 4 * (1 - keep) + 0.1 * four
    over = {"bleu": drop - 1.0}
    status = "infeasible" if over["bleu"] > 0 else "feasible"
    return TrialResult(status, {"size": keep * (50 if four else 100)}, over, steps=3, cached_steps=1)


def search(space, folder, trials=12, **options):
    return Search(space, SearchOptions(out=folder, trials=trials, **options))

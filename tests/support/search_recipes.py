"""Recipes with a search space, of the included translator's first rows, and a formula instead of runs."""

import gzip
import itertools
from pathlib import Path

import smelt.configs
from smelt.pipeline.search.study import Search, SearchOptions
from smelt.pipeline.search.trials import TrialResult
from tests.support.shared_folders import make_once

ROWS = 300


def _write_quickstart(folder: Path) -> None:
    """Each plan reads all rows: thousands would take a second a point."""
    whole = Path(smelt.configs.__file__).parent / "quickstart"
    (folder / "data").mkdir(parents=True)
    (folder / "model").symlink_to(whole / "model")
    for path in (whole / "data").iterdir():
        with gzip.open(path, "rt") as rows, gzip.open(folder / "data" / path.name, "wt") as few:
            few.writelines(itertools.islice(rows, ROWS))


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
  subject_to: {{bleu: {{max_drop: 1.0}}}}
  order: {{cut: [prune, drop-layers]}}
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


def formula(params):
    """The result of a point: what keeps more is larger and loses less; int4 is half the size."""
    keep, four = params["prune.keep_ratio"], params["quantize.scheme"] == "int4"
    drop = 4 * (1 - keep) + 0.1 * four
    over = {"bleu": drop - 1.0}
    status = "infeasible" if over["bleu"] > 0 else "feasible"
    return TrialResult(status, {"size": keep * (50 if four else 100)}, over, steps=3, cached_steps=1)


def search(space, folder, trials=12, **options):
    return Search(space, SearchOptions(out=folder, trials=trials, **options))

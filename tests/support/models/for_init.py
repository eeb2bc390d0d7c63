"""A tiny model of every family for `smelt init` to look at, and whether what it writes plans."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import every_family
import sentences
import seq2seq
import untrained
from once import made_once

from smelt.families.registry import BY_TASK, FAMILIES
from smelt.look.init_recipe import init_recipe
from smelt.planning.load import load_plan

# those that have to be told their languages have a test of their own
CASES = [(f, task) for task, known in BY_TASK.items() for f in known if f in every_family.OF_TEXTS]
CASES = [(f, task) for f, task in CASES if FAMILIES[f].languages != "codes"]


def models() -> dict[str, Path]:
    """Return model folders by family, `FAMILY-embedder`, an mBART, and `bare`, an encoder without a head."""
    home = made_once("for-init", _make)
    return {folder.name: folder / "m" for folder in home.iterdir()}


def model_for(models: dict[str, Path], family: str, task: str) -> Path:
    """Return the model of `family` that is for `task`: a sentence embedder is no classifier."""
    return models[f"{family}-embedder" if task == sentences.TASK else family]


def _make(home: Path) -> None:
    for family in untrained.CONFIGS:
        labels = ["0", "1"] if untrained.CONFIGS[family][0] == "text-classification" else []
        untrained.made(home / family, family, labels=labels)
    for family in every_family.CONFIGS:
        every_family.make(home / family / "m", family)
    for family in sentences.FAMILIES:
        (home / f"{family}-embedder").mkdir()
        sentences.embedder(home / f"{family}-embedder" / "m", family)
    seq2seq.bart(home / "mbart" / "m", kind="mbart")
    shutil.copytree(home / "bert" / "m", home / "bare" / "m")
    path = home / "bare" / "m" / "config.json"
    config = json.loads(path.read_text()) | {"architectures": ["BertModel"]}
    path.write_text(json.dumps({k: v for k, v in config.items() if k not in ("id2label", "problem_type")}))


def plans(model: Path, data: list[Any], path: Path, task: str | None = None) -> Any:
    """Write a recipe, plan it as it is and with its gates, and return the plan."""
    text, _ = init_recipe(str(model), data, str(path), task, force=True)
    plan = load_plan(path)
    assert not plan.blocked
    path.write_text(text.replace("\n# gates:", "\ngates:"))
    assert load_plan(path).gates
    return plan

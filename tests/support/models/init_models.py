"""A tiny model of every family for `smelt init` to look at, and whether what it writes plans."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from smelt.models.families.registry import FAMILIES, FAMILIES_BY_TASK
from smelt.pipeline.inspect.init_recipe import init_recipe
from smelt.pipeline.plan.load_plan import load_plan
from tests.support.models import embedders, every_family, masked, questions, taggers, untrained_models
from tests.support.shared_folders import make_once

# those that have to be told their languages have a test of their own
FAMILY_TASKS = [
    (f, task) for task, known in FAMILIES_BY_TASK.items() for f in known if f in every_family.TEXT_FAMILIES
]
FAMILY_TASKS = [(f, task) for f, task in FAMILY_TASKS if FAMILIES[f].language_selection != "codes"]


def make_models() -> dict[str, Path]:
    """Return models by name: families, `FAMILY-embedder`, `-masked`, `-tagger`, `-reader`, mBART, `bare`."""
    home = make_once("for-init", _write_models)
    return {folder.name: folder / "m" for folder in home.iterdir()}


def model_for(models: dict[str, Path], family: str, task: str) -> Path:
    """Return the model of `family` that is for `task`: a sentence embedder is no classifier."""
    suffixes = {
        embedders.TASK: "-embedder", masked.TASK: "-masked", taggers.TASK: "-tagger",
        questions.TASK: "-reader",
    }  # fmt: skip
    return models[f"{family}{suffixes.get(task, '')}"]


def _write_models(home: Path) -> None:
    for family in untrained_models.CONFIGS:
        labels = ["0", "1"] if untrained_models.CONFIGS[family][0] == "text-classification" else []
        untrained_models.make_untrained(home / family, family, labels=labels)
    for family in every_family.TEXT_FAMILIES.keys() - untrained_models.CONFIGS.keys():
        every_family.make_model(home / family / "m", family)
    for family in embedders.FAMILIES:
        (home / f"{family}-embedder").mkdir()
        embedders.write_embedder(home / f"{family}-embedder" / "m", family)
    for family in masked.FAMILIES:
        (home / f"{family}-masked").mkdir()
        masked.write_model(home / f"{family}-masked" / "m", family)
    for family in questions.FAMILIES:
        (home / f"{family}-reader").mkdir()
        questions.write_model(home / f"{family}-reader" / "m", family)
    for family in taggers.FAMILIES:
        (home / f"{family}-tagger").mkdir()
        taggers.write_model(
            home / f"{family}-tagger" / "m", family, ("O", "B-NAME", "I-NAME", "B-CITY", "I-CITY")
        )
    shutil.copytree(home / "bert" / "m", home / "bare" / "m")
    path = home / "bare" / "m" / "config.json"
    config = json.loads(path.read_text()) | {"architectures": ["BertModel"]}
    path.write_text(json.dumps({k: v for k, v in config.items() if k not in ("id2label", "problem_type")}))


def plan_recipe(model: Path, data: list[Any], path: Path, task: str | None = None) -> Any:
    """Write a recipe, plan it as it is and with its gates, and return the plan."""
    text, _ = init_recipe(str(model), data, str(path), task, force=True)
    plan = load_plan(path)
    assert not plan.blocked_steps
    path.write_text(text.replace("\n# gates:", "\ngates:"))
    assert load_plan(path).gates
    return plan

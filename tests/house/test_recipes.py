"""Every recipe that ships can be planned, and every recipe of the benchmarks can be read."""

from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from smelt.pipeline.recipe.yaml_file import dump_yaml

pytestmark = pytest.mark.quick

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = sorted((ROOT / "configs").glob("*.yaml"))
BENCHMARKS = sorted((ROOT / "benchmarks").rglob("*.yaml"))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_recipe_is_found_by_name_and_planned(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from smelt.pipeline.plan.load_plan import load_plan

    monkeypatch.chdir(Path.home())  # a recipe must not lean on the folder that smelt is started in
    plan = load_plan(path.stem, (), None)
    assert plan.path == path
    assert len(plan.steps) >= 1


def at_first_values(value: Any) -> Any:
    """A recipe with the lower bound or first choice of what is searched."""
    if isinstance(value, list):
        return [at_first_values(item) for item in value]
    if not isinstance(value, dict):
        return value
    if set(value) == {"search"}:
        choices = value["search"]
        return (
            choices[0] if isinstance(choices, list) else choices.get("low", *choices.get("choices", ())[:1])
        )
    return {k: at_first_values(v) for k, v in value.items() if (k, v) != ("optional", "search")}


@pytest.mark.parametrize("path", BENCHMARKS, ids=lambda path: path.stem)
def test_benchmark_recipe_is_valid(path: Path) -> None:
    from smelt.pipeline.recipe.recipe import METRICS_BY_TASK
    from tests.support.parsed_recipes import parse_recipe

    text = path.read_text()
    if YAML(typ="safe").load(text).get("search"):
        value = at_first_values(YAML(typ="safe").load(text))
        del value["search"]
        text = dump_yaml(value)
    recipe = parse_recipe(text, path)
    assert set(recipe.score.quality) <= set(METRICS_BY_TASK[recipe.task])

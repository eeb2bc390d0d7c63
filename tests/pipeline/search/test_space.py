"""The search space of a recipe: parameters, the recipe of a point, and errors named with their lines."""

from dataclasses import replace
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from smelt.core.errors import InputError
from smelt.pipeline.plan.load_plan import load_plan
from smelt.pipeline.search.space import grid_points, read_space
from tests.support.expected_errors import error_codes
from tests.support.search_recipes import QUICKSTART, RECIPE, small, write


@pytest.fixture(scope="module")
def space(tmp_path_factory):
    text = RECIPE.replace("keep: {search: {choices: [[0, 1], [0, 2]]}}", "decoder_layers: {search: [1, 2]}")
    return read_space(write(tmp_path_factory.mktemp("space"), text))


def test_parameters_and_objectives_are_read_from_recipe(space):
    parameters = {
        parameter.name: (parameter.kind, parameter.labels or (parameter.low, parameter.high))
        for parameter in space.parameters
    }
    assert parameters == {
        "prune": ("used", (True, False)),
        "prune.keep_ratio": ("float", (0.5, 0.9)),
        "drop-layers.decoder_layers": ("int", (1, 2)),
        "quantize.scheme": ("choice", ("int8-dynamic", "int4")),
        "cut": ("order", ('["prune", "drop-layers"]', '["drop-layers", "prune"]')),
    }
    goals = [(parameter.name, parameter.maximize) for parameter in space.objectives]
    assert goals == [("latency", False), ("size", False), ("bleu", True)]
    assert (space.leaf, space.sampler) == ("onnx", "nsga2")
    last = replace(space, plan=replace(space.plan, steps=space.plan.steps[:-1]))  # quantize
    assert len(str(last).splitlines()) == len(str(space).splitlines()) + 1  # it cannot be deployed


def test_recipe_at_point_has_no_search_keys(space, tmp_path):
    point = space.defaults() | {"prune.keep_ratio": 0.7, "cut": '["drop-layers", "prune"]'}
    value = space.recipe_at(point).value
    assert [next(iter(item)) for item in value["stages"]] == ["drop-layers", "prune", "quantize", "onnx"]
    assert value["stages"][1]["prune"]["keep_ratio"] == 0.7
    assert value["gates"] == {"bleu": {"max_degradation": 1.0}, "on": "validation"}
    without = space.recipe_at(point | {"prune": False}).value
    assert [item["name"] for item in without["stages"]] == ["drop-layers", "quantize", "onnx"]
    # the file of a point runs from another folder, and plans the same steps with the same settings
    moved = tmp_path / "elsewhere" / "point.yaml"
    moved.parent.mkdir()
    moved.write_text(space.plan_at(point).portable_recipe())
    planned = {step.name: step.settings for step in load_plan(moved).steps}
    assert planned == {step.name: step.settings for step in space.plan_at(point).steps}


def test_relative_paths_are_absolute_in_recipe_of_point(tmp_path):
    (tmp_path / "q").symlink_to(QUICKSTART)
    space = read_space(write(tmp_path, small().replace(str(QUICKSTART), "q")))
    value = YAML(typ="safe").load(space.plan_at(space.defaults()).portable_recipe())
    assert Path(value["model"]).samefile(QUICKSTART / "model")
    assert all(Path(path).is_absolute() for path in (value["model"], *value["data"].values()))


def test_written_recipe_of_point_includes_custom_metrics(tmp_path):
    (tmp_path / "own_of_point.py").write_text("def f(p, r, s): return [0.5] * len(p)\n")
    text = small(**{"[bleu, chrf]": "[bleu, 'own_of_point:f']"})
    space = read_space(write(tmp_path, text))
    moved = tmp_path / "recipes" / "trial-0000.yaml"
    space.write_recipe(space.defaults(), moved)
    (tmp_path / "own_of_point.py").unlink()
    assert load_plan(moved).recipe.score.quality == ("bleu", "own_of_point:f")


def test_changed_space_or_objective_changes_identity(tmp_path):
    base = read_space(write(tmp_path, small()))
    assert base.identity == read_space(write(tmp_path, small())).identity
    for old, new in (
        ("[0.5, 0.9]", "[0.5, 0.8]"),
        ("max_degradation: 1.0", "max_degradation: 2.0"),
        ("maximize: quality", ""),
    ):
        assert read_space(write(tmp_path, small().replace(old, new))).identity != base.identity


@pytest.mark.parametrize(
    ("old", "new", "codes"),
    [
        ("[0.5, 0.9]", "{choices: []}", ["empty-choices"]),
        ("[0.5, 0.9]", "{choices: [0.5, 0.5]}", ["duplicate-choice"]),
        ("[0.5, 0.9]", "[0.9, 0.5]", ["wrong-search-range"]),
        ("[0.5, 0.9]", "{low: 0, high: 0.5, log: true}", ["wrong-search-range"]),
        ("[0.5, 0.9]", "0.5", ["wrong-search-range"]),
        ("[0.5, 0.9]", "[0.5, 1.5]", ["wrong-value"]),  # refused by the setting itself
        ("int8-dynamic, int4", "int8-dynamic, int5", ["wrong-value"]),
        ("minimize: [latency, size]\n  maximize: quality", "trials: 3", ["missing-setting"]),
        ("[latency, size]", "[latency, speed]", ["metric-not-scored"]),
        ("[latency, size]", "[rouge1]", ["metric-not-scored"]),
        ("[latency, size]", "[bleu]", ["wrong-direction"]),
        ("quality: [bleu, chrf]", "quality: [bleu], latency: false", ["settings-conflict"]),
        ("{bleu: {max_degradation: 1.0}}", "{blue: {max_degradation: 1.0}}", ["unknown-metric"]),
        ("{bleu: {max_degradation: 1.0}}", "{bleu: {}}", ["missing-setting"]),
        ("{bleu: {max_degradation: 1.0}}", "{bleu: {min: 101}}", ["unreachable-limit"]),
        ("{bleu: {max_degradation: 1.0}}", "{size_bytes: {max: 0}}", ["unreachable-limit"]),
        ("{bleu: {max_degradation: 1.0}}", "{bleu: {max_degradation: 1.0, at: prune}}", ["wrong-value"]),
        ("  - onnx\n", "  - onnx: {}\n    optional: search\n", ["not-a-chain"]),
        ("  - onnx\n", "  - onnx: {}\n    from: prune\n", ["not-a-chain"]),
        ("  minimize:", "  order: {cut: [prune, onnx]}\n  minimize:", ["wrong-order-group"]),
        ("  minimize:", "  order: {cut: [prune, prun]}\n  minimize:", ["unknown-step"]),
        ("  minimize:", "  order: {prune: [prune, quantize]}\n  minimize:", ["wrong-order-group"]),
        ("  minimize:", "  order: {a: &b [prune, quantize], b: *b}\n  minimize:", ["wrong-order-group"]),
        ("[0.5, 0.9]", "{low: 0.5, high: 0.9, step: 0.5}", ["wrong-search-range"]),
        (f"  validation: {QUICKSTART}/data/validation.jsonl.gz\n", "", ["missing-data"]),
    ],
)  # fmt: skip
def test_invalid_search_spaces_are_rejected(tmp_path, old, new, codes):
    with pytest.raises(InputError) as raised:
        read_space(write(tmp_path, small().replace(old, new)))
    assert error_codes(raised.value) == codes


def test_all_search_errors_are_reported_together_with_lines(tmp_path):
    text = small()
    for old, new in (
        ("[0.5, 0.9]", "[0.9, 0.5]"),
        ("int8-dynamic, int4", "int8-dynamic, int5"),
        ("[latency, size]", "[latency, speed]"),
        ("{bleu: {max_degradation: 1.0}}", "{blue: {max_degradation: 1.0}}"),
        ("minimize:", "trial: 3\n  minimize:"),
    ):
        text = text.replace(old, new)
    path = write(tmp_path, text)
    with pytest.raises(InputError) as raised:
        read_space(path)
    errors_by_setting = {error.setting: error for error in raised.value.messages}
    assert {setting: error.code for setting, error in errors_by_setting.items()} == {
        "stages[0].prune.keep_ratio.search": "wrong-search-range",
        "quantize.scheme": "wrong-value",
        "search.trial": "unknown-setting",
        "search.minimize[1]": "metric-not-scored",
        "gates.blue": "unknown-metric",
    }
    assert len(raised.value.messages) == 5
    lines = path.read_text().splitlines()
    assert "blue" in lines[errors_by_setting["gates.blue"].line - 1]


def test_custom_metric_with_lower_is_better_is_minimized(tmp_path, monkeypatch):
    (tmp_path / "own_loss.py").write_text("def loss(prediction, references):\n    return 1.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    text = small().replace("chrf]", '"own_loss:loss": {greater_is_better: false}]')
    text = text.replace("[latency, size]", "[size, own_loss:loss]")
    assert [objective.name for objective in read_space(write(tmp_path, text)).objectives][
        1
    ] == "own_loss:loss"


def test_upper_bound_is_highest_reachable_step(tmp_path):
    text = small().replace("[0.5, 0.9]", "{low: 0.5, high: 1.05, step: 0.2}")  # 1.05 would be refused
    keep = read_space(write(tmp_path, text)).parameters[0]
    assert keep.corner_values() == (0.5, pytest.approx(0.9))
    floating = replace(keep, low=0.1, high=0.7, step=0.1)
    assert max(point[keep.name] for point in grid_points([floating])) == 0.7


def test_recipe_without_ranges_is_rejected(tmp_path):
    text = (
        small()
        .replace("{search: [0.5, 0.9]}", "0.5")
        .replace("{search: {choices: [int8-dynamic, int4]}}", "int4")
    )
    with pytest.raises(InputError) as raised:
        read_space(write(tmp_path, text))
    assert error_codes(raised.value) == ["empty-search-space"]


def test_rejected_value_is_reported_with_line(tmp_path):
    path = write(tmp_path, small().replace("[0.5, 0.9]", "[0.5, 1.5]"))
    with pytest.raises(InputError) as raised:
        read_space(path)
    line = (
        path.read_text().splitlines().index(next(x for x in path.read_text().splitlines() if "prune" in x))
        + 1
    )
    assert f"{path}:{line}:" in str(raised.value)
    assert raised.value.as_message().setting == "prune.keep_ratio"

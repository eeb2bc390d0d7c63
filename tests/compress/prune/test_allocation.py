"""`prune` with a budget: met, said, and refused where it leaves nothing."""

import json

import pytest
from transformers import AutoTokenizer

from smelt.compress.drop_layers.layer_selection import keep_layers
from smelt.compress.prune import latency_costs
from smelt.compress.prune.budget import BudgetAllocation
from smelt.compress.prune.costs import resolve_sequence_length
from smelt.compress.prune.heads_and_neurons import target_groups
from smelt.compress.prune.settings import PruneSettings, least_parameters
from smelt.compress.prune.stage import Prune
from smelt.core.errors import InputError
from smelt.models.checkpoint import count_stored_parameters, load_model
from smelt.models.families.registry import family_of
from smelt.models.model_size import read_model_size
from smelt.pipeline.plan.load_plan import load_plan
from tests.support import harness
from tests.support.expected_errors import message_locations, raises_code, raises_setting_codes
from tests.support.models import every_family, images, tiny
from tests.support.pairs.matrix import matrix_cells

MEASURES = {
    "parameters": {"parameters": 0.75},
    "flops": {"flops": 0.75, "sequence_length": 10},
    "latency": {"latency": 0.75, "sequence_length": 10, "measure_on": "ort-cpu"},
}


def weights(part):
    """A second for each weight: products this small take no longer than larger ones."""
    return sum(
        product.num_weights
        for product in (*part.input_layers, *([part.output_layer] if part.output_layer else []))
    )


@pytest.mark.parametrize(
    ("family", "measure"), matrix_cells(["t5", "qwen2", "modernbert", "gpt2", "mpnet"], list(MEASURES))
)
def test_budget_is_met_and_reported(family, measure, monkeypatch, tmp_path):
    monkeypatch.setattr(
        latency_costs, "time_parts", lambda parts, on, threads: [weights(part) for part in parts]
    )
    source = every_family.model_with_layers(family, 3)
    settings = PruneSettings(
        budget=MEASURES[measure], calibration_samples=4, reconstruct=False, multiple_of=4
    )
    ctx = every_family.run_stage(Prune(), settings, source, family, tmp_path / "out")
    details = ctx.details["budget"]
    assert (details["measure"], details["asked"]) == (measure, 0.75)
    assert 0.6 < details["left"] <= 0.75
    assert details["reached"] == pytest.approx(details["left"] * details["before"], rel=1e-3)
    model, _ = load_model(ctx.out)
    assert count_stored_parameters(model) < count_stored_parameters(load_model(source)[0])
    if measure == "parameters":
        assert details["reached"] == count_stored_parameters(model) == ctx.details["parameters_after"]


@pytest.mark.parametrize("importance", ["magnitude", "taylor", "obs"])
def test_budget_works_with_any_importance(importance, tmp_path):
    targets = ["ffn"] if importance == "magnitude" else ["heads", "ffn"]
    settings = PruneSettings(
        budget={"parameters": 0.8},
        importance=importance,
        targets=targets,
        calibration_samples=4,
        reconstruct=importance == "obs",
    )
    ctx = every_family.run_stage(
        Prune(), settings, every_family.model_with_layers("bert", 3), "bert", tmp_path / "out"
    )
    assert 0.75 < ctx.details["budget"]["left"] <= 0.8


def test_budget_unreachable_with_heads_alone_is_rejected(tmp_path):
    half = {"parameters": 0.5}
    settings = PruneSettings(budget=half, targets=["heads"], importance="random", reconstruct=False)
    with raises_code("budget-too-small", InputError) as caught:
        every_family.run_stage(
            Prune(), settings, every_family.model_with_layers("bert", 3), "bert", tmp_path / "out"
        )
    assert caught.value.setting == "budget.parameters"


@pytest.mark.parametrize(("settings", "code", "named"), [
    ({"budget": {}}, "missing-setting", "parameters, flops, latency"),
    ({"budget": {"parameters": 0.5, "latency": 0.5}}, "settings-conflict", "parameters and latency"),
    ({"budget": {"parameters": 1.0}}, "less_than", "1"),
    ({"budget": {"parameters": 0.5, "sequence_length": 9}}, "unused-setting", "sequence_length"),
    ({"budget": {"flops": 0.5, "measure_on": "torch"}}, "unused-setting", "measure_on"),
    ({"budget": {"parameters": 0.5}, "keep_ratio": 0.5, "scope": "global"}, "settings-conflict",
     "keep_ratio and scope"),
    ({"budget": {"parameters": 0.5}, "importance": "magnitude"}, "wrong-importance", "importance"),
    ({"importance": "obs", "reconstruct": False}, "settings-conflict", "reconstruct"),
])  # fmt: skip
def test_invalid_budget_settings_are_rejected(settings, code, named):
    with raises_setting_codes(code) as caught:
        PruneSettings.model_validate(settings)
    assert named in caught.value.errors()[0]["msg"]


def test_budget_defaults_to_obs_or_without_refit_to_fisher():
    assert PruneSettings.model_validate({"budget": {"parameters": 0.5}}).importance == "obs"
    without_refit = {"budget": {"parameters": 0.5}, "reconstruct": False}
    assert PruneSettings.model_validate(without_refit).importance == "fisher"
    options = {"budget": {"parameters": 0.5}, "importance": "taylor"}
    assert PruneSettings.model_validate(options).importance == "taylor"
    assert PruneSettings.model_validate({}).importance == "taylor"


@pytest.mark.parametrize("family", ["t5", "gpt2"])
def test_sequence_length_is_mean_length_of_data(family, tmp_path):
    """Counted here by the tokenizer alone; running text has no texts, and takes the default."""
    source = every_family.model_with_layers(family, 3)
    settings = PruneSettings(
        budget={"flops": 0.75}, calibration_samples=4, reconstruct=False, importance="random"
    )
    ctx = every_family.run_stage(Prune(), settings, source, family, tmp_path / "out")
    expected = resolve_sequence_length(load_model(source)[0], None)
    if family != "gpt2":
        tokenizer = AutoTokenizer.from_pretrained(source)
        texts = [text for e in ctx.data["train"].examples for text in (e.text, *e.references)]
        expected = round(sum(len(tokenizer(text).input_ids) for text in texts) / len(texts))
        assert 3 < expected < 30
    assert ctx.details["budget"]["sequence_length"] == expected


@pytest.mark.parametrize("targets", [["heads"], ["ffn"], ["layers", "heads", "ffn"]])
@pytest.mark.parametrize("family", every_family.DISTINCT_FAMILIES)
def test_plan_refuses_no_budget_that_can_be_reached(family, targets):
    """The plan counts no more than what the smallest shape has: not positions, norms and last heads."""
    folder = every_family.model_with_layers(family, 2)
    size = read_model_size(folder, json.loads((folder / "config.json").read_text()))
    settings = PruneSettings(targets=targets, budget={"parameters": 0.5}, importance="fisher")
    model, _ = load_model(folder)
    for stack in family_of(model).stacks(model.config.to_dict()) if "layers" in targets else []:
        keep_layers(model, [], stack.name, [0], "first", stage="prune")
    allocation = BudgetAllocation(model, target_groups(model, settings), None, settings, None)
    assert 0.2 * allocation.least < least_parameters(settings, size) <= allocation.least


def test_plan_reports_budget_of_parameters_below_smallest_shape(tmp_path):
    tiny.write_bert(tmp_path / "model")
    tiny.write_labeled(tmp_path / "rows.jsonl")
    data = "data: {train: rows.jsonl, test: rows.jsonl}"
    head = f"model: {tmp_path / 'model'}\ntask: text-classification\n{data}"
    recipe = tmp_path / "recipe.yaml"

    def errors(*stages):
        recipe.write_text("\n".join([head, "stages:", *(f"  - {stage}" for stage in stages)]) + "\n")
        try:
            load_plan(recipe)
        except InputError as error:
            return message_locations(error.messages)
        return []

    line = 5
    prune = "prune: {targets: [layers, heads, ffn], budget: {parameters: RATIO}}"
    assert errors(prune.replace("RATIO", "0.5")) == []
    expected = [("budget-too-small", "stages[0].prune.budget.parameters", line)]
    assert errors(prune.replace("RATIO", "0.01")) == expected
    assert errors(prune.replace("RATIO", "0.01").replace("layers,", "layers, width,")) == []
    assert errors("trim-vocabulary: {}", prune.replace("RATIO", "0.01")) == []  # what is left is not known
    (tmp_path / "model" / "structure.json").write_text('{"schema": 1, "edits": []}')
    assert errors(prune.replace("RATIO", "0.01")) == []


@pytest.mark.parametrize("measure", ["flops", "latency"])
def test_budget_of_image_model_counts_patches(measure, monkeypatch, tmp_path):
    monkeypatch.setattr(
        latency_costs, "time_parts", lambda parts, on, threads: [weights(part) for part in parts]
    )
    source = images.write_model(tmp_path / "model", num_hidden_layers=1)
    data = images.read_rows(images.write_rows(tmp_path / "rows.jsonl"))
    settings = PruneSettings(budget={measure: 0.7}, importance="random", reconstruct=False)
    ctx = harness.run_stage(Prune(), settings, source, tmp_path / "out", images.TASK, data)
    assert ctx.details["budget"]["sequence_length"] == 4 * 4 + 1
    assert ctx.details["budget"]["left"] <= 0.7

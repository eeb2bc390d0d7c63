"""`prune` with layers and width within a budget: the path of the search, its loss, the model."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy.stats import ttest_rel
from transformers import AutoTokenizer

from smelt.compress.drop_layers.settings import DropLayersSettings
from smelt.compress.drop_layers.stage import DropLayers
from smelt.compress.prune import latency_costs, shape_search
from smelt.compress.prune.budget import BudgetAllocation
from smelt.compress.prune.costs import count_multiplications
from smelt.compress.prune.heads_and_neurons import target_groups
from smelt.compress.prune.settings import PruneSettings
from smelt.compress.prune.stage import Prune
from smelt.core.errors import InputError
from smelt.core.messages import message_codes
from smelt.data.splits import Columns, Example, Split, Windows, spread_indices
from smelt.models import text_rules
from smelt.models.checkpoint import count_stored_parameters, load_model
from smelt.models.hidden_width import hidden_width
from smelt.models.model_size import count_parameters
from smelt.stage import QuantizedInput
from smelt.tasks.encode_split import encode_split
from smelt.tasks.read_split import read_split
from tests.support import harness
from tests.support.expected_errors import raises_code, raises_setting_codes
from tests.support.models import every_family, tiny
from tests.support.usability_checks import check_save_and_load

TASK = "text-classification"
ALL_TARGETS = ["layers", "width", "heads", "ffn"]


def prune_shape(source, family, out, ratio, **settings):
    options = {"targets": ALL_TARGETS, "budget": {"parameters": ratio}, "calibration_samples": 4}
    return every_family.run_stage(
        Prune(), PruneSettings.model_validate(options | settings), source, family, out
    )


def test_search_takes_best_step_and_result_equals_separate_stages(tmp_path, monkeypatch):
    """With a loss that prefers two of three layers and all but eight channels."""
    family = "bert"
    source = every_family.model_with_layers(family, 3)
    before, _ = load_model(source)
    width = hidden_width(before)

    def loss(model, *_):
        return abs(model.config.num_hidden_layers - 2) + abs(hidden_width(model) - width + 8) / 8

    monkeypatch.setattr(shape_search, "mean_loss", loss)
    weights_only = {"importance": "random", "reconstruct": False, "multiple_of": 8}
    ctx = prune_shape(source, family, tmp_path / "out", 0.5, **weights_only)
    visited = [(len(c["kept_layers"]["layers"]), c["width"], c["loss"]) for c in ctx.details["candidates"]]
    assert visited == [
        (3, width, 2), (2, width, 1), (3, width - 8, 1), (1, width, 2), (2, width - 8, 0),
        (1, width - 8, 1), (2, width - 16, 1),
    ]  # fmt: skip
    layers, limit = ctx.details["kept_layers"]["layers"], 0.5 * count_stored_parameters(before)
    narrow = {"targets": ["width"], "keep_ratio": (width - 8) / width, "calibration_samples": 4}
    narrowed = every_family.run_stage(
        Prune(),
        PruneSettings.model_validate(narrow | {"reconstruct": False}),
        source,
        family,
        tmp_path / "narrowed",
    ).out
    dropped = every_family.run_stage(
        DropLayers(), DropLayersSettings(layers=layers), narrowed, family, tmp_path / "dropped"
    ).out
    ratio = limit / count_stored_parameters(load_model(dropped)[0])
    units = {"budget": {"parameters": ratio}, **weights_only}
    last = every_family.run_stage(
        Prune(), PruneSettings.model_validate(units), dropped, family, tmp_path / "last"
    )
    assert last.details["kept_neurons"] == ctx.details["kept_neurons"]
    assert hidden_width(load_model(ctx.out)[0]) == ctx.details["width"] == width - 8
    torch.testing.assert_close(
        harness.logits(load_model(ctx.out)[0]), harness.logits(load_model(last.out)[0])
    )
    assert limit * 0.9 < count_stored_parameters(load_model(ctx.out)[0]) <= limit


@pytest.mark.parametrize(("spread", "layers"), [(0.0, 1), (1.0, 3)])
def test_smaller_shape_is_taken_if_loss_is_significantly_smaller(spread, layers, tmp_path, monkeypatch):
    """Each removed layer reduces the mean loss by 0.01; that of a sample changes by `spread`."""
    source, signs = every_family.model_with_layers("bert", 3), itertools.cycle((1, -1))

    def loss(model, *_):
        removed = 3 - model.config.num_hidden_layers
        return 1 - removed * (0.01 + spread * next(signs))

    monkeypatch.setattr(shape_search, "mean_loss", loss)
    data = read_split(str(tiny.write_labeled(tmp_path / "rows.jsonl", 60)), TASK, Columns(), tmp_path)
    settings = PruneSettings.model_validate(
        {"targets": ["layers", "heads", "ffn"], "budget": {"parameters": 0.5}, "calibration_samples": 8}
    )
    ctx = harness.run_stage(Prune(), settings, source, tmp_path / "out", TASK, data)
    losses = [candidate["loss"] for candidate in ctx.details["candidates"]]
    assert losses == pytest.approx([1, 0.99, 0.98][: len(losses)])
    assert len(ctx.details["kept_layers"]["layers"]) == layers


@pytest.mark.parametrize("num_candidates", [1, 3])
@pytest.mark.parametrize("count", [1, 2, 5, 40])
def test_smaller_loss_is_significant_by_paired_t_test_of_scipy(count, num_candidates):
    search, random = object.__new__(shape_search._ShapeSearch), np.random.default_rng(count)
    search._rows, search._weights = [{}] * count, np.ones(count)
    best = SimpleNamespace(losses=random.normal(size=count))
    decisions = set()
    for shift in np.linspace(-3, 1, 41):
        losses = best.losses + shift + random.normal(size=count)
        p_value = ttest_rel(losses, best.losses, alternative="less").pvalue if count > 1 else 1.0
        expected = bool(p_value < 0.025 / num_candidates)
        assert search._is_better(SimpleNamespace(losses=losses), best, num_candidates) == expected
        decisions.add(expected)
    assert decisions == ({False, True} if count > 2 else {False} if count == 1 else decisions)


def test_reported_loss_is_that_of_written_model_on_samples_held_back(tmp_path):
    """Transformers' own loss on the samples that nothing was calibrated on."""
    source = every_family.model_with_layers("bert", 2)
    data = read_split(str(tiny.write_labeled(tmp_path / "rows.jsonl", 60)), TASK, Columns(), tmp_path)
    settings = PruneSettings.model_validate(
        {"targets": ALL_TARGETS, "budget": {"parameters": 0.7}, "calibration_samples": 8}
    )
    ctx = harness.run_stage(Prune(), settings, source, tmp_path / "out", TASK, data)
    assert ctx.details["budget"]["left"] <= 0.7
    assert ctx.details["parameters_after"] == count_stored_parameters(load_model(ctx.out)[0])
    tokenizer, model = AutoTokenizer.from_pretrained(source), load_model(ctx.out)[0]
    losses = []
    for index in spread_indices(60, 6, seed=0):
        example = data.examples[index]
        labels = torch.tensor([int(example.label)])
        with torch.no_grad():
            losses.append(float(model(**tokenizer(example.text, return_tensors="pt"), labels=labels).loss))
    candidates, shape = ctx.details["candidates"], ("kept_layers", "width")
    assert len(candidates) > 2
    (chosen,) = (c for c in candidates if all(c[name] == ctx.details[name] for name in shape))
    assert chosen["loss"] == pytest.approx(sum(losses) / 6, rel=1e-4)


def test_samples_that_compare_candidates_are_in_no_calibration(monkeypatch, tmp_path):
    seen = {}
    monkeypatch.setattr(
        shape_search,
        "load_calibration_samples",
        lambda model, src, count, ctx, *_, **__: seen.update(ctx.data),
    )
    monkeypatch.setattr(shape_search, "spread_indices", lambda *_: [1, 3, 5])
    split = Split("texts", tuple(Example(str(number), label=number % 2) for number in range(30)))
    ctx, _ = shape_search._hold_back(None, None, harness.make_context(tmp_path, TASK, {"train": split}))
    assert [example.text for example in seen["train"].examples] == ["1", "3", "5"]
    others = [str(number) for number in range(30) if number not in (1, 3, 5)]
    assert [example.text for example in ctx.data["train"].examples] == others
    assert message_codes(ctx.warnings) == ["few-held-back-samples"]


@pytest.mark.parametrize(("num_windows", "num_held_back", "codes"), [
    (80, 8, []), (79, 7, ["few-held-back-samples"]), (9, 0, ["few-held-back-samples"]),
])  # fmt: skip
def test_last_windows_of_running_text_are_held_back(num_windows, num_held_back, codes, tmp_path):
    """The text is one sample: what counts is how many windows it has."""
    folder, windows = every_family.model_with_layers("gpt2", 1), Windows(length=8)
    source, task = tiny.as_artifact(folder, "language-modeling"), "language-modeling"
    model, tokenizer = load_model(folder)[0], AutoTokenizer.from_pretrained(folder)
    ids = tokenizer("one two three " * 8 * num_windows).input_ids[: 8 * num_windows + 1]
    split = Split("text", (Example(tokenizer.decode(ids)),), windows=windows)
    encoded = encode_split(split, model.config, tokenizer, harness.make_context(tmp_path, task))
    assert len(encoded) == num_windows
    ctx, judging = shape_search._hold_back(
        model, source, harness.make_context(tmp_path, task, {"train": split})
    )
    rest = encode_split(ctx.data["train"], model.config, tokenizer, ctx)
    assert rest == encoded[: num_windows - num_held_back]
    assert judging.num_samples == (num_held_back or num_windows)
    assert message_codes(ctx.warnings) == codes


@pytest.mark.parametrize(("num_layers", "is_spent"), [(2, False), (3, True)])
def test_unspent_budget_has_a_warning(num_layers, is_spent, monkeypatch, tmp_path):
    """With a loss that prefers so many of three layers; two cost less than three quarters."""
    monkeypatch.setattr(
        shape_search, "mean_loss", lambda model, *_: abs(model.config.num_hidden_layers - num_layers)
    )
    source = every_family.model_with_layers("bert", 3)
    options = {"targets": ["layers", "heads", "ffn"], "importance": "random", "reconstruct": False}
    ctx = prune_shape(source, "bert", tmp_path / "out", 0.95, multiple_of=1, **options)
    budget = ctx.details["budget"]
    assert (budget["left"] > 0.9 * 0.95) == is_spent
    assert ("budget-not-spent" in message_codes(ctx.warnings)) != is_spent


def test_search_tokenizes_running_text_once(monkeypatch, tmp_path):
    texts, cut = [], text_rules.cut_windows

    def recorded(split, *arguments, **options):
        texts.append(split)
        return cut(split, *arguments, **options)

    monkeypatch.setattr(text_rules, "cut_windows", recorded)
    source = every_family.model_with_layers("gpt2", 3)
    ctx = prune_shape(source, "gpt2", tmp_path / "out", 0.9)
    assert len(ctx.details["candidates"]) > 2
    assert len(texts) == 1


@pytest.mark.parametrize(("family", "targets"), [
    ("marian", ["layers", "heads", "ffn"]), ("qwen3", ALL_TARGETS), ("gpt2", ["width", "ffn"])
])  # fmt: skip
def test_budget_below_heads_and_neurons_starts_at_fewest_steps_that_meet_it(family, targets, tmp_path):
    source = every_family.model_with_layers(family, 3)
    settings = PruneSettings.model_validate({"targets": targets, "budget": {"parameters": 0.5}})
    full_model, _ = load_model(source)
    heads_and_neurons = BudgetAllocation(
        full_model, target_groups(full_model, settings), None, settings, None
    )
    ratio = 0.95 * heads_and_neurons.least / count_stored_parameters(full_model)
    ctx = prune_shape(source, family, tmp_path / "out", ratio, targets=targets, importance="fisher")
    losses = [candidate["loss"] for candidate in ctx.details["candidates"]]
    assert losses[0] is None
    assert min(loss for loss in losses if loss is not None) < float("inf")
    model, _ = load_model(ctx.out)
    budget = ctx.details["budget"]
    assert budget["reached"] == ctx.details["parameters_after"] == count_parameters(ctx.out)
    assert budget["before"] == ctx.details["parameters_before"] == count_parameters(source)
    assert budget["left"] <= ratio
    kept_layers = ctx.details["kept_layers"].values()
    assert budget["units"]["layers"] == [3 * len(kept_layers), sum(map(len, kept_layers))]
    tables = [each.get_input_embeddings().weight for each in (full_model, model)]
    widths = [table.shape[1] for table in tables]
    assert budget["units"].get("width") == (widths if "width" in targets else None)
    for target, units, details in (("heads", "heads", "kept_heads"), ("ffn", "neurons", "kept_neurons")):
        before, after = budget["units"][units]
        assert after == sum(ctx.details[details].values()) <= before or target not in targets
    check_save_and_load(ctx.out, tmp_path / "saved")


def test_budget_below_smallest_shape_is_rejected_before_search(monkeypatch, tmp_path):
    source = every_family.model_with_layers("bert", 2)
    monkeypatch.setattr(shape_search, "ablation_losses", None)
    with raises_code("budget-too-small", InputError) as caught:
        prune_shape(source, "bert", tmp_path / "out", 0.01, importance="fisher")
    assert caught.value.setting == "budget.parameters"


def test_layers_are_chosen_once_for_all_widths(monkeypatch, tmp_path):
    chosen, losses = [], shape_search.ablation_losses

    def recorded(model, batches, without, ctx, num_trials):
        chosen.append(num_trials)
        return losses(model, batches, without, ctx, num_trials)

    monkeypatch.setattr(shape_search, "ablation_losses", recorded)
    source = every_family.model_with_layers("bert", 3)
    with raises_code("budget-too-small", InputError):
        monkeypatch.setattr(shape_search._ShapeSearch, "_require_reachable", lambda _: None)
        prune_shape(source, "bert", tmp_path / "out", 0.01, importance="fisher")
    assert chosen == [3, 2]


@pytest.mark.parametrize(
    "budget", [{"flops": 0.6, "sequence_length": 8}, {"latency": 0.6, "sequence_length": 8}]
)
def test_flops_and_latency_are_compared_with_original_model(budget, monkeypatch, tmp_path):
    """A second for each weight of the timed layers."""

    timed_parts = []

    def seconds(parts, on, threads):
        timed_parts.extend(parts)
        layers = [[*part.input_layers, *([part.output_layer] if part.output_layer else [])] for part in parts]
        return [float(sum(layer.num_weights for layer in timed)) for timed in layers]

    monkeypatch.setattr(latency_costs, "time_parts", seconds)
    source = every_family.model_with_layers("bert", 3)
    ctx = prune_shape(source, "bert", tmp_path / "out", 0.5, budget=budget, importance="fisher")
    details = ctx.details["budget"]
    model, _ = load_model(source)
    if "flops" in budget:
        assert details["before"] == count_multiplications(model, 8)
        assert details["reached"] == count_multiplications(load_model(ctx.out)[0], 8)
    assert details["reached"] == pytest.approx(details["left"] * details["before"], rel=1e-3)
    assert details["left"] <= 0.6
    assert len(timed_parts) == len(set(timed_parts))  # no part of another candidate is timed again
    assert bool(timed_parts) == ("latency" in budget)


def test_latency_budget_of_neurons_counts_attentions(monkeypatch, tmp_path):
    monkeypatch.setattr(latency_costs, "time_parts", lambda parts, on, threads: [1.0] * len(parts))
    source = every_family.model_with_layers("bert", 2)
    settings = PruneSettings.model_validate(
        {"targets": ["ffn"], "budget": {"latency": 0.99}, "importance": "random", "reconstruct": False}
    )
    with raises_code("budget-too-small", InputError):  # parts take as long in every size
        every_family.run_stage(Prune(), settings, source, "bert", tmp_path / "out")


@pytest.mark.parametrize(("settings", "code"), [
    ({"targets": ["layers", "ffn"]}, "settings-conflict"),
    ({"targets": ["layers", "width"], "budget": {"parameters": 0.5}}, "unused-setting"),
    ({"targets": ["layers"], "budget": {"parameters": 0.5}}, "unused-setting"),
    ({"targets": ["layers", "channels"], "budget": {"parameters": 0.5}}, "unused-setting"),
    ({"targets": ["layers", "ffn", "channels"], "budget": {"parameters": 0.5}}, "settings-conflict"),
    ({"targets": ALL_TARGETS, "budget": {"parameters": 0.5}, "importance": "wanda"}, "wrong-importance"),
    ({"targets": ALL_TARGETS, "budget": {"parameters": 0.5}, "importance": "activation"}, "wrong-importance"),
])  # fmt: skip
def test_targets_that_do_not_combine_are_rejected(settings, code):
    with raises_setting_codes(code):
        PruneSettings.model_validate(settings)


def test_default_importance_within_a_budget_is_obs():
    settings = PruneSettings.model_validate({"targets": ALL_TARGETS, "budget": {"parameters": 0.5}})
    assert settings.importance == "obs"
    assert settings.searches_shape
    assert not PruneSettings.model_validate({"budget": {"parameters": 0.5}}).searches_shape


def test_quantized_models_and_samples_without_labels_are_rejected(tmp_path):
    settings = PruneSettings.model_validate({"targets": ["layers", "ffn"], "budget": {"parameters": 0.5}})
    assert Prune.quantized_input_error(settings, QuantizedInput(("int8-dynamic",)))
    unlabeled = Split("rows.jsonl", (Example("a"), Example("b")))
    [error] = Prune.check_rows(settings, TASK, {"train": unlabeled})
    assert error.code == "missing-labels"
    by_weights = settings.model_copy(update={"importance": "magnitude", "reconstruct": False})
    assert Prune.needs_with(by_weights, ("train",)) == {"train"}
    source = every_family.model_with_layers("bert", 2)
    with raises_code("missing-labels", InputError):
        harness.run_stage(Prune(), settings, source, tmp_path / "out", TASK, unlabeled)

"""Mixed precision as a part of the stage: bits within a budget, or as few as validation allows."""

import itertools
import json

import pytest
import torch

from smelt.calibration.samples import CalibrationSamples, load_calibration_samples, model_outputs
from smelt.calibration.sequential import ModelPart
from smelt.compress.quantize import mixed_precision
from smelt.compress.quantize.awq import AwqRunner
from smelt.compress.quantize.mixed_precision import measure_matrix_sensitivities, weight_matrices
from smelt.compress.quantize.plan_layers import plan_layers, quantize_layers, round_to_nearest
from smelt.compress.quantize.settings import QuantizeSettings
from smelt.compress.quantize.stage import Quantize
from smelt.core.errors import InputError
from smelt.data.splits import Columns
from smelt.models.checkpoint import load_model, save_model
from smelt.quantization.layers import is_quantized
from smelt.quantization.schemes.registry import SCHEMES_BY_BITS
from smelt.tasks.read_split import read_split
from tests.support import harness
from tests.support.expected_errors import raises_code, raises_setting_codes
from tests.support.models import every_family, tiny

FEW = {
    "exclude": ["*.layer.1.*", "*.attention.*", "*.pooler.*"], "group_size": 32, "calibration_samples": 4,
    "sensitivity_samples": 2,
}  # fmt: skip


def run(out, **settings):
    source = every_family.model_with_layers("bert", 2)
    quantize_settings = QuantizeSettings(**settings)
    return (
        source,
        quantize_settings,
        every_family.run_stage(Quantize(), quantize_settings, source, "bert", out),
    )


@pytest.mark.parametrize("budget", [3.0, 4.5])
def test_bit_widths_equal_brute_force_within_budget(tmp_path, budget):
    source, quantize_settings, ctx = run(tmp_path / "out", mixed_precision={"target_bits": budget}, **FEW)
    model, _ = load_model(source)
    units = weight_matrices(plan_layers(model, quantize_settings), quantize_settings, sorted(SCHEMES_BY_BITS))
    details = ctx.details["mixed_precision"]
    assert len(units) == 4  # the embedding, two products of the first layer, the classifier
    total = sum(unit.num_weights for unit in units)
    best = min(
        (sum(details["sensitivity"][u.name][str(b)] for u, b in zip(units, picks, strict=True)), picks)
        for picks in itertools.product(sorted(SCHEMES_BY_BITS), repeat=len(units))
        if sum(u.costs[b] for u, b in zip(units, picks, strict=True)) <= budget * total
    )
    assert details["bits"] == {u.name: b for u, b in zip(units, best[1], strict=True)}
    assert len(set(details["bits"].values())) > 1
    assert details["average_bits"] == pytest.approx(ctx.details["bits_per_weight"], abs=2e-3)
    assert details["average_bits"] <= budget
    layers = {n: m for n, m in harness.load_output_model(ctx).named_modules() if is_quantized(m)}
    assert {n: m.matrix.scheme.bits for n, m in layers.items()} == details["bits"]
    worst = [damage["2"] for damage in details["sensitivity"].values()]
    assert worst == sorted(worst, reverse=True)


@pytest.mark.parametrize(
    "settings", [{"mixed_precision": {"target_bits": 4.5}}, {"scheme": "int4", "exclude": "auto"}], ids=str
)
def test_few_sensitivity_tokens_warn(tmp_path, settings):
    few = {"group_size": 32, "calibration_samples": 1, "sensitivity_samples": 1}
    *_, ctx = run(tmp_path / "out", **few, **settings)
    (warning,) = [message for message in ctx.warnings if message.code == "few-sensitivity-tokens"]
    assert "8 tokens" in warning.message


@pytest.mark.parametrize("by_layer", [False, True])
def test_sensitivity_is_output_change_relative_to_variance(tmp_path, by_layer):
    settings = (
        {"scheme": "int2", "exclude": [*FEW["exclude"], "auto"]}
        if by_layer
        else {"mixed_precision": {"target_bits": 4.5, "bit_widths": [2, 8]}}
    )
    source, quantize_settings, ctx = run(tmp_path / "out", **FEW | settings)
    model, _ = load_model(source)
    rows = load_calibration_samples(model, tiny.as_artifact(source, ctx.task), 4, ctx, "quantize").subset(2)
    float_outputs = torch.cat([o.flatten() for o in model_outputs(model, rows.batches)])
    planned = plan_layers(model, quantize_settings)
    if by_layer:
        name, sensitivity = next(iter(ctx.details["sensitivity"].items()))
        layers = [layer for layer in planned if layer.name == name]
    else:
        name, sensitivity = next(iter(ctx.details["mixed_precision"]["sensitivity"].items()))
        unit = next(unit for unit in weight_matrices(planned, quantize_settings, [2]) if unit.name == name)
        layers, sensitivity = unit.layers_with_bits(2, quantize_settings), sensitivity["2"]
    quantize_layers(model, layers, {})
    difference = torch.cat([o.flatten() for o in model_outputs(model, rows.batches)]) - float_outputs
    assert sensitivity == pytest.approx(
        float(difference.square().mean() / float_outputs.var(correction=0)), rel=0.01
    )


@pytest.mark.parametrize(
    "options", [{"mixed_precision": {"target_bits": 4.5}}, {"exclude": "auto", "scheme": "int4"}]
)
def test_non_finite_outputs_are_rejected(tmp_path, options):
    model, edits = load_model(every_family.model_with_layers("bert", 2))
    with torch.no_grad():
        model.get_submodule("bert.encoder.layer.1.output.LayerNorm").weight.fill_(float("nan"))
    source = tmp_path / "astray"
    source.mkdir()
    save_model(model, edits, source, every_family.model_with_layers("bert", 2))
    settings = QuantizeSettings(calibration_samples=2, sensitivity_samples=1, **options)
    with raises_code("non-finite-outputs", InputError):
        every_family.run_stage(Quantize(), settings, source, "bert", tmp_path / "out")


def test_tied_embedding_and_output_layer_get_one_bit_width(tmp_path):
    source = every_family.model_with_layers("gpt2", 1)
    settings = QuantizeSettings(
        mixed_precision={"target_bits": 4.0},
        group_size=32,
        calibration_samples=2,
        sensitivity_samples=1,
        method="gptq",
        exclude=["*.c_attn"],
    )
    ctx = every_family.run_stage(Quantize(), settings, source, "gpt2", tmp_path / "out")
    model = harness.load_output_model(ctx)
    assert model.get_output_embeddings().matrix is model.get_input_embeddings().matrix
    assert "lm_head" not in ctx.details["mixed_precision"]["bits"]
    assert ctx.details["gptq_error"]
    assert ctx.details["bits_per_weight"] <= 4.0


@pytest.mark.parametrize("clip", ["none", "awq"])
def test_awq_searches_scales_for_chosen_bit_widths(tmp_path, clip):
    source, quantize_settings, ctx = run(
        tmp_path / "out", mixed_precision={"target_bits": 4.5}, method="awq", clip=clip, **FEW
    )
    details = ctx.details["mixed_precision"]["bits"]
    layers = {n: m for n, m in harness.load_output_model(ctx).named_modules() if is_quantized(m)}
    assert {n.removesuffix(".linear"): m.matrix.scheme.bits for n, m in layers.items()} == details
    model, _ = load_model(source)
    artifact, count = tiny.as_artifact(source, ctx.task), FEW["calibration_samples"]
    rows = load_calibration_samples(model, artifact, count, ctx, "quantize", held_back=True)
    units = weight_matrices(plan_layers(model, quantize_settings), quantize_settings, ())
    chosen_layers = [
        layer for unit in units for layer in unit.layers_with_bits(details[unit.name], quantize_settings)
    ]
    alone = harness.make_context(tmp_path / "alone")
    runner = AwqRunner(model, chosen_layers, rows, False, True, lambda names: torch.float32, alone)
    runner.calibrate(runner.targets, ModelPart(model, rows, alone))
    runner.report()
    assert ctx.details["awq_alpha"] == alone.details["awq_alpha"]
    assert ctx.details["awq_error"] == alone.details["awq_error"]


def scored_by_bits(artifact, *rows):
    """A score that falls by what the average lacks of eight bits; the float model has 8."""
    edits = (
        json.loads((artifact.path / "structure.json").read_text())["edits"]
        if (artifact.path / "structure.json").is_file()
        else []
    )
    bits = [WIDTHS_BY_NAME[e["scheme"]] for e in edits if e["op"] == "quantize"]
    return {"bleu": 8.0 if not bits else sum(bits) / len(bits)}


WIDTHS_BY_NAME = {scheme.name: bits for bits, scheme in SCHEMES_BY_BITS.items()}


def dropped(out, turned=(), **bits):
    path = tiny.write_labeled(out / "rows.jsonl")
    data = read_split(str(path), "text-classification", Columns(), out)
    settings = QuantizeSettings(mixed_precision=bits, **FEW)
    source = every_family.model_with_layers("bert", 2)
    return harness.run_stage(
        Quantize(),
        settings,
        source,
        out / "out",
        "text-classification",
        data,
        score=scored_by_bits,
        negated_metrics=frozenset(turned),
    )


def test_fewest_bits_within_max_degradation_are_chosen(tmp_path):
    ctx = dropped(tmp_path, max_degradation=3.0)
    details = ctx.details["mixed_precision"]
    picked = list(details["bits"].values())
    assert sum(picked) / len(picked) >= 5
    worse = [s for s in details["scores"] if s["bleu"] < 5]
    assert worse  # fewer bits were tried, and lost more
    assert all(details["average_bits"] > s["average_bits"] for s in worse)
    assert (details["metric"], details["score_of_floats"]) == ("bleu", 8.0)
    assert min(s["average_bits"] for s in details["scores"] if s["bleu"] >= 5) == details["average_bits"]


def test_negated_metric_is_reported_with_original_sign(tmp_path):
    ctx = dropped(tmp_path, max_degradation=3.0, turned={"bleu"})
    details = ctx.details["mixed_precision"]
    assert {s["bleu"] < 0 for s in details["scores"]} == {True}  # the stand-in is turned round
    assert details["score_of_floats"] == -8.0


def test_unreachable_max_degradation_warns(tmp_path):
    ctx = dropped(tmp_path, max_degradation=0.5, bit_widths=[2, 4])
    details = ctx.details["mixed_precision"]
    for name, damage in details["sensitivity"].items():
        assert damage[str(details["bits"][name])] == min(damage.values())
    (message,) = [warning.message for warning in ctx.warnings if warning.code == "max-degradation-exceeded"]
    assert all(value in message for value in (f"{details['average_bits']:.3g}", "0.5", "bleu"))


def test_unscored_metric_is_rejected_before_sensitivity_is_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(
        mixed_precision,
        "measure_matrix_sensitivities",
        lambda *options: pytest.fail("the long part was done first"),
    )
    with raises_code("metric-not-scored", InputError) as caught:
        dropped(tmp_path, max_degradation=0.5, metric="chrf")
    assert caught.value.setting == "mixed_precision.metric"
    assert all(metric in str(caught.value) for metric in ("chrf", "bleu"))


def test_budget_below_cost_of_padded_groups_is_rejected(tmp_path):
    with raises_code("budget-too-small", InputError) as caught:
        run(tmp_path / "out", mixed_precision={"target_bits": 2.2}, **(FEW | {"group_size": 128}))
    assert caught.value.setting == "mixed_precision.target_bits"


@pytest.mark.parametrize(("options", "code", "named"), [
    ({"mixed_precision": {}}, "settings-conflict", "target_bits"),
    ({"mixed_precision": {"target_bits": 4, "max_degradation": 1}}, "settings-conflict", "max_degradation"),
    ({"mixed_precision": {"target_bits": 1.5}}, "budget-out-of-range", "8.25"),
    ({"mixed_precision": {"target_bits": 9}}, "budget-out-of-range", "8.25"),
    ({"mixed_precision": {"target_bits": 0}}, "greater_than", "0"),
    ({"mixed_precision": {"target_bits": 4, "bit_widths": [4]}}, "too_short", "2"),
    ({"mixed_precision": {"target_bits": 4, "bit_widths": [4, 4]}}, "duplicate-value", "bit_widths"),
    ({"mixed_precision": {"target_bits": 4, "bit_widths": [4, 5]}}, "literal_error", "8"),
    ({"mixed_precision": {"target_bits": 4, "metric": "bleu"}}, "unused-setting", "metric"),
    ({"mixed_precision": {"target_bits": 4}, "scheme": "int4"}, "settings-conflict", "scheme"),
    ({"mixed_precision": {"target_bits": 4}, "embedding_scheme": "int4"}, "settings-conflict",
     "embedding_scheme"),
    ({"mixed_precision": {"target_bits": 4}, "smoothquant_alpha": 0.5}, "settings-conflict",
     "smoothquant_alpha"),
    ({"mixed_precision": {"target_bits": 4}, "exclude": "auto"}, "settings-conflict", "exclude: auto"),
    ({"mixed_precision": {"target_bits": 4}, "sensitivity_samples": 0}, "too-few-rows",
     "sensitivity_samples"),
    ({"mixed_precision": {"target_bits": 4}, "group_size": 16}, "wrong-value", "16"),
])  # fmt: skip
def test_invalid_mixed_precision_settings_are_rejected(options, code, named):
    with raises_setting_codes(code) as caught:
        QuantizeSettings(**options)
    assert named in caught.value.errors()[0]["msg"]


def test_required_splits_depend_on_budget_or_max_degradation():
    budget, drop = (
        QuantizeSettings(mixed_precision=bits) for bits in ({"target_bits": 4}, {"max_degradation": 1})
    )
    assert Quantize.needs_with(budget, {"train"}) == {"train"}
    assert Quantize.needs_with(drop, {"train", "calibration"}) == {"calibration", "validation"}
    assert QuantizeSettings(mixed_precision={"target_bits": 5, "bit_widths": [4, 8]}).used_schemes() == (
        "int4",
        "int8-groupwise",
    )


def test_measuring_sensitivity_restores_modules_under_all_names(tmp_path):
    source = every_family.model_with_layers("gpt2", 1)
    model, _ = load_model(source)
    settings = QuantizeSettings(
        mixed_precision={"target_bits": 4.5}, group_size=32, calibration_samples=2, sensitivity_samples=1
    )
    before = dict(model.named_modules(remove_duplicate=False))
    units = weight_matrices(plan_layers(model, settings), settings, [2, 4])
    assert max(len(unit.layers) for unit in units) == 2  # embedding and head
    ctx = harness.make_context(tmp_path / "out")
    rows = CalibrationSamples(
        "made", [{"input_ids": torch.arange(9)[None], "attention_mask": torch.ones(1, 9).long()}], 1, 9
    )
    measure_matrix_sensitivities(model, units, rows, settings, round_to_nearest, ctx)
    assert dict(model.named_modules(remove_duplicate=False)) == before
    assert all(unit.sensitivities[2] > unit.sensitivities[4] > 0 for unit in units)

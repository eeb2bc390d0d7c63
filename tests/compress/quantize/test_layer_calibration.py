"""What no row reaches, what is fed no numbers, and on how many rows damage is told."""

import pytest
import torch

from smelt.compress.quantize.nested_settings import LowRankCorrection
from smelt.compress.quantize.plan_layers import plan_layers
from smelt.compress.quantize.sequential import SequentialQuantizer
from smelt.compress.quantize.settings import QuantizeSettings
from smelt.core.errors import InputError
from smelt.data.splits import Columns
from smelt.models.checkpoint import load_model
from smelt.tasks.read_split import read_split
from tests.support import harness
from tests.support.expected_errors import raises_code
from tests.support.models import every_family, tiny

ASLEEP = "bert.encoder.layer.0.intermediate.dense"


def decided(tmp_path, change, **settings):
    source = every_family.model_with_layers("bert", 1)
    model, _ = load_model(source)
    change(model.bert.encoder.layer[0].intermediate)
    rows = read_split(
        str(tiny.write_labeled(tmp_path / "rows.jsonl")), "text-classification", Columns(), tmp_path
    )
    ctx = harness.make_context(tmp_path / "out", "text-classification", rows)
    settings_model = QuantizeSettings(**settings)
    artifact = tiny.as_artifact(source, ctx.task)
    quantizer = SequentialQuantizer(model, plan_layers(model, settings_model), artifact, settings_model, ctx)
    quantizer.calibrate()
    return quantizer, ctx


def put_to_sleep(part):
    """Let `part` give zeros without its linear layer."""
    part.forward = lambda x: x.new_zeros(*x.shape[:-1], part.dense.out_features)


@pytest.mark.parametrize("settings", [
    {"scheme": "int8-static", "sensitivity_samples": 0}, {"scheme": "int4", "method": "gptq"},
    {"scheme": "int4", "method": "awq"}, {"scheme": "int4", "method": "awq-gptq"},
    {"scheme": "int4", "method": "autoround", "iterations": 2},
], ids=["static", "gptq", "awq", "awq-gptq", "autoround"])  # fmt: skip
def test_uncalibrated_layers_are_warned_once(settings, tmp_path):
    calibration, ctx = decided(tmp_path, put_to_sleep, **settings)
    (warning,) = [message for message in ctx.warnings if message.code == "uncalibrated-layers"]
    assert f" {ASLEEP};" in warning.message
    names = [layer.name for layer in calibration.layers]
    assert (ASLEEP in names) == (settings["scheme"] == "int4")
    if settings["scheme"] == "int8-static":
        assert {layer.weight_id for layer in calibration.layers if layer.needs_range} == set(
            calibration.ranges
        )


@pytest.mark.parametrize("error", ["inputs", "outputs"])
@pytest.mark.parametrize("method", ["rtn", "gptq"])
def test_correction_of_uncalibrated_layer_minimizes_weight_error(method, error, tmp_path):
    options = {
        "scheme": "int4",
        "method": method,
        "low_rank_correction": LowRankCorrection(rank=2, objective=error),
    }
    calibration, _ = decided(tmp_path, put_to_sleep, **options)
    weight = next(layer.weight_id for layer in calibration.layers if layer.name == ASLEEP)
    if method == "rtn":
        assert bool(calibration.corrections[weight].correction.isfinite().all())
    else:
        assert weight not in calibration.corrections


@pytest.mark.parametrize("settings", [
    {"scheme": "int8-static"}, {"scheme": "int4", "method": "gptq"},
    {"scheme": "int4", "low_rank_correction": LowRankCorrection(rank=2, objective="inputs")},
    {"scheme": "int4", "low_rank_correction": LowRankCorrection(rank=2, objective="outputs")},
], ids=["static", "gptq", "inputs", "outputs"])  # fmt: skip
def test_non_finite_activations_are_rejected_with_layer_name(settings, tmp_path):
    def astray(part):
        part.dense.register_forward_hook(lambda module, x, out: out * torch.inf)

    with raises_code("non-finite-activations", InputError) as caught:
        decided(tmp_path, astray, **settings)
    assert "bert.encoder.layer.0.output.dense" in str(caught.value)


def test_sensitivity_reports_number_of_samples_used(tmp_path):
    _, ctx = decided(tmp_path, lambda part: None, scheme="int8-static", sensitivity_samples=64)
    assert 0 < ctx.details["sensitivity_samples"] <= ctx.details["calibration"]["samples"] < 64


@pytest.mark.parametrize(
    "settings",
    [
        {"scheme": "int8-dynamic", "smoothquant_alpha": 0.5, "sensitivity_samples": 4},
        {"scheme": "int4", "exclude": "auto"},
    ],
    ids=str,
)
def test_sensitivity_is_measured_on_request_and_for_exclude_auto(settings, tmp_path):
    _, ctx = decided(tmp_path, lambda part: None, **settings)
    assert ctx.details["sensitivity"]

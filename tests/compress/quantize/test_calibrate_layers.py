"""What no row reaches, what is fed no numbers, and on how many rows damage is told."""

import pytest
import torch

from smelt.compress.quantize.calibrate_layers import calibrate_layers
from smelt.compress.quantize.plan_layers import plan_layers
from smelt.compress.quantize.settings import LowRankCorrection, QuantizeSettings
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
    made = QuantizeSettings(**settings)
    found = calibrate_layers(model, plan_layers(model, made), tiny.as_artifact(source, ctx.task), made, ctx)
    return found, ctx


def put_to_sleep(part):
    """Let `part` give zeros without its linear layer."""
    part.forward = lambda x: x.new_zeros(*x.shape[:-1], part.dense.out_features)


@pytest.mark.parametrize(
    "settings",
    [
        {"scheme": "int8-static", "sensitivity_samples": 0},
        {"scheme": "int4", "method": "gptq"},
        {"scheme": "int4", "method": "awq"},
        {"scheme": "int4", "method": "awq-gptq"},
    ],
    ids=["static", "gptq", "awq", "awq-gptq"],
)
def test_layers_that_no_row_reaches_are_told_once(settings, tmp_path):
    found, ctx = decided(tmp_path, put_to_sleep, **settings)
    (warning,) = [one for one in ctx.warnings if one.code == "uncalibrated-layers"]
    assert f" {ASLEEP};" in warning.message
    names = [layer.name for layer in found.layers]
    assert (ASLEEP in names) == (settings["scheme"] == "int4")
    if settings["scheme"] == "int8-static":
        assert {layer.weight_id for layer in found.layers if layer.needs_range} == set(found.ranges)


@pytest.mark.parametrize("error", ["inputs", "outputs"])
@pytest.mark.parametrize("method", ["rtn", "gptq"])
def test_the_pair_of_a_layer_that_no_row_reaches_is_nearest_to_its_weights(method, error, tmp_path):
    made = {
        "scheme": "int4",
        "method": method,
        "low_rank_correction": LowRankCorrection(rank=2, objective=error),
    }
    found, _ = decided(tmp_path, put_to_sleep, **made)
    weight = next(layer.weight_id for layer in found.layers if layer.name == ASLEEP)
    if method == "rtn":
        assert bool(found.corrections[weight].correction.isfinite().all())
    else:
        assert weight not in found.corrections


@pytest.mark.parametrize(
    "settings",
    [
        {"scheme": "int8-static"},
        {"scheme": "int4", "method": "gptq"},
        {"scheme": "int4", "low_rank_correction": LowRankCorrection(rank=2, objective="inputs")},
        {"scheme": "int4", "low_rank_correction": LowRankCorrection(rank=2, objective="outputs")},
    ],
    ids=["static", "gptq", "inputs", "outputs"],
)
def test_what_is_fed_numbers_that_are_none_is_refused_by_name(settings, tmp_path):
    def astray(part):
        part.dense.register_forward_hook(lambda module, x, out: out * torch.inf)

    with raises_code("non-finite-activations", InputError) as caught:
        decided(tmp_path, astray, **settings)
    assert "bert.encoder.layer.0.output.dense" in str(caught.value)


def test_damage_is_told_with_the_rows_that_there_were(tmp_path):
    _, ctx = decided(tmp_path, lambda part: None, scheme="int8-static", sensitivity_samples=64)
    assert 0 < ctx.details["sensitivity_samples"] <= ctx.details["calibration"]["rows"] < 64


@pytest.mark.parametrize(
    "settings", [{"scheme": "int8-dynamic"}, {"scheme": "int4", "exclude": "auto"}], ids=str
)
def test_what_compares_or_smooths_measures_damage(settings, tmp_path):
    smooth = {} if "exclude" in settings else {"smoothquant_alpha": 0.5}
    _, ctx = decided(tmp_path, lambda part: None, **settings, **smooth)
    assert ctx.details["sensitivity"]

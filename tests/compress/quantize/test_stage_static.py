"""Quantizing with a look at rows: ranges, damage, what stays float, and what is said of too few rows."""

import pytest
import torch

from smelt.compress.quantize.mixed_precision import select_sensitive
from smelt.compress.quantize.nested_settings import MaxExcluded
from smelt.compress.quantize.stage import Quantize, QuantizeSettings
from smelt.core.errors import InputError
from smelt.data.splits import Example, Split
from smelt.quantization.layers import QuantizedLinear
from tests.support import harness
from tests.support.expected_errors import raises_code, raises_setting_codes
from tests.support.models import tiny

ROWS = Split("made.jsonl", tuple(Example(s, references=(s,)) for s in tiny.SENTENCES))


@pytest.fixture(scope="module")
def marian(tmp_path_factory):
    return tiny.write_marian(tmp_path_factory.mktemp("marian") / "model")


def run(source, out, data=ROWS, **settings):
    return harness.run_stage(
        Quantize(), QuantizeSettings(scheme="int8-static", **settings), source, out, data=data
    )


def linears(ctx):
    return {n: m for n, m in harness.load_output_model(ctx).named_modules() if isinstance(m, QuantizedLinear)}


def test_input_range_ignores_padding(marian, tmp_path):
    from smelt.models.checkpoint import load_model, load_tokenizer

    ctx = run(marian, tmp_path / "out", calibration_method="minmax", sensitivity_samples=0)
    model, tokenizer = load_model(marian)[0], load_tokenizer(marian)
    extremes = [0.0]

    def look(module, inputs):
        extremes.extend([float(inputs[0].min()), float(inputs[0].max())])

    name = "model.decoder.layers.0.fc1"
    model.get_submodule(name).register_forward_pre_hook(look)
    for text in tiny.SENTENCES:  # one by one: nothing is padded
        ids = tokenizer(text, return_tensors="pt")["input_ids"]
        labels = tokenizer(text_target=text, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            model(input_ids=ids, labels=labels)
    matrix, scale = linears(ctx)[name].matrix, (max(extremes) - min(extremes)) / 255
    assert float(matrix.input_scale) == pytest.approx(scale, rel=1e-4)
    assert int(matrix.input_zero_point) == round(-128 - min(extremes) / scale)
    assert ctx.details["calibration"]["samples"] == len(tiny.SENTENCES)
    assert "sensitivity" not in ctx.details


def test_layers_with_one_input_share_range_and_tied_head_has_range(marian, tmp_path):
    quantized_layers = linears(run(marian, tmp_path / "out", sensitivity_samples=0))
    attention = "model.encoder.layers.0.self_attn."
    scales = {float(quantized_layers[f"{attention}{part}_proj"].matrix.input_scale) for part in "qkv"}
    assert len(scales) == 1
    assert 1.0 not in {float(layer.matrix.input_scale) for layer in quantized_layers.values()}
    assert "lm_head" in quantized_layers


def test_sensitivity_is_sorted_and_model_is_unchanged(marian, tmp_path):
    ctx = run(marian, tmp_path / "out", sensitivity_samples=2)
    values = list(ctx.details["sensitivity"].values())
    assert values == sorted(values, reverse=True)
    assert len(values) == ctx.details["linear_layers"]
    assert 0 < values[0] < 0.1
    assert ctx.details["sensitivity_samples"] == 2


def test_sensitivity_without_request_is_measured_only_where_layers_are_chosen_by_it(marian, tmp_path):
    """Each layer needs runs of its own: quadratic in layers, most of the time of a BERT-base."""
    static = QuantizeSettings(scheme="int8-static")
    assert "sensitivity" not in run(marian, tmp_path / "out").details
    assert static.to_report()["sensitivity_samples"] == 0
    assert static.model_copy(update={"exclude": ["auto"]}).to_report()["sensitivity_samples"] == 8


def test_most_sensitive_layers_are_kept_float_within_max_excluded(marian, tmp_path):
    ctx = run(marian, tmp_path / "out", exclude="auto", max_excluded={"layers": 2}, sensitivity_samples=2)
    worst = list(ctx.details["sensitivity"])[:2]
    assert sorted(ctx.details["float_linear_layers"]) == sorted(worst)


def test_exclude_auto_works_with_other_schemes(marian, tmp_path):
    settings = QuantizeSettings(scheme="int4", exclude=["auto", "*.fc1"], max_excluded={"layers": 1})
    ctx = harness.run_stage(Quantize(), settings, marian, tmp_path / "out", data=ROWS)
    worst = next(iter(ctx.details["sensitivity"]))
    assert worst in ctx.details["float_linear_layers"]
    assert not any(".fc1" in name for name in ctx.details["sensitivity"])
    assert ctx.warnings == []


@pytest.mark.parametrize(("budget", "stay"), [
    ({}, ["a"]),  # a tenth of four layers, at least one
    ({"layers": 0}, []), ({"layers": 2}, ["a", "b"]), ({"sensitivity": 0.5}, ["a"]),
    ({"sensitivity": 0.2}, ["a", "b"]), ({"sensitivity": 0.2, "layers": 1}, ["a"]),
])  # fmt: skip
def test_max_excluded_limits_layers_and_sensitivity(budget, stay):
    damage = {"a": 6.0, "b": 3.0, "c": 0.9, "d": 0.1}
    assert select_sensitive(damage, MaxExcluded(**budget)) == stay


def test_missing_samples_are_rejected_and_few_samples_warn(marian, tmp_path):
    with raises_code("no-calibration-data", InputError):
        run(marian, tmp_path / "none", data={})
    few = Split("few.jsonl", ROWS.examples[:1])
    ctx = run(marian, tmp_path / "few", data={"calibration": few, "train": ROWS}, sensitivity_samples=0)
    (warning,) = ctx.warnings
    assert warning.code == "few-calibration-tokens"
    assert "few.jsonl" in warning.message


def test_required_splits_depend_on_settings():
    static = QuantizeSettings(scheme="int8-static")
    assert Quantize.needs_with(static, ["train"]) == {"train"}
    assert Quantize.needs_with(static, ["train", "calibration"]) == {"calibration"}
    assert Quantize.needs_with(QuantizeSettings(exclude="auto"), []) == {"train"}
    assert Quantize.needs_with(QuantizeSettings(), []) == frozenset()


@pytest.mark.parametrize(("settings", "code", "named"), [
    ({"calibration_method": "mse"}, "unused-setting", "calibration_method"),
    ({"calibration_samples": 3}, "unused-setting", "calibration_samples"),
    ({"scheme": "int8-static", "calibration_method": "mse", "calibration_percentile": 99.0},
     "unused-setting", "calibration_percentile"),
    ({"scheme": "int8-static", "max_excluded": {"layers": 1}}, "unused-setting", "max_excluded"),
    ({"exclude": "auto", "sensitivity_samples": 0}, "too-few-rows", "sensitivity_samples"),
])  # fmt: skip
def test_unused_static_settings_are_rejected(settings, code, named):
    with raises_setting_codes(code) as caught:
        QuantizeSettings(**settings)
    words = caught.value.errors()[0]["msg"].replace(":", "").split()
    assert named in words


def test_tensorrt_export_of_zero_points_is_rejected(marian, tmp_path):
    from smelt.export.onnx_stage import Onnx
    from smelt.export.settings import OnnxSettings

    quantized = run(marian, tmp_path / "codes", sensitivity_samples=0).out
    with raises_code("unsupported-scheme-options", InputError) as caught:
        harness.run_stage(Onnx(), OnnxSettings(target="tensorrt"), quantized, tmp_path / "graphs", data=ROWS)
    assert caught.value.setting == "target"


def test_bf16_export_of_int8_static_is_rejected(marian, tmp_path):
    from smelt.export.onnx_stage import Onnx
    from smelt.export.settings import OnnxSettings

    quantized_ctx = run(marian, tmp_path / "codes", sensitivity_samples=0, activations_symmetric=True)
    settings = OnnxSettings(target="tensorrt", dtype="bf16")
    with raises_code("unsupported-dtype", InputError) as caught:
        harness.run_stage(Onnx(), settings, quantized_ctx.out, tmp_path / "graphs", data=ROWS)
    assert caught.value.setting == "dtype"
    assert "int8-static" in str(caught.value)


def test_classifier_ranges_do_not_depend_on_labels(tmp_path):
    source = tiny.write_bert(tmp_path / "bert")
    labeled = Split(
        "rows", tuple(Example(text, label=f"LABEL_{i % 2}") for i, text in enumerate(tiny.SENTENCES))
    )
    unlabeled = Split("rows", tuple(Example(text) for text in tiny.SENTENCES))
    settings = QuantizeSettings(scheme="int8-static", sensitivity_samples=0)
    scales = []
    for name, split in (("labeled", labeled), ("unlabeled", unlabeled)):
        ctx = harness.run_stage(
            Quantize(), settings, source, tmp_path / name, "text-classification", {"calibration": split}
        )
        scales.append({n: float(layer.matrix.input_scale) for n, layer in linears(ctx).items()})
    assert scales[0] == scales[1]

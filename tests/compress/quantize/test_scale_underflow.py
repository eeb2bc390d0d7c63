"""Weights that float16 scales do not hold: warned of where codes are worse for it, and nowhere else."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from smelt.compress.quantize.plan_layers import PlannedLayer, scale_underflow_warnings, small_weights
from smelt.compress.quantize.settings import QuantizeSettings
from smelt.compress.quantize.stage import Quantize
from smelt.core.messages import message_codes
from smelt.quantization.schemes.registry import SCHEMES, default_options
from tests.support.harness import run_stage
from tests.support.models import tiny


def layer(largest, scheme, dtype=torch.float32, **options):
    torch.manual_seed(0)
    linear = nn.Linear(256, 8, bias=False)
    linear.weight.data.normal_()
    linear.weight.data *= largest / linear.weight.data.abs().max()
    return PlannedLayer(linear.to(dtype), "a", scheme, default_options(SCHEMES[scheme]) | options, True)


# the error of nearest codes: of 3e-6 in int8-groupwise all of the weights, of 1e-6 in pow2 none
@pytest.mark.parametrize(
    ("scheme", "largest", "warned"),
    [
        ("int8-groupwise", 1e-4, False), ("int8-groupwise", 3e-6, True),
        ("int4", 1e-5, False), ("int4", 1e-7, True), ("int4", 1e-30, True),
        ("int2", 1e-6, False), ("int2", 1e-8, True),
        ("kmeans4", 3e-5, False), ("kmeans4", 3e-6, True), ("pow2", 1e-6, False), ("pow2", 1e-8, True),
        ("ternary", 1e-6, False), ("ternary", 1e-8, True), ("binary", 1e-6, False), ("binary", 1e-8, True),
        ("int8-dynamic", 1e-9, False), ("bnb-nf4", 1e-9, False),
    ],
)  # fmt: skip
def test_scale_underflow_warns_only_if_precision_is_lost(scheme, largest, warned):
    layers = [layer(largest, scheme)]
    warnings = scale_underflow_warnings(layers, small_weights(layers))
    assert len(warnings) == warned
    assert set(message_codes(warnings)) <= {"scale-underflow"}
    assert all(
        message.message.startswith("a: ") and f" {largest:g}," in message.message for message in warnings
    )


@pytest.mark.parametrize("stands", [2e-5, 2e-4])
def test_underflow_of_most_rows_warns_despite_one_large_row(stands):
    planned = layer(3e-6, "kmeans4")
    planned.module.weight.data[0] = 0
    planned.module.weight.data[0, 0] = stands
    assert len(scale_underflow_warnings([planned], small_weights([planned]))) == 1


def test_underflow_of_negligible_rows_does_not_warn():
    planned = layer(5e-4, "int4")
    planned.module.weight.data[1:] *= 1e-5
    assert scale_underflow_warnings([planned], small_weights([planned])) == []


def test_positive_scale_underflow_warns():
    layers = [layer(1e-9, "int4", symmetric="positive")]
    assert len(scale_underflow_warnings(layers, small_weights(layers))) == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_zero_and_normal_weights_are_not_checked(dtype):
    zeros = layer(1.0, "int4", dtype)
    zeros.module.weight.data.zero_()
    assert small_weights([zeros, layer(0.1, "int4", dtype)]) == {}
    assert list(small_weights([layer(1e-7, "int4", dtype)])) == ["a"]


def test_suggested_exclude_lists_all_layers_of_tied_matrix(tmp_path):
    source = shutil.copytree(tiny.write_marian(tmp_path / "model"), tmp_path / "small")
    tensors = load_file(source / "model.safetensors")
    tensors["model.shared.weight"] *= 1e-8
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    settings = {"scheme": "int4", "group_size": 16}
    (message,) = (
        warning.message
        for warning in run_stage(Quantize(), QuantizeSettings(**settings), source, tmp_path / "a").warnings
        if warning.code == "scale-underflow"
    )
    assert '"lm_head"' in message
    names = json.loads(message[message.index("[") : message.index("]") + 1])
    excluded_ctx = run_stage(Quantize(), QuantizeSettings(**settings, exclude=names), source, tmp_path / "b")
    assert "scale-underflow" not in message_codes(excluded_ctx.warnings)

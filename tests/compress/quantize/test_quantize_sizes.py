"""The predicted bytes of quantized weights are those of the artifact."""

from __future__ import annotations

import json

import pytest

from smelt.compress.quantize.settings import QuantizeSettings
from smelt.compress.quantize.stage import Quantize, quantize_size
from smelt.export.onnx_stage import OnnxSettings, export_size
from smelt.models.model_size import SizeInputs, read_model_size, size_from_config
from smelt.models.weight_files import LARGE_BYTES, weight_files_size
from tests.support.models import every_family


@pytest.mark.parametrize(
    "settings",
    [
        {"scheme": "int4", "group_size": 16},
        {"scheme": "int8-dynamic", "embeddings": False},
        {"scheme": "ternary"},
    ],
)
def test_predicted_size_equals_artifact_size(tmp_path, settings):
    folder, chosen = every_family.model_with_layers("llama", 3), QuantizeSettings(**settings)
    size = read_model_size(folder, json.loads((folder / "config.json").read_text()))
    ctx = every_family.run_stage(Quantize(), chosen, folder, "llama", tmp_path / "out")
    planned = quantize_size(chosen, SizeInputs(size, size, "language-modeling", {}))
    header = 12_000  # names and shapes in the file's header
    assert weight_files_size(ctx.out) == pytest.approx(planned.disk_bytes, rel=0.03, abs=header)
    assert planned.disk_bytes < 0.7 * size.stored_bytes


LARGE = size_from_config(
    {
        "model_type": "llama", "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22,
        "num_attention_heads": 32, "vocab_size": 32000,
    }
)  # fmt: skip


def test_large_model_needs_memory_of_one_block_if_layers_are_independent():
    size = LARGE
    assert size.stored_bytes > LARGE_BYTES
    inputs = SizeInputs(size, size, "language-modeling", {})
    block, scaled, in_memory = (
        quantize_size(QuantizeSettings(scheme="int4", **options), inputs)
        for options in ({}, {"method": "awq-gptq"}, {"low_rank_correction": {"rank": 8}})
    )
    assert block.least_bytes == scaled.least_bytes == 4 * size.largest_block
    assert block.memory_bytes < 0.2 * size.float_bytes < size.float_bytes < in_memory.memory_bytes
    static = QuantizeSettings(scheme="int8-static")
    measured = QuantizeSettings(scheme="int8-static", sensitivity_samples=8)
    lighter = dict(Quantize.lighter_settings(measured))["sensitivity_samples: 0"]
    light, default, heavy = (quantize_size(s, inputs).memory_bytes for s in (lighter, static, measured))
    assert light == default < 0.2 * size.float_bytes < size.float_bytes < heavy


def test_export_of_quantized_weights_needs_no_float_copy():
    quantized = LARGE.stored_as(0.6, 2.0)
    inputs = SizeInputs(quantized, quantized, "language-modeling", {})
    planned = export_size(OnnxSettings(target="ort-cpu"), inputs)
    assert planned.memory_bytes < quantized.float_bytes

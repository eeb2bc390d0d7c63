"""Codes against what their config says of them, by headers alone; and how many there are."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from smelt.core.errors import InputError
from smelt.models.quantization_config import (
    QuantizationConfig,
    compatible_group_size,
    count_values_by_dtype,
    require_quantized_tensors,
)
from smelt.models.weight_files import weight_tensors
from tests.support.expected_errors import raises_code
from tests.support.models import causal, quantized_checkpoints

AUTO_ROUND = Path(__file__).parent / "written_by_auto_round"
GPTQ, AWQ = QuantizationConfig("gptq", 32, 1), QuantizationConfig("awq", 32, 0)
# of a layer of 64 inputs and 96 outputs in groups of 32
SHAPES = {
    "gptq": {"qweight": [8, 96], "qzeros": [2, 12], "scales": [2, 96], "g_idx": [64]},
    "awq": {"qweight": [64, 12], "qzeros": [2, 12], "scales": [2, 96]},
}


def written(folder, shapes, **types):
    """Write a layer `a` of tensors of these shapes next to a float one; None: there is no such tensor."""
    usual = {"scales": np.float16}
    tensors = {
        f"a.{part}": np.zeros(shape, types.get(part, usual.get(part, np.int32)))
        for part, shape in shapes.items()
        if shape is not None
    }
    folder.mkdir(exist_ok=True)
    save_file(tensors | {"b.weight": np.zeros((4, 4), np.float16)}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("coding", [GPTQ, AWQ], ids=["gptq", "awq"])
def test_matching_quantized_tensors_are_accepted(coding, tmp_path):
    shapes = SHAPES[coding.method]
    require_quantized_tensors(written(tmp_path / "m", shapes), coding)
    require_quantized_tensors(written(tmp_path / "m", shapes, scales=np.float32), coding)
    # one group for all of a row; and a last one that is not full
    single_group = shapes | {"qzeros": [1, 12], "scales": [1, 96]}
    require_quantized_tensors(
        written(tmp_path / "m", single_group), QuantizationConfig(coding.method, None, 0)
    )
    require_quantized_tensors(
        written(tmp_path / "m", single_group), QuantizationConfig(coding.method, 128, 0)
    )
    require_quantized_tensors(written(tmp_path / "m", shapes), QuantizationConfig(coding.method, 48, 0))
    if coding == GPTQ:
        require_quantized_tensors(written(tmp_path / "m", shapes | {"g_idx": None}), GPTQ)


@pytest.mark.parametrize("form", ["gptq", "awq", "auto-round"])
def test_auto_round_checkpoints_are_accepted(form):
    require_quantized_tensors(
        AUTO_ROUND / form, QuantizationConfig("awq" if form == "awq" else "gptq", 32, 0)
    )


SHAPE = "shape-mismatch"
REFUSED = {
    "other groups": (QuantizationConfig("gptq", 16, 1), {}, SHAPE,
        ("qzeros'", "int32 [2, 12]", " 16, ", "int32 [4, 12]")),
    "whole rows": (QuantizationConfig("gptq", None, 1), {}, SHAPE, ("int32 [1, 12]",)),
    "eight bits": (GPTQ, {"qweight": [16, 96], "qzeros": [2, 24]}, SHAPE,
        ("qzeros'", "int32 [2, 24]", "[4, 12]")),
    "fewer codes": (GPTQ, {"qweight": [6, 96]}, SHAPE, ("g_idx'", "int32 [64]", " 48 ", "int32 [48]")),
    "scales": (GPTQ, {"scales": [2, 48]}, SHAPE, ("scales'", "float16 [2, 48]", "[2, 96]")),
    "no zeros": (GPTQ, {"qzeros": None}, "missing-tensor", ("'a.qzeros'",)),
    "no scales": (GPTQ, {"scales": None}, "missing-tensor", ("'a.scales'",)),
    "no order": (QuantizationConfig("gptq", 32, 1, act_order=True), {"g_idx": None}, "missing-tensor",
        ("'a.g_idx'",)),
    "no codes": (GPTQ, {"qweight": None}, "not-quantized", ("gptq",)),
    "no matrix": (GPTQ, {"qweight": [768]}, SHAPE, ("qweight'", "int32 [768]")),
    "another layout": (GPTQ, SHAPES["awq"], SHAPE, (" 512 ", " 12 ", "int32 [16, 1]")),
    "no size of ours": (QuantizationConfig("gptq", 40, 1), {}, "unsupported-group-size",
        (" 40 ", "16, 32, 64, 128")),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_mismatched_quantized_tensors_are_rejected(case, tmp_path):
    coding, other, code, values = REFUSED[case]
    with raises_code(code, InputError) as caught:
        require_quantized_tensors(written(tmp_path / "m", SHAPES["gptq"] | other), coding)
    assert all(value in str(caught.value) for value in values)


@pytest.mark.parametrize(
    ("part", "kind"), [("qweight", np.int64), ("qzeros", np.uint8), ("scales", np.int32)]
)
def test_wrong_dtypes_are_rejected(part, kind, tmp_path):
    with raises_code("shape-mismatch", InputError) as caught:
        require_quantized_tensors(written(tmp_path / "m", SHAPES["gptq"], **{part: kind}), GPTQ)
    assert f"'a.{part}'" in str(caught.value)


def test_compatible_group_size_is_largest_divisor(tmp_path):
    sizes = {
        group: compatible_group_size(tmp_path, "a", QuantizationConfig("gptq", group, 1), 384)
        for group in (16, 96, 192, 256)
    }
    assert sizes == {16: 16, 96: 32, 192: 64, 256: 128}
    assert (
        compatible_group_size(tmp_path, "a", QuantizationConfig("gptq", None, 1), 100) == 128
    )  # of a row, which is one group


@pytest.mark.parametrize("kind", ["gptq", "awq"])
def test_only_quantized_values_are_counted(kind, tmp_path):
    source = causal.write_model(tmp_path / "float", "llama")
    num_values = sum(int(np.prod(entry["shape"])) for _, _, entry in weight_tensors(source))
    folder, values = getattr(quantized_checkpoints, f"write_{kind}")(source, tmp_path / kind)
    codes = sum(value.size for value in values.values())
    assert count_values_by_dtype(folder) == {"I4": codes, "F16": num_values - codes}


def test_auto_round_values_are_counted():
    values = load_file(AUTO_ROUND / "gptq-values.safetensors")
    assert count_values_by_dtype(AUTO_ROUND / "gptq")["I4"] == sum(value.size for value in values.values())

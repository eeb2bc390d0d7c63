"""Codes against what their config says of them, by headers alone; and how many there are."""

from pathlib import Path

import causal
import coded
import numpy as np
import pytest
from refusals import refused
from safetensors.numpy import load_file, save_file

from smelt.core.errors import InputError
from smelt.runtime.models.coded.headers import own_group, require_codes, values_by_type
from smelt.runtime.models.coded.said import Coding
from smelt.runtime.models.weight_files import weight_tensors

AUTO_ROUND = Path(__file__).parent / "written_by_auto_round"
GPTQ, AWQ = Coding("gptq", 32, 1), Coding("awq", 32, 0)
# of a layer of 64 inputs and 96 outputs in groups of 32
SHAPES = {
    "gptq": {"qweight": [8, 96], "qzeros": [2, 12], "scales": [2, 96], "g_idx": [64]},
    "awq": {"qweight": [64, 12], "qzeros": [2, 12], "scales": [2, 96]},
}


def written(folder, shapes, **types):
    """Write a layer `a` of tensors of these shapes beside a float one; None: there is no such tensor."""
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
def test_codes_that_fit_are_taken(coding, tmp_path):
    shapes = SHAPES[coding.method]
    require_codes(written(tmp_path / "m", shapes), coding)
    require_codes(written(tmp_path / "m", shapes, scales=np.float32), coding)
    # one group for all of a row; and a last one that is not full
    one = shapes | {"qzeros": [1, 12], "scales": [1, 96]}
    require_codes(written(tmp_path / "m", one), Coding(coding.method, None, 0))
    require_codes(written(tmp_path / "m", one), Coding(coding.method, 128, 0))
    require_codes(written(tmp_path / "m", shapes), Coding(coding.method, 48, 0))
    if coding == GPTQ:
        require_codes(written(tmp_path / "m", shapes | {"g_idx": None}), GPTQ)


@pytest.mark.parametrize("form", ["gptq", "awq", "auto-round"])
def test_another_tools_checkpoints_fit(form):
    require_codes(AUTO_ROUND / form, Coding("awq" if form == "awq" else "gptq", 32, 0))


SHAPE = "shape-mismatch"
REFUSED = {
    "other groups": (
        Coding("gptq", 16, 1),
        {},
        SHAPE,
        ("qzeros'", "int32 [2, 12]", " 16, ", "int32 [4, 12]"),
    ),
    "whole rows": (Coding("gptq", None, 1), {}, SHAPE, ("int32 [1, 12]",)),
    "eight bits": (
        GPTQ,
        {"qweight": [16, 96], "qzeros": [2, 24]},
        SHAPE,
        ("qzeros'", "int32 [2, 24]", "[4, 12]"),
    ),
    "fewer codes": (GPTQ, {"qweight": [6, 96]}, SHAPE, ("g_idx'", "int32 [64]", " 48 ", "int32 [48]")),
    "scales": (GPTQ, {"scales": [2, 48]}, SHAPE, ("scales'", "float16 [2, 48]", "[2, 96]")),
    "no zeros": (GPTQ, {"qzeros": None}, "missing-tensor", ("'a.qzeros'",)),
    "no scales": (GPTQ, {"scales": None}, "missing-tensor", ("'a.scales'",)),
    "no order": (Coding("gptq", 32, 1, ordered=True), {"g_idx": None}, "missing-tensor", ("'a.g_idx'",)),
    "no codes": (GPTQ, {"qweight": None}, "not-quantized", ("gptq",)),
    "no matrix": (GPTQ, {"qweight": [768]}, SHAPE, ("qweight'", "int32 [768]")),
    "another layout": (GPTQ, SHAPES["awq"], SHAPE, (" 512 ", " 12 ", "int32 [16, 1]")),
    "no size of ours": (Coding("gptq", 40, 1), {}, "unsupported-group-size", (" 40 ", "16, 32, 64, 128")),
}


@pytest.mark.parametrize("case", REFUSED)
def test_codes_that_do_not_fit_are_refused(case, tmp_path):
    coding, other, code, values = REFUSED[case]
    with refused(code, InputError) as caught:
        require_codes(written(tmp_path / "m", SHAPES["gptq"] | other), coding)
    assert all(value in str(caught.value) for value in values)


@pytest.mark.parametrize(
    ("part", "kind"), [("qweight", np.int64), ("qzeros", np.uint8), ("scales", np.int32)]
)
def test_codes_and_scales_have_their_types(part, kind, tmp_path):
    with refused("shape-mismatch", InputError) as caught:
        require_codes(written(tmp_path / "m", SHAPES["gptq"], **{part: kind}), GPTQ)
    assert f"'a.{part}'" in str(caught.value)


def test_the_largest_size_that_divides_a_group(tmp_path):
    sizes = {group: own_group(tmp_path, "a", Coding("gptq", group, 1), 384) for group in (16, 96, 192, 256)}
    assert sizes == {16: 16, 96: 32, 192: 64, 256: 128}
    assert own_group(tmp_path, "a", Coding("gptq", None, 1), 100) == 128  # of a row, which is one group


@pytest.mark.parametrize("kind", ["gptq", "awq"])
def test_a_code_is_a_value_and_what_says_its_meaning_is_none(kind, tmp_path):
    source = causal.model(tmp_path / "float", "llama")
    whole = sum(int(np.prod(entry["shape"])) for _, _, entry in weight_tensors(source))
    folder, values = getattr(coded, kind)(source, tmp_path / kind)
    codes = sum(value.size for value in values.values())
    assert values_by_type(folder) == {"I4": codes, "F16": whole - codes}


def test_codes_of_another_tool_are_as_many_as_its_own_values():
    values = load_file(AUTO_ROUND / "gptq-values.safetensors")
    assert values_by_type(AUTO_ROUND / "gptq")["I4"] == sum(value.size for value in values.values())

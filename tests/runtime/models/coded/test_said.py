"""What configs say of codes: the words of GPTQ's and AWQ's tools, and those that are not read."""

import pytest

from smelt.core.errors import InputError
from smelt.runtime.models.coded.said import Coding, coding_of

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False}
AUTO_ROUND = {"quant_method": "auto-round", "bits": 4, "group_size": 32} | {
    "packing_format": "auto_round:auto_gptq"
}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "GEMM"}


def of(**said):
    return coding_of({"quantization_config": said})


def test_layouts_that_are_read():
    assert coding_of({}) is None
    assert of(**GPTQ) == of(**GPTQ, checkpoint_format="gptq") == Coding("gptq", 128, 1)
    assert of(**GPTQ, checkpoint_format="gptq_v2") == Coding("gptq", 128, 0)
    assert of(**GPTQ, checkpoint_format="GPTQ_V2") == Coding("gptq", 128, 0)
    assert of(**GPTQ | {"desc_act": True}) == Coding("gptq", 128, 1, ordered=True)
    assert of(**GPTQ | {"desc_act": True, "group_size": -1}) == Coding("gptq", None, 1)
    assert of(**GPTQ | {"group_size": -1}) == Coding("gptq", None, 1)
    assert of(**AWQ) == Coding("awq", 64, 0)
    assert of(**AUTO_ROUND) == Coding("gptq", 32, 1)
    assert of(quant_method="awq", w_bit=4, q_group_size=128, version="gemm") == Coding("awq", 128, 0)


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (
            {"quant_method": "bitsandbytes", "load_in_4bit": True},
            "quant_method is 'bitsandbytes'; .* gptq, awq and auto-round",
        ),
        ({"load_in_4bit": True}, "quant_method is ''"),
        (GPTQ | {"bits": 3}, "gptq codes of 3 bits; smelt reads 4"),
        (GPTQ | {"bits": 8}, "gptq codes of 8 bits"),
        (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format is 'marlin', a layout of one kernel"),
        (GPTQ | {"is_marlin_format": True}, "checkpoint_format is 'marlin'"),
        (GPTQ | {"pack_dtype": "int8"}, "pack_dtype is 'int8'; smelt reads int32"),
        (GPTQ | {"group_size": "all"}, "group_size is all; expected a whole number"),
        (AUTO_ROUND | {"bits": 2}, "gptq codes of 2 bits"),
        (
            AUTO_ROUND | {"packing_format": "auto_round:auto_awq"},
            "packing_format is 'auto_round:auto_awq'; smelt reads auto_round:auto_gptq",
        ),
        (AWQ | {"version": "gemv"}, "version is 'gemv', a layout of one kernel; smelt reads gemm"),
    ],
)
def test_layouts_that_are_not_read_are_refused_by_name(said, message):
    with pytest.raises(InputError, match=message):
        of(**said)


def test_no_object_at_all():
    with pytest.raises(InputError, match="quantization_config is gptq; expected an object"):
        coding_of({"quantization_config": "gptq"})

"""What configs say of codes: the words of GPTQ's and AWQ's tools, and those that are not read."""

import pytest

from smelt.core.errors import InputError
from smelt.models.quantization_config import QuantizationConfig, parse_quantization_config
from tests.support.expected_errors import raises_code
from tests.support.pairs import matrix

pytestmark = pytest.mark.quick

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False}
AUTO_ROUND = {"quant_method": "auto-round", "bits": 4, "group_size": 32} | {
    "packing_format": "auto_round:auto_gptq"
}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "GEMM"}


def of(**options):
    return parse_quantization_config({"quantization_config": options})


def test_supported_layouts_are_parsed():
    assert parse_quantization_config({}) is None
    assert of(**GPTQ) == of(**GPTQ, checkpoint_format="gptq") == QuantizationConfig("gptq", 128, 1)
    assert of(**GPTQ, checkpoint_format="gptq_v2") == QuantizationConfig("gptq", 128, 0)
    assert of(**GPTQ, checkpoint_format="GPTQ_V2") == QuantizationConfig("gptq", 128, 0)
    assert of(**GPTQ | {"desc_act": True}) == QuantizationConfig("gptq", 128, 1, act_order=True)
    assert of(**GPTQ | {"desc_act": True, "group_size": -1}) == QuantizationConfig("gptq", None, 1)
    assert of(**GPTQ | {"group_size": -1}) == QuantizationConfig("gptq", None, 1)
    assert of(**AWQ) == QuantizationConfig("awq", 64, 0)
    assert of(**AUTO_ROUND) == QuantizationConfig("gptq", 32, 1)
    assert of(**GPTQ, format="gptq_v2") == QuantizationConfig("gptq", 128, 0)
    assert of(quant_method="awq", w_bit=4, q_group_size=128, version="gemm") == QuantizationConfig(
        "awq", 128, 0
    )


@pytest.mark.parametrize(("options", "code", "setting", "values"), [
    ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "unsupported-method", "quant_method",
     ('"bitsandbytes"', "gptq, awq", "auto-round")),
    ({"load_in_4bit": True}, "unsupported-method", "quant_method", ("null",)),
    (GPTQ | {"bits": 3}, "unsupported-bits", "bits", ("gptq", " 3 ", " 4.")),
    (GPTQ | {"bits": 8}, "unsupported-bits", "bits", ("gptq", " 8 ")),
    (GPTQ | {"checkpoint_format": "marlin"}, "unsupported-packing", "checkpoint_format", ("'marlin'",)),
    (GPTQ | {"is_marlin_format": True}, "unsupported-packing", "checkpoint_format", ("'marlin'",)),
    (GPTQ | {"pack_dtype": "int8"}, "unsupported-packing", "pack_dtype", ("'int8'", "int32")),
    (GPTQ | {"group_size": "all"}, "wrong-value", "group_size", ('"all"',)),
    (AUTO_ROUND | {"bits": 2}, "unsupported-bits", "bits", ("gptq", " 2 ")),
    (AUTO_ROUND | {"packing_format": "auto_round:auto_awq"}, "unsupported-packing", "packing_format",
     ("'auto_round:auto_awq'", "auto_round:auto_gptq")),
    ({k: v for k, v in AWQ.items() if k != "version"} | {"format": "gemv"}, "unsupported-packing", "format",
     ("'gemv'",)),
    (AWQ | {"version": "gemv"}, "unsupported-packing", "version", ("'gemv'", "gemm")),
])  # fmt: skip
def test_unsupported_layouts_are_rejected_by_name(options, code, setting, values):
    with raises_code(code, InputError) as caught:
        of(**options)
    assert caught.value.setting == f"quantization_config.{setting}"
    assert all(value in str(caught.value) for value in values)


def test_config_that_is_no_object_is_rejected():
    with raises_code("wrong-value", InputError) as caught:
        parse_quantization_config({"quantization_config": "gptq"})
    assert caught.value.setting == "quantization_config"


# what AutoRound writes where it rounds activations too, or weights to other values: auto_round/schemes.py
ACTIVATIONS, TYPE = "quantized-activations", "unsupported-quantized-type"
OTHERS = [
    ({"act_bits": 8, "act_data_type": "fp8"}, ACTIVATIONS, "8", "fp8"),
    ({"act_bits": 4, "act_dynamic": True}, ACTIVATIONS, "4", "int"),
    ({"act_bits": "8"}, ACTIVATIONS, "8"),
    ({"act_bits": True}, ACTIVATIONS, "True"),
    ({"data_type": "mx_fp"}, TYPE, "'mx_fp'"),
    ({"data_type": "nv_fp"}, TYPE, "'nv_fp'"),
    ({"data_type": "fp8_to_int_sym"}, TYPE, "'fp8_to_int_sym'"),
    ({"data_type": "int_asym_float_zp"}, TYPE, "'int_asym_float_zp'"),
    ({"data_type": "int_sym_dq"}, TYPE, "'int_sym_dq'"),
    ({"rotation_config": {"hadamard_type": "hadamard", "block_size": 32}}, "rotated-weights"),
    ({"spinquant_config": {"r1": True}}, "rotated-weights"),
    ({"rotation": "hadamard"}, "rotated-weights"),  # GPTQModel
    (
        {"adapter": {"name": "lora", "path": "eora", "rank": 32}},  # as GPTQModel's Lora.to_dict writes it
        "unsupported-adapter",
        '"lora"',
    ),
    ({"activation": "w4afp8"}, ACTIVATIONS, '"w4afp8"'),  # GPTQModel 7.7
    ({"activation": {"mode": "w4a_nvfp4"}}, ACTIVATIONS, "w4a_nvfp4"),
    ({"bits": "4"}, "unsupported-bits", '"4"'),
    ({"group_size": "32"}, "wrong-value", '"32"'),
]


@pytest.mark.parametrize(("case", "base"), matrix.matrix_cells(OTHERS, [GPTQ, AUTO_ROUND, AWQ]), ids=str)
def test_non_integer_or_activation_quantization_is_rejected(base, case):
    options, code, *values = case
    with raises_code(code, InputError) as caught:
        of(**base | options)
    assert caught.value.setting == f"quantization_config.{next(iter(options))}"
    assert all(value in str(caught.value) for value in values)


@pytest.mark.parametrize("options", [
    {"data_type": "int4"}, {"data_type": "int_sym"}, {"data_type": None}, {"act_bits": None},
    {"act_bits": 16, "act_data_type": "float"}, {"rotation_config": {}}, {"spinquant_config": None},
    {"adapter": None, "activation": None}, {"adapter": {}, "meta": {"adapter": None, "quantizer": ["a:1"]}},
    {"rotation": None, "packing_format": None, "checkpoint_format": None, "pack_dtype": None},
])  # fmt: skip
def test_integer_weights_with_float_activations_are_accepted(options):
    assert of(**AUTO_ROUND | options) == QuantizationConfig("gptq", 32, 1)


ALIKE = [
    {"extra_config": {"model.layers.0.mlp.gate_proj": {"bits": 16, "data_type": "fp"}}},
    {"extra_config": {"lm_head": {"bits": 4, "group_size": 32, "data_type": "int", "act_bits": None}}},
    {"extra_config": {".*q_proj.*": {"sym": False}}},
    {"extra_config": None, "dynamic": {}},
    {"dynamic": {"-:.*gate.*": {}, "-:.*up.*": {"bits": 8}, "+:.*down.*": {"bits": 4, "group_size": 32}}},
    {"modules_in_block_to_quantize": [["self_attn.q_proj"]], "modules_to_not_convert": ["lm_head"]},
]


@pytest.mark.parametrize("options", ALIKE)
def test_float_or_uniform_layer_overrides_are_accepted(options):
    assert of(**AUTO_ROUND | options) == of(**AUTO_ROUND)


MIXED = "mixed-quantization"


@pytest.mark.parametrize(("options", "code", "setting", "values"), [
    ({"extra_config": {"lm_head": {"bits": 8}}}, MIXED, "extra_config", ("'lm_head'", "bits 8", " 4;")),
    ({"extra_config": {"a": {"group_size": 128}}}, MIXED, "extra_config", ("'a'", "group_size 128", " 32;")),
    ({"extra_config": {"a": {"data_type": "mx_fp"}}}, TYPE, "data_type", ("extra_config: 'a':",)),
    ({"extra_config": {"a": {"act_bits": 8}}}, ACTIVATIONS, "act_bits", ("extra_config: 'a':",)),
    ({"dynamic": {"up": {"adapter": {"name": "lora"}}}}, "unsupported-adapter", "adapter",
     ("dynamic: 'up':",)),
    ({"dynamic": {"up": {"activation": "w4afp8"}}}, ACTIVATIONS, "activation", ("dynamic: 'up':",)),
    ({"dynamic": {"+:.*down.*": {"bits": 8}}}, MIXED, "dynamic", ("'+:.*down.*'", "bits 8")),
    ({"dynamic": {".*down.*": {"group_size": -1}}}, MIXED, "dynamic", ("group_size -1",)),
    ({"dynamic": ["a"]}, "wrong-value", "dynamic", ("['a']",)),
    ({"extra_config": {"a": 8}}, "wrong-value", "extra_config", ("{'a': 8}",)),
])  # fmt: skip
@pytest.mark.parametrize("base", [AUTO_ROUND, AWQ | {"group_size": 32}], ids=["auto-round", "awq"])
def test_mixed_layer_overrides_are_rejected(base, options, code, setting, values):
    with raises_code(code, InputError) as caught:
        of(**base | options)
    assert caught.value.setting == f"quantization_config.{setting}"
    assert all(value in str(caught.value) for value in values)


def test_act_order_of_single_layers_is_detected():
    options = {"dynamic": {"+:.*down.*": {"desc_act": True}, "-:.*up.*": {"desc_act": True}}}
    assert of(**GPTQ | options) == QuantizationConfig("gptq", 128, 1, act_order=True)
    assert not of(**GPTQ | {"dynamic": {"-:.*up.*": {"desc_act": True}}}).act_order
    assert not of(**AWQ | options).act_order

"""What configs say of codes: the words of GPTQ's and AWQ's tools, and those that are not read."""

import pytest
from refusals import refused

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
    assert of(**GPTQ, format="gptq_v2") == Coding("gptq", 128, 0)
    assert of(quant_method="awq", w_bit=4, q_group_size=128, version="gemm") == Coding("awq", 128, 0)


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (
            {"quant_method": "bitsandbytes", "load_in_4bit": True},
            'quant_method is "bitsandbytes"; .* gptq, awq and auto-round',
        ),
        ({"load_in_4bit": True}, "quant_method is null"),
        (GPTQ | {"bits": 3}, "gptq codes of 3 bits; smelt reads 4"),
        (GPTQ | {"bits": 8}, "gptq codes of 8 bits"),
        (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format is 'marlin', a layout of one kernel"),
        (GPTQ | {"is_marlin_format": True}, "checkpoint_format is 'marlin'"),
        (GPTQ | {"pack_dtype": "int8"}, "pack_dtype is 'int8'; smelt reads int32"),
        (GPTQ | {"group_size": "all"}, 'group_size is "all"; expected a whole number'),
        (AUTO_ROUND | {"bits": 2}, "gptq codes of 2 bits"),
        (
            AUTO_ROUND | {"packing_format": "auto_round:auto_awq"},
            "packing_format is 'auto_round:auto_awq'; smelt reads auto_round:auto_gptq",
        ),
        ({k: v for k, v in AWQ.items() if k != "version"} | {"format": "gemv"}, "format is 'gemv', a layout"),
        (AWQ | {"version": "gemv"}, "version is 'gemv', a layout of one kernel; smelt reads gemm"),
    ],
)
def test_layouts_that_are_not_read_are_refused_by_name(said, message):
    with pytest.raises(InputError, match=message):
        of(**said)


def test_no_object_at_all():
    with refused("wrong-value", InputError) as caught:
        coding_of({"quantization_config": "gptq"})
    assert caught.value.setting == "quantization_config"


# what AutoRound writes where it rounds activations too, or weights to other values: auto_round/schemes.py
OTHERS = [
    ({"act_bits": 8, "act_data_type": "fp8"}, r"act_bits is 8: activations \(fp8\) are rounded too"),
    ({"act_bits": 4, "act_dynamic": True}, r"act_bits is 4: activations \(int\) are rounded too"),
    ({"act_bits": "8"}, "act_bits is 8"),
    ({"act_bits": True}, "act_bits is True"),
    ({"data_type": "mx_fp"}, "data_type is 'mx_fp'; smelt reads whole numbers"),
    ({"data_type": "nv_fp"}, "data_type is 'nv_fp'"),
    ({"data_type": "fp8_to_int_sym"}, "data_type is 'fp8_to_int_sym'"),
    ({"data_type": "int_asym_float_zp"}, "data_type is 'int_asym_float_zp'"),
    ({"data_type": "int_sym_dq"}, "data_type is 'int_sym_dq'.* no scales that are codes themselves"),
    ({"rotation_config": {"hadamard_type": "hadamard", "block_size": 32}}, "rotation_config: .* are rotated"),
    ({"spinquant_config": {"r1": True}}, "spinquant_config: the weights are rotated"),
    ({"rotation": "hadamard"}, "rotation: the weights are rotated"),  # GPTQModel
    (
        {"adapter": {"name": "lora", "path": "eora", "rank": 32}},  # as GPTQModel's Lora.to_dict writes it
        r'adapter: the checkpoint holds an adapter \("lora"\) beside its codes, .* does not read',
    ),
    ({"activation": "w4afp8"}, 'activation is "w4afp8": what layers are fed is rounded too'),  # GPTQModel 7.7
    ({"activation": {"mode": "w4a_nvfp4"}}, "activation is .*w4a_nvfp4.* another model"),
    ({"bits": "4"}, 'codes of "4" bits; smelt reads 4'),
    ({"group_size": "32"}, 'group_size is "32"; expected a whole number'),
]


@pytest.mark.parametrize("base", [GPTQ, AUTO_ROUND, AWQ], ids=["gptq", "auto-round", "awq"])
@pytest.mark.parametrize(("said", "message"), OTHERS)
def test_what_is_no_rounding_of_weights_alone_to_whole_numbers_is_refused(base, said, message):
    with pytest.raises(InputError, match=message):
        of(**base | said)


@pytest.mark.parametrize("said", [
    {"data_type": "int4"}, {"data_type": "int_sym"}, {"data_type": None}, {"act_bits": None},
    {"act_bits": 16, "act_data_type": "float"}, {"rotation_config": {}}, {"spinquant_config": None},
    {"adapter": None, "activation": None}, {"adapter": {}, "meta": {"adapter": None, "quantizer": ["a:1"]}},
    {"rotation": None, "packing_format": None, "checkpoint_format": None, "pack_dtype": None},
])  # fmt: skip
def test_whole_numbers_and_float_activations_are_read(said):
    assert of(**AUTO_ROUND | said) == Coding("gptq", 32, 1)


ALIKE = [
    {"extra_config": {"model.layers.0.mlp.gate_proj": {"bits": 16, "data_type": "fp"}}},
    {"extra_config": {"lm_head": {"bits": 4, "group_size": 32, "data_type": "int", "act_bits": None}}},
    {"extra_config": {".*q_proj.*": {"sym": False}}},
    {"extra_config": None, "dynamic": {}},
    {"dynamic": {"-:.*gate.*": {}, "-:.*up.*": {"bits": 8}, "+:.*down.*": {"bits": 4, "group_size": 32}}},
    {"modules_in_block_to_quantize": [["self_attn.q_proj"]], "modules_to_not_convert": ["lm_head"]},
]


@pytest.mark.parametrize("said", ALIKE)
def test_layers_that_are_left_float_or_are_as_the_others(said):
    assert of(**AUTO_ROUND | said) == of(**AUTO_ROUND)


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"extra_config": {"lm_head": {"bits": 8}}}, "'lm_head' has bits 8, and the others have 4"),
        (
            {"extra_config": {"a": {"group_size": 128}}},
            "'a' has group_size 128, and the others have 32",
        ),
        ({"extra_config": {"a": {"data_type": "mx_fp"}}}, "extra_config: 'a': data_type is 'mx_fp'"),
        ({"extra_config": {"a": {"act_bits": 8}}}, "extra_config: 'a': act_bits is 8"),
        ({"dynamic": {"up": {"adapter": {"name": "lora"}}}}, "dynamic: 'up': adapter: the checkpoint holds"),
        ({"dynamic": {"up": {"activation": "w4afp8"}}}, "dynamic: 'up': activation is .w4afp8"),
        ({"dynamic": {"+:.*down.*": {"bits": 8}}}, r"dynamic: '\+:\.\*down\.\*' has bits 8"),
        ({"dynamic": {".*down.*": {"group_size": -1}}}, "has group_size -1"),
        ({"dynamic": ["a"]}, r"dynamic is \['a'\]; expected an object for each layer"),
        ({"extra_config": {"a": 8}}, "extra_config is {'a': 8}; expected an object for each layer"),
    ],
)
@pytest.mark.parametrize("base", [AUTO_ROUND, AWQ | {"group_size": 32}], ids=["auto-round", "awq"])
def test_layers_with_codes_of_another_kind_are_refused(base, said, message):
    with pytest.raises(InputError, match=message):
        of(**base | said)


def test_an_order_of_single_layers_needs_an_index_too():
    own = {"dynamic": {"+:.*down.*": {"desc_act": True}, "-:.*up.*": {"desc_act": True}}}
    assert of(**GPTQ | own) == Coding("gptq", 128, 1, ordered=True)
    assert not of(**GPTQ | {"dynamic": {"-:.*up.*": {"desc_act": True}}}).ordered
    assert not of(**AWQ | own).ordered

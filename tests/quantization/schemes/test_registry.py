import pytest

from smelt.core.errors import InputError
from smelt.quantization.scheme import GRAPH_TARGETS
from smelt.quantization.schemes.registry import (
    DEFAULT_SCHEME,
    SCHEMES,
    bits_per_weight,
    default_options,
    find_scheme,
    schemes_by_option,
    supported_dtypes,
    supported_targets,
    unsupported_reason,
    unsupported_scheme_options,
    validate_scheme_options,
)
from tests.support.expected_errors import raises_code

pytestmark = pytest.mark.quick


def test_default_scheme_quantizes_everything_without_training():
    assert SCHEMES[DEFAULT_SCHEME].supports_embeddings
    assert not SCHEMES[DEFAULT_SCHEME].requires_training


@pytest.mark.parametrize("scheme_name", ["itn4", "int5", 7, None, [], {}])
def test_unknown_scheme_error_lists_the_schemes(scheme_name):
    with raises_code("unknown-scheme", InputError) as caught:
        find_scheme(scheme_name)
    assert all(name in str(caught.value) for name in SCHEMES)


OPTIONS = "unsupported-scheme-options"


def test_schemes_sharing_an_option_agree_on_its_default_and_description():
    for group in schemes_by_option().values():
        assert len({option.description for _, option in group}) == 1
        assert all(option.allows(option.default) for _, option in group)


@pytest.mark.parametrize(("scheme", "change", "code", "values"), [
    ("int4", {"group_size": 48}, "wrong-value", ("48", "16, 32, 64, 128")),
    ("binary", {"group_size": 16}, "wrong-value", ("16", "32, 64, 128")),
    ("int4", {"group_size": True}, "wrong-value", ("True",)),
    ("int4", {"symmetric": 1}, "wrong-value", ("1", "true, false, positive")),
    ("int4", {"accuracy_level": 2}, "wrong-value", ("2", "0", "4")),
    ("int4", {"bits": 3}, OPTIONS, ("int4", "group_size, symmetric, accuracy_level")),
    ("int8-dynamic", {"group_size": 64}, OPTIONS, ("granularity",)),
    ("int8-dynamic", {"granularity": "group"}, "wrong-value", ("'group'", "channel, tensor")),
    ("bnb-int8", {"granularity": "tensor"}, OPTIONS, ("bnb-int8",)),
])  # fmt: skip
def test_inapplicable_options_are_refused(scheme, change, code, values):
    with raises_code(code, InputError) as caught:
        validate_scheme_options(find_scheme(scheme), default_options(find_scheme(scheme)) | change)
    assert caught.value.setting == (next(iter(change)) if code == "wrong-value" else None)
    assert all(value in str(caught.value) for value in values)


def test_missing_option_is_refused():
    with raises_code("unsupported-scheme-options", InputError) as caught:
        validate_scheme_options(find_scheme("int4"), {"group_size": 64})
    assert all(part in str(caught.value) for part in ("int4", "{'group_size': 64}"))


@pytest.mark.parametrize(("scheme", "options", "bits"), [
    ("int8-dynamic", {}, 8 + 32 / 1024), ("int8-static", {"activations_symmetric": False}, 8 + 32 / 1024),
    ("int8-dynamic", {"granularity": "tensor"}, 8 + 32 / 1024),  # stored for each row all the same
    ("int4", {"group_size": 64, "symmetric": True}, 4.25),
    ("int4", {"group_size": 32, "symmetric": False}, 4 + 16 / 32 + 4 / 32),
    ("int8-groupwise", {"group_size": 128, "symmetric": True}, 8 + 16 / 128),
    ("int8-groupwise", {"group_size": 32, "symmetric": False}, 8 + 16 / 32 + 8 / 32),
    ("int3", {"group_size": 64, "symmetric": True}, 3.25),
    ("int3", {"group_size": 128, "symmetric": False}, 3 + 16 / 128 + 4 / 128),
    ("int2", {"group_size": 64, "symmetric": True}, 2.25),
    ("int2", {"group_size": 32, "symmetric": False}, 2 + 16 / 32 + 2 / 32),
    ("ternary", {"group_size": 64, "granularity": "group"}, 8 * 13 / 64 + 16 / 64),
    ("ternary", {"group_size": 64, "granularity": "channel"}, 8 * 205 / 1024 + 16 / 1024),
    ("binary", {"group_size": 64}, 1.25), ("kmeans4", {"group_size": 256}, 4 + (16 * 8 + 16) / 256),
    ("pow2", {"group_size": 64}, 4.25), ("mxfp4", {"group_size": 32}, 4.25),
    ("bnb-nf4", {"use_double_quant": False}, 4.5),
    ("bnb-int8", {}, 8 + 32 / 1024),
    # of 1,024 rows: codes, a float16 for each row, and for each number of the codebooks
    ("additive", {"num_codebooks": 2, "nbits_per_codebook": 8}, 2 + 16 / 1024 + 2 * 256 * 8 * 16 / 1024**2),
    ("additive", {"num_codebooks": 3, "nbits_per_codebook": 4}, 1.5 + 16 / 1024 + 3 * 16 * 8 * 16 / 1024**2),
])  # fmt: skip
def test_bits_per_weight_include_scales_and_zero_points(scheme, options, bits):
    assert bits_per_weight(find_scheme(scheme), options, 1024) == bits


def test_several_schemes_run_where_each_of_them_runs():
    assert supported_targets([]) == ["ort-cpu", "ort-cuda", "tensorrt", "openvino", *GRAPH_TARGETS]
    assert supported_targets([find_scheme("int4"), find_scheme("binary")]) == ["ort-cpu", "ort-cuda"]
    assert supported_targets([find_scheme("int8-static")]) == [
        "ort-cpu",
        "tensorrt",
        "openvino",
        *GRAPH_TARGETS,
    ]


def test_tensorrt_runs_4_bits_only_with_some_options():
    int4, fine = find_scheme("int4"), {"group_size": 64, "symmetric": "positive", "accuracy_level": 0}
    assert supported_targets([int4]) == ["ort-cpu", "ort-cuda", "tensorrt", "openvino"]
    int4_targets, groupwise = int4.unsupported_targets, find_scheme("int8-groupwise")
    assert "tensorrt" not in int4_targets
    assert unsupported_reason(int4, "ort-tensorrt") == int4_targets["ort-tensorrt"]
    assert "ort-tensorrt" not in groupwise.unsupported_targets
    assert unsupported_reason(groupwise, "ort-tensorrt") == groupwise.unsupported_targets["tensorrt"]
    assert unsupported_scheme_options(int4, fine, "tensorrt") == []
    assert unsupported_scheme_options(int4, fine | {"group_size": 32}, "tensorrt") == [
        "`group_size: 64 or 128`"
    ]
    assert unsupported_scheme_options(int4, fine | {"symmetric": False}, "tensorrt") == [
        "`symmetric: positive`"
    ]
    assert unsupported_scheme_options(int4, fine | {"accuracy_level": 4}, "tensorrt") == [
        "`accuracy_level: 0`"
    ]
    assert (
        unsupported_scheme_options(int4, {"group_size": 128}, "tensorrt") == []
    )  # of what is not known nothing is said
    assert supported_dtypes([int4], "tensorrt") == ["fp32", "fp16"]
    assert supported_dtypes([int4, find_scheme("int8-static")], "tensorrt") == ["fp32", "fp16"]
    assert supported_dtypes([int4, find_scheme("fp8")], "tensorrt") == ["fp32", "fp16"]
    assert supported_dtypes([find_scheme("fp8")], "tensorrt") == ["fp32", "fp16", "bf16"]
    assert unsupported_scheme_options(int4, fine | {"accuracy_level": 4}, "openvino") == []
    assert supported_dtypes([int4], "openvino") == ["fp32"]


def test_tensor_name_has_one_meaning_in_all_schemes():
    """Place-holders name a table by its word alone."""
    tables = {}
    for scheme in SCHEMES.values():
        for name, table in scheme.unpacking_tables().items():
            assert (tables.setdefault(name, table) == table).all(), f"{scheme.name}: {name}"

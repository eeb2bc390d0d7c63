"""What a recipe may say of `quantize`: what fits together, and nothing that means nothing."""

import pytest

from smelt.compress.quantize.settings import QuantizeSettings
from smelt.quantization.schemes.registry import SCHEMES
from tests.support.expected_errors import raises_setting_codes

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(("options", "table"), [
    ({}, "int8-dynamic"), ({"scheme": "int4"}, "int4"), ({"scheme": "binary"}, "int8-dynamic"),
    ({"scheme": "binary", "embedding_scheme": "int4"}, "int4"),
    ({"scheme": "int4", "embedding_scheme": "int8-dynamic"}, "int8-dynamic"),
])  # fmt: skip
def test_embedding_scheme_is_explicit_or_derived(options, table):
    settings = QuantizeSettings(**options)
    assert settings.resolved_embedding_scheme == table
    assert settings.used_schemes() == tuple(dict.fromkeys((settings.scheme, table)))


@pytest.mark.parametrize(("options", "code", "named"), [
    ({"group_size": 64}, "unused-setting", "group_size"),
    ({"granularity": "group"}, "wrong-value", "channel, tensor"),
    ({"scheme": "ternary", "granularity": "tensor"}, "wrong-value", "group, channel"),
    ({"scheme": "int2", "symmetric": "positive", "embedding_scheme": "int3"}, "wrong-value", "int2"),
    ({"mixed_precision": {"target_bits": 3.5}, "symmetric": "positive"}, "wrong-value", "2-bit"),
    ({"scheme": "int4", "granularity": "tensor"}, "unused-setting", "granularity"),
    ({"scheme": "kmeans4", "symmetric": False}, "unused-setting", "symmetric"),
    ({"scheme": "binary", "group_size": 16}, "wrong-value", "32, 64 or 128"),
    ({"scheme": "binary", "embedding_scheme": "binray"}, "literal_error", "int8-dynamic"),
    ({"scheme": "int4", "activation_bits": 4}, "unused-setting", "activation_bits"),
    ({"scheme": "binary", "activation_bits": 4, "accuracy_level": 0}, "settings-conflict", "accuracy_level"),
    ({"scheme": "kmeans4", "clip": "mse"}, "settings-conflict", "clip: mse"),
    ({"scheme": "int4", "embedding_scheme": "kmeans4", "clip": "percentile"}, "settings-conflict",
     "clip: percentile"),
])  # fmt: skip
def test_options_unsupported_by_scheme_are_rejected(options, code, named):
    with raises_setting_codes(code) as caught:
        QuantizeSettings(**options)
    assert named in caught.value.errors()[0]["msg"]


@pytest.mark.parametrize(("options", "taken"), [
    ({}, {"int8-dynamic": "channel"}), ({"granularity": "tensor"}, {"int8-dynamic": "tensor"}),
    ({"scheme": "int8-static", "granularity": "tensor"}, {"int8-static": "tensor"}),
    ({"scheme": "binary", "granularity": "tensor"}, {"int8-dynamic": "tensor"}),
    ({"scheme": "ternary", "granularity": "channel", "embedding_scheme": "int8-dynamic"},
     {"ternary": "channel", "int8-dynamic": "channel"}),
    ({"scheme": "ternary", "embedding_scheme": "int8-dynamic"},
     {"ternary": "group", "int8-dynamic": "channel"}),
])  # fmt: skip
def test_granularity_applies_to_schemes_that_support_it(options, taken):
    settings = QuantizeSettings(**options)
    assert {name: settings.scheme_options(name)["granularity"] for name in taken} == taken


@pytest.mark.parametrize(("options", "table", "taken"), [
    ({"scheme": "int4", "symmetric": False, "embedding_scheme": "int8-dynamic"}, "int8-dynamic",
     {"symmetric": True, "granularity": "channel"}),
    ({"scheme": "int8-static", "granularity": "tensor", "symmetric": False,
      "embedding_scheme": "int8-dynamic"}, "int8-dynamic", {"symmetric": True, "granularity": "channel"}),
    ({"scheme": "int8-static", "granularity": "tensor"}, "int8-static", {"granularity": "tensor"}),
    ({"scheme": "int2", "symmetric": False}, "int4", {"symmetric": False}),  # of the same kind of groups
    ({"scheme": "binary", "symmetric": False}, "int8-dynamic", {"symmetric": False}),  # binary has none
])  # fmt: skip
def test_options_of_linear_layers_do_not_reach_int8_embeddings_of_another_scheme(options, table, taken):
    settings = QuantizeSettings(**options)
    assert settings.resolved_embedding_scheme == table
    assert taken.items() <= settings.scheme_options(table).items()
    linear = settings.scheme_options(settings.scheme)
    assert all(linear[name] == value for name, value in options.items() if name in linear)


def test_effective_options_are_in_key():
    plain = QuantizeSettings(scheme="int4").model_dump()
    assert plain["embedding_scheme"] is None
    for options in (
        {"group_size": 64},
        {"symmetric": False},
        {"accuracy_level": 0},
        {"embedding_scheme": "int8-static"},
    ):
        assert QuantizeSettings(scheme="int4", **options).model_dump() == plain | options
    ternary = QuantizeSettings(scheme="ternary", symmetric="positive")  # that is of its vocabulary, in int4
    assert ternary.model_dump()["symmetric"] == "positive"
    assert ternary.model_dump(exclude_defaults=True) == {"scheme": "ternary", "symmetric": "positive"}


def test_reported_settings_are_valid_for_all_scheme_pairs():
    for scheme in SCHEMES:
        for vocabulary in [None, *(name for name, other in SCHEMES.items() if other.supports_embeddings)]:
            settings = QuantizeSettings(scheme=scheme, embedding_scheme=vocabulary)
            reloaded = QuantizeSettings(**settings.to_report())
            assert reloaded.to_report() == settings.to_report()
            assert [reloaded.scheme_options(name) for name in reloaded.used_schemes()] == [
                settings.scheme_options(name) for name in settings.used_schemes()
            ]


@pytest.mark.parametrize(("options", "meant", "idle"), [
    ({"scheme": "int8-dynamic"}, {"granularity": "channel", "embedding_scheme": "int8-dynamic"},
     {"group_size", "accuracy_level", "calibration_method", "calibration_percentile",
     "calibration_samples", "sensitivity_samples", "smoothquant_alpha", "max_excluded"}),
    ({"scheme": "int8-static"}, {"calibration_percentile": 99.99, "calibration_samples": None},
     {"group_size"}),
    ({"scheme": "int8-static", "calibration_method": "mse"}, {"calibration_method": "mse"},
     {"calibration_percentile"}),
    ({"scheme": "int4", "clip": "percentile"}, {"calibration_percentile": 99.99},
     {"calibration_method", "calibration_samples", "granularity"}),
    ({"scheme": "int2"}, {"group_size": 64, "embedding_scheme": "int4"}, {"calibration_samples"}),
    ({"scheme": "int2", "embeddings": False, "output_layer": False}, {"output_layer": False},
     {"embedding_scheme"}),
    ({"mixed_precision": {"target_bits": 4.5}}, {"group_size": 64, "calibration_samples": None},
     {"scheme", "embedding_scheme", "calibration_method"}),
    ({"scheme": "binary"}, {"embedding_scheme": "int8-dynamic", "granularity": "channel", "symmetric": True},
     set()),
    ({"scheme": "int4", "embedding_scheme": "int8-dynamic"}, {"granularity": "channel"}, set()),
    ({"scheme": "int8-dynamic", "embedding_scheme": "ternary"}, {"group_size": 64}, {"granularity"}),
])  # fmt: skip
def test_report_contains_used_settings_only(options, meant, idle):
    settings = QuantizeSettings(**options)
    reported = settings.to_report()
    assert meant.items() <= reported.items()
    assert not idle & set(reported)
    reloaded = QuantizeSettings(**reported)  # reported settings are valid, and mean the same
    assert reloaded.to_report() == reported
    assert [reloaded.scheme_options(name) for name in reloaded.used_schemes()] == [
        settings.scheme_options(name) for name in settings.used_schemes()
    ]

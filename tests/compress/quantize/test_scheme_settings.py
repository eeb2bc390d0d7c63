"""Each option of a scheme is a setting of `quantize`, and its description names the schemes that have it."""

import pytest

from smelt.compress.quantize.settings import QuantizeSettings
from smelt.quantization.schemes.registry import schemes_by_option

pytestmark = pytest.mark.quick


@pytest.mark.parametrize("name", schemes_by_option())
def test_an_option_is_a_setting_that_names_its_schemes(name):
    found, field = schemes_by_option()[name], QuantizeSettings.model_fields[name]
    assert field.default is None  # each scheme's own default
    assert field.description.startswith(f"{found[0][1].description}. ")
    assert all(scheme.name in field.description for scheme, _ in found)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("group_size", "int2, ternary, binary: 32, 64, 128; default 64. kmeans4: 128, 256; default 256"),
        (
            "granularity",
            "int8-dynamic, int8-static: channel, tensor; default channel. ternary: group, channel;",
        ),
        ("symmetric", "int8-groupwise, int3, int2: true, false; default true. int4: default true"),
    ],
)
def test_values_are_listed_for_schemes_that_do_not_take_all(name, words):
    assert words in QuantizeSettings.model_fields[name].description

"""Each option of a scheme is a setting of `quantize`, and its help says whose it is."""

from smelt.compress.quantize.settings import QuantizeSettings
from smelt.runtime.schemes.registry import options_of_all


def test_every_option_of_a_scheme_is_a_setting_with_its_default_and_the_names_of_its_schemes():
    fields = QuantizeSettings.model_fields
    for name, found in options_of_all().items():
        first = next((option for _, option in found if not option.later), found[0][1])
        assert fields[name].default == first.default
        names = ", ".join(scheme.name for scheme, _ in found)
        assert fields[name].description.startswith(f"{names}: {found[0][1].description}")


def test_what_a_scheme_narrows_is_said_in_the_help():
    assert "binary: 32, 64, 128)" in QuantizeSettings.model_fields["group_size"].description


def test_a_default_of_an_option_that_came_later_is_said_in_the_help():
    told = QuantizeSettings.model_fields["granularity"].description
    assert "int8-dynamic, int8-static: channel, tensor, unless given channel; ternary: group, row)" in told

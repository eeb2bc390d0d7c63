"""Settings of generation: what contradicts itself, and what it is called."""

import pytest

from smelt.generation.config import GenerationSettings
from tests.support.expected_errors import raises_setting_codes

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(("wishes", "code", "name"), [
    ({"num_beams": 2, "do_sample": True}, "settings-conflict", "do_sample"),
    ({"length_penalty": 1.0}, "unused-setting", "length_penalty"),
    ({"early_stopping": "never"}, "unused-setting", "early_stopping"),
    ({"top_p": 0.9}, "unused-setting", "top_p"),
    ({"min_length": 2, "min_new_tokens": 2}, "settings-conflict", "min_length"),
])  # fmt: skip
def test_contradicting_settings_are_refused(wishes, code, name):
    with raises_setting_codes(code) as caught:
        GenerationSettings(**wishes)
    assert name in str(caught.value.errors()[0]["msg"])


def test_summary_names_the_search():
    assert GenerationSettings(max_new_tokens=9).summary() == "greedy, at most 9 new tokens"
    assert GenerationSettings(num_beams=4).summary() == "beam 4, up to the model's longest output"
    assert GenerationSettings(do_sample=True).summary().startswith("sampled")

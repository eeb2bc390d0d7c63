"""Settings of generation: what contradicts itself, and what it is called."""

import pytest
from refusals import invalid

from smelt.runtime.generate.settings import Generation


@pytest.mark.parametrize(
    ("wishes", "code", "name"),
    [
        ({"num_beams": 2, "do_sample": True}, "settings-conflict", "do_sample"),
        ({"length_penalty": 1.0}, "unused-setting", "length_penalty"),
        ({"early_stopping": "never"}, "unused-setting", "early_stopping"),
        ({"top_p": 0.9}, "unused-setting", "top_p"),
        ({"min_length": 2, "min_new_tokens": 2}, "settings-conflict", "min_length"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(wishes, code, name):
    with invalid(code) as caught:
        Generation(**wishes)
    assert name in str(caught.value.errors()[0]["msg"])


def test_summary_names_the_search():
    assert Generation(max_new_tokens=9).summary() == "greedy, at most 9 new tokens"
    assert Generation(num_beams=4).summary() == "beam 4, to the model's longest output"
    assert Generation(do_sample=True).summary().startswith("sampled")

"""Settings of generation: what contradicts itself, and what it is called."""

import pytest
from pydantic import ValidationError

from smelt.runtime.generate.settings import Generation


@pytest.mark.parametrize(
    ("wishes", "message"),
    [
        ({"beams": 2, "do_sample": True}, "do_sample draws one text; it does not go with beams: 2"),
        ({"length_penalty": 1.0}, "length_penalty means nothing without beams above 1"),
        ({"early_stopping": "never"}, "early_stopping means nothing without beams above 1"),
        ({"top_p": 0.9}, "top_p means nothing without do_sample: true"),
        ({"min_length": 2, "min_new_tokens": 2}, "give min_new_tokens or min_length, not both"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(wishes, message):
    with pytest.raises(ValidationError, match=message):
        Generation(**wishes)


def test_summary_names_the_search():
    assert Generation(max_new_tokens=9).summary() == "greedy, at most 9 new tokens"
    assert Generation(beams=4).summary() == "beam 4, to the model's longest output"
    assert Generation(do_sample=True).summary().startswith("sampled")

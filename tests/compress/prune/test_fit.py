"""What is said of units before torch is imported is what cutting them would say."""

import pytest
from every_family import OF_TEXTS
from refusals import refused

from smelt.compress.prune.fit import check_units, heads_that_stay
from smelt.core.errors import InputError
from smelt.families.registry import FAMILIES


@pytest.mark.parametrize("kind", sorted(OF_TEXTS))
def test_only_heads_that_cannot_go_are_refused_when_nothing_else_is_to_go(kind):
    config = {"model_type": kind}
    fixed = any(a.fixed_heads for s in FAMILIES[kind].stacks(config) for a in s.attentions)
    assert bool(check_units(["heads"], config)) == fixed == bool(heads_that_stay(["heads", "ffn"], config))
    assert check_units(["ffn"], config) == check_units(["heads", "ffn"], config) == []
    assert heads_that_stay(["ffn"], config) == []


def test_the_message_says_why_and_what_to_write():
    config = {"model_type": "mpnet"}
    [found] = check_units(["heads"], config)
    assert (found.setting, found.code) == ("targets", "fixed-heads")
    assert "[ffn]" in found.message
    with refused("fixed-heads", InputError) as caught:
        heads_that_stay(["heads"], config)
    assert caught.value.setting == "targets"
    assert "mpnet" in str(caught.value)


def test_a_family_that_is_not_known_is_left_to_the_stage():
    assert check_units(["heads"], {"model_type": "mamba"}) == []

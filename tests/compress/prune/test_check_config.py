"""What is said of units before torch is imported is what cutting them would say."""

import pytest

from smelt.compress.prune.settings import check_units, fixed_heads_warnings
from smelt.core.errors import InputError
from smelt.models.families.registry import FAMILIES
from tests.support.expected_errors import raises_code
from tests.support.models.every_family import TEXT_FAMILIES

pytestmark = pytest.mark.quick


@pytest.mark.parametrize("kind", sorted(TEXT_FAMILIES))
def test_unprunable_heads_are_rejected_only_without_other_targets(kind):
    config = {"model_type": kind}
    fixed = any(a.fixed_heads_reason for s in FAMILIES[kind].stacks(config) for a in s.attentions)
    assert (
        bool(check_units(["heads"], config)) == fixed == bool(fixed_heads_warnings(["heads", "ffn"], config))
    )
    assert check_units(["ffn"], config) == check_units(["heads", "ffn"], config) == []
    assert fixed_heads_warnings(["ffn"], config) == []


def test_message_gives_reason_and_suggested_setting():
    config = {"model_type": "mpnet"}
    [error] = check_units(["heads"], config)
    assert (error.setting, error.code) == ("targets", "fixed-heads")
    assert "[ffn]" in error.message
    with raises_code("fixed-heads", InputError) as caught:
        fixed_heads_warnings(["heads"], config)
    assert caught.value.setting == "targets"
    assert "mpnet" in str(caught.value)


def test_unknown_family_is_not_checked_before_loading():
    assert check_units(["heads"], {"model_type": "mamba"}) == []

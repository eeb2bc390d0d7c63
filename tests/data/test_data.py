"""Rows that say the same are told by the same fingerprint."""

import pytest

from smelt.data.splits import Example, Split

pytestmark = pytest.mark.quick

FINGERPRINT = "507148ab1fbcc6ebbd8276f3ad72fbde24e14a2bc35382f9589b01d1dc1a286c"


def test_fingerprints_equal_recorded_values():
    """Recorded before labels could be anything else: results that are kept must be found again."""
    rows = (Example("good", label=1), Example("bad", text_pair="x", label="neg"))
    assert Split("a", rows).fingerprint == FINGERPRINT

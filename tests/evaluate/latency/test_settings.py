import pytest

from smelt.evaluate.latency import LatencySettings
from tests.support.expected_errors import raises_setting_codes

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(("wrong", "code"), [
    ({"batch_sizes": []}, "wrong-value"), ({"batch_sizes": [0]}, "wrong-value"),
    ({"batch_sizes": [2, 2]}, "wrong-value"), ({"rounds": 2}, "greater_than_equal"),
    ({"threads": 0}, "greater_than_equal"),
])  # fmt: skip
def test_settings_out_of_range_are_rejected(wrong: dict[str, object], code: str) -> None:
    with raises_setting_codes(code):
        LatencySettings.model_validate(wrong)


def test_threads_default_to_artifact_setting() -> None:
    assert LatencySettings().threads is None

import pytest
from pydantic import ValidationError

from smelt.evaluate.latency import LatencySettings


@pytest.mark.parametrize(
    "wrong",
    [{"batch_sizes": []}, {"batch_sizes": [0]}, {"batch_sizes": [2, 2]}, {"rounds": 2}, {"threads": 0}],
)
def test_settings_refuse_when_out_of_range(wrong: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        LatencySettings.model_validate(wrong)


def test_the_artifact_decides_on_threads_when_nothing_is_said() -> None:
    assert LatencySettings().threads is None

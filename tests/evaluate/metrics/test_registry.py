"""Every metric has a name, a unit, tasks, and what it scores."""

import pytest

from smelt.evaluate.metrics.metric import Metric
from smelt.evaluate.metrics.registry import METRICS, METRICS_BY_TASK, find_metric

pytestmark = pytest.mark.quick


def test_every_metric_belongs_to_a_task():
    assert sorted(METRICS) == sorted({name for names in METRICS_BY_TASK.values() for name in names})


@pytest.mark.parametrize("name", METRICS)
def test_every_metric_has_samples_description_and_formula(name):
    metric = METRICS[name]
    assert metric.samples
    assert metric.description
    assert type(metric).example_rows is not Metric.example_rows
    assert metric.kind in ("proportion", "mean") or type(metric).value is not Metric.value
    assert not {*metric.tasks} & {*metric.optional}
    assert {*metric.main} <= {*metric.tasks}


def test_unknown_name_raises_key_error():
    with pytest.raises(KeyError, match="mcc"):
        find_metric("mcc")

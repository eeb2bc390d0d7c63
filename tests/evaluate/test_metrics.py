"""A metric has a line in the table of metrics, a value on resamples, and a word on the pages."""

from pathlib import Path

import numpy as np
import pytest

from smelt.evaluate.metrics import METRICS
from smelt.evaluate.significance import Statistics, metric_value
from smelt.pipeline.recipe import recipe

PAGES = Path(__file__).resolve().parents[2] / "docs" / "reference"
USED = sorted({name for names in recipe.METRICS_BY_TASK.values() for name in names})
COLUMNS = {"bleu": 10, "chrf": 18, "perplexity": 3, "bits_per_byte": 3}


def test_the_table_holds_the_metrics_of_all_tasks():
    assert sorted(METRICS) == USED


@pytest.mark.parametrize("page", ["recipe.md", "report.md"])
@pytest.mark.parametrize("name", USED)
def test_a_page_names_every_metric(name, page):
    assert f"`{name}`" in (PAGES / page).read_text(encoding="utf-8")


def _statistics(name):
    rows = np.ones((3, COLUMNS.get(name, 2))).tolist()
    return Statistics(metric=name, signature="s", examples="e", rows=rows)


@pytest.mark.parametrize("name", USED)
def test_every_metric_has_a_value_on_resamples(name):
    assert np.isfinite(metric_value(_statistics(name)))


def test_a_metric_without_a_formula_is_no_mean_of_its_first_column():
    with pytest.raises(KeyError) as caught:
        metric_value(_statistics("mcc"))
    assert "mcc" in caught.value.args[0]
    assert caught.value.args[0] != "mcc"  # no look-up that failed by chance

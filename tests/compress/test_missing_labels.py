"""A stage whose importance is computed from a loss refuses samples without labels, in the plan."""

import pytest

from smelt.compress.drop_layers.settings import DropLayersSettings
from smelt.compress.drop_layers.stage import DropLayers
from smelt.compress.factorize.settings import FactorizeSettings
from smelt.compress.factorize.stage import Factorize
from smelt.compress.prune.settings import PruneSettings
from smelt.compress.prune.stage import Prune
from smelt.data.splits import Example, Split


@pytest.mark.parametrize(
    ("task", "code"), [("sentence-similarity", "missing-scores"), ("text-classification", "missing-labels")]
)
@pytest.mark.parametrize(("stage", "settings"), [
    (DropLayers, DropLayersSettings()), (Prune, PruneSettings(keep_ratio=0.5)),
    (Factorize, FactorizeSettings(keep_ratio=0.5, method="fwsvd")),
])  # fmt: skip
def test_loss_based_importances_reject_unlabeled_samples(stage, settings, task, code):
    split = Split("rows.jsonl", (Example("a"), Example("b")))
    [error] = stage.check_rows(settings, task, {"train": split})
    assert error.code == code
    labeled = Split("rows.jsonl", (Example("a", label="x"), Example("b", label="y")))
    assert stage.check_rows(settings, task, {"train": labeled}) == []

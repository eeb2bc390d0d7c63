"""The stored layouts of the families are those of transformers' models today."""

import json

import pytest

from smelt.models.families.family import DECODER_TASKS, Family, PublishedLearningRate
from smelt.models.families.layout import LAYOUT_FOLDER, layout_to_json
from smelt.models.families.registry import FAMILIES
from tests.support.models import every_family
from tests.support.pairs import matrix
from tools.family_layouts import derive_all, derive_layout
from tools.family_trace import CannotDescribeError

DERIVED = (
    sorted(FAMILIES)
    if matrix.is_full_matrix()
    else sorted({*every_family.DISTINCT_FAMILIES, "vit", "dinov2"})
)


@pytest.mark.parametrize("name", DERIVED)
def test_stored_layout_equals_tiny_model(name):
    for file, layout in derive_all(name).items():
        stored = json.loads((LAYOUT_FOLDER / f"{file}.json").read_text())
        assert stored == json.loads(json.dumps(layout_to_json(layout))), f"make layouts NAME={name}"


def test_every_layout_belongs_to_a_family():
    names = {
        f"{family.name}-{variant}" if variant else family.name
        for family in FAMILIES.values()
        for variant in family.layouts
    }
    assert {path.stem for path in LAYOUT_FOLDER.glob("*.json")} == names


def test_family_with_norms_without_weights_is_rejected():
    """Of nanochat."""
    nanochat = Family(name="nanochat", tasks=DECODER_TASKS, learning_rate=PublishedLearningRate(2e-5, None))
    with pytest.raises(CannotDescribeError):
        derive_layout(nanochat, {})

"""Techniques that change the structure: their result can be saved, trained, quantized and exported."""

import pytest

from smelt.pipeline.recipe.stages import load_stage
from tests.support import usability_checks
from tests.support.models import every_family
from tests.support.pairs.paired_techniques import TECHNIQUES


@pytest.mark.parametrize("name", [name for name, technique in TECHNIQUES.items() if technique.usable_on])
def test_technique_output_can_be_saved_trained_quantized_and_exported(name, tmp_path):
    technique = TECHNIQUES[name]
    family, layers = technique.usable_on
    stage = load_stage(technique.stage)
    settings = stage.settings_type.model_validate(technique.settings)
    source = every_family.model_with_layers(family, layers)
    result = every_family.run_stage(stage(), settings, source, family, tmp_path / "result").out
    usability_checks.check_usable(result, family, tmp_path / "later")

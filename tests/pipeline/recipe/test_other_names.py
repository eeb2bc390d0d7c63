"""An unknown setting that has another name in other tools is suggested by its name here."""

import pytest

from smelt.pipeline.recipe.stages import load_stage
from smelt.pipeline.recipe.validation_errors import RecipeErrors, validate_settings
from smelt.pipeline.recipe.yaml_file import parse_yaml
from smelt.stage import Settings
from tests.support.expected_errors import raises_code


@pytest.mark.parametrize(("stage", "other_name", "here"), [
    ("finetune", "lr", "learning_rate"), ("finetune", "num_train_epochs", "epochs"),
    ("finetune", "lr_scheduler_type", "lr_schedule"), ("prune", "ratio", "keep_ratio"),
    ("sparsify", "amount", "sparsity"), ("distill", "alpha", "losses"), ("quantize", "desc_act", "act_order"),
    ("quantize", "ignore", "exclude"), ("quantize", "iters", "iterations"), ("quantize", "bits", "scheme"),
])  # fmt: skip
def test_setting_names_of_other_tools_suggest_own_names(stage: str, other_name: str, here: str) -> None:
    kind: type[Settings] = load_stage(stage).settings_type
    assert here in kind.model_fields
    errors = RecipeErrors(parse_yaml("a: 1", "r.yaml"))
    validate_settings(kind, {other_name: 0.5}, (), errors)
    with raises_code("unknown-setting") as excinfo:
        errors.raise_if_any()
    assert f"'{here}'" in str(excinfo.value)

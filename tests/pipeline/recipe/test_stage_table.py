"""The table of stages: every row leads to a class that keeps the contract."""

from __future__ import annotations

import subprocess
import sys
from typing import Any, get_args

import pytest

from smelt.core.artifact import Format
from smelt.core.errors import InputError
from smelt.data.tasks import Task
from smelt.pipeline.recipe.stages import STAGE_CLASSES, all_stages, load_stage
from smelt.stage import Need, Settings, Stage
from tests.support.expected_errors import raises_code

pytestmark = pytest.mark.quick


@pytest.mark.parametrize("stage_name", STAGE_CLASSES)
def test_every_table_entry_is_valid_stage(stage_name: str) -> None:
    stage = load_stage(stage_name)
    assert issubclass(stage, Stage)
    assert stage.name == stage_name
    assert stage.accepts
    assert stage.accepts <= set(get_args(Format))
    assert stage.produces in get_args(Format)
    assert stage.needs | stage.may_need <= set(get_args(Need))
    assert stage.needs | stage.may_need >= stage.needs_with(stage.settings_type(), ("train",))
    assert stage.tasks
    assert stage.tasks <= set(get_args(Task))
    assert stage.version >= 1
    assert stage.source
    assert stage.__doc__
    assert issubclass(stage.settings_type, Settings)
    assert stage.settings_type()


REPORTED_SETTINGS = [
    *((stage_name, {}) for stage_name in STAGE_CLASSES), ("prune", {"targets": ["width"]}),
    ("prune", {"targets": ["channels"]}), ("prune", {"targets": ["channels"], "reconstruct": False}),
    ("prune", {"budget": {"flops": 0.5}}), ("prune", {"keep_ratio": {"heads": 0.5, "ffn": 0.5}}),
    ("factorize", {"targets": ["embeddings"], "rank": 8}),
    ("factorize", {"method": "tucker", "rank": "vbmf"}),
    ("factorize", {"parameter_budget": 0.5}), ("sparsify", {"pattern": "2:4"}),
    ("quantize", {"mixed_precision": {"target_bits": 4.5}, "method": "gptq"}),
    ("quantize", {"scheme": "int4", "method": "autoround"}),
    ("quantize", {"scheme": "int4", "low_rank_correction": {"objective": "outputs"}}),
    ("finetune", {"qat": {}}), ("finetune", {"qat": {"scales": "lsq"}}), ("finetune", {"sparsify": {}}),
    ("finetune", {"sparsify": {"method": "soft-movement"}}), ("finetune", {"sparsify": {"pattern": "2:4"}}),
    ("finetune", {"learned_masks": {}}), ("finetune", {"lora": {}}), ("distill", {"qat": {}}),
    ("distill", {"sequence_level": {}}), ("distill", {"student": {"layers": 2}}),
    ("distill", {"student": {"model": "small"}}),
    ("distill", {"phases": [{"losses": {"hidden_states": 1.0}}, {"losses": {"logits": 1.0}}]}),
]  # fmt: skip


@pytest.mark.parametrize(("stage_name", "options"), REPORTED_SETTINGS, ids=str)
def test_reported_settings_round_trip(stage_name: str, options: dict[str, Any]) -> None:
    settings = load_stage(stage_name).settings_type.model_validate(options)
    second_settings = type(settings).model_validate(settings.to_report())
    assert second_settings.to_report() == settings.to_report()
    if stage_name != "quantize":  # it reports the options that its schemes resolve
        assert second_settings == settings


def test_embedding_report_does_not_limit_calibration_samples() -> None:
    settings = load_stage("factorize").settings_type
    values = {"targets": ["embeddings"], "rank": 8}
    assert settings.model_validate(values).to_report()["calibration_samples"] is None
    assert (
        settings.model_validate(values | {"calibration_samples": 9}).to_report()["calibration_samples"] == 9
    )


def test_all_stages_follow_table_order() -> None:
    assert list(all_stages()) == list(STAGE_CLASSES)


def test_unknown_stage_suggests_nearest() -> None:
    with raises_code("unknown-stage", InputError) as excinfo:
        load_stage("distil")
    assert all(value in str(excinfo.value) for value in ("'distil'", ", ".join(STAGE_CLASSES), "'distill'?"))


def test_loading_stages_imports_no_heavy_packages() -> None:
    code = (
        "import sys; from smelt.pipeline.recipe.stages import all_stages; all_stages();"
        "sys.exit(' '.join({'torch', 'transformers', 'onnx', 'onnxruntime', 'tensorrt'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.strip() == ""

"""An unknown setting that has another name in other tools is suggested by its name here."""

import pytest

from smelt.pipeline.recipe.stages import load_stage
from smelt.pipeline.recipe.validation_errors import RecipeErrors, validate_settings
from smelt.pipeline.recipe.yaml_file import parse_yaml
from smelt.stage import Settings
from tests.support.expected_errors import raises_code


@pytest.mark.parametrize(("stage", "other_name", "here"), [
    # TrainingArguments and scripts of transformers
    ("finetune", "optim", "optimizer"), ("finetune", "num_train_epochs", "epochs"),
    ("finetune", "warmup_ratio", "warmup_steps"), ("finetune", "per_device_train_batch_size", "batch_size"),
    ("finetune", "max_eval_samples", "max_validation_samples"), ("finetune", "eval_steps", "num_evals"),
    ("finetune", "save_steps", "checkpoint_interval_minutes"), ("distill", "max_seq_length", "max_length"),
    ("distill", "bf16", "precision"), ("finetune", "label_smoothing", "label_smoothing_factor"),
    ("finetune", "lr", "learning_rate"), ("distill", "teacher_name_or_path", "teacher"),
    # peft
    ("finetune", "lora_alpha", "lora"), ("finetune", "target_modules", "lora"), ("distill", "r", "lora"),
    # llm-compressor, GPTQModel, AutoAWQ
    ("quantize", "desc_act", "act_order"), ("quantize", "ignore", "exclude"), ("quantize", "bits", "scheme"),
    ("quantize", "num_calibration_samples", "calibration_samples"),
    ("quantize", "q_group_size", "group_size"),
    ("quantize", "smoothing_strength", "smoothquant_alpha"), ("sparsify", "mask_structure", "pattern"),
    ("quantize", "w_bit", "scheme"), ("quantize", "iters", "iterations"),
    # NNCF, ONNX Runtime, Olive, TensorRT
    ("quantize", "ignored_scope", "exclude"), ("quantize", "subset_size", "calibration_samples"),
    ("quantize-onnx", "nodes_to_exclude", "exclude"), ("quantize-onnx", "op_types_to_quantize", "op_types"),
    ("onnx", "target_opset", "opset"), ("tensorrt", "builder_optimization_level", "optimization_level"),
    ("tensorrt", "max_workspace_size", "workspace_mib"),
    # torch-pruning and others
    ("prune", "pruning_ratio", "keep_ratio"), ("prune", "ratio", "keep_ratio"),
    ("sparsify", "amount", "sparsity"), ("sparsify", "target_sparsity", "sparsity"),
    ("distill", "alpha", "losses"),
])  # fmt: skip
def test_setting_names_of_other_tools_suggest_own_names(stage: str, other_name: str, here: str) -> None:
    kind: type[Settings] = load_stage(stage).settings_type
    assert here in kind.model_fields
    errors = RecipeErrors(parse_yaml("a: 1", "r.yaml"))
    validate_settings(kind, {other_name: 0.5}, (), errors)
    with raises_code("unknown-setting") as excinfo:
        errors.raise_if_any()
    assert f"'{here}'" in str(excinfo.value)


@pytest.mark.parametrize(
    ("other_name", "here"), [("rank", "r"), ("lora_alpha", "alpha"), ("target_modules", "targets")]
)
def test_names_of_peft_within_lora_suggest_own_names(other_name: str, here: str) -> None:
    errors = RecipeErrors(parse_yaml("a: 1", "r.yaml"))
    validate_settings(load_stage("finetune").settings_type, {"lora": {other_name: 4}}, (), errors)
    with raises_code("unknown-setting") as excinfo:
        errors.raise_if_any()
    assert f"'{here}'" in str(excinfo.value)

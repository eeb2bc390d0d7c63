"""Read `launch.config_file`: a file of `accelerate config`, or DeepSpeed's own JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from smelt.core.errors import InputError
from smelt.core.files import resolve_path
from smelt.pipeline.recipe.yaml_file import parse_yaml, read_text_file
from smelt.training.processes import ZERO_OPTIONS, LaunchSettings, zero_option_problem

_STRATEGIES = {
    "NO": "ddp", "MULTI_CPU": "ddp", "MULTI_GPU": "ddp", "FSDP": "fsdp", "DEEPSPEED": "deepspeed",
}  # fmt: skip
# What a stage sets, by its name in DeepSpeed's file: there "auto", or off.
_SET_BY_STAGE = {
    "train_batch_size": "batch_size",
    "train_micro_batch_size_per_gpu": "batch_size",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "max_grad_norm",
    "optimizer": "optimizer",
    "scheduler": "lr_scheduler_type",
    "fp16": "precision",
    "bf16": "precision",
    "torch_autocast": "precision",
    "zero_force_ds_cpu_optimizer": "optimizer",
    "zero_allow_untested_optimizer": "optimizer",
}
_ONLY_REPORTS = {"steps_per_print", "wall_clock_breakdown"}
# Of `zero_optimization`: smelt's values are needed for weights that are exchanged between updates.
_SET_BY_SMELT = {
    "stage3_param_persistence_threshold", "stage3_max_reuse_distance",
    "stage3_gather_16bit_weights_on_model_save", "stage3_gather_fp16_weights_on_model_save",
}  # fmt: skip
_OFFLOADS = ("offload_optimizer", "offload_param")
_OFFLOAD_OPTIONS = {"device", "pin_memory", "buffer_count", "fast_init"}
_KNOWN = {"stage", *_OFFLOADS, *_SET_BY_SMELT, *ZERO_OPTIONS}
# What a stage sets, by its place in a file of accelerate, with the values that leave it to the stage.
_STAGE_KEYS_OF_ACCELERATE = {
    ("mixed_precision",): ("precision", (None, "no", False)),
    ("fsdp_config", "fsdp_activation_checkpointing"): ("gradient_checkpointing", (None, False, "false")),
    ("deepspeed_config", "gradient_accumulation_steps"): ("gradient_accumulation_steps", (None, 1, "auto")),
    ("deepspeed_config", "gradient_clipping"): ("max_grad_norm", (None, "none", "auto")),
}
# Of a file of accelerate (its ClusterConfig): what is read, and what does not matter on one machine.
_KEYS_OF_ACCELERATE = {
    "compute_environment", "debug", "deepspeed_config", "distributed_type", "downcast_bf16",
    "enable_cpu_affinity", "fsdp_config", "gpu_ids", "ipex_config", "machine_rank", "main_process_ip",
    "main_process_port", "main_training_function", "mixed_precision", "mpirun_config", "num_machines",
    "num_processes", "rdzv_backend", "same_network", "use_cpu",
}  # fmt: skip
_WHOLE_SHARDS = (None, 1, "1", "FULL_SHARD", True, "true")


def resolve_launch(launch: LaunchSettings, base: Path) -> LaunchSettings:
    """Return the settings with those of `launch.config_file`; those next to it take precedence.

    Raises:
        InputError: the file cannot be read, or describes what smelt does not start (`launch-config`).
    """
    if launch.config_file is None:
        return launch
    path = resolve_path(base, launch.config_file)
    file_content = _read(path)
    if "zero_optimization" in file_content:
        changed = _deepspeed(file_content, path)
    elif "distributed_type" in file_content:
        changed = _accelerate(file_content, path)
    else:
        raise _refused(
            path, ["neither a file of `accelerate config` (no distributed_type) nor of DeepSpeed (no"
                   " zero_optimization)"],
        )  # fmt: skip
    explicit_settings = launch.model_dump(include=launch.model_fields_set)
    if "zero_options" in explicit_settings:
        explicit_settings["zero_options"] = (
            changed.get("zero_options", {}) | explicit_settings["zero_options"]
        )
    try:
        return LaunchSettings.model_validate(changed | explicit_settings)
    except ValidationError as error:
        raise _refused(path, [str(detail["msg"]) for detail in error.errors()]) from error


def _read(path: Path) -> Mapping[str, Any]:
    """Return the mapping in a file of YAML or JSON, which may be indented with tabs."""
    text = read_text_file(path)
    if text.lstrip()[:1] == "{":
        try:
            return _mapping(json.loads(text, object_pairs_hook=_unique))
        except (ValueError, RecursionError) as error:
            if path.suffix == ".json":
                raise _refused(path, [f"not valid JSON: {error}"]) from error
    document = parse_yaml(text, str(path))
    if document.errors:
        raise _refused(path, [f"line {line}: {message}" for _, message, line, _ in document.errors])
    return _mapping(document.value)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"'{next(name for name in names if names.count(name) > 1)}' appears twice")
    return mapping


def _accelerate(config: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Return the settings in a file of `accelerate config`."""
    kind, count = config.get("distributed_type"), config.get("num_processes", 1)
    problems = []
    if not isinstance(kind, str) or kind not in _STRATEGIES or type(count) is not int or count < 1:
        problems.append(
            f"distributed_type {kind!r} with num_processes {count!r} is not supported; supported:"
            f" {', '.join(_STRATEGIES)}, with 1 or more processes"
        )
    if config.get("num_machines", 1) not in (1, "1"):
        problems.append(
            f"num_machines {config['num_machines']!r}: for several machines start `smelt run` with "
            "torchrun or"
            " srun (docs/how-to/several-devices.md)"
        )
    for keys, (setting, free) in _STAGE_KEYS_OF_ACCELERATE.items():
        value: Any = config
        for key in keys:
            value = _mapping(value).get(key)
        if value not in free:
            problems.append(
                f"{keys[-1]} {value!r} is a setting of the stage: {setting}; set it there, and here"
                f" {free[1]!r}"
            )
    if config.get("gpu_ids") not in (None, "all"):
        problems.append(f"gpu_ids {config['gpu_ids']!r} is not supported; set CUDA_VISIBLE_DEVICES")
    unknown = [key for key, value in config.items() if value and key not in _KEYS_OF_ACCELERATE]
    problems += [f"{key[:80]} is not supported; remove it" for key in unknown]
    sharding = _mapping(config.get("fsdp_config"))
    for key in ("fsdp_reshard_after_forward", "fsdp_sharding_strategy"):
        if sharding.get(key) not in _WHOLE_SHARDS:
            problems.append(f"{key} {sharding[key]!r} is not supported; supported: FULL_SHARD")
    changed: dict[str, Any] = {"num_processes": count, "strategy": _STRATEGIES.get(str(kind), "ddp")}
    if problems:
        raise _refused(path, problems)
    if kind == "DEEPSPEED":
        deepspeed_config = _mapping(config.get("deepspeed_config"))
        if deepspeed_config.get("deepspeed_config_file"):
            deepspeed_path = resolve_path(path.parent, str(deepspeed_config["deepspeed_config_file"]))
            return changed | _deepspeed(_read(deepspeed_path), deepspeed_path)
        devices = {name: {"device": deepspeed_config.get(f"{name}_device", "none")} for name in _OFFLOADS}
        zero_config = {"stage": deepspeed_config.get("zero_stage", 2), **devices}
        if problems := list(_zero_problems(zero_config)):
            raise _refused(path, problems)
        return changed | _zero(zero_config)
    offload = str(sharding.get("fsdp_offload_params", False)).lower() == "true"
    return changed | ({"cpu_offload": True} if offload else {})


def _deepspeed(config: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Return the settings in a file of DeepSpeed."""
    problems = []
    for name, value in config.items():
        off = value is False or (isinstance(value, dict) and value.get("enabled") in (False, "auto"))
        if name == "zero_optimization" or name in _ONLY_REPORTS or off:
            continue
        if name not in _SET_BY_STAGE:
            problems.append(f"'{name[:80]}' is not supported; remove it")
        elif isinstance(value, dict):
            problems.append(f"'{name}' is a setting of the stage: {_SET_BY_STAGE[name]}; remove this section")
        elif value != "auto":
            problems.append(f"'{name}' is a setting of the stage: {_SET_BY_STAGE[name]}; set it to \"auto\"")
    zero_config = _mapping(config.get("zero_optimization"))
    if problems := problems + list(_zero_problems(zero_config)):
        raise _refused(path, problems)
    return {"strategy": "deepspeed"} | _zero(zero_config)


def _zero_problems(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield what smelt does not start of DeepSpeed's section `zero_optimization`."""
    stage = config.get("stage")
    if isinstance(stage, bool) or stage not in (1, 2, 3):
        yield f"ZeRO stage {stage!r} is not supported; supported: 1, 2, 3"
    for name in _OFFLOADS:
        value = config.get(name)
        if value is not None and not isinstance(value, dict):
            yield f"{name} must be a mapping such as {{device: cpu}}, not {str(value)[:60]!r}"
            continue
        for key in _mapping(value).keys() - _OFFLOAD_OPTIONS:
            yield f"{name}: '{key[:80]}' is not supported; remove it"
        device = _mapping(value).get("device", "none")
        if name == "offload_param" and device == "cpu" and stage != 3:
            yield f"{name} needs stage 3; remove it"
        if device not in ("none", "cpu", None):
            yield f"{name}: device {str(device)[:60]!r} is not supported; supported: none, cpu"
    for name, value in config.items():
        if name not in _KNOWN:
            yield f"zero_optimization: '{name[:80]}' is not supported; remove it"
        elif name in ZERO_OPTIONS and value != "auto" and (problem := zero_option_problem(name, value)):
            yield f"zero_optimization: {problem}"


def _zero(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings in DeepSpeed's section `zero_optimization`, which has no problems."""
    options = {
        name: value if isinstance(value, bool) else int(value)  # such as 5e8
        for name, value in config.items()
        if name in ZERO_OPTIONS and value != "auto"
    }
    offloads = any(_mapping(config.get(name)).get("device") == "cpu" for name in _OFFLOADS)
    return {
        "strategy": "deepspeed", "zero_stage": config["stage"], "cpu_offload": offloads,
        "zero_options": options,
    }  # fmt: skip


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _refused(path: Path, problems: list[str]) -> InputError:
    return InputError(
        f"{path}: this launch configuration cannot be used: {'. '.join(problems)}.",
        code="launch-config",
        file=str(path),
        setting="launch.config_file",
    )

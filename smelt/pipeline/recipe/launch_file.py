"""Read `launch.config_file`: a file of `accelerate config`, or DeepSpeed's own JSON."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from smelt.core.errors import InputError
from smelt.core.files import resolve_path
from smelt.pipeline.recipe.yaml_file import read_yaml
from smelt.training.processes import ZERO_OPTIONS, LaunchSettings

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
    "scheduler": "lr_schedule",
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
_KNOWN = {"stage", *_OFFLOADS, *_SET_BY_SMELT, *ZERO_OPTIONS}


def resolve_launch(launch: LaunchSettings, base: Path) -> LaunchSettings:
    """Return the settings with those of `launch.config_file`.

    Raises:
        InputError: the file cannot be read, or describes what smelt does not start (`launch-config`).
    """
    if launch.config_file is None:
        return launch
    path = resolve_path(base, launch.config_file)
    found = _mapping(read_yaml(path).value)  # also JSON
    changed = _deepspeed(found, path) if "zero_optimization" in found else _accelerate(found, path)
    return launch.model_copy(update=changed)


def _accelerate(found: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Return the settings in a file of `accelerate config`."""
    kind, count = found.get("distributed_type"), found.get("num_processes", 1)
    if kind not in _STRATEGIES or not isinstance(count, int) or count < 1:
        raise InputError(
            f"{path}: distributed_type {kind!r} with num_processes {count!r} is not supported. Supported:"
            f" {', '.join(_STRATEGIES)}, with 1 or more processes.",
            code="launch-config",
            file=str(path),
        )
    if found.get("num_machines", 1) != 1:
        raise InputError(
            f"{path}: num_machines {found['num_machines']!r}: for several machines start `smelt run` with"
            " torchrun or srun (docs/how-to/several-devices.md).",
            code="launch-config",
            file=str(path),
        )
    changed: dict[str, Any] = {"num_processes": count, "strategy": _STRATEGIES[kind]}
    if kind == "DEEPSPEED":
        own = _mapping(found.get("deepspeed_config"))
        if own.get("deepspeed_config_file"):
            other = resolve_path(path.parent, str(own["deepspeed_config_file"]))
            return changed | _deepspeed(_mapping(read_yaml(other).value), other)
        devices = {name: {"device": own.get(f"{name}_device", "none")} for name in _OFFLOADS}
        return changed | _zero({"stage": own.get("zero_stage", 2), **devices}, path)
    offload = str(_mapping(found.get("fsdp_config")).get("fsdp_offload_params", False)).lower() == "true"
    return changed | {"cpu_offload": offload}


def _deepspeed(found: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Return the settings in a file of DeepSpeed."""
    for name, value in found.items():
        off = value is False or (isinstance(value, dict) and value.get("enabled") in (False, "auto"))
        if name in _SET_BY_STAGE and value != "auto" and not off:
            raise InputError(
                f"{path}: '{name}' is a setting of the stage: {_SET_BY_STAGE[name]}. Set it to auto, or"
                " remove it from the file.",
                code="launch-config",
                file=str(path),
            )
        if name not in (*_SET_BY_STAGE, *_ONLY_REPORTS, "zero_optimization"):
            raise _unsupported(str(name), path)
    return {"strategy": "deepspeed"} | _zero(_mapping(found.get("zero_optimization")), path)


def _zero(found: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Return the settings in DeepSpeed's section `zero_optimization`."""
    stage = found.get("stage")
    if stage not in (1, 2, 3):
        raise InputError(
            f"{path}: ZeRO stage {stage!r} is not supported. Supported: 1, 2, 3.",
            code="launch-config",
            file=str(path),
        )
    devices = {str(_mapping(found.get(name)).get("device", "none")) for name in _OFFLOADS}
    if wrong := sorted(devices - {"none", "cpu"}):
        raise InputError(
            f"{path}: offload to '{wrong[0][:60]}' is not supported. Supported: none, cpu.",
            code="launch-config",
            file=str(path),
        )
    options = {}
    for name, value in found.items():
        if name in ZERO_OPTIONS and isinstance(value, int | float):
            options[name] = value if isinstance(value, bool) else int(value)  # such as 5e8
        elif (name in ZERO_OPTIONS and value != "auto") or name not in _KNOWN:
            raise _unsupported(f"zero_optimization: {{{name}: {value}}}", path)
    return {"zero_stage": int(stage), "cpu_offload": "cpu" in devices, "zero_options": options}


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _unsupported(what: str, path: Path) -> InputError:
    return InputError(
        f"{path}: '{what[:80]}' is not supported. Remove it from the file.",
        code="launch-config",
        file=str(path),
    )

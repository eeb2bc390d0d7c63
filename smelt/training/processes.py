"""Several processes of one training: their settings, and what they exchange.

Every process computes the stage with a part of each batch; torch averages the gradients (Li et al. 2020,
PyTorch Distributed, arXiv:2006.15704). The settings import no torch, so that recipes load quickly.
"""

from __future__ import annotations

import os
import re
from datetime import timedelta
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from smelt.core.errors import InputError, SettingError
from smelt.runtimes.device import cuda_device_count
from smelt.stage import RecipePath, Settings

# Of DeepSpeed's `zero_optimization`: how values are exchanged. The others would change what is kept where.
_ZERO_FLAGS = frozenset({
    "allgather_partitions", "contiguous_gradients", "overlap_comm", "reduce_scatter", "round_robin_gradients",
})  # fmt: skip
ZERO_OPTIONS = _ZERO_FLAGS | {
    "allgather_bucket_size", "reduce_bucket_size", "stage3_max_live_parameters",
    "stage3_prefetch_bucket_size", "sub_group_size",
}  # fmt: skip
DEEPSPEED_VERSION = "0.19"  # the oldest supported release
# Process 0 scores checkpoints while the others wait.
_TIMEOUT = timedelta(days=1)


class LaunchSettings(Settings):
    """Processes that train a stage together."""

    num_processes: int = Field(
        default=1, ge=1, le=1024, description="processes of each training stage; with CUDA one per GPU"
    )
    strategy: Literal["ddp", "fsdp", "deepspeed"] = Field(
        default="ddp",
        description="ddp: every process holds the whole model; fsdp: parameters, gradients and optimizer"
        " states are divided; deepspeed: as zero_stage",
    )
    zero_stage: Literal[1, 2, 3] = Field(
        default=2,
        description="deepspeed: 1 divides optimizer states, 2 also gradients, 3 also parameters",
    )
    cpu_offload: bool = Field(
        default=False,
        description="fsdp, deepspeed: optimizer states, and parameters if they are divided, are kept in the"
        " CPU's memory",
    )
    zero_options: dict[str, int | bool] = Field(
        default_factory=dict,
        max_length=20,
        description="deepspeed: further settings of DeepSpeed's `zero_optimization`, such as"
        " reduce_bucket_size and overlap_comm",
    )
    config_file: RecipePath = Field(
        default=None,
        description="file of `accelerate config`, or of DeepSpeed (without processes); settings next to it"
        " take precedence",
    )
    scoring: bool = Field(
        default=False, description="the processes also score quality; worth their start for many samples"
    )

    @model_validator(mode="after")
    def _check_strategy(self) -> Self:
        if self.config_file is not None and "strategy" not in self.model_fields_set:
            return self  # the file has it, and is checked
        if self.cpu_offload and self.strategy == "ddp":
            raise SettingError("cpu_offload requires strategy: fsdp or deepspeed", code="settings-conflict")
        for name in {"zero_stage", "zero_options"} & self.model_fields_set:
            if self.strategy != "deepspeed":
                raise SettingError(f"{name} requires strategy: deepspeed", code="settings-conflict")
        if unsupported := sorted(self.zero_options.keys() - ZERO_OPTIONS):
            raise SettingError(
                f"zero_options: '{unsupported[0][:60]}' is not supported; supported:"
                f" {', '.join(sorted(ZERO_OPTIONS))}",
                code="unknown-setting",
            )
        for name, value in self.zero_options.items():
            if problem := zero_option_problem(name, value):
                raise SettingError(f"zero_options: {problem}", code="wrong-value")
        return self

    @property
    def divides(self) -> int:
        """What the processes divide: 1 optimizer states, 2 also gradients, 3 also parameters; 0: nothing."""
        return {"ddp": 0, "fsdp": 3, "deepspeed": self.zero_stage}[self.strategy]

    @property
    def description(self) -> str:
        """The strategy in words, such as `deepspeed, ZeRO-3, offload to the CPU`."""
        zero = [f"ZeRO-{self.zero_stage}"] if self.strategy == "deepspeed" else []
        return ", ".join([self.strategy, *zero, *(["offload to the CPU"] if self.cpu_offload else [])])

    def required_packages(self) -> dict[str, str]:
        """Return deepspeed if it is the strategy."""
        return {"deepspeed": DEEPSPEED_VERSION} if self.strategy == "deepspeed" else {}


def zero_option_problem(name: str, value: Any) -> str | None:
    """Return what is wrong with the value of one of `ZERO_OPTIONS`; None if nothing is."""
    if name in _ZERO_FLAGS:
        return None if isinstance(value, bool) else f"{name} must be true or false, not {str(value)[:60]!r}"
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 1 or value % 1:
        return f"{name} must be a whole number of at least 1, not {str(value)[:60]!r}"
    if name == "allgather_bucket_size" and value % 2:
        return f"{name} must be even, not {value}"
    return None


# Of transformers' optimizers: those that treat each weight by itself, since DeepSpeed gives them vectors.
_ZERO_OPTIMIZERS = ("adamw_torch", "adamw_torch_fused", "rmsprop", "sgd")


def strategy_conflicts(launch: LaunchSettings, settings: Any) -> list[str]:
    """Return the settings of a training that the strategy does not support.

    No strategy that divides gradients scales the loss. DeepSpeed's checkpoints are pickled.
    """
    conflicts = ["precision: fp16"] if launch.divides and settings.precision == "fp16" else []
    if launch.divides and settings.torch_compile:
        conflicts.append("torch_compile")
    if launch.divides == 3:
        conflicts += settings.needs_whole_parameters
    minutes = settings.checkpoint_interval_minutes
    is_set = minutes is not None and "checkpoint_interval_minutes" in settings.model_fields_set
    if launch.strategy == "deepspeed" and is_set:
        conflicts.append(f"checkpoint_interval_minutes: {minutes:g}")
    if launch.strategy == "deepspeed" and settings.optimizer not in _ZERO_OPTIMIZERS:
        conflicts.append(f"optimizer: {settings.optimizer}")
    return conflicts


def require_gpus(launch: LaunchSettings, device: str) -> None:
    """Require a GPU on this machine for each process, if it has GPUs and `device` is not cpu.

    Raises:
        InputError: there are fewer (`too-few-gpus`).
    """
    # the driver is asked only if needed: it takes time to start
    gpus = cuda_device_count() if launch.num_processes > 1 and device != "cpu" else 0
    if gpus and launch.num_processes > gpus:
        raise InputError(
            f"launch: {launch.num_processes} processes need as many GPUs, but this machine has {gpus}. Lower"
            " num_processes, set device: cpu, or use several machines.",
            code="too-few-gpus",
            setting="launch.num_processes",
        )


def external_processes() -> int:
    """Return the number of processes if torchrun or srun started this one with others, else 0.

    SLURM_STEP_NUM_TASKS is set by srun alone, SLURM_NTASKS also in a batch script, which runs once.
    """
    count = launcher_number("WORLD_SIZE", "SLURM_STEP_NUM_TASKS")
    started = "MASTER_ADDR" in os.environ and ("RANK" in os.environ or "SLURM_PROCID" in os.environ)
    return count if started and count > 1 else 0


def require_single_process(command: str) -> None:
    """Require that no launcher started `command` in several processes.

    Raises:
        InputError: `started-by-launcher`.
    """
    if external_processes():
        raise InputError(
            f"torchrun or srun started {command} in {external_processes()} processes. Start it once; its"
            " trainings start the processes of launch: {num_processes: N}.",
            code="started-by-launcher",
        )


def launcher_number(*names: str) -> int:
    """Return the first environment variable of these that is set; 0 if none is.

    Raises:
        InputError: `no-connection`: it is no whole number.
    """
    name = next((name for name in names if os.environ.get(name)), None)
    if name is None:
        return 0
    text = os.environ[name].strip()
    if not (text.isascii() and text.isdigit()):  # isdigit alone: also a superscript two
        raise _launcher_error(name, "a whole number")
    return int(text)


def _launcher_error(name: str, expected: str) -> InputError:
    return InputError(
        f"{name}={os.environ[name]}: expected {expected}, as torchrun or srun sets it. Correct or unset it.",
        code="no-connection",
    )


def external_rank() -> int:
    """Return the number of this process among those of torchrun or srun; 0 without others.

    Raises:
        InputError: `no-connection`: it is no number below that of the processes, for which all would wait.
    """
    count = external_processes()
    rank = launcher_number("RANK", "SLURM_PROCID") if count else 0
    if rank and rank >= count:
        raise _launcher_error(
            "RANK" if os.environ.get("RANK") else "SLURM_PROCID",
            f"a number from 0 to {count - 1}, since there are {count} processes",
        )
    return rank


def slurm_tasks_on_node() -> int:
    """Return the number of srun's processes on this node, from a list such as 4(x2),3.

    Raises:
        InputError: `no-connection`: a variable of srun has another form.
    """
    name, counts = "SLURM_STEP_TASKS_PER_NODE", list[int]()
    for node_group in os.environ.get(name, "1").split(","):
        match = re.fullmatch(r"([0-9]+)(?:\(x([0-9]+)\))?", node_group)
        if match is None:
            raise _launcher_error(name, "a list such as 4(x2),3")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts[min(launcher_number("SLURM_NODEID"), len(counts) - 1)]


def external_machines() -> int:
    """Return the number of machines over which torchrun or srun started the processes; 1 if none did."""
    if (count := external_processes()) and (local_count := launcher_number("LOCAL_WORLD_SIZE")):
        return max(1, count // local_count)
    return max(1, launcher_number("SLURM_STEP_NUM_NODES")) if count and "WORLD_SIZE" not in os.environ else 1


def join_processes(device: str, strategy: str = "ddp") -> None:
    """Join the process group that the environment describes (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT).

    DeepSpeed takes the device from the environment.

    Raises:
        InputError: device is cuda, and this process has no GPU of its own (`too-few-gpus`).
    """
    import torch

    if device == "cpu":
        if strategy == "deepspeed":
            os.environ |= {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
        torch.distributed.init_process_group("gloo", timeout=_TIMEOUT)
        return
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if local >= torch.cuda.device_count():
        raise InputError(
            f"launch: process {local} of this machine needs a GPU of its own, but torch finds"
            f" {torch.cuda.device_count()}. Lower num_processes, or set device: cpu; with srun, add"
            " --gpu-bind none.",
            code="too-few-gpus",
            setting="launch.num_processes",
        )
    torch.cuda.set_device(local)
    torch.distributed.init_process_group("cpu:gloo,cuda:nccl", timeout=_TIMEOUT)


def leave_processes() -> None:
    """Leave the process group."""
    import torch

    torch.distributed.destroy_process_group()

"""Sizes of a step: memory of weights, gradients and optimizer states, and files; without torch.

Activations are not estimated: they depend on the lengths of texts and the kernels that run. The time of a
step is that of an earlier one (`smelt.pipeline.plan.costs`), in proportion to `StepSize.work`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from smelt.data.tasks import Task
from smelt.models.model_size import FLOAT_BYTES, ModelSize
from smelt.models.weight_files import LARGE_BYTES

# Memory of a process that has imported what a step imports.
INTERPRETER_BYTES = 560_000_000


@dataclass(frozen=True)
class SizeInputs:
    """What a step's sizes follow from.

    source, result: sizes of its input model, and of its output as far as the config shows it. samples: their
    number by split, of splits that were read. named: sizes of the steps that its settings name, by setting.
    is_gpu: whether the step trains on a GPU. processes: that train together, on `machines`; zero_stage: what
    they divide: 1 optimizer states, 2 also gradients, 3 also weights; offloaded: whether that stays in the
    CPU's memory; by_deepspeed: whether DeepSpeed divides it, with its own copy of the weights.
    """

    source: ModelSize
    result: ModelSize
    task: Task
    samples: Mapping[str, int]
    named: Mapping[str, ModelSize] = field(default_factory=dict)
    is_gpu: bool = False
    processes: int = 1
    zero_stage: int = 0
    offloaded: bool = False
    by_deepspeed: bool = False
    machines: int = 1


@dataclass(frozen=True)
class StepSize:
    """The sizes of a step.

    memory_bytes: of the weights, gradients and optimizer states that it holds at a time, without the
    interpreter and its libraries. least_bytes: the part of it that no setting of the machine avoids. result:
    the size of the output. disk_bytes: of the artifact. temporary_bytes: of files that exist only while the
    step runs. device_bytes, least_device_bytes: memory of a GPU. work: weights times the samples that pass
    through them, to which the time of steps of one kind is proportional; None: unknown.
    """

    memory_bytes: int
    least_bytes: int
    result: ModelSize
    disk_bytes: int
    temporary_bytes: int = 0
    device_bytes: int = 0
    least_device_bytes: int = 0
    work: float | None = None


def is_streamed(size: ModelSize) -> bool:
    """Return whether a stage that works block by block does so with this model."""
    return size.stored_bytes > LARGE_BYTES


def certain_bytes(size: ModelSize) -> int:
    """Return the weights that any stage holds at a time: of a large model those of one block."""
    return FLOAT_BYTES * size.largest_block if is_streamed(size) else size.held_bytes


def one_shot_size(
    inputs: SizeInputs,
    *,
    result: ModelSize | None = None,
    more_bytes: int = 0,
    streamed: bool = False,
    samples: int = 1,
) -> StepSize:
    """Return the sizes of a step that loads a model, changes it and writes it.

    Args:
        inputs: of the step.
        result: the size of the output; None: `inputs.result`.
        more_bytes: memory in addition to the weights.
        streamed: whether the model is processed block by block, if it is large.
        samples: on which it calibrates.
    """
    size, result = inputs.source, result or inputs.result
    held = size.float_bytes
    if streamed and is_streamed(size):  # a block and its changed copy; all else is mapped from the file
        held = size.outside_bytes + 2 * FLOAT_BYTES * size.largest_block
    return StepSize(
        memory_bytes=held + more_bytes,
        least_bytes=min(certain_bytes(size), held),
        result=result,
        disk_bytes=result.stored_bytes,
        work=float(size.parameters * samples),
    )

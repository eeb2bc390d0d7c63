"""The cost of a training, estimated without torch: updates, validations, optimizer and activations.

A weight that AdamW trains takes 16 bytes: itself, its gradient and two moments in float32 (Rajbhandari et al.
2020, ZeRO, arXiv:1910.02054, section 3.1, without the copy of mixed precision).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial

from smelt.models.costs import (
    INTERPRETER_BYTES,
    Batch,
    CostInputs,
    SampleLengths,
    StepCost,
    Work,
    activation_bytes,
    forward_work,
    generated,
    generation_over,
    load_work,
    save_work,
    total,
)
from smelt.models.model_size import FLOAT_BYTES, ModelSize
from smelt.training.settings import LOSS_METRIC, OPTIMIZERS, TrainingSettings

_GRADIENT_BYTES = 4
# Bytes that AdamW, the norm of the gradients and their clipping read and write for each weight.
_UPDATE_BYTES = 44
# Freed memory is kept for the next update (`freed_memory_retained`), in pieces that do not fit all of them.
_FRAGMENTATION = 1.25
# Of torch operations that take as long as Trainer's imports and start, and as tokenizing a text.
_START_CALLS, _TEXT_CALLS = 1.2e6, 25
# Training through rounded weights and activations: element-wise passes over all weights in an update, and how
# much longer the layers take.
_ROUNDING_PASSES, _ROUNDING_FACTOR = 150, 3.5


def trained_weights(settings: TrainingSettings, size: ModelSize) -> int:
    """Return the number of weights that have gradients: all, or those of the adapters."""
    if settings.lora is None:
        return size.parameters
    rows = 0
    for stack in size.stacks:
        feed, attention = stack.matrices[: stack.feed_forward], stack.matrices[stack.feed_forward :]
        parts = {"ffn": feed, "attention": attention}
        rows += stack.layers * sum(n + m for name in settings.lora.targets for n, m in parts[name])
    return settings.lora.rank * rows


def weight_state_bytes(settings: TrainingSettings, size: ModelSize, validates: bool = True) -> int:
    """Return the bytes of weights, gradients, the optimizer's state, and kept copies of the weights.

    validates: whether there are validation samples, by which the best weights are kept.
    """
    trained = trained_weights(settings, size)
    kept = (bool(settings.num_evals) and validates) + (settings.ema_decay is not None)
    return size.float_bytes + trained * (
        _GRADIENT_BYTES + OPTIMIZERS[settings.optimizer] + kept * FLOAT_BYTES
    )


def training_cost(
    settings: TrainingSettings,
    inputs: CostInputs,
    *,
    teachers: Sequence[ModelSize] = (),
    samples: SampleLengths | None = None,
    layer_copies: float = 0.0,
) -> StepCost:
    """Return the cost of a training.

    Args:
        settings: of the training.
        inputs: of its step; `result` is the trained model.
        teachers: models that run on every batch, without gradients.
        samples: of the training; None: the split `train`.
        layer_copies: of the linear layers' weights, that each update makes of rounded or masked ones.
    """
    size = inputs.result
    samples = samples or inputs.samples.get("train")
    held, trained = weight_state_bytes(settings, size), trained_weights(settings, size)
    work, active = None, 0
    if samples is not None:
        batches = _training_batches(settings, samples)
        active = _batch_bytes(settings, size, batches, len(teachers)) // inputs.processes
        work = _training_work(settings, inputs, samples, batches, teachers, layer_copies > 0)
        work += load_work(inputs.source) + save_work(size) + total([load_work(t) for t in teachers])
    own = partial(_own_bytes, inputs, trained, OPTIMIZERS[settings.optimizer])
    memory = own(held) + active + round(layer_copies * FLOAT_BYTES * size.block_weights)
    memory += sum(teacher.float_bytes for teacher in teachers)
    certain = weight_state_bytes(settings, size, "validation" in inputs.samples)
    if settings.lora is not None:  # the weights may be quantized
        certain += inputs.source.held_bytes - size.float_bytes
    least, on_device, least_on_device = own(certain), 0, 0
    if inputs.is_gpu:  # the CPU keeps the copies of the weights, and the model before and after
        on_device = memory - bool(settings.num_evals) * FLOAT_BYTES * trained
        # paged states move to the CPU when the GPU is full
        states = 0 if settings.optimizer.startswith("paged_") else OPTIMIZERS[settings.optimizer]
        least_on_device = own(size.float_bytes + trained * (_GRADIENT_BYTES + states))
        if inputs.offloaded:
            least_on_device = 0 if inputs.zero_stage == 3 else size.float_bytes
            on_device = active + max(least_on_device, FLOAT_BYTES * 2 * size.largest_block)
        if inputs.by_deepspeed:  # it moves the whole model before it divides it
            on_device, least_on_device = (max(n, size.float_bytes) for n in (on_device, least_on_device))
        memory, least = 2 * size.float_bytes + sum(t.float_bytes for t in teachers), size.float_bytes
    here = math.ceil(inputs.processes / inputs.machines)
    interpreters = INTERPRETER_BYTES * here * (here > 1)
    return StepCost(
        work=work,
        memory_bytes=memory * here + interpreters,
        least_bytes=least * (inputs.processes // inputs.machines),
        result=size,
        disk_bytes=size.stored_bytes,
        temporary_bytes=held - _GRADIENT_BYTES * trained,
        device_bytes=on_device,
        least_device_bytes=least_on_device,
    )


def _own_bytes(inputs: CostInputs, trained: int, state_bytes: int, held: int) -> int:
    """Return one process's part of `held` bytes of weights, gradients, optimizer states and copies."""
    copied = inputs.by_deepspeed and (inputs.zero_stage < 3 or inputs.offloaded)  # DeepSpeed's own weights
    copies = FLOAT_BYTES * trained // inputs.processes if copied else 0
    if inputs.zero_stage == 3:
        return held // inputs.processes + copies
    divided = trained * (state_bytes * (inputs.zero_stage >= 1) + _GRADIENT_BYTES * (inputs.zero_stage >= 2))
    return held - divided + divided // inputs.processes + copies


def _batch_bytes(settings: TrainingSettings, size: ModelSize, batches: Sequence[Batch], teachers: int) -> int:
    """Return the bytes of activations and logits for the largest batch."""
    largest = max(batches, key=lambda batch: activation_bytes(size, batch, False))
    found = activation_bytes(size, largest, settings.dropout != 0, settings.gradient_checkpointing)
    tokens = largest.target if size.is_encoder_decoder else largest.source + largest.target
    found += teachers * FLOAT_BYTES * largest.samples * tokens * size.output_width
    return round(found * _FRAGMENTATION)


def _training_batches(settings: TrainingSettings, samples: SampleLengths) -> list[Batch]:
    if settings.max_length is not None:
        samples = samples.limited(settings.max_length)
    if settings.packing:
        length = settings.max_length or max(samples.source, default=1)
        count = max(1, math.ceil(sum(samples.source) / length))
        samples = SampleLengths((length,) * count, (0,) * count, count)
    return samples.batches(settings.batch_size, settings.max_tokens_per_batch) or [Batch(1, 1, 1)]


def _training_work(
    settings: TrainingSettings,
    inputs: CostInputs,
    samples: SampleLengths,
    batches: Sequence[Batch],
    teachers: Sequence[ModelSize],
    rounds: bool,
) -> Work:
    size, task = inputs.result, inputs.task
    per_epoch = len(batches) * samples.count / max(1, len(samples.source))
    accumulated = settings.gradient_accumulation_steps
    count = settings.max_steps * accumulated if settings.max_steps else settings.epochs * per_epoch
    each = total([forward_work(size, batch, task, "training") for batch in batches])
    for teacher in teachers:
        each += total([forward_work(teacher, batch, task) for batch in batches])
    if settings.gradient_checkpointing:
        each += total([forward_work(size, batch, task) for batch in batches])
    updates = Work.of("moved", _UPDATE_BYTES * trained_weights(settings, size)) * (count / accumulated)
    if rounds:
        each *= _ROUNDING_FACTOR
        updates += Work.of("moved", _ROUNDING_PASSES * FLOAT_BYTES * size.parameters) * count
    texts = samples.count * (2 if any(samples.target) else 1)
    started = Work.of("calls", _START_CALLS + _TEXT_CALLS * texts)
    found = started + each * (count / len(batches) / inputs.processes) + updates
    validation = inputs.samples.get("validation")
    if settings.num_evals and validation is not None:
        chosen = validation.first(settings.max_validation_samples)
        scored = total([forward_work(size, batch, task) for batch in _training_batches(settings, chosen)])
        if settings.metric_for_best_model != LOSS_METRIC and generated(task):
            scored += generation_over(chosen, size, 32, 1)
        found += scored * (settings.num_evals + 1)  # the initial weights are scored too
    return found


def lighter_trainings(settings: TrainingSettings) -> Iterator[tuple[str, TrainingSettings]]:
    """Yield settings that need less memory for the same updates, or for another training, with their text."""
    if settings.max_tokens_per_batch is None:
        for parts in (2, 4, 8, 16, 32):
            if settings.batch_size >= parts:
                size, times = settings.batch_size // parts, settings.gradient_accumulation_steps * parts
                text = f"batch_size: {size}, gradient_accumulation_steps: {times}"
                yield (
                    text,
                    settings.model_copy(update={"batch_size": size, "gradient_accumulation_steps": times}),
                )
    if not settings.gradient_checkpointing:
        yield "gradient_checkpointing: true", settings.model_copy(update={"gradient_checkpointing": True})
    if OPTIMIZERS[settings.optimizer] > OPTIMIZERS["adafactor"]:
        yield "optimizer: adafactor", settings.model_copy(update={"optimizer": "adafactor"})
    if settings.lora is None:
        from smelt.training.settings import LoraSettings

        yield "lora: {}", settings.model_copy(update={"lora": LoraSettings()})

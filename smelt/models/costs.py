"""What a step costs: operations, memory and disk, without torch. Stages estimate theirs with these parts.

Operations are counted (Kaplan et al. 2020, arXiv:2001.08361, table 1: two per weight and token, and those of
attention) and become seconds by the measured speeds of a machine (smelt/pipeline/inspect/machine.py).
Bytes of activations follow Korthikanti et al. 2022 (arXiv:2205.05198, section 4), in float32.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Literal, cast

from smelt.data.tasks import Task, task_traits
from smelt.models.model_size import FLOAT_BYTES, ModelSize
from smelt.models.weight_files import LARGE_BYTES

# forward, training, decode: operations of blocks, in a pass, with gradients, and for one token of each text.
# matrix: of large matrix products. solver: of decompositions and inverses. moved: bytes read and written by
# element-wise operations. read, written: bytes of files. calls: of torch by Python. seconds: by the clock.
Unit = Literal[
    "forward", "training", "decode", "matrix", "solver", "moved", "read", "written", "calls", "seconds"
]
# Memory of a process that has imported what a step imports, where it is not measured.
INTERPRETER_BYTES = 560_000_000
# Of torch operations that take as long as the imports of a stage.
_IMPORT_CALLS = 5e5
# Torch operations that a block's code calls, and the times that training calls each.
_CALLS_PER_BLOCK, _TRAINING_CALLS = 40, 3
# Element-wise passes over the logits by a loss, its gradient and the softmax.
_LOGIT_PASSES = 8
# Numbers of width a token that a block's attention and norms keep for the backward pass: inputs of both norms
# and of the linear layers, queries, keys, values, the result of attention, and the sums.
_KEPT_WIDTHS = 12
_KEPT_PER_SCORE_BYTES = 9  # of attention with dropout: softmax, dropout's result, its mask


@dataclass(frozen=True)
class Work:
    """Amounts of work by unit and the width of the model (0 where it has no effect)."""

    amounts: Mapping[tuple[Unit, int], float] = field(default_factory=dict)

    @classmethod
    def of(cls, unit: Unit, amount: float, width: int = 0) -> Work:
        """Return work in one unit."""
        return cls({(unit, width): amount})

    @classmethod
    def from_json(cls, amounts: Mapping[str, float]) -> Work:
        """Return the work of `to_json`."""
        work_amounts: dict[tuple[Unit, int], float] = {}
        for name, amount in amounts.items():
            unit, _, width = name.partition(":")
            work_amounts[cast(Unit, unit), int(width)] = amount
        return cls(work_amounts)

    def to_json(self) -> dict[str, float]:
        """Return the amounts by `unit:width`."""
        return {f"{unit}:{width}": amount for (unit, width), amount in self.amounts.items()}

    def __add__(self, other: Work) -> Work:
        merged = dict(self.amounts)
        for unit, amount in other.amounts.items():
            merged[unit] = merged.get(unit, 0.0) + amount
        return Work(merged)

    def __mul__(self, times: float) -> Work:
        return Work({unit: times * amount for unit, amount in self.amounts.items()})


def total(works: Iterator[Work] | Sequence[Work]) -> Work:
    """Return the sum of `works`."""
    return reduce(Work.__add__, works, Work())


@dataclass(frozen=True)
class SampleLengths:
    """Tokens of the samples of a split, estimated: source and target (0 without one) of each.

    count: of samples in the split; the lengths may be those of a part.
    """

    source: tuple[int, ...]
    target: tuple[int, ...]
    count: int

    @property
    def tokens(self) -> float:
        """Tokens of a sample, source and target, on average."""
        return (sum(self.source) + sum(self.target)) / max(1, len(self.source))

    @property
    def longest(self) -> tuple[int, int]:
        """The largest source and target length."""
        return max(self.source, default=0), max(self.target, default=0)

    def limited(self, length: int) -> SampleLengths:
        """Return the lengths of texts that are truncated to `length` tokens."""
        source, target = (tuple(min(n, length) for n in lengths) for lengths in (self.source, self.target))
        return SampleLengths(source, target, self.count)

    def first(self, count: int) -> SampleLengths:
        """Return the lengths of `count` samples, spread over the split."""
        num_lengths = len(self.source)
        num_chosen = min(count, num_lengths)
        indices = [num_lengths * k // num_chosen for k in range(num_chosen)] if num_chosen else []
        return SampleLengths(
            tuple(self.source[i] for i in indices),
            tuple(self.target[i] for i in indices),
            min(count, self.count),
        )

    def batches(self, size: int, tokens: int | None = None) -> list[Batch]:
        """Return the batches of samples of similar length, as the training makes them.

        tokens: instead of `size`: source, target and padding of a batch.
        """
        batches: list[Batch] = []
        num_held, max_lengths = 0, (0, 0)
        for source, target in sorted(zip(self.source, self.target, strict=True)):
            widened = (max(max_lengths[0], source), max(max_lengths[1], target))
            is_full = num_held >= size if tokens is None else sum(widened) * (num_held + 1) > tokens
            if num_held and is_full:
                batches.append(Batch(num_held, *max_lengths))
                num_held, widened = 0, (source, target)
            num_held, max_lengths = num_held + 1, widened
        return [*batches, Batch(num_held, *max_lengths)] if num_held else batches


@dataclass(frozen=True)
class Batch:
    """A batch of padded samples: their number, and the lengths of sources and targets, tokens."""

    samples: int
    source: int
    target: int


@dataclass(frozen=True)
class CostInputs:
    """What a step's estimate is made from.

    source, result: sizes of its input model, and of its output as far as the config shows it. named: of the
    steps that its settings name, by setting. samples: by split. limit: tokens that the model can read.
    is_gpu: whether the step trains on a GPU. processes: that train together, on `machines`; zero_stage: what
    they divide: 1 optimizer states, 2 also gradients, 3 also weights; offloaded: whether that stays in the
    CPU's memory; by_deepspeed: whether DeepSpeed divides it, with its own copy of the weights. cores: of each
    machine. concurrent: how many of the processes compute at a time, on all machines; the others wait.
    """

    source: ModelSize
    result: ModelSize
    task: Task
    samples: Mapping[str, SampleLengths]
    named: Mapping[str, ModelSize] = field(default_factory=dict)
    is_gpu: bool = False
    processes: int = 1
    zero_stage: int = 0
    offloaded: bool = False
    by_deepspeed: bool = False
    machines: int = 1
    cores: int = 1
    concurrent: int = 1

    @property
    def turns(self) -> float:
        """How often a machine does what each process does by itself: processes for each that computes."""
        return self.processes / self.concurrent

    @property
    def calibration(self) -> SampleLengths | None:
        """The samples that a stage calibrates on, None if they were not read."""
        return self.samples.get("calibration") or self.samples.get("train")


@dataclass(frozen=True)
class StepCost:
    """The estimated cost of a step.

    work: None: unknown. memory_bytes: the most at a time, without the interpreter and its libraries.
    least_bytes: a lower bound of it. result: the size of the output. disk_bytes: of the artifact.
    temporary_bytes: of files that exist only while the step runs. device_bytes, least_device_bytes: memory of
    a GPU.
    """

    work: Work | None
    memory_bytes: int
    least_bytes: int
    result: ModelSize
    disk_bytes: int
    temporary_bytes: int = 0
    device_bytes: int = 0
    least_device_bytes: int = 0


def block_flops(size: ModelSize, source: float, target: float, context: tuple[float, float]) -> float:
    """Return the operations of all blocks for tokens: 2 per weight, and 4 per pair in attention and channel.

    Args:
        size: of the model.
        source: tokens of the first stack.
        target: tokens of the second one, if there is one.
        context: tokens that each token attends to, in each stack.
    """
    flops = 0.0
    for number, stack in enumerate(size.stacks):
        tokens = source if number == 0 else target
        context_length = context[min(number, 1)]
        weights = size.kept_ratio * stack.block_weights
        flops += stack.layers * tokens * (2 * weights + 4 * context_length * stack.attention_width)
    return flops


def forward_work(size: ModelSize, batch: Batch, task: Task, kind: Unit = "forward") -> Work:
    """Return the work of one pass over a batch, with the output layer; three times that for training."""
    tokens, targets = _token_counts(size, batch)
    times = 3 if kind == "training" else 1
    flops = times * block_flops(size, tokens, targets, _contexts(size, batch))
    work = Work.of(kind, flops, size.width) + Work.of(
        "calls", size.layers * _CALLS_PER_BLOCK * (_TRAINING_CALLS if kind == "training" else 1)
    )
    if size.output_width:
        scored_tokens = targets if size.is_encoder_decoder else tokens
        logits = scored_tokens * size.output_width
        work += Work.of("matrix", times * 2 * logits * size.width)
        work += Work.of("moved", (_LOGIT_PASSES if kind == "training" else 3) * FLOAT_BYTES * logits)
    return work


def _token_counts(size: ModelSize, batch: Batch) -> tuple[float, float]:
    """Return the tokens of the first and the second stack for a batch, padding included."""
    if size.image_tokens:
        return batch.samples * size.image_tokens, 0
    if size.is_encoder_decoder:
        return batch.samples * batch.source, batch.samples * batch.target
    return batch.samples * (batch.source + batch.target), 0


def _contexts(size: ModelSize, batch: Batch) -> tuple[float, float]:
    if size.image_tokens:
        return size.image_tokens, 0
    if size.is_encoder_decoder:
        return batch.source, (batch.source + batch.target) / 2  # of self- and cross-attention, on average
    return batch.source + batch.target, 0


def decoding_work(size: ModelSize, batch: Batch, beams: int) -> Work:
    """Return the work of generating the targets of a batch, a token of each text at a time, with caches."""
    decoder = replace(size, stacks=size.stacks[-1:])
    num_rows, steps = batch.samples * beams, max(1, batch.target)
    context = batch.source + batch.target / 2
    step_flops = block_flops(decoder, num_rows, 0, (context, 0))
    logits = num_rows * size.output_width
    step = (
        Work.of("decode", step_flops, size.width)
        + Work.of("calls", decoder.layers * _CALLS_PER_BLOCK + 20 * (1 + (beams > 1)))
        + Work.of("matrix", 2 * logits * size.width)
        + Work.of("moved", 4 * FLOAT_BYTES * logits + FLOAT_BYTES * _streamed_weights(decoder))
    )
    prompt = size if not size.is_encoder_decoder else replace(size, stacks=size.stacks[:1], output_width=0)
    return forward_work(prompt, replace(batch, target=0), "translation") + step * steps


def _streamed_weights(size: ModelSize) -> int:
    """Return the weights that each step of decoding reads: all of the blocks, and the output layer."""
    return size.block_weights + size.output_width * size.width


def activation_bytes(size: ModelSize, batch: Batch, dropout: bool, checkpointing: bool = False) -> int:
    """Return the bytes that a backward pass needs of a forward pass, in float32, logits included.

    Args:
        size: of the model.
        batch: the largest one.
        dropout: whether attention has dropout, so that its scores are kept.
        checkpointing: whether only the inputs of blocks are kept, and one block is computed again at a time.
    """
    tokens, contexts, total_bytes, largest = _token_counts(size, batch), _contexts(size, batch), 0.0, 0.0
    for number, stack in enumerate(size.stacks):
        num_tokens, context_length = tokens[min(number, 1)], contexts[min(number, 1)]
        layer_bytes = (
            FLOAT_BYTES * num_tokens * (_KEPT_WIDTHS * size.width + size.kept_ratio * stack.hidden_units)
        )
        layer_bytes += (
            _KEPT_PER_SCORE_BYTES * num_tokens * context_length * stack.attention_heads if dropout else 0
        )
        largest = max(largest, layer_bytes)
        total_bytes += stack.layers * (
            FLOAT_BYTES * num_tokens * size.width if checkpointing else layer_bytes
        )
    scored_tokens = tokens[1] if size.is_encoder_decoder else tokens[0]
    # logits, their gradient, and its product with the loss's
    return round(
        total_bytes + (largest if checkpointing else 0) + 3 * FLOAT_BYTES * scored_tokens * size.output_width
    )


def pass_bytes(size: ModelSize, batch: Batch) -> int:
    """Return the bytes of a forward pass without gradients: those of one block, and some of the logits.

    Losses take the logits in parts.
    """
    tokens = _token_counts(size, batch)
    widest = max((stack.hidden_units for stack in size.stacks), default=0)
    scored_tokens = tokens[1] if size.is_encoder_decoder else tokens[0]
    return round(
        FLOAT_BYTES * (max(tokens) * (4 * size.width + widest) + scored_tokens * size.output_width / 4)
    )


def passes_over(samples: SampleLengths, size: ModelSize, task: Task, batch_size: int = 32) -> Work:
    """Return the work of one pass over samples in batches, scaled to their whole number."""
    batch_work = total([forward_work(size, batch, task) for batch in samples.batches(batch_size)])
    return batch_work * (samples.count / max(1, len(samples.source)))


def generation_over(samples: SampleLengths, size: ModelSize, batch_size: int, beams: int) -> Work:
    """Return the work of generating texts as long as the targets of `samples`."""
    batch_work = total([decoding_work(size, batch, beams) for batch in samples.batches(batch_size)])
    return batch_work * (samples.count / max(1, len(samples.source)))


def load_work(size: ModelSize) -> Work:
    """Return the work of reading a model's file and widening it to float32."""
    read_work = Work.of("read", size.stored_bytes) + Work.of("moved", 2 * size.float_bytes)
    return read_work + Work.of("calls", _IMPORT_CALLS)


def save_work(size: ModelSize) -> Work:
    """Return the work of writing a model: once to the disk, and once more to compute its hash."""
    return Work.of("written", size.stored_bytes) + Work.of("read", size.stored_bytes)


def is_streamed(size: ModelSize) -> bool:
    """Return whether a stage that works block by block does so with this model."""
    return size.stored_bytes > LARGE_BYTES


def streamed_bytes(size: ModelSize) -> int:
    """Return the memory of a model of which one block is loaded: its float32 weights, and a changed copy.

    All else is mapped from the file.
    """
    return size.outside_bytes + 2 * FLOAT_BYTES * size.largest_block


def certain_bytes(size: ModelSize) -> int:
    """Return the weights that any stage holds at a time: of a large model those of one block."""
    return FLOAT_BYTES * size.largest_block if is_streamed(size) else size.held_bytes


def one_shot_cost(
    inputs: CostInputs,
    *,
    result: ModelSize | None = None,
    work: Work | None = None,
    more_bytes: float = 0.0,
    streamed: bool = False,
) -> StepCost:
    """Return the cost of a stage that loads a model, changes it and writes it.

    Args:
        inputs: of the step.
        result: the size of the output; None: `inputs.result`.
        work: of the change; None: none besides reading and writing.
        more_bytes: memory in addition to the weights.
        streamed: whether the model is processed block by block, if it is large.
    """
    size, result = inputs.source, result or inputs.result
    by_block = streamed and is_streamed(size)
    held_bytes = streamed_bytes(size) if by_block else size.float_bytes
    return StepCost(
        work=load_work(size) + save_work(result) + (work or Work()),
        memory_bytes=round(held_bytes + more_bytes),
        least_bytes=min(certain_bytes(size), held_bytes),
        result=result,
        disk_bytes=result.stored_bytes,
    )


def calibration_batches(inputs: CostInputs, count: int, tokens: int = 1024) -> list[Batch]:
    """Return the batches of `count` calibration samples; empty if the samples were not read."""
    samples = inputs.calibration
    if samples is None:
        return []
    first_samples = samples.first(count)
    longest = max(1, sum(first_samples.longest))
    return first_samples.batches(max(1, tokens // longest))


def generated(task: Task) -> bool:
    """Return whether quality is scored on generated texts."""
    return task_traits(task).output == "text"


def num_tokens(batches: Sequence[Batch]) -> int:
    """Return the tokens of batches, padding included."""
    return sum(batch.samples * (batch.source + batch.target) for batch in batches)


Matrices = Sequence[Sequence[tuple[int, int]]]
"""By stack, rows and columns of linear layers of one block."""


def moment_work(size: ModelSize, batches: Sequence[Batch], matrices: Matrices) -> Work:
    """Return the work of summing second moments of inputs, of their factors, and of multiplying by them."""
    tokens, work = num_tokens(batches), Work()
    for stack, layers in zip(size.stacks, matrices, strict=True):
        flops = sum(
            2 * tokens * columns**2 + 4 * out_features * columns**2 for out_features, columns in layers
        )
        layer_flops = (
            Work.of("matrix", flops) + cubic_solver_work([columns for _, columns in layers]) * 2
        )  # float64
        work += layer_flops * stack.layers
    return work


def moment_bytes(size: ModelSize, matrices: Matrices, by_block: bool) -> float:
    """Return the bytes of second moments in float64, and of copies of the largest one.

    by_block: whether only those of one block are in memory at a time.
    """
    sizes = [[8.0 * columns**2 for _, columns in layers] for layers in matrices]
    largest = max((layer_bytes for block in sizes for layer_bytes in block), default=0.0)
    if by_block:
        return max(map(sum, sizes), default=0.0) + 3 * largest
    total_bytes = sum(stack.layers * sum(block) for stack, block in zip(size.stacks, sizes, strict=True))
    return total_bytes + 3 * largest


def cubic_solver_work(widths: Sequence[int]) -> Work:
    """Return the work of a Cholesky factor, its inverse, and the factor of that, of matrices by width."""
    return Work.of("solver", sum(2 * math.pow(width, 3) for width in widths))

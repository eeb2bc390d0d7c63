"""Sizes of a model, from its config and the headers of its files, and of a step; without torch.

The weights of blocks follow from the family's description and the config's numbers. What the description
lacks (norms, biases, tables of positions) is the difference to the headers, if there are weights.
Activations are not estimated: they depend on the lengths of texts and the kernels that run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smelt.core.files import read_json_object
from smelt.data.tasks import Task
from smelt.models.families.config_keys import config_value
from smelt.models.families.family import Family
from smelt.models.families.layout import Attention, Stack
from smelt.models.families.registry import find_family
from smelt.models.text_rules import MODULES_FILE
from smelt.models.weight_files import LARGE_BYTES, has_weights, is_unused_tensor, value_count, weight_tensors

if TYPE_CHECKING:
    from smelt.quantization.layers import QuantizedMatrix


FLOAT_BYTES = 4  # of a weight in memory, whatever its file holds
# Calibration without `calibration_samples`: tokens for each input of the widest linear layer; at most (as
# many as GPTQ and SparseGPT use: 128 windows of 2,048); samples at least.
TOKENS_PER_INPUT, MAX_CALIBRATION_TOKENS, MIN_CALIBRATION_SAMPLES = 10, 262_144, 128
# Beyond this second moments of layer inputs are stored on disk.
STATISTICS_MEMORY_BYTES = 2 * 2**30
_STORED_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}


@dataclass(frozen=True)
class StackSize:
    """One stack of equal blocks.

    matrices: rows and columns of each linear layer of a block: `feed_forward` of them, as many for each of
    the `experts` (the last one is after the units), then query, key, value and output of each attention.
    """

    name: str
    layers: int
    matrices: tuple[tuple[int, int], ...]
    feed_forward: int
    experts: int = 1

    @property
    def block_weights(self) -> int:
        """The weights of one block's linear layers."""
        return sum(out_features * columns for out_features, columns in self.matrices)

    @property
    def output_matrices(self) -> tuple[tuple[int, int], ...]:
        """Rows and columns of the layers that read neurons and heads."""
        expert_layers = self.feed_forward // self.experts
        downs = self.matrices[expert_layers - 1 : self.feed_forward : expert_layers]
        return (*downs, *self.matrices[self.feed_forward + 3 :: 4])

    def with_units(self, heads: float, neurons: float) -> StackSize:
        """Return the stack with these parts of its heads and neurons."""
        scales = [(neurons, 1.0)] * (self.feed_forward // self.experts - 1) + [(1.0, neurons)]
        scales *= self.experts
        scales += [(heads, 1.0), (heads, 1.0), (heads, 1.0), (1.0, heads)] * len(self.matrices)
        return replace(
            self,
            matrices=tuple(
                (round(n * out_features), round(m * columns))
                for (n, m), (out_features, columns) in zip(self.matrices, scales, strict=False)
            ),
        )


@dataclass(frozen=True)
class ModelSize:
    """The numbers of weights of a model, and their bytes.

    table_weights: of token embeddings, each once. head_weights: of an output layer that is not tied.
    other_weights: norms, biases, positions, classifiers. bytes_per_weight: stored, of the linear layers in
    blocks; table_bytes_per_weight: of all others. kept_ratio: part of the linear layers' weights that earlier
    steps left, where the config does not show it; 1 / layers if one block is called for every layer.
    """

    width: int
    stacks: tuple[StackSize, ...]
    table_weights: int
    head_weights: int
    other_weights: int = 0
    bytes_per_weight: float = FLOAT_BYTES
    table_bytes_per_weight: float = FLOAT_BYTES
    kept_ratio: float = 1.0

    @property
    def block_weights(self) -> int:
        """Weights of all blocks' linear layers."""
        return round(self.kept_ratio * sum(stack.layers * stack.block_weights for stack in self.stacks))

    @property
    def parameters(self) -> int:
        """All weights, each once."""
        return self.block_weights + self.table_weights + self.head_weights + self.other_weights

    @property
    def float_bytes(self) -> int:
        """Bytes of all weights in float32, as stages hold them."""
        return FLOAT_BYTES * self.parameters

    @property
    def stored_bytes(self) -> int:
        """Bytes of the weights in files."""
        outer_weights = self.table_weights + self.head_weights + self.other_weights
        return round(self.bytes_per_weight * self.block_weights + self.table_bytes_per_weight * outer_weights)

    @property
    def largest_block(self) -> int:
        """Weights of the largest block."""
        return max((stack.block_weights for stack in self.stacks), default=self.parameters)

    @property
    def outside_bytes(self) -> int:
        """Bytes in files of what is not in a block."""
        outer_weights = self.table_weights + self.head_weights + self.other_weights
        return round(self.table_bytes_per_weight * outer_weights)

    @property
    def held_bytes(self) -> int:
        """Bytes that a loaded model certainly holds: float32 weights, or quantized ones as they are."""
        return self.float_bytes if self.bytes_per_weight > 1.5 else self.stored_bytes

    @property
    def calibration_tokens(self) -> int:
        """The tokens that stages calibrate on by default."""
        inputs = (columns for stack in self.stacks for _, columns in stack.matrices)
        return min(MAX_CALIBRATION_TOKENS, TOKENS_PER_INPUT * max(inputs, default=0))

    @property
    def is_complete(self) -> bool:
        """Whether the weights are floats, and all that the config shows."""
        return bool(self.stacks) and self.kept_ratio == 1.0 and self.bytes_per_weight > 1.5

    @property
    def layers(self) -> int:
        """Blocks of all stacks."""
        return sum(stack.layers for stack in self.stacks)

    @property
    def is_encoder_decoder(self) -> bool:
        """Whether it has an encoder and a decoder."""
        return len(self.stacks) > 1

    def scaled_blocks(self, ratio: float) -> ModelSize:
        """Return the size with this part of the blocks' weights."""
        return replace(self, kept_ratio=self.kept_ratio * ratio)

    def scaled_to(self, ratio: float) -> ModelSize:
        """Return the size with this part of all weights, removed from the blocks where these have as many."""
        removed = (1 - ratio) * self.parameters
        if removed < self.block_weights:
            return self.scaled_blocks(1 - removed / self.block_weights)
        return replace(
            self.scaled_blocks(ratio),
            table_weights=round(ratio * self.table_weights),
            head_weights=round(ratio * self.head_weights),
            other_weights=round(ratio * self.other_weights),
        )

    def with_units(self, heads: float, neurons: float) -> ModelSize:
        """Return the size with these parts of the heads and neurons of each block."""
        return replace(self, stacks=tuple(stack.with_units(heads, neurons) for stack in self.stacks))

    def stored_as(self, block_bytes: float, table_bytes: float | None = None) -> ModelSize:
        """Return the size with other bytes per stored weight."""
        table = self.table_bytes_per_weight if table_bytes is None else table_bytes
        return replace(self, bytes_per_weight=block_bytes, table_bytes_per_weight=table)


def size_from_config(config: Mapping[str, Any]) -> ModelSize | None:
    """Return the size of a model with this Hugging Face config; None without blocks, or for unknown families.

    Classifiers and poolers of encoders are not included.
    """
    family = find_family(config)
    width = family.hidden_size(config) if family is not None else None
    if family is None or width is None:
        return None
    stacks = [
        stack_size
        for stack in family.stacks(config)
        if (stack_size := _stack_size(family, stack, config, width))
    ]
    if not stacks:
        return None
    vocabulary = (
        0
        if family.architecture == "encoder" and family.input_kind != "texts"
        else _number(config.get("vocab_size")) or 0
    )
    table_width = family.embedding_size(config) or width
    generates = family.architecture != "encoder"
    separate = config.get("share_encoder_decoder_embeddings") is False  # Marian's option
    repeated = any(stack.repeats_block for stack in family.stacks(config))
    return ModelSize(
        width=width,
        stacks=tuple(stacks),
        table_weights=vocabulary * table_width * (2 if separate else 1),
        head_weights=0 if not generates or family.ties_output(config) else vocabulary * table_width,
        kept_ratio=1 / stacks[0].layers if repeated else 1.0,
    )


def sum_of_weights(weights: int) -> ModelSize:
    """Return the size of a model without blocks, such as a graph or a convolutional network."""
    return ModelSize(0, (), 0, 0, other_weights=weights)


def read_model_size(folder: Path, config: Mapping[str, Any]) -> ModelSize | None:
    """Return the size of the model in `folder`; without weights as `size_from_config`.

    Raises:
        InputError: a file of the weights is missing or damaged.
    """
    size = size_from_config(config)
    if not has_weights(folder) or find_family(config) is None:
        return size
    size = size or sum_of_weights(0)
    count = stored_bytes = 0
    is_float = True
    for _, _, entry in weight_tensors(folder):
        is_float = is_float and entry["dtype"] in _STORED_BYTES
        count += value_count(entry)
        stored_bytes += value_count(entry) * _STORED_BYTES.get(entry["dtype"], 1)
    bytes_per_weight = stored_bytes / max(1, count)
    size = size.stored_as(bytes_per_weight, bytes_per_weight)
    difference = count - size.parameters
    if difference < 0 and is_float and size.block_weights > -difference:  # low-rank, pruned or shared layers
        return size.scaled_blocks(1 + difference / size.block_weights)
    if difference < 0:  # quantized weights, several in a number
        block_bytes = size.stored_bytes
        return size.stored_as(
            bytes_per_weight * stored_bytes / max(1, block_bytes),
            bytes_per_weight * stored_bytes / max(1, block_bytes),
        )
    return replace(size, other_weights=difference)


def _stack_size(family: Family, stack: Stack, config: Mapping[str, Any], width: int) -> StackSize | None:
    layers, feed = stack.num_layers(config), stack.feed_forward
    if layers is None or layers < 1:
        return None
    units = feed.neurons(config, width) or 4 * width  # GPT-2's `n_inner` and others: absent
    experts = _number(config.get(feed.num_experts_key)) if feed.num_experts_key else None
    is_fused = feed.gate is not None and feed.gate == feed.up
    matrices = [(2 * units if is_fused else units, width) for _ in feed.input_layers] + [(width, units)]
    matrices *= experts or 1
    for attention in stack.attentions:
        heads, key_heads, head = _heads(attention, config, width)
        matrices += [(heads * head, width), (key_heads * head, width), (key_heads * head, width)]
        matrices.append((width, heads * head))
    return StackSize(
        name=stack.name,
        layers=layers,
        matrices=tuple(matrices),
        feed_forward=len(matrices) - 4 * len(stack.attentions),
        experts=experts or 1,
    )


def _heads(attention: Attention, config: Mapping[str, Any], width: int) -> tuple[int, int, int]:
    """Return the heads of an attention, those of its keys, and the width of a head."""
    heads = _number(config_value(config, attention.heads_key)) or 1
    key_heads = _number(config_value(config, attention.kv_heads_key)) if attention.kv_heads_key else None
    head = _number(config_value(config, attention.head_dim_key)) if attention.head_dim_key else None
    return heads, key_heads or heads, head or width // heads


def _number(value: Any) -> int | None:
    return value if isinstance(value, int) and value > 0 else None


def count_parameters(folder: Path) -> int:
    """Return the number of weights of the model in `folder`, without reading them.

    A quantized matrix counts as outputs times inputs: scales, zero points and padding
    of groups do not count, so that quantizing does not change the count. Unused tensors (masks and
    positions of old checkpoints) do not count either.

    Raises:
        InputError: the model is quantized, and config and edits do not define a model.
    """
    matrices = _quantized_matrices(folder)
    parts = tuple(f"{name}." for name in matrices)
    family, embeds = (
        str(read_json_object(folder / "config.json").get("model_type")),
        (folder / MODULES_FILE).is_file(),
    )
    floats = sum(
        value_count(entry)
        for _, name, entry in weight_tensors(folder)
        if not name.startswith(parts) and not is_unused_tensor(family, name, embeds=embeds)
    )
    unique_matrices = {id(matrix): matrix for matrix in matrices.values()}
    return floats + sum(len(matrix.codes) * matrix.width for matrix in unique_matrices.values())


def _quantized_matrices(folder: Path) -> dict[str, QuantizedMatrix]:
    """Return the quantized matrices by all of their names; shared ones have several."""
    from smelt.models.edits import read_edits
    from smelt.models.empty_model import empty_model
    from smelt.quantization.layers import QuantizedMatrix

    if not any(edit.get("op") == "quantize" for edit in read_edits(folder)):
        return {}
    modules = empty_model(folder)[0].named_modules(remove_duplicate=False)
    return {name: module for name, module in modules if isinstance(module, QuantizedMatrix)}


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
    through them, to which the time of steps of one kind is proportional; None: unknown. calibration_tokens:
    the default number of tokens for calibration, if the step uses it.
    """

    memory_bytes: int
    least_bytes: int
    result: ModelSize
    disk_bytes: int
    temporary_bytes: int = 0
    device_bytes: int = 0
    least_device_bytes: int = 0
    work: float | None = None
    calibration_tokens: int | None = None


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
    samples: int | None = 1,
) -> StepSize:
    """Return the sizes of a step that loads a model, changes it and writes it.

    Args:
        inputs: of the step.
        result: the size of the output; None: `inputs.result`.
        more_bytes: memory in addition to the weights.
        streamed: whether the model is processed block by block, if it is large.
        samples: on which it calibrates; None: by the default number of tokens.
    """
    size, result = inputs.source, result or inputs.result
    held = size.float_bytes
    if streamed and is_streamed(size):  # a block and its changed copy; all else is mapped from the file
        held = size.outside_bytes + 2 * FLOAT_BYTES * size.largest_block
    tokens = size.calibration_tokens if samples is None else None
    return StepSize(
        memory_bytes=held + more_bytes,
        least_bytes=min(certain_bytes(size), held),
        result=result,
        disk_bytes=result.stored_bytes,
        work=float(size.parameters * (samples or tokens or 1)),
        calibration_tokens=tokens,
    )

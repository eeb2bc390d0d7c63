"""How far a step is from its baseline: signal-to-quantization-noise ratio (SQNR) of layers.

Every block of the step gets the hidden states that the same block of the baseline gets, so that the error of
one block does not reach the next one: a low ratio is the block's own. The ratio is 20 log10(|y| / |y - x|) in
dB over all samples, y being the output of the baseline and x that of the step. 20 dB is an error of 10 % of
the output, 40 dB of 1 %.

Both models run block by block: in memory are one block of each, what is outside of their blocks, the hidden
states between two blocks (on disk beyond a limit), and the outputs of one batch.

Source: PyTorch's Numeric Suite (`torch.ao.ns.fx.utils.compute_sqnr`); Qualcomm AIMET and Intel Neural
Compressor rank layers for mixed precision by it.

Shapes: B = batch, L = length, D = hidden width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from smelt.calibration.block_states import BlockOutput
from smelt.calibration.samples import draw_samples, make_batches, model_outputs, split_pairs
from smelt.calibration.sequential import SequentialRunner
from smelt.core.artifact import Artifact
from smelt.core.errors import RunError
from smelt.core.system import require_memory
from smelt.data.splits import Split
from smelt.data.tasks import Task, task_traits
from smelt.models.checkpoint import add_model_prefix, load_weights
from smelt.models.empty_model import empty_model, transpose_conv1d_tensors
from smelt.models.families.layout import Stack
from smelt.models.families.registry import Block, blocks_of, output_modules
from smelt.models.model_size import FLOAT_BYTES
from smelt.models.streamed_model import trim_memory
from smelt.models.weight_files import weight_tensors
from smelt.quantization.layers import QuantizedMatrix
from smelt.runtimes.device import torch_device
from smelt.stage import Context
from smelt.tasks.samples import TensorBatch, load_processor


class BlockwiseModel:
    """The model in `folder`, in eval mode. edits: its structure.

    Raises:
        InputError: weights are missing, damaged, or do not match the config and the edits.
        RunError: there is not enough memory for the largest block and what is outside of blocks.
    """

    def __init__(self, folder: Path) -> None:
        self.model, self.edits = empty_model(folder)
        self._device = "cpu"
        files = {name: (path, name) for path, name, _ in weight_tensors(folder)}
        self._files = add_model_prefix(self.model, files)
        in_blocks = self._names_in_blocks()
        tensors = {name: self._read(name) for name in self._files}  # mapped into memory, not read yet
        tensors = {
            name: tensor.to("meta") if name in in_blocks else tensor for name, tensor in tensors.items()
        }
        outside_bytes = sum(FLOAT_BYTES * t.numel() for t in tensors.values() if not t.is_meta)
        blocks = [block.module for block in blocks_of(self.model)]
        block_bytes = max((sum(p.nbytes for p in block.parameters()) for block in blocks), default=0)
        require_memory(
            outside_bytes + block_bytes,
            f"Loading {folder} block by block in float32",
            "Use a machine with more memory.",
        )
        tensors = {n: t.float() if t.is_floating_point() else t for n, t in tensors.items()}
        # names in the file of the parameters of modules; a shared module is read under one of its names
        self._sources: dict[nn.Module, dict[str, str]] = {}
        for name in in_blocks:
            parent, _, last = name.rpartition(".")
            self._sources.setdefault(self.model.get_submodule(parent), {})[last] = name
        load_weights(self.model, transpose_conv1d_tensors(self.model, tensors), folder)
        self.model.eval()

    def place(self, device: str) -> None:
        """Move the weights in memory to `device`; blocks are loaded there from now on."""
        self._device = device
        for tensor in chain(self.model.parameters(), self.model.buffers()):
            if not tensor.is_meta:
                tensor.data = tensor.data.to(device)

    @contextmanager
    def loaded(self, block: nn.Module) -> Iterator[None]:
        """Have the weights of `block`, a module of the model, in memory inside the context."""
        sources = {module: self._sources.get(module, {}) for module in block.modules()}
        names = {name for by_parameter in sources.values() for name in by_parameter.values()}
        tensors = transpose_conv1d_tensors(self.model, {name: self._read(name) for name in names})
        empty = {module: dict(module.named_parameters(recurse=False)) for module in sources}
        for module, by_parameter in sources.items():
            for parameter, name in by_parameter.items():
                tensor = tensors[name].to(self._device)
                value = tensor.float() if tensor.is_floating_point() else tensor
                setattr(module, parameter, nn.Parameter(value, requires_grad=False))
        del tensors
        try:
            yield
        finally:
            for module, by_parameter in sources.items():
                for parameter in by_parameter:
                    setattr(module, parameter, empty[module][parameter])
                if isinstance(module, QuantizedMatrix):
                    module.clear_cache()
            trim_memory()

    def _names_in_blocks(self) -> set[str]:
        """Return the names in the file of parameters that only blocks have."""
        prefixes = tuple(f"{block.stack.module_path}." for block in blocks_of(self.model))
        parameters = dict(self.model.named_parameters(remove_duplicate=False))
        tied = getattr(self.model, "all_tied_weights_keys", None) or {}
        outside = {id(p) for name, p in parameters.items() if not name.startswith(prefixes) or name in tied}
        outside |= {id(parameters[name]) for name in tied.values() if name in parameters}
        return {name for name, p in parameters.items() if name in self._files and id(p) not in outside}

    def _read(self, name: str) -> Tensor:
        path, stored_name = self._files[name]
        with safe_open(path, framework="pt") as file:
            tensor: Tensor = file.get_tensor(stored_name)
        return tensor


# Lower ratios, and outputs that are NaN or infinite, are reported as this; JSON has no infinity.
LOWEST_DB = -100.0
# Of the hidden states between two blocks, how much each of three passes holds; the rest is on disk.
_STATES_BYTES = 2**27
# Numbers whose squares are summed at a time, in float64: those of all logits need several times their memory.
_SUMMED_AT_ONCE = 2**20

# Blocks of the baseline by stack: for each block of the step, the index of the baseline's.
BlockPositions = Mapping[str, Sequence[int]]
# The same batches as both models encode them: the baseline's, the step's.
BatchPairs = Sequence[tuple[TensorBatch, TensorBatch]]


# A layer: its stack, the index of its block there, and its part of the block (see `_PARTS`).
_Place = tuple[str, int, str]
_EMBEDDINGS, _BLOCK, _OUTPUT = "embeddings", "block", "output"
_PARTS = (_EMBEDDINGS, _BLOCK, "self-attention", "cross-attention", "feed-forward", _OUTPUT)


@dataclass
class _Ratio:
    """Sums of squares of a layer's outputs and of their errors."""

    signal: float = 0.0
    noise: float = 0.0

    def add(self, expected: Tensor, actual: Tensor) -> None:
        sides = (side.reshape(-1).split(_SUMMED_AT_ONCE) for side in (expected, actual))
        for y_float, x_float in zip(*sides, strict=True):
            y, x = y_float.double(), x_float.double()
            self.signal += float(y.square().sum())
            self.noise += float((y - x).square().sum())

    @property
    def db(self) -> float | None:
        """The ratio in dB; None if the outputs are equal."""
        if self.noise == 0:
            return None
        if not math.isfinite(self.noise) or self.signal == 0:
            return LOWEST_DB
        return round(max(LOWEST_DB, 10 * math.log10(self.signal / self.noise)), 3)


class NotComparableError(Exception):
    """The layers of two models cannot be compared; the text is the reason."""


def not_compared(reason: str | None) -> dict[str, Any]:
    """Return the `layer_sqnr` of a step without any ratio."""
    return {"samples": 0, "output_sqnr_db": None, "layers": [], "reason": reason}


@dataclass(frozen=True)
class SampleSource:
    """What samples are drawn from, for both models. count: number of samples; of running text, windows."""

    split: Split
    task: Task
    count: int
    seed: int

    def encode(self, model: Any, folder: Path) -> list[Any]:
        """Return the samples as the tokenizer in `folder` encodes them.

        Raises:
            NotComparableError: there are no samples with targets.
        """
        ctx = Context(out=folder, task=self.task, data={}, seed=self.seed, ancestors={}, score=lambda: {})
        split = self.split
        if task_traits(self.task).output == "text":
            split = replace(split, examples=tuple(e for e in split.examples if e.references))
        if not len(split):
            raise NotComparableError("the samples have no targets")
        rows = draw_samples(split, model, load_processor(folder), self.count, ctx, "score")
        return split_pairs(rows)


class LayerComparison:
    """Compares the layers of steps with those of one baseline.

    Raises:
        NotComparableError: no memory for a block of the baseline, or samples without targets.
    """

    def __init__(self, baseline: Artifact, source: SampleSource, device: str) -> None:
        self.source, self.device = source, device
        self.baseline = _open_blockwise(baseline)
        self._samples = source.encode(self.baseline.model, baseline.path)

    def compare(self, step: Artifact, kept_positions: BlockPositions) -> dict[str, Any]:
        """Return the ratios of the layers of `step`, as `layer_sqnr` of a step in report.json.

        Args:
            step: a torch artifact.
            kept_positions: by stack, the baseline's blocks that the step has, where it has fewer.
        """
        comparison = not_compared(None)
        try:
            model = _open_blockwise(step)
            is_quantized = any(e["op"] == "quantize" for e in model.edits)
            device = "cpu" if is_quantized else torch_device(self.device)
            for each in (self.baseline, model):
                each.place(device)
            pairs = self._batch_pairs(model.model, step.path, device)
            comparison |= compare_layers(self.baseline, model, pairs, kept_positions)
            comparison["samples"] = sum(len(next(iter(batch.values()))) for batch, _ in pairs)
        except NotComparableError as error:
            comparison["reason"] = str(error)
        return comparison

    def _batch_pairs(self, model: Any, folder: Path, device: str) -> list[tuple[TensorBatch, TensorBatch]]:
        """Return the batches of the samples that both tokenizers encode into equally many tokens."""
        models = (self.baseline.model, model)
        vocabularies = [each.config.to_dict().get("vocab_size") for each in models]
        if task_traits(self.source.task).samples == "running-text" and vocabularies[0] != vocabularies[1]:
            raise NotComparableError("another tokenizer cuts the text into other windows")
        step_samples = self.source.encode(model, folder)
        if len(step_samples) != len(self._samples):
            raise NotComparableError("its tokenizer gives another number of samples")
        alike = [
            index
            for index, row in enumerate(step_samples)
            if row.token_counts == self._samples[index].token_counts
        ]
        if not alike:
            raise NotComparableError("no sample has as many tokens as for the baseline")
        both = zip((self._samples, step_samples), models, strict=True)
        sides = [list(make_batches([rows[index] for index in alike], side.config)) for rows, side in both]
        placed = [[{n: v.to(device) for n, v in b.items()} for b in batches] for batches in sides]
        return list(zip(*placed, strict=True))


def _open_blockwise(artifact: Artifact) -> BlockwiseModel:
    """Return the model of a torch artifact.

    Raises:
        NotComparableError: there is not enough memory.
    """
    try:
        return BlockwiseModel(artifact.path)
    except RunError as error:
        if error.code != "out-of-memory":
            raise
        raise NotComparableError("not enough memory for the model and the baseline") from error


@dataclass
class _Layers:
    """The ratios of layers, and which of the baseline's layers the step has."""

    ratios: dict[_Place, _Ratio] = field(default_factory=dict)
    present: set[_Place] = field(default_factory=set)

    def compare(self, layer: _Place, expected: Tensor | None, output: Tensor) -> None:
        self.present.add(layer)
        if expected is not None and expected.shape == output.shape:
            self.ratios.setdefault(layer, _Ratio()).add(expected, output)

    def compare_removed(self, layer: _Place, expected: Tensor, instead: Tensor) -> None:
        self.ratios.setdefault(layer, _Ratio()).add(expected, instead)


def compare_layers(
    baseline: BlockwiseModel, step: BlockwiseModel, pairs: BatchPairs, kept_positions: BlockPositions
) -> dict[str, Any]:
    """Return the SQNR of each layer of `step` on the inputs of the baseline's, and of its outputs.

    Layers are the embeddings, the blocks, in them the output of each attention and feed-forward part (whose
    widths no pruning of heads or neurons changes), and the output layer. A removed block is compared as if it
    returned its input, a removed part as if it returned zeros. The outputs (logits, embeddings) are those of
    each model on its own.

    Args:
        baseline: the model to compare with.
        step: the changed model, on the same device.
        pairs: the same batches for both, on that device.
        kept_positions: see `LayerComparison.compare`.

    Returns:
        `layers`: `name` (the baseline's), `part`, `sqnr_db` (None: equal outputs) and `removed` of each, in
        the order of the model; empty for models without blocks of attention and feed-forward parts.
        `output_sqnr_db`: of the outputs; None if they are equal, or have other widths, which is the `reason`.

    Raises:
        NotComparableError: the blocks or the hidden states do not match.
    """
    stacks = {block.stack.name: block.stack for block in blocks_of(baseline.model)}
    positions = _block_positions(baseline.model, step.model, stacks, kept_positions)
    with TemporaryDirectory(prefix="states-") as folder:
        passes = _Passes(baseline, step, pairs, Path(folder))
        for name, stack in stacks.items():
            passes.run_stack(stack, positions[name])
        output_ratio = passes.compare_outputs(list(stacks.values())[-1:])
    return {
        "layers": _layer_rows(passes.layers, baseline.model, stacks),
        "output_sqnr_db": None if output_ratio is None else output_ratio.db,
        "reason": "its outputs have another width" if output_ratio is None else None,
    }


def _layer_rows(layers: _Layers, baseline: Any, stacks: Mapping[str, Stack]) -> list[dict[str, Any]]:
    names, heads = list(stacks), output_modules(baseline)
    rows = []
    for layer in sorted(layers.ratios, key=lambda key: (names.index(key[0]), key[1], _PARTS.index(key[2]))):
        stack_name, index, part = layer
        name = f"{stacks[stack_name].module_path}.{index}"
        if part == _EMBEDDINGS:
            name = next(iter(stacks[stack_name].stream.embeddings), _EMBEDDINGS).removesuffix(".weight")
        elif part == _OUTPUT:
            name = heads[-1] if heads else _OUTPUT
        removed = layer not in layers.present
        rows.append({"name": name, "part": part, "sqnr_db": layers.ratios[layer].db, "removed": removed})
    return rows


def _block_positions(
    baseline: Any, model: Any, stacks: Mapping[str, Stack], kept_positions: BlockPositions
) -> dict[str, Sequence[int]]:
    """Return the baseline's block for each block of `model`, by stack, in increasing order.

    Raises:
        NotComparableError: they are not known.
    """
    step_stacks = {block.stack.name: block.stack for block in blocks_of(model)}
    if step_stacks.keys() != stacks.keys():
        raise NotComparableError("it is a model of another kind")
    positions: dict[str, Sequence[int]] = {}
    for name, stack in stacks.items():
        count = len(stack.modules(baseline))
        present = len(step_stacks[name].modules(model))
        positions[name] = indices = kept_positions.get(name, range(count))
        is_known = len(indices) == present and list(indices) == sorted(set(indices) & set(range(count)))
        if not is_known:
            raise NotComparableError("it has another number of blocks, and which ones were kept is not known")
    return positions


@dataclass
class _BlockStates:
    """The input of a block, float [B, L, D], and the outputs of the block and its parts, of one batch."""

    input: Tensor
    outputs: dict[str, Tensor]


class _Passes:
    """Three passes through all blocks, one block at a time.

    baseline: of the baseline. own: of the step. forced: of the step, whose blocks get the inputs of the
    baseline's.
    """

    def __init__(
        self, baseline: BlockwiseModel, step: BlockwiseModel, pairs: BatchPairs, folder: Path
    ) -> None:
        self.layers = _Layers()
        self._models, self._count = (baseline, step), len(pairs)
        batches = [[pair[side] for pair in pairs] for side in (0, 1)]
        self._baseline = SequentialRunner(baseline.model, batches[0], folder / "baseline", _STATES_BYTES)
        self._own = SequentialRunner(step.model, batches[1], folder / "own", _STATES_BYTES)
        self._forced = SequentialRunner(step.model, batches[1], folder / "forced", _STATES_BYTES)

    def run_stack(self, stack: Stack, positions: Sequence[int]) -> None:
        """Run a stack of both models and compare its blocks.

        Args:
            stack: of the baseline.
            positions: for each block of the step, the baseline's.
        """
        baseline, step = self._models
        blocks = _blocks_by_position(baseline.model, stack.name)
        step_blocks = dict(zip(positions, _blocks_by_position(step.model, stack.name), strict=True))
        first_inputs: dict[int, Tensor] = {}  # of the stack by batch, until the step's first block runs
        for runner in (self._baseline, self._own, self._forced):
            runner.run_before_index(stack, 0)
        for position, block in enumerate(blocks):
            step_block = step_blocks.get(position)
            index = positions.index(position) if step_block is not None else 0
            with ExitStack() as loaded:
                loaded.enter_context(baseline.loaded(block.module))
                if step_block is not None:
                    loaded.enter_context(step.loaded(step_block.module))
                for number in range(self._count):
                    expected = _run_block(self._baseline, block, number, position)
                    if position == 0:
                        first_inputs[number] = expected.input
                    if step_block is None:
                        removed = (stack.name, position, _BLOCK)
                        self.layers.compare_removed(removed, expected.outputs[_BLOCK], expected.input)
                        continue
                    step_output = _run_block(self._own, step_block, number, index)
                    if step_output.input.shape != expected.input.shape:
                        raise NotComparableError("its hidden states have another width")
                    if index == 0:
                        embeddings = (stack.name, 0, _EMBEDDINGS)
                        self.layers.compare(embeddings, first_inputs.pop(number), step_output.input)
                    forced = _run_block(self._forced, step_block, number, index, expected.input)
                    self._compare_block((stack.name, position), expected, forced)
            self._baseline.finish_position(position)
            if step_block is not None:
                self._own.finish_position(index)
                self._forced.finish_position(index)
        for number in range(self._count):  # what follows the stack gets the baseline's states too
            states = _hidden_states(self._baseline.states.get(number, "cpu"))
            self._forced.states.put(
                number, _with_hidden_states(self._forced.states.get(number, "cpu"), states)
            )

    def _compare_block(
        self, block_key: tuple[str, int], expected: _BlockStates, forced: _BlockStates
    ) -> None:
        for part, output in forced.outputs.items():
            self.layers.compare((*block_key, part), expected.outputs.get(part), output)
        for part in expected.outputs.keys() - forced.outputs.keys():
            output = expected.outputs[part]
            self.layers.compare_removed((*block_key, part), output, torch.zeros_like(output))

    def compare_outputs(self, last_stack: Sequence[Stack]) -> _Ratio | None:
        """Return the ratio of the outputs, and compare the output layer after `last_stack`, if there is one.

        None if the outputs have other widths (another vocabulary, another embedding).
        """
        ratio = _Ratio()
        for number in range(self._count):
            expected, output = _output(self._baseline, number), _output(self._own, number)
            if expected.shape != output.shape:
                return None
            ratio.add(expected, output)
            del output  # logits of a large vocabulary: two of them at a time
            for stack in last_stack:
                output_key = (stack.name, len(stack.modules(self._models[0].model)), _OUTPUT)
                self.layers.compare(output_key, expected, _output(self._forced, number))
        return ratio


def _blocks_by_position(model: Any, stack: str) -> list[Block]:
    """Return the block at each position of a stack; a repeated block has several."""
    blocks = [block for block in blocks_of(model) if block.stack.name == stack]
    by_position = {position: block for block in blocks for position in block.call_indices}
    return [by_position[position] for position in sorted(by_position)]


def _run_block(
    runner: SequentialRunner, block: Block, number: int, position: int, states: Tensor | None = None
) -> _BlockStates:
    """Run one position of a model for one batch; `states` replace its input."""
    inputs: list[Tensor] = []
    outputs: dict[str, Tensor] = {}

    def see(block_input: Tensor, result: BlockOutput) -> None:
        inputs.append(block_input)
        outputs[_BLOCK] = _hidden_states(result)

    def see_part(part: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
            outputs[part] = output

        return hook

    with ExitStack() as hooks:
        for part, layer in _part_outputs(block):
            handle = runner.model.get_submodule(layer).register_forward_hook(see_part(part))
            hooks.callback(handle.remove)
        if states is not None:
            handle = block.module.register_forward_pre_hook(lambda module, inputs: (states, *inputs[1:]))
            hooks.callback(handle.remove)
        runner.run_batch(number, position, see)
    return _BlockStates(inputs[0], outputs)


def _part_outputs(block: Block) -> Iterator[tuple[str, str]]:
    """Yield the name of each part of a block, and of the module that computes its output."""
    for attention in block.attentions:
        yield "cross-attention" if attention.cross else "self-attention", attention.out
    if block.feed_forwards:
        yield "feed-forward", block.stack.feed_forward.with_prefix(block.module_path).output_module


def _hidden_states(output: BlockOutput) -> Tensor:
    states: Tensor = output if isinstance(output, Tensor) else output[0]
    return states


def _with_hidden_states(output: BlockOutput, states: Tensor) -> BlockOutput:
    return states if isinstance(output, Tensor) else (states, *output[1:])


def _output(runner: SequentialRunner, number: int) -> Tensor:
    """Return the output of a model for one batch from the states after its last block."""
    with runner.resume_batch(number):
        return next(model_outputs(runner.model, [runner.batches[number]]))

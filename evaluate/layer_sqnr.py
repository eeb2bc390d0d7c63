"""How far a step is from its baseline: signal-to-quantization-noise ratio (SQNR) of layers, KL divergence.

Every block of the step gets the hidden states that the same block of the baseline gets, so that the error of
one block does not reach the next one: a low ratio is the block's own. The ratio is 20 log10(|y| / |y - x|) in
dB over all samples, y being the output of the baseline and x that of the step. 20 dB is an error of 10 % of
the output, 40 dB of 1 %.

Source: PyTorch's Numeric Suite (`torch.ao.ns.fx.utils.compute_sqnr`); Qualcomm AIMET and Intel Neural
Compressor rank layers for mixed precision by it.

KL divergence is that of the next-token distributions from the baseline's. The baseline writes the outputs of
some samples. Every model then gets these outputs as its own (teacher forcing), so that both predict the next
token after the same tokens. It needs no references, and unlike a comparison of texts it does not grow once
one token differs.

Shapes: B = batch, L = length, D = hidden width, T = tokens of the longest output, N = compared tokens,
V = vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from smelt.calibration.samples import draw_samples, make_batches, model_outputs, split_pairs
from smelt.core.artifact import Artifact
from smelt.core.system import available_bytes
from smelt.data.splits import Split
from smelt.data.tasks import Task, task_traits
from smelt.generation.backend import Batch, Logits, Tokens
from smelt.generation.config import GenerationConfig, GenerationSettings, vocabulary_sizes
from smelt.generation.runner import Runner
from smelt.generation.search import forced_logits
from smelt.models.checkpoint import load_model
from smelt.models.families.family import Stack
from smelt.models.families.registry import Block, blocks_of, output_modules
from smelt.runtimes.device import torch_device
from smelt.runtimes.predict_texts import generation_batches
from smelt.stage import Context
from smelt.tasks.samples import TensorBatch, load_processor

# Raised whenever the same models and samples would give another result.
SQNR_VERSION = 1
# Lower ratios, and outputs that are NaN or infinite, are reported as this; JSON has no infinity.
LOWEST_DB = -100.0
# Of the free memory, how much the two models may take.
_MEMORY_SHARE = 0.8

# Blocks of the baseline by stack: for each block of the step, the index of the baseline's.
BlockPositions = Mapping[str, Sequence[int]]


# A layer: its stack, the index of its block there, and its part of the block (see `_PARTS`).
_Place = tuple[str, int, str]
_EMBEDDINGS, _BLOCK, _OUTPUT = "embeddings", "block", "output"
_PARTS = (_EMBEDDINGS, _BLOCK, "self-attention", "cross-attention", "feed-forward", _OUTPUT)


@dataclass
class _Ratio:
    """Sums of squares of a layer's outputs and of their errors."""

    signal: float = 0.0
    noise: float = 0.0

    def add(self, expected: Tensor, found: Tensor) -> None:
        y, x = expected.double(), found.double()
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
        NotComparableError: no memory for the baseline, or samples without targets.
    """

    def __init__(self, baseline: Artifact, source: SampleSource, device: str) -> None:
        self.source, self.device = source, device
        self._require_memory(baseline)
        self.model, _ = load_model(baseline.path)
        self._rows = source.encode(self.model, baseline.path)

    def compare(self, step: Artifact, kept: BlockPositions) -> dict[str, Any]:
        """Return the ratios of the layers of `step`, as `layer_sqnr` of a step in report.json.

        Args:
            step: a torch artifact.
            kept: by stack, the baseline's blocks that the step has, where it has fewer.
        """
        found = not_compared(None)
        try:
            self._require_memory(step)
            model, edits = load_model(step.path)
            device = "cpu" if any(e["op"] == "quantize" for e in edits) else torch_device(self.device)
            for each in (self.model, model):
                each.to(device)
            pairs = self._batch_pairs(model, step.path, device)
            found["samples"] = sum(len(next(iter(batch.values()))) for batch, _ in pairs)
            found["output_sqnr_db"] = output_sqnr(self.model, model, pairs)
            found["layers"] = block_sqnr(self.model, model, pairs, kept)
        except NotComparableError as error:
            found["reason"] = str(error)
        return found

    def _require_memory(self, artifact: Artifact) -> None:
        needed = 4 * int(artifact.manifest.details.get("parameters") or 0)
        if needed > _MEMORY_SHARE * available_bytes():
            raise NotComparableError("not enough memory for the model and the baseline")

    def _batch_pairs(self, model: Any, folder: Path, device: str) -> list[tuple[TensorBatch, TensorBatch]]:
        """Return the batches of the samples that both tokenizers encode into equally many tokens."""
        vocabularies = [each.config.to_dict().get("vocab_size") for each in (self.model, model)]
        if task_traits(self.source.task).samples == "running-text" and vocabularies[0] != vocabularies[1]:
            raise NotComparableError("another tokenizer cuts the text into other windows")
        own = self.source.encode(model, folder)
        if len(own) != len(self._rows):
            raise NotComparableError("its tokenizer gives another number of samples")
        alike = [at for at, row in enumerate(own) if row.token_counts == self._rows[at].token_counts]
        if not alike:
            raise NotComparableError("no sample has as many tokens as for the baseline")
        both = ((self._rows, self.model), (own, model))
        sides = [list(make_batches([rows[at] for at in alike], side.config)) for rows, side in both]
        placed = [[{n: v.to(device) for n, v in b.items()} for b in batches] for batches in sides]
        return list(zip(*placed, strict=True))


@torch.inference_mode()
def output_sqnr(baseline: Any, model: Any, pairs: Sequence[tuple[TensorBatch, TensorBatch]]) -> float | None:
    """Return the SQNR of the outputs of `model` (logits, embeddings) in dB, each model on its own.

    None if the outputs are equal.

    Args:
        baseline: the model to compare with.
        model: the changed model.
        pairs: the same batches for both.

    Raises:
        NotComparableError: the outputs have other widths (another vocabulary, another embedding).
    """
    ratio = _Ratio()
    for expected_batch, batch in pairs:
        [expected], [output] = model_outputs(baseline, [expected_batch]), model_outputs(model, [batch])
        if expected.shape != output.shape:
            raise NotComparableError("its outputs have another width")
        ratio.add(expected, output)
    return ratio.db


@torch.inference_mode()
def block_sqnr(
    baseline: Any,
    model: Any,
    pairs: Sequence[tuple[TensorBatch, TensorBatch]],
    kept: BlockPositions,
) -> list[dict[str, Any]]:
    """Return the SQNR of each layer of `model` on the inputs of the baseline's, in the order of the model.

    Layers are the embeddings, the blocks, in them the output of each attention and feed-forward part (whose
    widths no pruning of heads or neurons changes), and the output layer. A removed block is compared as if it
    returned its input, a removed part as if it returned zeros.

    Args:
        baseline: the model to compare with.
        model: the changed model.
        pairs: the same batches for both.
        kept: see `LayerComparison.compare`.

    Returns:
        `name` (the baseline's), `part`, `sqnr_db` (None: equal outputs) and `removed` of each; empty for
        models without blocks of attention and feed-forward parts.

    Raises:
        NotComparableError: the blocks or the hidden states do not match.
    """
    stacks = {block.stack.name: block.stack for block in blocks_of(baseline)}
    positions = _block_positions(baseline, model, stacks, kept)
    ratios: dict[_Place, _Ratio] = {}
    present: set[_Place] = set()
    for expected_batch, batch in pairs if stacks else ():
        states = _BaselineStates()
        with observe_blocks(baseline, states.start, states.finish):
            [expected] = model_outputs(baseline, [expected_batch])
        step = _StepStates(states, positions, ratios, present)
        with observe_blocks(model, step.start, step.finish):
            [output] = model_outputs(model, [batch])
        if expected.shape == output.shape:
            last = list(stacks)[-1]
            step.compare((last, len(states.inputs[last]), _OUTPUT), expected, output)
        step.compare_removed()
    heads = output_modules(baseline)
    found = []
    for place in sorted(ratios, key=lambda at: (list(stacks).index(at[0]), at[1], _PARTS.index(at[2]))):
        stack, index, part = place
        name = f"{stacks[stack].module_path}.{index}"
        if part == _EMBEDDINGS:
            name = next(iter(stacks[stack].stream.embeddings), _EMBEDDINGS).removesuffix(".weight")
        elif part == _OUTPUT:
            name = heads[-1] if heads else _OUTPUT
        removed = place not in present
        found.append({"name": name, "part": part, "sqnr_db": ratios[place].db, "removed": removed})
    return found


def _block_positions(
    baseline: Any, model: Any, stacks: Mapping[str, Stack], kept: BlockPositions
) -> dict[str, Sequence[int]]:
    """Return the baseline's block for each block of `model`, by stack.

    Raises:
        NotComparableError: they are not known.
    """
    own = {block.stack.name: block.stack for block in blocks_of(model)}
    if own.keys() != stacks.keys():
        raise NotComparableError("it is a model of another kind")
    found: dict[str, Sequence[int]] = {}
    for name, stack in stacks.items():
        count = len(stack.modules(baseline))
        present = len(own[name].modules(model))
        found[name] = kept.get(name, range(count))
        if len(found[name]) != present or not all(0 <= at < count for at in found[name]):
            raise NotComparableError("it has another number of blocks, and which ones were kept is not known")
    return found


# Called with the place and the input of a block; returns the states that it gets instead, or None.
BlockStart = Callable[[str, int, Tensor], Tensor | None]
# The same for the output of a block, or of a part of it.
BlockEnd = Callable[[_Place, Tensor, bool], Tensor | None]


@contextmanager
def observe_blocks(model: Any, on_start: BlockStart, on_end: BlockEnd) -> Iterator[None]:
    """Call `on_start` before, and `on_end` after each block of one forward pass inside the context.

    A stack calls its blocks in order, also repeated ones, so the number of calls is the index of the block.

    Args:
        model: a model with blocks.
        on_start: called with the stack, the index of the block and its input, float [B, L, D].
        on_end: called with the place, the output, float [B, L, D], and whether it is the stack's last block;
            also for parts, whose output is not replaced.
    """
    calls: dict[str, int] = {}
    running: list[str] = []  # the stack; two stacks may share a part

    def start(stack: str) -> Callable[..., Any]:
        def hook(module: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...] | None:
            calls[stack] = calls.get(stack, -1) + 1
            running[:] = [stack]
            states = on_start(stack, calls[stack], given[0])
            return None if states is None else (states, *given[1:])

        return hook

    def end(stack: str, length: int) -> Callable[..., Any]:
        def hook(module: nn.Module, given: tuple[Any, ...], result: Any) -> Any:
            more = result[1:] if isinstance(result, tuple) else None
            output = result if more is None else result[0]
            at = calls[stack]
            states = on_end((stack, at, _BLOCK), output, at == length - 1)
            return None if states is None else states if more is None else (states, *more)

        return hook

    def part_end(stack: str, part: str) -> Callable[..., None]:
        def hook(module: nn.Module, given: tuple[Any, ...], output: Tensor) -> None:
            if running == [stack]:
                on_end((stack, calls[stack], part), output, False)

        return hook

    with ExitStack() as hooks:
        for block in blocks_of(model):
            name, length = block.stack.name, len(block.stack.modules(model))
            handles = [
                block.module.register_forward_pre_hook(start(name)),
                block.module.register_forward_hook(end(name, length)),
                *(
                    model.get_submodule(layer).register_forward_hook(part_end(name, part))
                    for part, layer in _part_outputs(block)
                ),
            ]
            for handle in handles:
                hooks.callback(handle.remove)
        yield


def _part_outputs(block: Block) -> Iterator[tuple[str, str]]:
    """Yield the name of each part of a block, and of the linear layer that computes its output."""
    for attention in block.attentions:
        yield "cross-attention" if attention.cross else "self-attention", attention.out
    if block.feed_forward is not None:
        yield "feed-forward", block.feed_forward.down


class _BaselineStates:
    """The inputs of the baseline's blocks by stack, and the outputs of its layers, of one batch."""

    def __init__(self) -> None:
        self.inputs: dict[str, list[Tensor]] = {}
        self.outputs: dict[_Place, Tensor] = {}

    def start(self, stack: str, index: int, states: Tensor) -> None:
        self.inputs.setdefault(stack, []).append(states)

    def finish(self, place: _Place, output: Tensor, is_last: bool) -> None:
        self.outputs[place] = output


class _StepStates:
    """Compares the layers of a step with those of the baseline, on the baseline's hidden states."""

    def __init__(
        self,
        base: _BaselineStates,
        positions: Mapping[str, Sequence[int]],
        ratios: dict[_Place, _Ratio],
        present: set[_Place],
    ) -> None:
        self.base, self.positions, self.ratios, self.present = base, positions, ratios, present

    def start(self, stack: str, index: int, states: Tensor) -> Tensor:
        expected = self.base.inputs[stack][self.positions[stack][index]]
        if expected.shape != states.shape:
            raise NotComparableError("its hidden states have another width")
        if index == 0:
            self.compare((stack, 0, _EMBEDDINGS), self.base.inputs[stack][0], states)
        return expected

    def finish(self, place: _Place, output: Tensor, is_last: bool) -> Tensor | None:
        stack, index, part = place
        of_baseline = (stack, self.positions[stack][index], part)
        self.compare(of_baseline, self.base.outputs.get(of_baseline), output)
        return self.base.outputs[stack, len(self.base.inputs[stack]) - 1, _BLOCK] if is_last else None

    def compare(self, place: _Place, expected: Tensor | None, output: Tensor) -> None:
        self.present.add(place)
        if expected is not None and expected.shape == output.shape:
            self.ratios.setdefault(place, _Ratio()).add(expected, output)

    def compare_removed(self) -> None:
        """Compare the layers of the baseline that the step lacks, without parts of removed blocks."""
        for place, expected in self.base.outputs.items():
            stack, index, part = place
            if place in self.present:
                continue
            if part == _BLOCK:
                self.ratios.setdefault(place, _Ratio()).add(expected, self.base.inputs[stack][index])
            elif (stack, index, _BLOCK) in self.present:
                self.ratios.setdefault(place, _Ratio()).add(expected, torch.zeros_like(expected))


# Raised whenever the same models and samples would give another result.
TOKEN_DIVERGENCE_VERSION = 1
# The baseline's logits in memory; of longer outputs only the first tokens are compared.
_MAX_LOGITS_BYTES = 512 * 2**20


@dataclass(frozen=True)
class _Outputs:
    """Outputs of the baseline. batch: their sources. tokens: int64 [B, T]. is_compared: bool [B, T].

    logits: of the baseline for the compared tokens, float32 [N, V].
    """

    batch: Batch
    tokens: Tokens
    is_compared: Any
    logits: Logits


def tokens_not_compared(reason: str) -> dict[str, Any]:
    """Return the fields of `agreement` of a step without a divergence."""
    return {"kl_divergence": None, "kl_n": None, "kl_tokens": None, "kl_reason": reason}


class TokenComparison:
    """Compares the next-token distributions of steps with those of one baseline.

    baseline: an open runner of a generating model; it may be closed afterwards. texts: the sources or
    prompts. generation: how the baseline writes. batch_size: sources per call.
    """

    def __init__(
        self, baseline: Runner, texts: Sequence[str], generation: GenerationSettings, batch_size: int
    ) -> None:
        self.texts, self.generation, self.batch_size = texts, generation, batch_size
        self.decoding = baseline.text.resolved_generation(generation, baseline)
        vocabulary = vocabulary_sizes(baseline.config)[1]
        longest = max(1, _MAX_LOGITS_BYTES // (4 * vocabulary * len(texts)))
        self._outputs = []
        for part, (_, batch) in enumerate(self._batches(baseline, self.decoding)):
            rows = baseline.generator(baseline, batch, self.decoding, part)
            tokens = np.full((len(rows), max(1, *map(len, rows))), self.decoding.pad, dtype=np.int64)
            for row, new in zip(tokens, rows, strict=True):
                row[: len(new)] = new
            # a forced first token is not a prediction
            first = int(self.decoding.forced_bos_token_id is not None and self.decoding.start is not None)
            places, counts = np.arange(tokens.shape[1]), np.array([min(len(new), longest) for new in rows])
            is_compared = (places >= first) & (places < counts[:, None])
            logits = _compared_logits(baseline, batch, self.decoding, tokens, is_compared)
            self._outputs.append(_Outputs(batch, tokens, is_compared, logits))
        self._texts = [baseline.text.tokenizer.decode_batch(each.tokens.tolist()) for each in self._outputs]

    def _batches(self, runner: Runner, decoding: GenerationConfig) -> Sequence[tuple[list[int], Batch]]:
        return generation_batches(runner, self.texts, decoding, self.batch_size)

    def compare(self, step: Runner) -> dict[str, Any]:
        """Return the mean divergence KL(baseline || step), nats per token, as fields of `agreement`.

        Where the two cannot be compared `kl_reason` says why.
        """
        try:
            total = self._total_divergence(step)
        except NotComparableError as error:
            return tokens_not_compared(str(error))
        count = sum(len(each.logits) for each in self._outputs)
        return {
            "kl_divergence": max(0.0, total / count),  # rounding errors may be negative
            "kl_n": sum(len(each.tokens) for each in self._outputs),
            "kl_tokens": count,
            "kl_reason": None,
        }

    def _total_divergence(self, step: Runner) -> float:
        """Return the sum over all compared tokens, nats.

        Raises:
            NotComparableError: other tokens, or outputs without a finite divergence.
        """
        if not any(len(each.logits) for each in self._outputs):
            raise NotComparableError("the baseline writes no tokens")
        batches = [batch for _, batch in self._batches(step, self.decoding)]
        total = 0.0
        for each, texts, own in zip(self._outputs, self._texts, batches, strict=True):
            if not np.array_equal(each.batch.input_ids, own.input_ids):
                raise NotComparableError("its tokenizer gives other tokens for the samples")
            if step.text.tokenizer.decode_batch(each.tokens.tolist()) != texts:
                raise NotComparableError("its tokenizer has other tokens")
            logits = _compared_logits(step, own, self.decoding, each.tokens, each.is_compared)
            if logits.shape != each.logits.shape:
                raise NotComparableError("its vocabulary has another size")
            total += summed_divergence(logits, each.logits)
        if np.isposinf(total):
            raise NotComparableError(
                "it excludes tokens to which the baseline gives a probability, as a shortlist does; the"
                " divergence is infinite"
            )
        if not np.isfinite(total):
            raise NotComparableError("its outputs are not finite")
        return total


def _compared_logits(
    runner: Runner, batch: Batch, decoding: GenerationConfig, tokens: Tokens, is_compared: Any
) -> Logits:
    """Return the logits of the compared tokens, float32 [N, V], in the order of their positions."""
    last = int(np.flatnonzero(is_compared.any(axis=0)).max(initial=0))
    steps = forced_logits(runner, batch, decoding, tokens[:, : last + 1])
    return np.concatenate([logits[is_compared[:, at]] for at, logits in enumerate(steps)])


def summed_divergence(logits: Logits, expected: Logits) -> float:
    """Return the sum of KL(expected || logits) over rows, nats; infinite where only `logits` exclude a token.

    Args:
        logits: of the step, float32 [N, V].
        expected: of the baseline, likewise.
    """
    total = 0.0
    for own, base in zip(
        torch.from_numpy(logits).split(64), torch.from_numpy(expected).split(64), strict=True
    ):
        p, q = base.double().log_softmax(dim=-1), own.double().log_softmax(dim=-1)
        terms = p.exp() * (p - q)
        total += float(terms.masked_fill(p.isneginf(), 0.0).sum())  # 0 log 0 = 0
    return total

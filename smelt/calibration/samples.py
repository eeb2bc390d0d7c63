"""Calibration samples, drawn with the recipe's seed, and hooks that observe the inputs of layers on them.

By default samples of equal lengths share a batch, so that there is no padding to ignore; the tokens of a
batch are limited. A translation model gets its targets as decoder inputs (teacher forcing), a language model
windows of running text. Where a stage reports errors, further samples are held back from calibration, and
errors are measured on them.

Shapes: B = batch, L = source length, T = target length, K = inputs of a layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from smelt.core.artifact import Artifact
from smelt.core.errors import InputError
from smelt.core.messages import with_count
from smelt.data.labels import REGRESSION, class_names, problem_type
from smelt.data.splits import Split, spread_indices
from smelt.models.edits import module_names
from smelt.models.families.registry import blocks_of, family_of
from smelt.models.model_size import (
    MAX_CALIBRATION_TOKENS,
    MIN_CALIBRATION_SAMPLES,
    TOKENS_PER_INPUT,
)
from smelt.models.sentence_model import head_output
from smelt.stage import Context
from smelt.tasks.encode_split import encode_split
from smelt.tasks.samples import (
    IGNORE_INDEX,
    EncodedSample,
    TensorBatch,
    collate,
    group_by_length,
    load_processor,
)

# Tokens of a batch, unless one sample is longer: inputs of a layer of width 4096 take 16 MB then.
_MAX_BATCH_TOKENS = 1024
# Samples for a loss or its gradients without `calibration_samples`.
LOSS_SAMPLES = 256
# Samples that are held back, if there are enough; else a tenth of all.
_MIN_HELD_BACK = 16
# A choice by fewer samples that are held back has a warning.
_FEW_HELD_BACK = 8
# Pairs per batch for a loss on their scores.
_PAIRS_PER_BATCH = 16


@dataclass(frozen=True)
class CalibrationSamples:
    """Inputs of a model, in batches.

    origin: of the split, for messages. num_samples: number of texts (or pairs), or windows. tokens: of all,
    without padding. held_back: samples of the same split on which errors are measured; None: the same ones.
    """

    origin: str
    batches: list[TensorBatch]
    num_samples: int
    tokens: int
    held_back: CalibrationSamples | None = None

    @property
    def details(self) -> dict[str, Any]:
        """The origin and the numbers of samples and tokens, for the report."""
        held_back = {} if self.held_back is None else {"held_back": self.held_back.num_samples}
        return {"origin": self.origin, "samples": self.num_samples, "tokens": self.tokens} | held_back

    def subset(self, rows: int) -> CalibrationSamples:
        """Return `rows` samples, spread over the batches: the first of each, or more if these are too few.

        Each is a batch of its own, without padding.
        """
        most = 1 if len(self.batches) >= rows else rows
        single = [
            _without_padding({name: value[index : index + 1] for name, value in batch.items()})
            for batch in self.batches
            for index in range(min(most, *map(len, batch.values())))
        ]
        spread_samples = [single[i] for i in spread_indices(len(single), rows, 0)]
        return replace(
            self,
            batches=spread_samples,
            num_samples=len(spread_samples),
            tokens=sum(map(_count_tokens, spread_samples)),
        )


def load_calibration_samples(
    model: Any,
    src: Artifact,
    count: int | None,
    ctx: Context,
    stage: str,
    *,
    labels: bool = False,
    padded: bool = False,
    held_back: bool = False,
) -> CalibrationSamples:
    """Return `count` samples of the split `calibration`, else of `train`; all if there are fewer.

    Args:
        model: its config defines the inputs.
        src: the artifact with the tokenizer.
        count: number of samples; of running text, windows. None: see `default_sample_count`; with `labels`
            `LOSS_SAMPLES`.
        ctx: data, task, seed; receives a warning about truncated texts.
        stage: the name of the stage, for messages.
        labels: whether batches also have `labels` (see `collate`), for a loss. Pairs of texts that are
            embedded separately are kept together then, several in a padded batch: their loss compares
            them.
        padded: whether samples of similar lengths share a batch, if the caller ignores padding (as
            `observe_inputs` does); short texts then need far fewer batches. Batches also have `labels`,
            which mark the padding of a target.
        held_back: whether further samples are held back: a tenth as many, at least 16. If there are no
            others, a tenth of all samples is held back; none of fewer than ten.

    Raises:
        InputError: there are no samples.
    """
    split = ctx.data.get("calibration") or ctx.data.get("train")
    if split is None or not len(split):
        raise InputError(
            f"{stage}: calibration requires samples, and the recipe has none. Add data:"
            f" {{calibration: FILE}} or data: {{train: FILE}}.",
            code="no-calibration-data",
            setting="data.calibration",
        )
    wanted = LOSS_SAMPLES if count is None and labels else count
    drawn = _draw(split, model, load_processor(src.path), wanted, ctx, stage, held_back)
    samples, others = (
        CalibrationSamples(split.origin, batches, len(encoded), sum(map(_count_tokens, batches)))
        for encoded in drawn
        for batches in [_collate_batches(encoded, model.config, labels, padded)]
    )
    return replace(samples, held_back=others) if others.num_samples else samples


def warn_of_few_held_back(count: int, what: str, ctx: Context) -> None:
    """Warn if `what` ("candidates are compared", say) is decided on few samples, or on none held back.

    Args:
        count: number of samples that are used for nothing else; 0: calibration samples decide.
        what: for the message, with its verb.
        ctx: receives the warning.
    """
    if count >= _FEW_HELD_BACK:
        return
    which = f"only {with_count(count, 'sample')}" if count else "the calibration samples, as there are so few"
    ctx.warn(
        "few-held-back-samples",
        f"{what} on {which}; another choice may be better. Use at least {10 * _FEW_HELD_BACK} samples as"
        " calibration data (data.calibration, else data.train), of which a tenth is held back.",
    )


def _collate_batches(
    encoded: Sequence[EncodedSample], config: Any, labels: bool, padded: bool
) -> list[TensorBatch]:
    """Return batches as `load_calibration_samples` describes them."""
    if labels and any(row.second_ids is not None for row in encoded):
        groups = group_by_length(encoded, _PAIRS_PER_BATCH, None, None)
        batches = [collate([encoded[i] for i in group], config) for group in groups]
    elif padded:
        single = split_pairs(encoded)
        groups = group_by_length(single, len(single), 2 * _MAX_BATCH_TOKENS, None)
        batches = [collate([single[i] for i in group], config) for group in groups]
    else:
        batches = list(make_batches(split_pairs(encoded), config))
    if not labels and not padded:
        for batch in batches:
            del batch["labels"]
    return batches


def draw_samples(
    split: Split, model: Any, tokenizer: Any, wanted: int, ctx: Context, stage: str
) -> list[EncodedSample]:
    """Return `wanted` samples of `split`, spread over it; all if there are fewer. See `encode_split`.

    Samples of classification without a label get one of the model's, which is not used.
    """
    return _draw(split, model, tokenizer, wanted, ctx, stage, held_back=False)[0]


def _draw(
    split: Split,
    model: Any,
    tokenizer: Any,
    wanted: int | None,
    ctx: Context,
    stage: str,
    held_back: bool,
) -> tuple[list[EncodedSample], list[EncodedSample]]:
    """Return the samples for calibration, and those that are held back from it."""
    name = f"{stage}: calibration"
    windows: list[EncodedSample] | None = None
    if ctx.traits.samples == "running-text":  # windows are cut from one text before any are selected
        windows = encode_split(split, model.config, tokenizer, ctx, split_name=name)

    def encode(indices: list[int], ctx: Context) -> list[EncodedSample]:
        if windows is not None:
            return [windows[i] for i in indices]
        selected = split.select(indices)
        if ctx.traits.output == "labels":
            config = model.config.to_dict()
            names = class_names(config)
            label = (0.0,) * len(names) if problem_type(config) == REGRESSION else names[0]
            labeled = (e if e.label is not None else replace(e, label=label) for e in selected.examples)
            selected = replace(selected, examples=tuple(labeled))
        return encode_split(selected, model.config, tokenizer, ctx, split_name=name)

    total = len(split) if windows is None else len(windows)
    if wanted is None:
        probed = spread_indices(total, MIN_CALIBRATION_SAMPLES, ctx.seed)
        wanted = default_sample_count(model, encode(probed, replace(ctx, warnings=[])), len(probed))
    chosen, others = _choose_indices(total, wanted, held_back, ctx.seed)
    samples = encode(chosen, ctx)  # an example with several targets is several samples
    return samples, encode(others, replace(ctx, warnings=[])) if others else []


def _choose_indices(total: int, wanted: int, held_back: bool, seed: int) -> tuple[list[int], list[int]]:
    """Return the indices of the samples for calibration, and of those that are held back."""
    count = 0
    if held_back:
        most = max(_MIN_HELD_BACK, wanted // 10)
        count = max(min(most, total - wanted), min(most, total // 10))
    chosen = spread_indices(total, min(wanted, total - count), seed)
    others = sorted({*range(total)}.difference(chosen))
    return chosen, [others[i] for i in spread_indices(len(others), count, seed)]


def default_sample_count(model: Any, samples: Sequence[EncodedSample], examples: int) -> int:
    """Return how many examples, like the `examples` of `samples`, a model is calibrated on by default.

    They have ten tokens for each input of the widest linear layer, in the encoder and in the decoder, but no
    more than `MAX_CALIBRATION_TOKENS` in all. There are at least `MIN_CALIBRATION_SAMPLES`. An image counts
    as its patches of 16 x 16 pixels.
    """
    single = [sample.token_counts for sample in split_pairs(samples)]
    sides: list[int] = [tokens for side in zip(*single, strict=True) if (tokens := sum(side))] or [1]
    linear_layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
    widest = max((int(layer.in_features) for layer in linear_layers), default=0)
    needed = math.ceil(TOKENS_PER_INPUT * widest * examples / min(sides))
    return max(MIN_CALIBRATION_SAMPLES, min(needed, MAX_CALIBRATION_TOKENS * examples // sum(sides)))


def split_pairs(samples: Sequence[EncodedSample]) -> list[EncodedSample]:
    """Return `samples`; pairs of texts that are embedded separately become two samples."""
    single = [replace(row, second_ids=None) for row in samples]
    return single + [
        replace(row, input_ids=row.second_ids, second_ids=None)
        for row in samples
        if row.second_ids is not None
    ]


def make_batches(samples: Sequence[EncodedSample], config: Any) -> Iterator[TensorBatch]:
    """Yield batches of samples of equal lengths, without padding."""
    by_length: dict[tuple[int, int], list[EncodedSample]] = {}
    for row in samples:
        by_length.setdefault(row.token_counts, []).append(row)
    for lengths in sorted(by_length):
        size = max(1, _MAX_BATCH_TOKENS // max(1, sum(lengths)))
        group = by_length[lengths]
        for start in range(0, len(group), size):
            yield collate(group[start : start + size], config)


def _count_tokens(batch: TensorBatch) -> int:
    """Return the number of tokens in `batch`, source and target, without padding; else of its samples."""
    if "attention_mask" not in batch:
        return len(next(iter(batch.values())))
    labels = batch.get("labels")
    targets = batch.get("decoder_input_ids")
    count = int(batch["attention_mask"].sum())
    if targets is None:
        return count
    return count + (targets.numel() if labels is None else int((labels != IGNORE_INDEX).sum()))


@torch.inference_mode()
def model_outputs(model: Any, batches: Iterable[Mapping[str, Any]]) -> Iterator[Tensor]:
    """Yield the outputs of `model` for each batch: logits or embeddings, float [..., V]."""
    options = model.can_generate() and {"use_cache": False}
    for batch in batches:
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        yield head_output(model(**inputs, **(options or {})))


LayersByKey = Mapping[str, Sequence[nn.Module]]
InputCallback = Callable[[str, Tensor], None]


class ObserveInputs(Protocol):
    """Calls back with the inputs of layers on all samples (see `observe_inputs`)."""

    def __call__(self, layers: LayersByKey, see: InputCallback, *, held_back: bool = False) -> None:
        """Call `see` with the inputs on the calibration samples, or on those that are held back."""


def observe_inputs(
    model: Any, samples: CalibrationSamples, layers: LayersByKey, callback: InputCallback, ctx: Context
) -> None:
    """Run `model` over `samples` and call `callback(key, x)` with the inputs of layers, float [tokens, K].

    Padding is removed if a batch has any.

    Args:
        model: in eval mode, on the CPU.
        samples: calibration samples.
        layers: by any key; several modules may have one key.
        callback: called for each call of a layer; it must keep no reference to `x`.
        ctx: reports progress.
    """
    batch: TensorBatch = {}

    def batches() -> Iterator[TensorBatch]:
        for cpu_batch in samples.batches:
            batch.clear()
            batch.update(cpu_batch)
            yield cpu_batch

    with input_hooks(model, layers, callback, batch):
        for num_done, _ in enumerate(model_outputs(model, batches()), start=1):
            ctx.progress(num_done, len(samples.batches), "calibration")


@dataclass(frozen=True)
class ModelInputs:
    """An `ObserveInputs` that runs the whole model each time."""

    model: Any
    samples: CalibrationSamples
    ctx: Context

    def __call__(self, layers: LayersByKey, see: InputCallback, *, held_back: bool = False) -> None:
        """Call `see` with the inputs on the samples, or on those that are held back."""
        samples = (self.samples.held_back or self.samples) if held_back else self.samples
        observe_inputs(self.model, samples, layers, see, self.ctx)


@contextmanager
def input_hooks(
    model: Any, layers: LayersByKey, callback: InputCallback, batch: TensorBatch
) -> Iterator[None]:
    """Call `callback(key, x)` whenever one of `layers` is called inside the context.

    Args:
        model: the model with these layers.
        layers: see `observe_inputs`.
        callback: see `observe_inputs`.
        batch: the current inputs of the model; the caller updates it. Its masks, and -100 among its
            labels, define the padding.
    """
    source = _source_modules(model)

    def hook(key: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        return lambda module, inputs: callback(key, token_rows(inputs[0].detach(), batch, module in source))

    handles = [m.register_forward_pre_hook(hook(key)) for key, modules in layers.items() for m in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _source_modules(model: Any) -> Collection[nn.Module]:
    """Return the modules of `model` whose inputs have one state for each source token."""
    family = family_of(model)
    if family is None or family.architecture != "seq2seq":
        return set(model.modules())
    blocks = blocks_of(model)
    encoder = blocks[0].stack
    cross_layers = [n for b in blocks for a in b.attentions if a.cross for n in (a.key, a.value)]
    norms = [name for name in (encoder.stream.embedding_norm, encoder.stream.final_norm) if name]
    prefixes = tuple(f"{name}." for name in (encoder.module_path, *norms, *cross_layers))
    return {m for m, names in module_names(model).items() if any(f"{n}.".startswith(prefixes) for n in names)}


def token_rows(x: Tensor, batch: TensorBatch, source: bool) -> Tensor:
    """Return the rows of `x`, float [..., K], that belong to tokens: [tokens, K].

    `x` may be [B, L, K], [B, L, ..., K], or [B L, K] (OPT flattens its states before the feed-forward part).
    Inputs of other shapes, such as one vector per sample, are returned whole.
    """
    mask = _token_mask(batch, source)
    if mask is None or bool(mask.all()):
        return x.flatten(0, -2)
    if x.shape[:-1] == mask.flatten().shape:
        return x[mask.flatten().to(x.device)]
    if x.shape[:-1][: mask.dim()] == mask.shape:  # not [B, K], even where K = L
        return x[mask.to(x.device)].flatten(0, -2)
    return x.flatten(0, -2)


def _without_padding(sample: TensorBatch) -> TensorBatch:
    """Return a batch of one sample without the padding at its end."""
    lengths = {
        source: int(mask.sum())
        for source in (True, False)
        if (mask := _token_mask(sample, source)) is not None
    }

    def length_of(name: str) -> int | None:
        is_target = name.startswith("decoder_") or (name == "labels" and "decoder_input_ids" in sample)
        return lengths.get(not is_target)

    return {
        name: value[:, : length_of(name)] if value.dim() == 2 else value for name, value in sample.items()
    }


def _token_mask(batch: TensorBatch, source: bool) -> Tensor | None:
    """Return the positions of tokens, bool [B, L] or [B, T]; None if the batch has no mask."""
    if source or "decoder_input_ids" not in batch:
        attention_mask = batch.get("attention_mask")
        return None if attention_mask is None else attention_mask.bool()
    if "decoder_attention_mask" in batch:
        return batch["decoder_attention_mask"].bool()
    labels = batch.get("labels")  # the token that follows each of decoder_input_ids
    return None if labels is None else labels != IGNORE_INDEX

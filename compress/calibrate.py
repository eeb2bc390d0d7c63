"""Running a model over real rows and looking at what its layers are fed.

Whatever decides something from activations (ranges, second moments, how much a change hurts) gets them here:
a few rows of the recipe, drawn by its seed, and hooks on the layers. Rows of equal lengths share a batch, so
that nothing is padded and no value has to be left out; a batch holds a bounded number of tokens, and each
layer's input is handed on while it is there and then forgotten. A translator is fed its targets (teacher
forcing), a language model windows of running text.

Shapes: B = batch, L = source length, T = target length, K = inputs of a layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from smelt.compress.train.data import Row, TensorBatch, collate, encode_split, spread_out
from smelt.core.artifact import Artifact
from smelt.core.data import Split
from smelt.core.errors import InputError
from smelt.core.stage import Context
from smelt.runtime.models.sentence_model import result_of

# Tokens of a batch, where a single row is not longer: what a layer of 4096 inputs gets is 16 MB then.
_TOKENS = 1024

See = Callable[[str, Tensor], None]


@dataclass(frozen=True)
class CalibrationRows:
    """Inputs of a model, in batches without padding.

    origin: of the split, for messages. rows: how many texts (or pairs of them) or windows. tokens: of all.
    """

    origin: str
    batches: list[TensorBatch]
    rows: int
    tokens: int

    def some(self, rows: int) -> CalibrationRows:
        """Return about `rows` rows: the first of every batch, then batches spread over all of them."""
        single = [{name: value[:1] for name, value in batch.items()} for batch in self.batches]
        chosen = [single[i] for i in spread_out(len(single), rows, 0)]
        return replace(self, batches=chosen, rows=len(chosen), tokens=sum(map(_tokens, chosen)))


def calibration_rows(model: Any, src: Artifact, wanted: int, ctx: Context, stage: str) -> CalibrationRows:
    """Return `wanted` rows of the split `calibration`, else of `train`; all where there are fewer.

    Args:
        model: whose config says how inputs look.
        src: where the tokenizer lies.
        wanted: rows; of running text, windows.
        ctx: data, task, seed; gets a warning of texts that were cut.
        stage: the stage's word, for messages.

    Raises:
        InputError: there are no such rows.
    """
    from smelt.runtime.models.checkpoint import load_tokenizer

    split = ctx.data.get("calibration") or ctx.data.get("train")
    if split is None or not len(split):
        raise InputError(
            f"{stage}: it looks at the activations of real rows, and there are none. Name some with data:"
            " {calibration: FILE} or data: {train: FILE}."
        )
    rows = _drawn(split, model, load_tokenizer(src.path), wanted, ctx, stage)
    batches = list(_batches(rows, model.config))
    return CalibrationRows(split.origin, batches, len(rows), sum(map(_tokens, batches)))


def _drawn(split: Split, model: Any, tokenizer: Any, wanted: int, ctx: Context, stage: str) -> list[Row]:
    windows = ctx.task == "language-modeling"  # of one text, which is cut before any are chosen
    if not windows:
        split = split.some(spread_out(len(split), wanted, ctx.seed))
    rows = encode_split(split, model.config, tokenizer, ctx, what=f"{stage}: calibration")
    return [rows[i] for i in spread_out(len(rows), wanted, ctx.seed)] if windows else rows


def _batches(rows: Sequence[Row], config: Any) -> Iterator[TensorBatch]:
    """Yield the inputs of `rows`; of pairs that are read one by one, those of either text."""
    single = [replace(row, second=None) for row in rows]
    single += [replace(row, source=row.second, second=None) for row in rows if row.second is not None]
    alike: dict[tuple[int, int], list[Row]] = {}
    for row in single:
        alike.setdefault(row.tokens, []).append(row)
    for lengths in sorted(alike):
        size = max(1, _TOKENS // max(1, sum(lengths)))
        group = alike[lengths]
        for at in range(0, len(group), size):
            batch = collate(group[at : at + size], config)
            del batch["labels"]
            yield batch


def _tokens(batch: TensorBatch) -> int:
    return sum(value.numel() for name, value in batch.items() if name.endswith("input_ids"))


@torch.inference_mode()
def outputs(model: Any, batches: Iterable[TensorBatch]) -> Iterator[Tensor]:
    """Yield what `model` makes of each batch: logits or vectors, float [..., V]."""
    plain = model.can_generate() and {"use_cache": False}
    for batch in batches:
        yield result_of(model(**batch, **(plain or {})))


def observe(
    model: Any, rows: CalibrationRows, layers: Mapping[str, Sequence[nn.Module]], see: See, ctx: Context
) -> None:
    """Run `model` over `rows` and call `see(key, x)` with what the layers get, float [tokens, K].

    Args:
        model: in eval mode, on the CPU.
        rows: what it reads.
        layers: by a key of the caller's; several modules may have one.
        see: called for each call of a layer; it must keep no reference to `x`.
        ctx: its `progress` is told.
    """
    with _hooks(layers, see):
        for done, _ in enumerate(outputs(model, rows.batches), start=1):
            ctx.progress(done, len(rows.batches), "calibration")


@contextmanager
def _hooks(layers: Mapping[str, Sequence[nn.Module]], see: See) -> Iterator[None]:
    def hook(key: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        return lambda module, inputs: see(key, inputs[0].detach().flatten(0, -2))

    handles = [m.register_forward_pre_hook(hook(key)) for key, found in layers.items() for m in found]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()

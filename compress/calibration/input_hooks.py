"""Hooks on layers: call back with the inputs of each layer while the model runs.

Shapes: B = batch, L = source length, T = target length, K = inputs of a layer.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from smelt.compress.calibration.samples import CalibrationSamples, model_outputs
from smelt.compress.train.encoded_samples import IGNORE_INDEX, TensorBatch
from smelt.core.stage import Context
from smelt.families.model_blocks import blocks_of
from smelt.families.registry import family_of
from smelt.runtime.models.structure import module_names

LayersByKey = Mapping[str, Sequence[nn.Module]]
InputCallback = Callable[[str, Tensor], None]


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
        for found in samples.batches:
            batch.clear()
            batch.update(found)
            yield found

    with input_hooks(model, layers, callback, batch):
        for done, _ in enumerate(model_outputs(model, batches()), start=1):
            ctx.progress(done, len(samples.batches), "calibration")


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
        return lambda module, inputs: callback(key, _token_rows(inputs[0].detach(), batch, module in source))

    handles = [m.register_forward_pre_hook(hook(key)) for key, found in layers.items() for m in found]
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
    crossed = [n for b in blocks for a in b.attentions if a.cross for n in (a.key, a.value)]
    norms = [name for name in (encoder.stream.embedding_norm, encoder.stream.final_norm) if name]
    inside = tuple(f"{name}." for name in (encoder.module_path, *norms, *crossed))
    return {m for m, names in module_names(model).items() if any(f"{n}.".startswith(inside) for n in names)}


def _token_rows(x: Tensor, batch: TensorBatch, source: bool) -> Tensor:
    """Return the rows of `x`, float [..., K], that belong to tokens: [tokens, K].

    `x` may be [B, L, K], [B, L, ..., K], or [B L, K] (OPT flattens its states before the feed-forward part).
    Inputs of other shapes, such as one vector per sample, are returned whole.
    """
    mask = _token_mask(batch, source)
    if mask is None or bool(mask.all()):
        return x.flatten(0, -2)
    if x.shape[:-1] == mask.flatten().shape:
        return x[mask.flatten().to(x.device)]
    if x.shape[: mask.dim()] == mask.shape:
        return x[mask.to(x.device)].flatten(0, -2)
    return x.flatten(0, -2)


def _token_mask(batch: TensorBatch, source: bool) -> Tensor | None:
    """Return the positions of tokens, bool [B, L] or [B, T]; None if the batch has no mask."""
    if source or "decoder_input_ids" not in batch:
        found = batch.get("attention_mask")
        return None if found is None else found.bool()
    if "decoder_attention_mask" in batch:
        return batch["decoder_attention_mask"].bool()
    labels = batch.get("labels")  # the token that follows each of decoder_input_ids
    return None if labels is None else labels != IGNORE_INDEX

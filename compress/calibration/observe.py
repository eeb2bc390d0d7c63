"""Hooks on layers: what each is fed while the model runs, handed on while it is there and then forgotten.

Shapes: B = batch, L = source length, T = target length, K = inputs of a layer.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from smelt.compress.calibration.rows import CalibrationRows, outputs
from smelt.compress.train.data import IGNORE, TensorBatch
from smelt.core.stage import Context
from smelt.families.registry import family_of
from smelt.families.walk import blocks_of
from smelt.runtime.models.structure import names_of

Layers = Mapping[str, Sequence[nn.Module]]
See = Callable[[str, Tensor], None]


def observe(model: Any, rows: CalibrationRows, layers: Layers, see: See, ctx: Context) -> None:
    """Run `model` over `rows` and call `see(key, x)` with what the layers get, float [tokens, K].

    Padding is left out, where a batch has any.

    Args:
        model: in eval mode, on the CPU.
        rows: what it reads.
        layers: by a key of the caller's; several modules may have one.
        see: called for each call of a layer; it must keep no reference to `x`.
        ctx: its `progress` is told.
    """
    batch: TensorBatch = {}

    def batches() -> Iterator[TensorBatch]:
        for found in rows.batches:
            batch.clear()
            batch.update(found)
            yield found

    with watched(model, layers, see, batch):
        for done, _ in enumerate(outputs(model, batches()), start=1):
            ctx.progress(done, len(rows.batches), "calibration")


@contextmanager
def watched(model: Any, layers: Layers, see: See, batch: TensorBatch) -> Iterator[None]:
    """Call `see(key, x)` meanwhile, whenever one of `layers` is called.

    Args:
        model: whose layers these are.
        layers: as `observe` takes them.
        see: as `observe` takes it.
        batch: what the model reads at the moment; the caller keeps it so. Its masks, and -100 among its
            labels, say which tokens are padding.
    """
    source = _reads_source(model)

    def hook(key: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        return lambda module, inputs: see(key, _tokens(inputs[0].detach(), batch, module in source))

    handles = [m.register_forward_pre_hook(hook(key)) for key, found in layers.items() for m in found]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _reads_source(model: Any) -> Collection[nn.Module]:
    """Return the modules of `model` that are fed a state for each token of the source."""
    family = family_of(model)
    if family is None or family.kind != "seq2seq":
        return set(model.modules())
    blocks = blocks_of(model)
    encoder = blocks[0].stack
    crossed = [n for b in blocks for a in b.attentions if a.cross for n in (a.key, a.value)]
    norms = [name for name in (encoder.stream.opening, encoder.stream.closing) if name]
    inside = tuple(f"{name}." for name in (encoder.place, *norms, *crossed))
    return {m for m, names in names_of(model).items() if any(f"{n}.".startswith(inside) for n in names)}


def _tokens(x: Tensor, batch: TensorBatch, source: bool) -> Tensor:
    """Return the rows of `x`, float [..., K], that belong to tokens: [tokens, K].

    `x` may be [B, L, K], [B, L, ..., K], or [B L, K] (OPT flattens its states before the feed-forward part).
    What has another shape, such as one vector of each row, is taken whole.
    """
    mask = _mask(batch, source)
    if mask is None or bool(mask.all()):
        return x.flatten(0, -2)
    if x.shape[:-1] == mask.flatten().shape:
        return x[mask.flatten().to(x.device)]
    if x.shape[: mask.dim()] == mask.shape:
        return x[mask.to(x.device)].flatten(0, -2)
    return x.flatten(0, -2)


def _mask(batch: TensorBatch, source: bool) -> Tensor | None:
    """Return where tokens are, bool [B, L] or [B, T]; None where nothing says so."""
    if source or "decoder_input_ids" not in batch:
        found = batch.get("attention_mask")
        return None if found is None else found.bool()
    if "decoder_attention_mask" in batch:
        return batch["decoder_attention_mask"].bool()
    labels = batch.get("labels")  # the token after each of decoder_input_ids
    return None if labels is None else labels != IGNORE

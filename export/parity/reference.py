"""What torch computes: as deployed, through the parent's runner, and exactly, with dequantized weights.

With dequantized weights and float32 activations nothing depends on how a value was rounded or on the other
rows of a batch (int8-dynamic finds its ranges over all of them), so that a graph can be held to fp32's
tolerance.

Shapes: B = batch, L = source length or prompt, D = width of the model, V = vocabulary, C = classes,
H = heads, d = width of a head, S = tokens of the longest prompt.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.modeling_outputs import BaseModelOutput

from smelt.export.graphs.attention import split_heads
from smelt.export.graphs.attention_modules import attention_modules
from smelt.export.parity.compare import Array
from smelt.export.parity.rows import STEPS
from smelt.runtime.batch import Batch, Tokens
from smelt.runtime.causal import is_causal, positions
from smelt.runtime.images.batch import ImageBatch
from smelt.runtime.layers.quantized import QuantizedLinear
from smelt.runtime.layers.quantized_conv import QuantizedConv2d, Rounded
from smelt.runtime.models.sentence_model import result_of
from smelt.runtime.predict import takes_types


@dataclass(frozen=True)
class Reference:
    """What the parent computes for a batch (a `Batch`, or an `ImageBatch`), as it is deployed.

    logits: float32 [B, C] (of an embedder the vectors, [B, D]), or [STEPS, B, V] of greedy steps. tokens:
    int64 [STEPS, B], what the decoder was fed; None for an encoder. hidden: float32 [B, L, D], an encoder's
    states, else None. exact: as logits, with dequantized weights, before the model was prepared for the
    export.
    """

    batch: Any
    logits: Array
    tokens: Tokens | None = None
    hidden: Array | None = None
    exact: Array | None = None


@dataclass(frozen=True)
class Exact:
    """What the parent computes with dequantized weights, for the same batch and tokens.

    logits and hidden as in `Reference`. cross: keys and values of cross-attention [B, H, L, d] by output
    name. whole: float32 [S, V], all logits of a language model's last prompt.
    """

    logits: Array
    hidden: Array | None = None
    cross: dict[str, Array] = field(default_factory=dict)
    whole: Array | None = None


def reference_of(runner: Any, batch: Batch | ImageBatch) -> Reference:
    """Run the parent's runner on `batch`; asked before anything prepares its model for an export."""
    reference = as_deployed(runner, batch)
    return replace(reference, exact=exact_of(runner.backend.model, reference).logits)


def deployed_again(runner: Any, reference: Reference) -> Reference:
    """Run the parent on the same batch and tokens once its products were given other forms.

    Its model is made ready for the export by now, so that torch's own attention has to be asked for.
    """
    with _torch_attention(runner.backend.model):
        logits, hidden = logits_for(runner, reference).copy(), reference.hidden
        if hidden is not None:
            with torch.inference_mode():
                ids, mask = _tensors(reference.batch)
                encoder = runner.backend.model.get_encoder()
                hidden = encoder(ids, attention_mask=mask).last_hidden_state.numpy()
    return replace(reference, logits=logits, hidden=hidden)


def as_deployed(runner: Any, batch: Batch | ImageBatch) -> Reference:
    """Run the parent's runner on `batch`; a model that generates goes greedily for some steps."""
    if isinstance(batch, ImageBatch) or not (
        is_causal(runner.config) or runner.config.get("is_encoder_decoder")
    ):
        return Reference(batch, runner.forward(batch).copy())
    if is_causal(runner.config):
        return _stepped(runner, batch, batch.input_ids[:, -1], None)
    start = runner.backend.model.generation_config.decoder_start_token_id
    start = runner.config["decoder_start_token_id"] if start is None else start
    with torch.inference_mode():
        ids, mask = _tensors(batch)
        hidden = runner.backend.model.get_encoder()(ids, attention_mask=mask).last_hidden_state.numpy()
    return _stepped(runner, batch, np.full(batch.input_ids.shape[0], start, dtype=np.int64), hidden)


def _stepped(runner: Any, batch: Batch, start: Tokens, hidden: Array | None) -> Reference:
    state = runner.encode(batch)
    tokens, logits = [np.ascontiguousarray(start)], []
    for _ in range(STEPS):
        logits.append(runner.decode_step(state, tokens[-1]).copy())
        tokens.append(logits[-1].argmax(axis=-1))
    return Reference(batch, np.stack(logits), np.stack(tokens[:-1]), hidden)


def logits_for(runner: Any, reference: Reference) -> Array:
    """Run `runner` on the reference's batch and tokens; shapes as in `Reference`."""
    if reference.tokens is None:
        return np.asarray(runner.forward(reference.batch))
    state = runner.encode(reference.batch)
    return np.stack([runner.decode_step(state, tokens) for tokens in reference.tokens])


@torch.inference_mode()
def exact_of(model: Any, reference: Reference) -> Exact:
    """Compute what the dequantized `model` gives for the batch and tokens of `reference`, without a cache."""
    with _torch_attention(model), _float_products(model):
        if reference.tokens is None:
            return Exact(_encoded(model, reference.batch))
        if is_causal(model.config.to_dict()):
            return _continued(model, reference.batch, reference.tokens)
        return _decoded(model, reference.batch, reference.tokens)


def _encoded(model: Any, batch: Batch | ImageBatch) -> Array:
    if isinstance(batch, ImageBatch):
        logits: Array = model(pixel_values=torch.from_numpy(batch.pixel_values)).logits.numpy()
        return logits
    ids, mask = _tensors(batch)
    types = {}
    if batch.token_type_ids is not None and takes_types(model.config.to_dict()):
        types["token_type_ids"] = torch.from_numpy(batch.token_type_ids)
    result: Array = result_of(model(input_ids=ids, attention_mask=mask, **types)).numpy()
    return result


def _decoded(model: Any, batch: Batch, tokens: Tokens) -> Exact:
    ids, mask = _tensors(batch)
    hidden = model.get_encoder()(ids, attention_mask=mask).last_hidden_state
    cross = {}
    for at, one in enumerate(attention_modules(model, "decoder_layers", cross=True)):
        for word, name in (("key", one.parts.key), ("value", one.parts.value)):
            made = split_heads(one.part(name)(hidden), one.heads.keys)
            cross[f"present.{at}.encoder.{word}"] = made.numpy()
    out = model(
        encoder_outputs=BaseModelOutput(last_hidden_state=hidden), attention_mask=mask,
        decoder_input_ids=torch.from_numpy(np.ascontiguousarray(tokens.T)), use_cache=False,
    )  # fmt: skip
    return Exact(out.logits.transpose(0, 1).numpy(), hidden.numpy(), cross)


def _continued(model: Any, batch: Batch, tokens: Tokens) -> Exact:
    # the first of `tokens` is the prompt's last one
    ids = np.concatenate([batch.input_ids, tokens[1:].T], axis=1)
    mask = np.concatenate([batch.attention_mask, np.ones_like(tokens[1:].T)], axis=1)
    logits = _causal_logits(model, ids, mask, STEPS).transpose(1, 0, 2)
    prompt, all_ones = batch.input_ids[-1:], np.ones_like(batch.input_ids[-1:])
    return Exact(logits, whole=_causal_logits(model, prompt, all_ones, prompt.shape[1])[0])


def _causal_logits(model: Any, ids: Tokens, mask: Tokens, last: int) -> Array:
    """Return the logits of the `last` tokens of each row, float32 [B, last, V]."""
    hidden = model.base_model(
        torch.from_numpy(np.ascontiguousarray(ids)), attention_mask=torch.from_numpy(mask),
        position_ids=torch.from_numpy(positions(mask)), use_cache=False,
    ).last_hidden_state  # fmt: skip
    logits: Array = model.get_output_embeddings()(hidden[:, -last:]).numpy()
    return logits


def _tensors(batch: Batch) -> tuple[Tensor, Tensor]:
    return torch.from_numpy(batch.input_ids), torch.from_numpy(batch.attention_mask)


@contextmanager
def _float_products(model: nn.Module) -> Iterator[None]:
    """Let quantized layers multiply float32 activations with what their codes stand for, within the block."""
    kinds = QuantizedLinear | QuantizedConv2d | Rounded
    layers = [module for module in model.modules() if isinstance(module, kinds)]
    for layer in layers:
        whole = partial(_product, layer) if isinstance(layer, QuantizedLinear) else layer.exact
        layer.forward = whole  # type: ignore[method-assign]
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def _product(layer: QuantizedLinear, x: Tensor) -> Tensor:
    return F.linear(x, layer.matrix.dequantize(), layer.bias)


@contextmanager
def _torch_attention(model: nn.Module) -> Iterator[None]:
    """Let torch's own attention compute within the block, also in a model that was made ready for export."""
    modules: list[Any] = [module for module in model.modules() if hasattr(module, "config")]
    configs = {id(module.config): module.config for module in modules}
    before = [(config, config._attn_implementation) for config in configs.values()]
    for config, _ in before:
        config._attn_implementation = "eager"
    try:
        yield
    finally:
        for config, name in before:
            config._attn_implementation = name


def round_weights_(model: nn.Module, dtype: str = "fp16", kept: Sequence[Tensor] = ()) -> None:
    """Give the weights of `model` but `kept` the values that they have in fp16 or bf16, in place.

    So are the sines and cosines that queries and keys are turned by: the graph holds them as tables, rounded
    as weights are. What scores of hundreds make of that rounding is no fault of the graph.
    """
    kind = {"fp16": torch.float16, "bf16": torch.bfloat16}[dtype]
    whole = set(map(id, kept))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point() and id(parameter) not in whole:
                parameter.copy_(parameter.to(kind).float())
    for module in model.modules():
        if any(name.endswith("inv_freq") for name, _ in module.named_buffers(recurse=False)):
            module.register_forward_hook(partial(_rounded, kind))


def _rounded(
    kind: torch.dtype, module: nn.Module, given: Any, found: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    """Return what a rotary embedding gives, cosines and sines, as a file of half precision holds them."""
    return tuple(table.to(kind).to(table.dtype) for table in found)

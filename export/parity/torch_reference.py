"""Reference outputs in torch, as deployed and with dequantized weights, and tolerances of parity checks.

With dequantized weights and float32 activations no output depends on rounding or on the other rows of a batch
(int8-dynamic computes ranges over all of them), so a graph can be compared at fp32's tolerance.

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
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.modeling_outputs import BaseModelOutput

from smelt.core.errors import ParityError
from smelt.export.graphs.attention import attention_modules, split_heads
from smelt.export.parity.parity_samples import PARITY_STEPS
from smelt.generation.runners import is_causal, position_ids
from smelt.models.sentence_model import encoder_result
from smelt.models.tokenizer import uses_token_types
from smelt.quantization.layers import QuantizedActivation, QuantizedConv2d, QuantizedLinear
from smelt.quantization.schemes.registry import SCHEMES
from smelt.runtimes.backend import Batch, Tokens
from smelt.runtimes.images import ImageBatch
from smelt.runtimes.runner import EMBEDDING_OUTPUT

FloatArray = NDArray[np.floating[Any]]


@dataclass(frozen=True)
class Tolerance:
    """The allowed difference of an output, relative to the standard deviation of the parent's output.

    Exact comparisons use fp32: the largest difference decides. Two runtimes that sum in different orders
    differ by 1e-6 to 1e-5 over the layers of a model, and by less than 1e-6 in the mean; tanh-GELU in place
    of GELU differs by 9e-5 in the mean. `rounded` is the graph of an fp16 file computed in float32 on its own
    weights: there constants that are not weights were rounded too.

    As deployed (fp16, bf16, or schemes that round activations) single values may differ much, so the mean
    decides. An activation that rounds to another value changes everything after it: equal formulas in two
    runtimes differ up to the noise of quantization itself; the scheme sets the limit (`drift`). Such a
    tolerance accepts a graph without its mask; the exact comparison finds that error.
    """

    max_difference: float | None
    mean_difference: float


INT8_CONVOLUTIONS = "int8-convolutions"
LOGITS_TOLERANCES = {
    "fp32": Tolerance(max_difference=1e-3, mean_difference=5e-5),
    "rounded": Tolerance(max_difference=None, mean_difference=1e-3),
    "rounded-bf16": Tolerance(max_difference=None, mean_difference=8e-3),  # three bits fewer
    "fp16": Tolerance(max_difference=None, mean_difference=0.01),
    # 0.007 to 0.034 was measured on tiny models of eight families, 0.012 on a BERT-base of random weights
    "bf16": Tolerance(max_difference=None, mean_difference=0.1),
    # compared with the same graph with float caches: 0.021 to 0.053 on tiny models of seven families, also
    # with quantized weights; wrong graphs are found by the comparison with numpy
    # (export/precision/kv_cache.py)
    "int8-caches": Tolerance(max_difference=None, mean_difference=0.2),
    **{
        name: Tolerance(max_difference=None, mean_difference=scheme.tolerance)
        for name, scheme in SCHEMES.items()
    },
    # int8 throughout, so one value that rounds differently changes everything after it: 0.006 to 0.034 on
    # tiny models in ONNX Runtime, 0.03 to 0.087 in OpenVINO, where int8 itself was 0.06 to 0.09 off
    INT8_CONVOLUTIONS: Tolerance(max_difference=None, mean_difference=0.2),
}
# of a sentence's vector
VECTOR_TOLERANCES = LOGITS_TOLERANCES | {
    name: Tolerance(max_difference=None, mean_difference=scheme.embedding_tolerance)
    for name, scheme in SCHEMES.items()
}
# descriptions of kinds in messages
_KIND_DESCRIPTIONS = {"rounded": "its fp16 weights in float32", "rounded-bf16": "its bf16 weights in float32"}


def check_output(
    graph: str, output: str, expected: FloatArray, got: FloatArray, kind: str
) -> dict[str, float]:
    """Compare one output; return the measured differences, relative to the spread of `expected`.

    Args:
        graph: name of the graph, for the message.
        output: name of its output.
        expected: the parent's output.
        got: the graph's output, same shape.
        kind: a key of TOLERANCES.

    Raises:
        ParityError: the shape differs, a value differs by more than the tolerance, or is not finite.
    """
    if expected.shape != got.shape:
        raise ParityError(
            f"{graph}: {output} has the shape {got.shape}, but its parent's has {expected.shape}.",
            code="shape-mismatch",
            file=f"{graph}.onnx",
        )
    if not np.isfinite(got).all():
        raise ParityError(
            f"{graph}: {output} contains NaN or infinite values. Set dtype: fp32.",
            code="non-finite-outputs",
            file=f"{graph}.onnx",
        )
    spread = float(np.std(expected, dtype=np.float64)) or 1.0
    off = np.abs(expected.astype(np.float64) - got) / spread
    found = {"largest": float(off.max()), "mean": float(off.mean())}
    tolerance = (VECTOR_TOLERANCES if output == EMBEDDING_OUTPUT else LOGITS_TOLERANCES)[kind]
    for name, limit in (("largest", tolerance.max_difference), ("mean", tolerance.mean_difference)):
        if limit is not None and found[name] > limit:
            raise ParityError(
                f"{graph}: {output} differs from its parent's: {name} difference {found[name]:.3g} standard"
                f" deviations of the output, limit {limit:g} ({_KIND_DESCRIPTIONS.get(kind, kind)}).",
                code="parity-failed",
                file=f"{graph}.onnx",
            )
    return {**found, "agreement": float((expected.argmax(-1) == got.argmax(-1)).mean())}


@dataclass(frozen=True)
class TorchReference:
    """The parent's outputs for a batch (a `Batch`, or an `ImageBatch`), as deployed.

    logits: float32 [B, C] (for an embedder the vectors, [B, D]), or [STEPS, B, V] of greedy steps. tokens:
    int64 [STEPS, B], the decoder's input; None for an encoder. encoder_states: float32 [B, L, D], an
    encoder's states, else None. exact_states: as logits, with dequantized weights, before the model was
    prepared for the export.
    """

    batch: Any
    logits: FloatArray
    tokens: Tokens | None = None
    encoder_states: FloatArray | None = None
    exact_states: FloatArray | None = None


@dataclass(frozen=True)
class ExactReference:
    """The parent's outputs with dequantized weights, for the same batch and tokens.

    logits and hidden as in `TorchReference`. cross_caches: keys and values of cross-attention [B, H, L, d] by
    output name. all_logits: float32 [S, V], all logits of a language model's last prompt.
    """

    logits: FloatArray
    encoder_states: FloatArray | None = None
    cross_caches: dict[str, FloatArray] = field(default_factory=dict)
    all_logits: FloatArray | None = None


def run_reference(runner: Any, batch: Batch | ImageBatch) -> TorchReference:
    """Run the parent's runner on `batch`; called before its model is prepared for an export."""
    reference = run_as_deployed(runner, batch)
    return replace(reference, exact_states=run_exact(runner.backend.model, reference).logits)


def rerun_reference(runner: Any, reference: TorchReference) -> TorchReference:
    """Run the parent on the same batch and tokens after operators were chosen for its layers.

    Its model is already prepared for the export, so torch's own attention has to be enabled.
    """
    with _torch_attention(runner.backend.model):
        logits, hidden = logits_for(runner, reference).copy(), reference.encoder_states
        if hidden is not None:
            with torch.inference_mode():
                ids, mask = _tensors(reference.batch)
                encoder = runner.backend.model.get_encoder()
                hidden = encoder(ids, attention_mask=mask).last_hidden_state.numpy()
    return replace(reference, logits=logits, encoder_states=hidden)


def run_as_deployed(runner: Any, batch: Batch | ImageBatch) -> TorchReference:
    """Run the parent's runner on `batch`; a model that generates is decoded greedily for some steps."""
    if isinstance(batch, ImageBatch) or not (
        is_causal(runner.config) or runner.config.get("is_encoder_decoder")
    ):
        return TorchReference(batch, runner.forward(batch).copy())
    if is_causal(runner.config):
        return _greedy_reference(runner, batch, batch.input_ids[:, -1], None)
    start = runner.backend.model.generation_config.decoder_start_token_id
    start = runner.config["decoder_start_token_id"] if start is None else start
    with torch.inference_mode():
        ids, mask = _tensors(batch)
        hidden = runner.backend.model.get_encoder()(ids, attention_mask=mask).last_hidden_state.numpy()
    return _greedy_reference(runner, batch, np.full(batch.input_ids.shape[0], start, dtype=np.int64), hidden)


def _greedy_reference(runner: Any, batch: Batch, start: Tokens, hidden: FloatArray | None) -> TorchReference:
    state = runner.encode(batch)
    tokens, logits = [np.ascontiguousarray(start)], []
    for _ in range(PARITY_STEPS):
        logits.append(runner.decode_step(state, tokens[-1]).copy())
        tokens.append(logits[-1].argmax(axis=-1))
    return TorchReference(batch, np.stack(logits), np.stack(tokens[:-1]), hidden)


def logits_for(runner: Any, reference: TorchReference) -> FloatArray:
    """Run `runner` on the reference's batch and tokens; shapes as in `TorchReference`."""
    if reference.tokens is None:
        return np.asarray(runner.forward(reference.batch))
    state = runner.encode(reference.batch)
    return np.stack([runner.decode_step(state, tokens) for tokens in reference.tokens])


@torch.inference_mode()
def run_exact(model: Any, reference: TorchReference) -> ExactReference:
    """Return the outputs of the dequantized `model` for the inputs of `reference`, without a cache."""
    with _torch_attention(model), _float_matmuls(model):
        if reference.tokens is None:
            return ExactReference(_run_single_pass(model, reference.batch))
        if is_causal(model.config.to_dict()):
            return _run_decoder_only(model, reference.batch, reference.tokens)
        return _run_encoder_decoder(model, reference.batch, reference.tokens)


def _run_single_pass(model: Any, batch: Batch | ImageBatch) -> FloatArray:
    if isinstance(batch, ImageBatch):
        logits: FloatArray = model(pixel_values=torch.from_numpy(batch.pixel_values)).logits.numpy()
        return logits
    ids, mask = _tensors(batch)
    types = {}
    if batch.token_type_ids is not None and uses_token_types(model.config.to_dict()):
        types["token_type_ids"] = torch.from_numpy(batch.token_type_ids)
    result: FloatArray = encoder_result(model(input_ids=ids, attention_mask=mask, **types)).numpy()
    return result


def _run_encoder_decoder(model: Any, batch: Batch, tokens: Tokens) -> ExactReference:
    ids, mask = _tensors(batch)
    hidden = model.get_encoder()(ids, attention_mask=mask).last_hidden_state
    cross = {}
    for at, attention in enumerate(attention_modules(model, "decoder_layers", cross=True)):
        for word, name in (("key", attention.parts.key), ("value", attention.parts.value)):
            projected = split_heads(attention.projection(name)(hidden), attention.heads.kv_heads)
            cross[f"present.{at}.encoder.{word}"] = projected.numpy()
    out = model(
        encoder_outputs=BaseModelOutput(last_hidden_state=hidden), attention_mask=mask,
        decoder_input_ids=torch.from_numpy(np.ascontiguousarray(tokens.T)), use_cache=False,
    )  # fmt: skip
    return ExactReference(out.logits.transpose(0, 1).numpy(), hidden.numpy(), cross)


def _run_decoder_only(model: Any, batch: Batch, tokens: Tokens) -> ExactReference:
    # the first of `tokens` is the prompt's last one
    ids = np.concatenate([batch.input_ids, tokens[1:].T], axis=1)
    mask = np.concatenate([batch.attention_mask, np.ones_like(tokens[1:].T)], axis=1)
    logits = _causal_logits(model, ids, mask, PARITY_STEPS).transpose(1, 0, 2)
    prompt, all_ones = batch.input_ids[-1:], np.ones_like(batch.input_ids[-1:])
    return ExactReference(logits, all_logits=_causal_logits(model, prompt, all_ones, prompt.shape[1])[0])


def _causal_logits(model: Any, ids: Tokens, mask: Tokens, last: int) -> FloatArray:
    """Return the logits of the `last` tokens of each row, float32 [B, last, V]."""
    hidden = model.base_model(
        torch.from_numpy(np.ascontiguousarray(ids)), attention_mask=torch.from_numpy(mask),
        position_ids=torch.from_numpy(position_ids(mask)), use_cache=False,
    ).last_hidden_state  # fmt: skip
    logits: FloatArray = model.get_output_embeddings()(hidden[:, -last:]).numpy()
    return logits


def _tensors(batch: Batch) -> tuple[Tensor, Tensor]:
    return torch.from_numpy(batch.input_ids), torch.from_numpy(batch.attention_mask)


@contextmanager
def _float_matmuls(model: nn.Module) -> Iterator[None]:
    """Make quantized layers multiply float32 activations with dequantized weights, within the block."""
    kinds = QuantizedLinear | QuantizedConv2d | QuantizedActivation
    layers = [module for module in model.modules() if isinstance(module, kinds)]
    for layer in layers:
        whole = partial(_float_linear, layer) if isinstance(layer, QuantizedLinear) else layer.forward_float
        layer.forward = whole  # type: ignore[method-assign]
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def _float_linear(layer: QuantizedLinear, x: Tensor) -> Tensor:
    return F.linear(x, layer.matrix.dequantize(), layer.bias)


@contextmanager
def _torch_attention(model: nn.Module) -> Iterator[None]:
    """Enable torch's own attention within the block, also in a model prepared for export."""
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
    """Round the weights of `model`, except `kept`, to fp16 or bf16, in place.

    The sines and cosines of rotary positions are rounded too: the graph holds them as tables, rounded like
    weights. The effect of that rounding on large attention scores is not an error of the graph.
    """
    kind = {"fp16": torch.float16, "bf16": torch.bfloat16}[dtype]
    whole = set(map(id, kept))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point() and id(parameter) not in whole:
                parameter.copy_(parameter.to(kind).float())
    for module in model.modules():
        if any(name.endswith("inv_freq") for name, _ in module.named_buffers(recurse=False)):
            module.register_forward_hook(partial(_round_rotary, kind))


def _round_rotary(
    kind: torch.dtype, module: nn.Module, given: Any, found: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    """Return cosines and sines of a rotary embedding, rounded as in a half-precision file."""
    return tuple(table.to(kind).to(table.dtype) for table in found)

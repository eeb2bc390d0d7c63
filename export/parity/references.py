"""References of parity checks: torch's outputs, a copy of the graphs with dequantized weights; tolerances.

With dequantized weights and float32 activations no output depends on rounding or on the other rows of a batch
(int8-dynamic computes ranges over all of them), so a graph can be compared at fp32's tolerance.

In the copy of a graph (`make_dequantized_copy`) a quantized operator becomes a float32 matrix multiplication
with its dequantized weights; a graph in fp16 computes in float32. Everything else (constants, masks, biases,
connections) is unchanged.

`check_constants` compares the constants of a graph bit for bit with the tensors of their layers: exporters
name constants after the tensors of the module. A changed scale, a bias of zeros or a table of positions with
a wrong offset is found here without any arithmetic, however little it would change an output.

Shapes: B = batch, L = source length or prompt, D = width of the model, V = vocabulary, C = classes,
H = heads, d = width of a head, S = tokens of the longest prompt.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from onnx import TensorProto
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput

from smelt.core.errors import ParityError
from smelt.export.graph_files import link_external_data, read_graph, write_graph
from smelt.export.graphs.attention import attention_modules, split_heads
from smelt.export.parity.parity_samples import PARITY_STEPS
from smelt.export.parity.single_texts import SingleTexts, has_run_time_ranges, join_outputs, split_texts
from smelt.export.value_types import values_of_type
from smelt.generation.backend import Batch, FeedBatch, Tokens
from smelt.generation.generating_runners import is_causal, position_ids
from smelt.models.families.registry import decoder_logits
from smelt.models.sentence_model import head_output
from smelt.models.text_rules import MODULES_FILE
from smelt.models.tokenizer import uses_token_types
from smelt.quantization.layers import float_activations
from smelt.quantization.scheme import QuantizedGraph
from smelt.quantization.schemes.nvfp4 import DYNAMIC_QUANTIZE
from smelt.quantization.schemes.registry import SCHEMES, replace_with_float_nodes
from smelt.runtimes.image_text import IMAGE_EMBEDS, TEXT_EMBEDS
from smelt.runtimes.onnx_import.signature import SIGNATURE_FILE
from smelt.runtimes.openvino_backend import ACTIVATION_BLOCKS
from smelt.runtimes.single_call_runners import EMBEDDING_OUTPUT

FloatArray = NDArray[np.floating[Any]]

# The files of a model next to its graphs by which a runner is chosen.
RUNNER_FILES = ("config.json", "generation_config.json", MODULES_FILE, SIGNATURE_FILE)


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
# Kinds of comparison of a scheme, and of its graphs in fp16 and bf16: a last digit of 16 bits decides between
# two codes more often than one of 32 bits. In float16 0.019 to 0.053 was measured for int8-static on tiny
# models of five families, 0.037 to 0.17 for fp8; in float32 at most 0.0005
HALF_SUFFIX = ", 16-bit floats"
_SCHEME_KINDS = [(name + suffix, scheme, factor) for name, scheme in SCHEMES.items()
                 for suffix, factor in (("", 1.0), (HALF_SUFFIX, 3.0))]  # fmt: skip
LOGITS_TOLERANCES = {
    "fp32": Tolerance(max_difference=1e-3, mean_difference=5e-5),
    "rounded": Tolerance(max_difference=None, mean_difference=1e-3),
    "rounded-bf16": Tolerance(max_difference=None, mean_difference=8e-3),  # three bits fewer
    "fp16": Tolerance(max_difference=None, mean_difference=0.01),
    # 0.007 to 0.034 was measured on tiny models of eight families, 0.012 on a BERT-base of random weights
    "bf16": Tolerance(max_difference=None, mean_difference=0.1),
    # compared with the same graph with float caches: 0.021 to 0.053 on tiny models of seven families, also
    # with quantized weights; wrong graphs are found by the comparison with numpy (export/kv_cache.py)
    "int8-caches": Tolerance(max_difference=None, mean_difference=0.2),
    # compared with the same graph with float attention
    "int8-attention": Tolerance(max_difference=None, mean_difference=0.2),
    **{kind: Tolerance(None, scheme.tolerance * factor) for kind, scheme, factor in _SCHEME_KINDS},
    # int8 throughout, so one value that rounds differently changes everything after it: 0.006 to 0.034 on
    # tiny models in ONNX Runtime, 0.03 to 0.087 in OpenVINO, where int8 itself was 0.06 to 0.09 off
    INT8_CONVOLUTIONS: Tolerance(max_difference=None, mean_difference=0.2),
}
VECTOR_OUTPUTS = (EMBEDDING_OUTPUT, IMAGE_EMBEDS, TEXT_EMBEDS)  # of texts and images
VECTOR_TOLERANCES = LOGITS_TOLERANCES | {
    kind: Tolerance(None, scheme.embedding_tolerance) for kind, scheme, _ in _SCHEME_KINDS
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
    std = float(np.std(expected, dtype=np.float64)) or 1.0
    off = np.abs(expected.astype(np.float64) - got) / std
    differences = {"largest": float(off.max()), "mean": float(off.mean())}
    tolerance = (VECTOR_TOLERANCES if output in VECTOR_OUTPUTS else LOGITS_TOLERANCES)[kind]
    for name, limit in (("largest", tolerance.max_difference), ("mean", tolerance.mean_difference)):
        if limit is not None and differences[name] > limit:
            raise ParityError(
                f"{graph}: {output} differs from its parent's: {name} difference "
                f"{differences[name]:.3g} standard"
                f" deviations of the output, limit {limit:g} ({_KIND_DESCRIPTIONS.get(kind, kind)}).",
                code="parity-failed",
                file=f"{graph}.onnx",
            )
    return {**differences, "agreement": float((expected.argmax(-1) == got.argmax(-1)).mean())}


@dataclass(frozen=True)
class TorchReference:
    """The parent's outputs for a batch (a `Batch`, or a `FeedBatch`), as deployed.

    logits: float32 [B, C] (for an embedder the vectors, [B, D]; for a head of tokens [tokens, C], without
    padding), or [STEPS, B, V] of greedy steps. tokens: int64 [STEPS, B], the decoder's input; None for an
    encoder. encoder_states: float32 [B, L, D], an encoder's states, else None. exact_states: as logits, with
    dequantized weights, before the model was prepared for the export. by_text: whether each text was computed
    alone (`single_texts`).
    """

    batch: Any
    logits: FloatArray
    tokens: Tokens | None = None
    encoder_states: FloatArray | None = None
    exact_states: FloatArray | None = None
    by_text: bool = False


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


def run_reference(runner: Any, batch: Batch | FeedBatch) -> TorchReference:
    """Run the parent's runner on `batch`; called before its model is prepared for an export.

    Of an encoder whose ranges depend on padding, each text is computed alone.
    """
    is_padded = isinstance(batch, Batch) and not is_causal(runner.config) and not batch.attention_mask.all()
    reference = run_as_deployed(runner, batch, is_padded and has_run_time_ranges(runner.backend.model))
    return replace(reference, exact_states=run_exact(runner.backend.model, reference).logits)


def rerun_reference(runner: Any, reference: TorchReference) -> TorchReference:
    """Run the parent on the same batch and tokens after operators were chosen for its layers.

    Its model is already prepared for the export, so torch's own attention has to be enabled.
    """
    with _torch_attention(runner.backend.model):
        logits, hidden = logits_for(runner, reference).copy(), reference.encoder_states
        if hidden is not None:
            hidden = _encoder_states(runner.backend.model, reference.batch, reference.by_text)
    return replace(reference, logits=logits, encoder_states=hidden)


def run_as_deployed(runner: Any, batch: Batch | FeedBatch, by_text: bool = False) -> TorchReference:
    """Run the parent's runner on `batch`; a model that generates is decoded greedily for some steps."""
    called: Any = SingleTexts(runner) if by_text else runner
    if isinstance(batch, FeedBatch) or not (
        is_causal(runner.config) or runner.config.get("is_encoder_decoder")
    ):
        logits = without_padded_tokens(called.forward(batch), batch).copy()
        return TorchReference(batch, logits, by_text=by_text)
    if is_causal(runner.config):
        return greedy_reference(runner, batch, batch.input_ids[:, -1], None)
    start = runner.backend.model.generation_config.decoder_start_token_id
    start = runner.config["decoder_start_token_id"] if start is None else start
    hidden = _encoder_states(runner.backend.model, batch, by_text)
    first_tokens = np.full(batch.input_ids.shape[0], start, dtype=np.int64)
    return replace(greedy_reference(called, batch, first_tokens, hidden), by_text=by_text)


@torch.inference_mode()
def _encoder_states(model: Any, batch: Batch, by_text: bool) -> FloatArray:
    """Return the states of the encoder of a torch model, [B, L, D]."""
    if by_text:
        return join_outputs([_encoder_states(model, text, False) for text in split_texts(batch)], batch)
    states: FloatArray = model.get_encoder()(**_source(batch)).last_hidden_state.numpy()
    return states


def greedy_reference(
    runner: Any, batch: Batch, start: Tokens, hidden: FloatArray | None, steps: int = PARITY_STEPS
) -> TorchReference:
    """Decode `batch` greedily for some steps from the tokens `start`, int64 [B]."""
    state = runner.encode(batch)
    tokens, logits = [np.ascontiguousarray(start)], []
    for _ in range(steps):
        logits.append(runner.decode_step(state, tokens[-1]).copy())
        tokens.append(logits[-1].argmax(axis=-1))
    return TorchReference(batch, np.stack(logits), np.stack(tokens[:-1]), hidden)


def without_padded_tokens(result: FloatArray, batch: Batch | FeedBatch) -> FloatArray:
    """Return the outputs of tokens, [B, L, C], without padding as [tokens, C]; others as they are.

    Where all keys of a position are masked, as in a padded local window, only rounding decides its output.
    """
    if isinstance(batch, FeedBatch) or result.shape[:2] != batch.attention_mask.shape or result.ndim != 3:
        return result
    return np.asarray(result[batch.attention_mask == 1])


def logits_for(runner: Any, reference: TorchReference) -> FloatArray:
    """Run `runner` on the reference's batch and tokens; shapes as in `TorchReference`."""
    runner = SingleTexts(runner) if reference.by_text else runner
    if reference.tokens is None:
        return without_padded_tokens(np.asarray(runner.forward(reference.batch)), reference.batch)
    state = runner.encode(reference.batch)
    return np.stack([runner.decode_step(state, tokens) for tokens in reference.tokens])


@torch.inference_mode()
def run_exact(model: Any, reference: TorchReference) -> ExactReference:
    """Return the outputs of the dequantized `model` for the inputs of `reference`, without a cache."""
    with _torch_attention(model), float_activations(model):
        if reference.tokens is None:
            result = _run_single_pass(model, reference.batch)
            return ExactReference(without_padded_tokens(result, reference.batch))
        if is_causal(model.config.to_dict()):
            return _run_decoder_only(model, reference.batch, reference.tokens)
        return _run_encoder_decoder(model, reference.batch, reference.tokens)


def _run_single_pass(model: Any, batch: Batch | FeedBatch) -> FloatArray:
    if isinstance(batch, FeedBatch):
        inputs = {name: torch.from_numpy(value) for name, value in batch.feeds.items()}
        logits: FloatArray = head_output(model(**inputs)).numpy()
        return logits
    types = {}
    if batch.token_type_ids is not None and uses_token_types(model.config.to_dict()):
        types["token_type_ids"] = torch.from_numpy(batch.token_type_ids)
    result: FloatArray = head_output(model(**_source(batch), **types)).numpy()
    return result


def _run_encoder_decoder(model: Any, batch: Batch, tokens: Tokens) -> ExactReference:
    mask = torch.from_numpy(batch.attention_mask)
    hidden = model.get_encoder()(**_source(batch)).last_hidden_state
    cross = {}
    for layer_index, attention in enumerate(attention_modules(model, "decoder_layers", cross=True)):
        for cache_kind, name in (("key", attention.parts.key), ("value", attention.parts.value)):
            projected = split_heads(attention.projection(name)(hidden), attention.heads.kv_heads)
            cross[f"present.{layer_index}.encoder.{cache_kind}"] = projected.numpy()
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
    logits: FloatArray = decoder_logits(model, hidden[:, -last:]).numpy()
    return logits


def _source(batch: Batch) -> dict[str, Tensor]:
    return {name: torch.from_numpy(values) for name, values in batch.source.items()}


@contextmanager
def _torch_attention(model: nn.Module) -> Iterator[None]:
    """Enable torch's own attention within the block, also in a model prepared for export."""
    modules: list[Any] = [module for module in model.modules() if hasattr(module, "config")]
    configs = {id(module.config): module.config for module in modules}
    previous_settings = [(config, config._attn_implementation) for config in configs.values()]
    for config, _ in previous_settings:
        config._attn_implementation = "eager"
    try:
        yield
    finally:
        for config, name in previous_settings:
            config._attn_implementation = name


def round_weights_(model: nn.Module, dtype: str = "fp16", excluded: Sequence[Tensor] = ()) -> None:
    """Round the weights of `model`, except `excluded`, to fp16 or bf16, in place.

    The sines and cosines of rotary positions are rounded too: the graph holds them as tables, rounded like
    weights. The effect of that rounding on large attention scores is not an error of the graph.
    """
    kind = {"fp16": torch.float16, "bf16": torch.bfloat16}[dtype]
    fp32_ids = set(map(id, excluded))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point() and id(parameter) not in fp32_ids:
                parameter.copy_(parameter.to(kind).float())
    for module in model.modules():
        if any(name.endswith("inv_freq") for name, _ in module.named_buffers(recurse=False)):
            module.register_forward_hook(partial(_round_rotary, kind))


def _round_rotary(
    kind: torch.dtype, module: nn.Module, inputs: Any, tables: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    """Return cosines and sines of a rotary embedding, rounded as in a half-precision file."""
    return tuple(table.to(kind).to(table.dtype) for table in tables)


_HALF_TYPES = (TensorProto.FLOAT16, TensorProto.BFLOAT16)
_ROUNDING_OPS = ("QuantizeLinear", "DequantizeLinear", "Round", DYNAMIC_QUANTIZE)


@contextmanager
def make_dequantized_copy(
    folder: Path, names: Iterable[str], widen: bool, rounding: bool = False
) -> Iterator[Path]:
    """Yield a copy of `folder` whose graphs `names` compute in float32; it is removed after the block.

    Quantized operators become float ones, unless `rounding`.

    Args:
        folder: with graphs, config and other files of a runner.
        names: of the graphs, without `.onnx`.
        widen: whether they are fp16 or bf16.
        rounding: with `widen`, round the outputs of each node as the graph itself would, so that a CPU shows
            overflows. ONNX Runtime has few kernels of these types there; for float16 it omits the casts
            between two nodes, and bfloat16 does not run at all.
    """
    with TemporaryDirectory(dir=folder, prefix=".exact-") as temporary:
        copy = Path(temporary)
        for name in RUNNER_FILES:
            if (folder / name).is_file():
                shutil.copyfile(folder / name, copy / name)
        for name in names:
            path = folder / f"{name}.onnx"
            model = read_graph(path, values=widen)
            if widen:
                widen_to_float32(model, rounding)
            link_external_data(model, folder, copy)
            if not rounding:
                dequantize_graph(model)
            write_graph(model, copy / path.name)
        yield copy


def dequantize_graph(model: Any) -> int:
    """Replace the quantized operators of an onnx.ModelProto in place; return their number.

    QuantizeLinear and DequantizeLinear of activations are bypassed, and so is Round between a division and a
    multiplication by a scale (activations of fewer bits than an operator has). The DequantizeLinear of a
    matrix becomes Cast and Mul, otherwise ONNX Runtime would fuse it into an operator that rounds
    activations.
    """
    nodes: list[Any] = []
    codes: set[str] = set()  # of activations
    block_scales: set[str] = set()  # computed with them
    rescaled = {name for node in model.graph.node if node.op_type == "Mul" for name in node.input}
    multiplied = {node.input[1] for node in model.graph.node if node.op_type == "MatMul"}
    num_converted = 0
    graph = QuantizedGraph(model.graph)
    for node in model.graph.node:
        float_nodes = replace_with_float_nodes(node, graph)
        is_dequantize = node.op_type == "DequantizeLinear" and node.input[0] in codes
        if is_dequantize or node.op_type in ("QuantizeLinear", DYNAMIC_QUANTIZE):
            float_nodes = [_cache_node(node)]
            codes.add(node.output[0])
            block_scales.update(node.output[1:])
        elif node.op_type == "DequantizeLinear" and node.input[0] in block_scales:
            float_nodes = []  # the values that it scales are floats
        elif node.op_type == "Round" and node.output[0] in rescaled:
            float_nodes = [_cache_node(node)]
        elif node.op_type == "DequantizeLinear" and node.output[0] in multiplied and not _is_blockwise(node):
            float_nodes = _dequantize_nodes(node)
        num_converted += float_nodes is not None and node.op_type not in _ROUNDING_OPS
        num_converted += is_dequantize
        nodes += [node] if float_nodes is None else float_nodes
    if num_converted:
        del model.graph.node[:]
        model.graph.node.extend(nodes)
    for entry in [entry for entry in model.metadata_props if entry.key == ACTIVATION_BLOCKS]:
        model.metadata_props.remove(entry)  # so that OpenVINO does not round activations
    # others are floats now
    value_infos = [value for value in model.graph.value_info if value.name not in codes]
    del model.graph.value_info[:]
    model.graph.value_info.extend(value_infos)
    return num_converted


def _is_blockwise(node: Any) -> bool:
    """Return whether a matrix has a scale per block of inputs; its activations are not rounded."""
    return any(attribute.name == "block_size" and attribute.i for attribute in node.attribute)


def _dequantize_nodes(node: Any) -> list[Any]:
    """Return the DequantizeLinear of a matrix, a scale and zero point per column, as Cast, Sub and Mul."""
    from onnx import helper

    codes, scales, *zeros = node.input
    values = f"{(prefix := node.output[0])}.float"  # nodes may have no name
    nodes = [helper.make_node("Cast", [codes], [values], to=TensorProto.FLOAT)]
    if zeros:
        nodes.append(helper.make_node("Cast", zeros, [f"{prefix}.zero"], to=TensorProto.FLOAT))
        nodes.append(helper.make_node("Sub", [values, f"{prefix}.zero"], [f"{prefix}.steps"]))
        values = f"{prefix}.steps"
    return [*nodes, helper.make_node("Mul", [values, scales], node.output, node.name)]


def _cache_node(node: Any) -> Any:
    from onnx import helper

    return helper.make_node("Identity", node.input[:1], node.output[:1], node.name)


def widen_to_float32(model: Any, rounding: bool = False) -> None:
    """Convert a graph of `convert_to_half` back to float32, in place; its constants keep their values.

    With `rounding`, half-precision outputs of nodes are rounded to that precision and back.
    """
    graph = model.graph
    half_values = {kind: values_of_type(model, kind) for kind in _HALF_TYPES} if rounding else {}
    for tensor in graph.initializer:
        _widen_tensor(tensor)
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("t"):
                _widen_tensor(attribute.t)
            if node.op_type == "Cast" and attribute.name == "to" and attribute.i in _HALF_TYPES:
                attribute.i = TensorProto.FLOAT
    for value in [*graph.input, *graph.output]:
        if value.type.tensor_type.elem_type in _HALF_TYPES:
            value.type.tensor_type.elem_type = TensorProto.FLOAT
    del graph.value_info[:]
    for kind, names in half_values.items():
        _insert_rounding(graph, names, kind)


def _insert_rounding(graph: Any, names: set[str], kind: int) -> None:
    from onnx import helper

    nodes: list[Any] = []
    for node in graph.node:
        nodes.append(node)
        for output_index, name in enumerate(node.output):
            if name in names:
                node.output[output_index] = unrounded_name = f"{name}.whole"
                nodes.append(helper.make_node("Cast", [unrounded_name], [f"{name}.rounded"], to=kind))
                nodes.append(helper.make_node("Cast", [f"{name}.rounded"], [name], to=TensorProto.FLOAT))
    del graph.node[:]
    graph.node.extend(nodes)


def _widen_tensor(tensor: Any) -> None:
    from onnx import numpy_helper

    if tensor.data_type in _HALF_TYPES:
        values = numpy_helper.to_array(tensor).astype("<f4")
        tensor.ClearField("int32_data")
        tensor.data_type, tensor.raw_data = TensorProto.FLOAT, np.ascontiguousarray(values).tobytes()


def check_constants(graph: str, model: Any, module: nn.Module, folder: Path) -> int:
    """Compare the constants of a graph with the tensors of the exported module.

    Args:
        graph: name of the graph, for the message.
        model: its onnx.ModelProto; external weights need not be loaded.
        module: the exported module.
        folder: the folder of the graph.

    Returns:
        The number of compared constants.

    Raises:
        ParityError: one has other values than its tensor, or fewer: only rows of maximum length would show
            that a table lacks its last entries.
    """
    from onnx import numpy_helper

    tensors: dict[str, Tensor] = dict(module.named_parameters(remove_duplicate=False))
    tensors |= dict(module.named_buffers(remove_duplicate=False))
    num_compared = 0
    for constant in model.graph.initializer:
        tensor = tensors.get(constant.name)
        if tensor is None:
            continue
        values = numpy_helper.to_array(constant, base_dir=str(folder))
        expected = tensor.detach().cpu().numpy()
        if expected.dtype == np.float32 and values.dtype.itemsize == 2:  # fp16, bf16
            expected = expected.astype(values.dtype)
        if expected.size != values.size:
            _raise_size_mismatch(graph, constant.name, list(expected.shape), list(values.shape))
        if expected.shape != values.shape or expected.dtype != values.dtype:
            continue  # an optimizer changed its layout
        num_compared += 1
        if not np.array_equal(expected, values):
            _raise_value_mismatch(graph, model, constant.name, int((expected != values).sum()), values.size)
    return num_compared


def _raise_size_mismatch(graph: str, name: str, expected: list[int], actual: list[int]) -> None:
    raise ParityError(
        f"{graph}: the constant '{name}' has the shape {actual}, but its tensor in the model has"
        f" {expected}: the numbers of values differ.",
        code="shape-mismatch",
        file=f"{graph}.onnx",
    )


def _raise_value_mismatch(graph: str, model: Any, name: str, differ: int, size: int) -> None:
    layer, _, part_name = name.rpartition(".")
    readers = [f"'{node.name}' ({node.op_type})" for node in model.graph.node if name in node.input]
    raise ParityError(
        f"{graph}: the constant '{name}' of node {', '.join(readers[:3]) or '(none)'} differs from"
        f" {part_name or name} of its layer{f' {layer}' if layer else ''} in {differ:,} of {size:,} values.",
        code="constant-mismatch",
        file=f"{graph}.onnx",
    )

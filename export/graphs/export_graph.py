"""Return the graphs of a model and export them.

Seq2seq models are exported as `encoder_model`, which also computes the keys and values of cross-attention
(once per text, not at each step), and `decoder_with_past_model`, which decodes one token. Classifiers,
sentence embedders and decoder-only language models are exported as `model`. File and tensor names are
Optimum's.

torch.onnx.export reads its table of ONNX operators at each call: the source of a thousand functions is parsed
for their names, 0.45 s each time, a fifth of a small graph's export (torch 2.13, onnxscript 0.7). For each
node it also reads the definition of ONNX's operator again, 2 % of that time. `cached_op_registry` makes a
process read both only once.

Shapes: B = batch, L = source length, P = past length, H = heads, d = width of a head, V = vocabulary,
C = classes, D = width of the model.
"""

from __future__ import annotations

import copy
import functools
import logging
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from smelt.core.errors import InputError, RunError
from smelt.core.messages import with_article
from smelt.core.system import gc_paused
from smelt.data.labels import HEAD_SUFFIXES
from smelt.export.graph_files import deduplicate_matrices
from smelt.export.graphs.attention import (
    AttentionModule,
    AttentionScope,
    GraphSpec,
    PackedLinear,
    attention_modules,
    exportable_attention,
    exportable_norms,
    pack_projections,
    split_heads,
)
from smelt.export.graphs.decoder_only import decoder_only_graph
from smelt.export.graphs.patches import exportable_patches
from smelt.export.graphs.pooling import exportable_pooling
from smelt.export.graphs.single_trace import single_trace, skip_unused_metadata
from smelt.export.graphs.two_towers import two_tower_graphs
from smelt.export.lower_opset import OLDEST_TORCH_OPSET, elementwise_layer_norms, lower_opset
from smelt.generation.backend import INPUT_FEATURES
from smelt.generation.generating_runners import NUM_LOGITS_INPUT, is_causal
from smelt.models.edits import fold_batch_norms
from smelt.models.families.registry import FAMILIES_BY_TASK, family_of, reads_audio
from smelt.models.sentence_model import head_output
from smelt.models.text_rules import is_sentence_model
from smelt.models.tokenizer import uses_token_types
from smelt.models.user_module import UserModuleForArrays
from smelt.quantization import emit
from smelt.quantization.layers import QuantizedEmbedding, QuantizedLinear, is_quantized
from smelt.runtimes.images import PIXEL_VALUES
from smelt.runtimes.single_call_runners import EMBEDDING_OUTPUT

_SIGNATURES: dict[Any, Any] = {}


@contextmanager
def cached_op_registry() -> Iterator[None]:
    """Make torch.onnx.export use a copy of the cached table; the first call fills the cache.

    The patched functions are not public. If torch or onnx_ir does not have them, nothing is changed.
    """
    with _cached_signatures(), _cached_torch_registry():
        yield


@contextmanager
def _cached_signatures() -> Iterator[None]:
    """Cache the definitions of ONNX operators, which are never modified."""
    try:
        from onnx_ir.schemas import OpSignature
    except ImportError:
        yield
        return
    signature: Any = OpSignature
    reads = vars(signature).get("from_op_schema")
    if not isinstance(reads, classmethod):
        yield
        return

    def from_op_schema(cls: Any, op_schema: Any) -> Any:
        name = (cls, op_schema.domain, op_schema.name, op_schema.since_version)
        if name not in _SIGNATURES:
            _SIGNATURES[name] = reads.__func__(cls, op_schema)
        return _SIGNATURES[name]

    signature.from_op_schema = classmethod(from_op_schema)
    try:
        yield
    finally:
        signature.from_op_schema = reads


@contextmanager
def _cached_torch_registry() -> Iterator[None]:
    try:
        from torch.onnx._internal.exporter._registration import ONNXRegistry
    except ImportError:
        yield
        return
    registry: Any = ONNXRegistry
    reads = vars(registry).get("from_torchlib")
    if not isinstance(reads, classmethod):
        yield
        return
    registry.from_torchlib = classmethod(_memoized_copy(reads.__func__))
    try:
        yield
    finally:
        registry.from_torchlib = reads


@functools.cache
def _memoized_copy(read: Callable[..., Any]) -> Callable[..., Any]:
    """Return `read` with a cache: the same arguments get a copy of the first result."""
    cached_read = functools.cache(read)

    @functools.wraps(read)
    def answer(*args: Any, **kwargs: Any) -> Any:
        table = copy.copy(cached_read(*args, **kwargs))
        # custom operators are added to the caller's copy
        table.functions = {
            operator: list(decompositions) for operator, decompositions in table.functions.items()
        }
        return table

    return answer


class Seq2SeqEncoder(nn.Module):
    """input_ids, attention_mask [B, L] -> last_hidden_state [B, L, D], keys and values [B, H, L, d]."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.encoder, self.scope = model.get_encoder(), AttentionScope()
        self.attentions = attention_modules(model, "encoder_layers")
        self.rms_norm = self.attentions[0].family.rms_norm
        crosses = attention_modules(model, "decoder_layers", cross=True)
        self.heads = [attention.heads.kv_heads for attention in crosses]
        projections = [
            attention.projection(n)
            for attention in crosses
            for n in (attention.parts.key, attention.parts.value)
        ]
        unique_projections = list(dict.fromkeys(projections))  # decoder layers may share them
        self.pack, self.places = (
            PackedLinear(unique_projections),
            [unique_projections.index(product) for product in projections],
        )

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, ...]:
        """Return the hidden states and each decoder layer's cross-attention keys and values."""
        return self.encode(attention_mask, input_ids, attention_mask=attention_mask)

    def encode(self, mask: Tensor | None, *inputs: Tensor, **options: Tensor) -> tuple[Tensor, ...]:
        """Return the outputs for the inputs and options of the encoder; mask: of its states."""
        self.scope.mask = mask
        with exportable_attention(self.attentions, self.scope), exportable_norms(self.encoder, self.rms_norm):
            hidden = self.encoder(*inputs, **options).last_hidden_state
        heads = [h for h in self.heads for _ in "kv"]
        packed = self.pack(hidden)
        caches = [
            split_heads(packed[pack_index], h).contiguous()
            for pack_index, h in zip(self.places, heads, strict=True)
        ]
        return hidden, *caches


class SpeechEncoder(Seq2SeqEncoder):
    """input_features float32 [B, M, F] -> as `Seq2SeqEncoder`, for T states; all of them are attended to."""

    def forward(self, input_features: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        """Return the hidden states and each decoder layer's cross-attention keys and values."""
        return self.encode(None, input_features)


class Seq2SeqDecoderStep(nn.Module):
    """One token and the caches -> logits float32 [B, V], the self-attention caches one longer."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.decoder, self.head, self.scope = (
            model.get_decoder(),
            model.get_output_embeddings(),
            AttentionScope(),
        )
        self.attentions = attention_modules(model, "decoder_layers")
        family = self.attentions[0].family
        self.rms_norm, self.scale = family.rms_norm, family.output_scale(model.config.to_dict())
        bias = model.get_buffer(family.logits_bias) if family.logits_bias else None
        if bias is not None and bool(bias.any()):
            self.head = _with_bias(self.head, bias.flatten())

    def forward(
        self, input_ids: Tensor, encoder_attention_mask: Tensor, past: list[Tensor], cross: list[Tensor]
    ) -> tuple[Tensor, ...]:
        """Return logits, then key and value [B, H, P + 1, d] of each layer."""
        self.scope.mask = encoder_attention_mask
        self.scope.past = list(zip(past[::2], past[1::2], strict=True))
        self.scope.cross = list(zip(cross[::2], cross[1::2], strict=True))
        self.scope.present = {}
        with exportable_attention(self.attentions, self.scope), exportable_norms(self.decoder, self.rms_norm):
            hidden = self.decoder(
                input_ids,
                # only enables cross-attention; its keys and values are in the caches
                encoder_hidden_states=past[0],
                past_key_values=_CacheLength(past[0].shape[2]),
                use_cache=True,
            ).last_hidden_state
        hidden = hidden if self.scale == 1.0 else hidden * self.scale
        logits = self.head(hidden.flatten(0, 1))
        caches = [t for i in range(len(self.scope.present)) for t in self.scope.present[i]]
        return logits.float(), *caches


class _CacheLength:
    """The part of a transformers cache that a decoder uses: its length."""

    is_updated: dict[int, bool] = {}  # noqa: RUF012
    is_compileable = False

    def __init__(self, length: int) -> None:
        self.length = length

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.length


def _with_bias(head: nn.Module, bias: Tensor) -> nn.Module:
    """Return an output layer that shares its matrix with `head` and adds `bias`."""
    new: QuantizedLinear | nn.Linear
    if isinstance(head, QuantizedLinear):
        new = head.with_outputs(head.out_features, True)
        new.matrix = head.matrix
    elif isinstance(head, nn.Linear):
        new = nn.Linear(head.in_features, head.out_features, True, device="meta")
        new.weight = head.weight
    else:
        return nn.Sequential(head, _AddBias(bias))
    old = head.bias
    new.bias = nn.Parameter(
        bias.detach() if old is None else bias.detach() + old.detach(), requires_grad=False
    )
    return new


class _AddBias(nn.Module):
    def __init__(self, bias: Tensor) -> None:
        super().__init__()
        self.bias = nn.Buffer(bias.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        return x + self.bias


def seq2seq_graphs(model: Any) -> list[GraphSpec]:
    """Return the two graphs of `model`, with small example inputs."""
    attentions, crosses = (attention_modules(model, "decoder_layers", cross) for cross in (False, True))
    ids, mask, token = (torch.ones(2, n, dtype=torch.int64) for n in (7, 7, 1))
    encoder_axes = {0: "batch", 1: "encoder_length"}
    # one of each per layer, unless the layer was skipped
    cross = [f"{i}.encoder.{kind}" for i in range(len(crosses)) for kind in ("key", "value")]
    self_names = [f"{i}.decoder.{kind}" for i in range(len(attentions)) for kind in ("key", "value")]
    outputs = ["last_hidden_state", *(f"present.{n}" for n in cross)]
    if reads_audio(model.config.to_dict()):
        frames = torch.randn(2, model.config.num_mel_bins, 2 * model.config.max_source_positions)
        encoder = GraphSpec(
            "encoder_model", SpeechEncoder(model), (frames,), [INPUT_FEATURES], outputs, ({0: "batch"},)
        )
    else:
        encoder = GraphSpec(
            "encoder_model", Seq2SeqEncoder(model), (ids, mask), ["input_ids", "attention_mask"], outputs,
            (encoder_axes, encoder_axes),
        )  # fmt: skip

    def caches(modules: list[AttentionModule], length: int) -> list[Tensor]:
        shapes = [(2, attention.heads.kv_heads, length, attention.heads.head_dim) for attention in modules]
        return [torch.zeros(shape) for shape in shapes for _ in "kv"]

    decoder = GraphSpec(
        "decoder_with_past_model", Seq2SeqDecoderStep(model),
        (token, mask, caches(attentions, 5), caches(crosses, 7)),
        ["input_ids", "encoder_attention_mask", *(f"past_key_values.{n}" for n in [*self_names, *cross])],
        ["logits", *(f"present.{n}" for n in self_names)],
        (
            {0: "batch"}, encoder_axes,
            [{0: "batch", 2: "past_length"}] * len(self_names),
            [{0: "batch", 2: "encoder_length"}] * len(cross),
        ),
    )  # fmt: skip
    return [encoder, decoder]


_ATTENTION_NAME = "smelt"  # transformers has no mask for this name, so it builds none


class SinglePassModel(nn.Module):
    """input_ids, attention_mask [B, L] -> float32, a classifier's logits [B, C] or a text's vector [B, D].

    A BERT classifier has the input token_type_ids too.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model, self.scope = model, AttentionScope()
        self.attentions = attention_modules(model)
        family = family_of(model)
        types = None if family is None else family.token_types
        # an embedder does not read pairs
        self.types = "zero" if types and is_sentence_model(model) else types

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None = None
    ) -> Tensor:
        """Return logits or vectors."""
        self.scope.mask = attention_mask
        types = {} if token_type_ids is None else {"token_type_ids": token_type_ids}
        if self.types == "zero":
            # all tokens have type 0, so one row is added to all of them instead of a gather per token
            types = {"token_type_ids": input_ids.new_zeros(1, 1)}
        with exportable_attention(self.attentions, self.scope):
            out = head_output(self.model(input_ids, attention_mask=attention_mask, **types))
        return out.float()


class SinglePassImageModel(nn.Module):
    """pixel_values float32 [B, 3, h, w] -> logits float32 [B, C]."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model, self.scope = model, AttentionScope()
        self.attentions = attention_modules(model)

    def forward(self, pixel_values: Tensor) -> Tensor:
        """Return logits."""
        with (
            exportable_attention(self.attentions, self.scope),
            exportable_patches(self.model),
            exportable_pooling(self.model),
        ):
            logits: Tensor = self.model(pixel_values).logits.float()
        return logits


def model_graphs(
    model: Any, image_size: tuple[int, int] | None = None, cache_length: int | None = None
) -> list[GraphSpec]:
    """Return the graphs of `model`, with small example inputs.

    Args:
        model: the model of its runner.
        image_size: height and width of the images, for an image model.
        cache_length: of a language model's caches, if it is fixed.

    Raises:
        InputError: the model family or a setting of its config is not supported.
    """
    family = family_of(model)
    if family and (problems := family.unsupported_config(model.config.to_dict())):
        raise InputError(
            f"onnx: config.json: {' '.join(problems)}", code="unsupported-config", file="config.json"
        )
    for module in model.modules():  # T5's stacks have their own configs
        if isinstance(module, PreTrainedModel):
            module.config._attn_implementation = _ATTENTION_NAME
    kind = family.architecture if family else None
    if isinstance(model, UserModuleForArrays):
        return [_arrays_graph(model)]
    if family and family.input_kind in ("images", "images-and-texts"):
        size = _required_size(image_size)
        return two_tower_graphs(model, size) if family.towers else [_image_graph(model, size)]
    if kind == "seq2seq" and model.can_generate():
        return seq2seq_graphs(model)
    if is_causal(model.config.to_dict()):
        # a call that leaves out an input cannot write to bound caches
        defaults = {NUM_LOGITS_INPUT: 0} if cache_length is None else {}
        return [GraphSpec("model", *decoder_only_graph(model, cache_length), input_defaults=defaults)]
    if kind == "encoder" and is_sentence_model(model):
        return [_encoder_graph(model, ["input_ids", "attention_mask"], EMBEDDING_OUTPUT)]
    if kind == "encoder" and type(model).__name__.endswith(HEAD_SUFFIXES):
        types = ["token_type_ids"] if uses_token_types(model.config.to_dict()) else []
        return [_encoder_graph(model, ["input_ids", "attention_mask", *types], "logits")]
    supported_families = "; ".join(f"{task}: {', '.join(names)}" for task, names in FAMILIES_BY_TASK.items())
    raise InputError(
        f"{with_article(type(model).__name__)} cannot be exported to ONNX yet. Supported families: "
        f"{supported_families}.",
        code="unsupported-family",
    )


def _encoder_graph(model: Any, names: list[str], output: str) -> GraphSpec:
    # three separate tensors: torch.export treats the same object as one input
    ids = tuple(torch.ones(2, 7, dtype=torch.int64) for _ in names)
    axes = ({0: "batch", 1: "length"},) * len(names)
    return GraphSpec("model", SinglePassModel(model), ids, names, [output], axes)


def _required_size(size: tuple[int, int] | None) -> tuple[int, int]:
    if size is None:
        raise InputError(
            "onnx: a graph needs a fixed image size, and preprocessor_config.json has none. Set size with"
            " height and width, or do_center_crop with crop_size.",
            code="missing-image-size",
            file="preprocessor_config.json",
        )
    return size


def _image_graph(model: Any, size: tuple[int, int]) -> GraphSpec:
    fold_batch_norms(model)
    pixels = torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(0))
    return GraphSpec(
        "model", SinglePassImageModel(model), (pixels,), [PIXEL_VALUES], ["logits"], ({0: "batch"},)
    )


class SinglePassArraysModel(nn.Module):
    """The inputs of a module of arrays, in the order of its config -> its outputs."""

    def __init__(self, model: UserModuleForArrays) -> None:
        super().__init__()
        self.model, self.attentions = model, attention_modules(model)

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Return the outputs."""
        named = dict(zip(self.model.config.inputs, inputs, strict=True))
        return tuple(self.model(**named).arrays.values())


def _arrays_graph(model: UserModuleForArrays) -> GraphSpec:
    fold_batch_norms(model)
    examples, outputs = model.example_inputs(2), list(model.config.outputs)
    # of one argument with several inputs, as torch.export sees it
    axes = (tuple({0: "batch"} for _ in examples),)
    return GraphSpec(
        "model", SinglePassArraysModel(model), tuple(examples.values()), [*examples], outputs, axes
    )


def _prepare_layers(graph: GraphSpec, target: str) -> None:
    """Create the packed projections and convert quantized weights and scales to the graph's layout."""
    graph.module.eval()
    pack_projections(graph.module.attentions)
    layers = [module for module in graph.module.modules() if is_quantized(module)]
    # lookups first: a layer whose matrix is also looked up in is exported differently
    for layer in sorted(layers, key=lambda layer: not isinstance(layer, QuantizedEmbedding)):
        layer.prepare_export(target)


def export_graph(graph: GraphSpec, target: emit.GraphTarget, opset: int) -> Any:
    """Trace `graph`; return it as an onnx.ModelProto that holds its weights.

    Raises:
        InputError: `opset-too-low`.
        RunError: torch's exporter failed.
    """
    _prepare_layers(graph, target)
    try:
        # tracing creates millions of live objects: garbage collection took 22 % of the time
        # private functions are patched until public ones do the same: without one of the three patches an
        # export takes 1.8, 2.8 or 1.4 times as long (docs/measurements/speed.md#export)
        with (
            gc_paused(),
            cached_op_registry(),
            single_trace(),
            skip_unused_metadata(),
            emit.exporting_to(target, opset),
            elementwise_layer_norms(opset),
            torch.no_grad(),
            _silence_export_warnings(),
        ):
            program = torch.onnx.export(
                graph.module, graph.inputs, None, dynamo=True, verbose=False,
                opset_version=max(opset, OLDEST_TORCH_OPSET),
                input_names=graph.input_names, output_names=graph.output_names,
                dynamic_shapes=graph.dynamic_axes, optimize=True,
            )  # fmt: skip
        assert program is not None
        model = program.model_proto
        if opset < OLDEST_TORCH_OPSET:
            lower_opset(model, opset, graph.name)
        deduplicate_matrices(model)
        _name_logits_dimension(model.graph)
        return model
    except (torch.onnx.errors.OnnxExporterError, RuntimeError, ValueError) as error:
        text = re.sub(r"\x1b\[[0-9;]*m", "", str(error))  # without colors
        raise RunError(f"{graph.name}: torch.onnx.export failed: {text}", code="export-failed") from error


@contextmanager
def _silence_export_warnings() -> Iterator[None]:
    """Suppress torch's warnings of its own deprecated calls, shared axes and missing torchvision."""
    logger = logging.getLogger("torch.onnx._internal.exporter._registration")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def _name_logits_dimension(graph: Any) -> None:
    """Name the dimension of logits that depends on an input; torch calls it u0."""
    for value in (*graph.output, *graph.value_info):
        for dimension in value.type.tensor_type.shape.dim:
            if re.fullmatch(r"u\d+", dimension.dim_param):
                dimension.dim_param = "num_logits"

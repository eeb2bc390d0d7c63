"""Return the graphs of a model and export them.

Seq2seq models are exported as `encoder_model`, which also computes the keys and values of cross-attention
(once per sentence, not at each step), and `decoder_with_past_model`, which decodes one token. Classifiers,
sentence embedders and decoder-only language models are exported as `model`. File and tensor names are
Optimum's.

Shapes: B = batch, L = source length, P = past length, H = heads, d = width of a head, V = vocabulary,
C = classes, D = width.
"""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from smelt.core.errors import InputError, RunError
from smelt.core.system import gc_paused
from smelt.core.text import with_article
from smelt.export.graph_files import deduplicate_matrices
from smelt.export.graphs.attention import (
    AttentionScope,
    attention_modules,
    exportable_attention,
    pack_projections,
)
from smelt.export.graphs.cache_op_registry import cached_op_registry
from smelt.export.graphs.decoder_only import decoder_only_graph
from smelt.export.graphs.graph_spec import GraphSpec
from smelt.export.graphs.seq2seq_graphs import seq2seq_graphs
from smelt.export.graphs.single_trace import single_trace
from smelt.export.graphs.skip_unused_metadata import skip_unused_metadata
from smelt.generation.runners import NUM_LOGITS_INPUT, is_causal
from smelt.models.edits import fold_batch_norms
from smelt.models.families.registry import FAMILIES_BY_TASK, family_of
from smelt.models.sentence_model import encoder_result, is_sentence_model
from smelt.quantization import emit
from smelt.quantization.layers import QuantizedEmbedding, is_quantized
from smelt.runtimes.images import PIXEL_VALUES
from smelt.runtimes.predict_texts import uses_token_types
from smelt.runtimes.runner import EMBEDDING_OUTPUT

_ATTENTION_NAME = "smelt"  # transformers has no mask for this name, so it builds none


class SinglePassModel(nn.Module):
    """input_ids, attention_mask [B, L] -> float32, a classifier's logits [B, C] or a text's vector [B, D].

    A BERT classifier has the input token_type_ids too.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model, self.scope = model, AttentionScope()
        self.attentions = attention_modules(model)
        types = self.attentions[0].family.token_types
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
            out = encoder_result(self.model(input_ids, attention_mask=attention_mask, **types))
        return out.float()


class SinglePassImageModel(nn.Module):
    """pixel_values float32 [B, 3, h, w] -> logits float32 [B, C]."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model, self.scope = model, AttentionScope()
        self.attentions = attention_modules(model)

    def forward(self, pixel_values: Tensor) -> Tensor:
        """Return logits."""
        with exportable_attention(self.attentions, self.scope):
            found: Tensor = self.model(pixel_values).logits.float()
        return found


def model_graphs(model: Any, image_size: tuple[int, int] | None = None) -> list[GraphSpec]:
    """Return the graphs of `model`, with small example inputs.

    Args:
        model: the model of its runner.
        image_size: height and width of the images, for an image model.

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
    if family and family.input_kind == "images":
        return [_image_graph(model, image_size)]
    if kind == "seq2seq" and model.can_generate():
        return seq2seq_graphs(model)
    if is_causal(model.config.to_dict()):
        return [GraphSpec("model", *decoder_only_graph(model), input_defaults={NUM_LOGITS_INPUT: 0})]
    if kind == "encoder" and is_sentence_model(model):
        return [_encoder_graph(model, ["input_ids", "attention_mask"], EMBEDDING_OUTPUT)]
    if kind == "encoder" and type(model).__name__.endswith("ForSequenceClassification"):
        types = ["token_type_ids"] if uses_token_types(model.config.to_dict()) else []
        return [_encoder_graph(model, ["input_ids", "attention_mask", *types], "logits")]
    known = "; ".join(f"{task}: {', '.join(names)}" for task, names in FAMILIES_BY_TASK.items())
    raise InputError(
        f"{with_article(type(model).__name__)} cannot be exported to ONNX yet. Supported families: {known}.",
        code="unsupported-family",
    )


def _encoder_graph(model: Any, names: list[str], output: str) -> GraphSpec:
    # three separate tensors: torch.export treats the same object as one input
    ids = tuple(torch.ones(2, 7, dtype=torch.int64) for _ in names)
    axes = ({0: "batch", 1: "length"},) * len(names)
    return GraphSpec("model", SinglePassModel(model), ids, names, [output], axes)


def _image_graph(model: Any, size: tuple[int, int] | None) -> GraphSpec:
    if size is None:
        raise InputError(
            "onnx: a graph needs a fixed image size, and preprocessor_config.json has none. Set size with"
            " height and width, or do_center_crop with crop_size.",
            code="missing-image-size",
            file="preprocessor_config.json",
        )
    fold_batch_norms(model)
    pixels = torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(0))
    return GraphSpec(
        "model", SinglePassImageModel(model), (pixels,), [PIXEL_VALUES], ["logits"], ({0: "batch"},)
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
            emit.exporting_to(target),
            torch.no_grad(),
            _silence_export_warnings(),
        ):
            program = torch.onnx.export(
                graph.module, graph.inputs, None, dynamo=True, opset_version=opset, verbose=False,
                input_names=graph.input_names, output_names=graph.output_names,
                dynamic_shapes=graph.dynamic_axes, optimize=True,
            )  # fmt: skip
        assert program is not None
        model = program.model_proto
        deduplicate_matrices(model)
        _name_logits_dimension(model.graph)
        return model
    except (torch.onnx.errors.OnnxExporterError, RuntimeError, ValueError) as error:
        raise RunError(f"{graph.name}: torch.onnx.export failed: {error}", code="export-failed") from error


@contextmanager
def _silence_export_warnings() -> Iterator[None]:
    """Suppress torch's warnings of its own deprecated calls, shared axes and missing torchvision."""
    logging.getLogger("torch.onnx._internal.exporter._registration").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _name_logits_dimension(graph: Any) -> None:
    """Name the dimension of logits that depends on an input; torch calls it u0."""
    for value in (*graph.output, *graph.value_info):
        for dimension in value.type.tensor_type.shape.dim:
            if re.fullmatch(r"u\d+", dimension.dim_param):
                dimension.dim_param = "num_logits"

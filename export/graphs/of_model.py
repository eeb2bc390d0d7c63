"""The graphs that a model leaves as, and their export.

Seq2seq models leave as `encoder_model`, which also computes the keys and values of cross-attention
(once for a sentence, not at each step), and `decoder_with_past_model`, which takes one token.
Classifiers, sentence embedders and decoder-only language models leave as `model`. File and tensor names are
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
from smelt.core.memory import uncollected
from smelt.core.text import article
from smelt.export.graphs.attention import Scope
from smelt.export.graphs.attention_modules import attention_modules, graph_attention, pack_projections
from smelt.export.graphs.decoder_only import causal_graph
from smelt.export.graphs.graph import Graph
from smelt.export.graphs.one_trace import one_trace
from smelt.export.graphs.operator_table import table_read_once
from smelt.export.graphs.promotion import known_types
from smelt.export.graphs.rules_by_operator import rules_by_operator
from smelt.export.graphs.seq2seq import seq2seq_graphs
from smelt.export.graphs.unread import nothing_unread
from smelt.export.weights.stored_once import store_once
from smelt.families.registry import BY_TASK, family_of
from smelt.runtime.causal import KEEP, is_causal
from smelt.runtime.embedder import VECTOR
from smelt.runtime.images.batch import INPUT
from smelt.runtime.layers import emit
from smelt.runtime.layers.quantized import QuantizedEmbedding, is_quantized
from smelt.runtime.models.edits.fold_norms import fold_batch_norms
from smelt.runtime.models.sentence_model import is_sentence_model, result_of
from smelt.runtime.predict import takes_types

_ATTENTION = "smelt"  # a name that transformers has no mask for: it then builds none


class Encoder(nn.Module):
    """input_ids, attention_mask [B, L] -> float32, a classifier's logits [B, C] or a text's vector [B, D].

    A BERT classifier has the input token_type_ids too.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model, self.scope = model, Scope()
        self.attentions = attention_modules(model)
        types = self.attentions[0].family.token_types
        # an embedder reads no pairs
        self.types = "zero" if types and is_sentence_model(model) else types

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None = None
    ) -> Tensor:
        """Return logits or vectors."""
        self.scope.mask = attention_mask
        types = {} if token_type_ids is None else {"token_type_ids": token_type_ids}
        if self.types == "zero":
            # all tokens have type 0: one row that is added to all of them, instead of a gather for each
            types = {"token_type_ids": input_ids.new_zeros(1, 1)}
        with graph_attention(self.attentions, self.scope):
            out = result_of(self.model(input_ids, attention_mask=attention_mask, **types))
        return out.float()


class ImageEncoder(nn.Module):
    """pixel_values float32 [B, 3, h, w] -> logits float32 [B, C]."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model, self.scope = model, Scope()
        self.attentions = attention_modules(model)

    def forward(self, pixel_values: Tensor) -> Tensor:
        """Return logits."""
        with graph_attention(self.attentions, self.scope):
            found: Tensor = self.model(pixel_values).logits.float()
        return found


def graphs_of(model: Any, image_size: tuple[int, int] | None = None) -> list[Graph]:
    """Return the graphs of `model`, with small example inputs.

    Args:
        model: as its runner has it.
        image_size: height and width of the images, of a model that reads some.

    Raises:
        InputError: a family of models that this stage does not know, or a config that asks for what no graph
            computes.
    """
    family = family_of(model)
    if family and (problems := family.refuses(model.config.to_dict())):
        raise InputError(
            f"onnx: config.json: {' '.join(problems)}", code="unsupported-config", file="config.json"
        )
    for module in model.modules():  # T5's stacks have configs of their own
        if isinstance(module, PreTrainedModel):
            module.config._attn_implementation = _ATTENTION
    kind = family.kind if family else None
    if family and family.reads == "images":
        return [_image_encoder(model, image_size)]
    if kind == "seq2seq" and model.can_generate():
        return seq2seq_graphs(model)
    if is_causal(model.config.to_dict()):
        return [Graph("model", *causal_graph(model), optional={KEEP: 0})]
    if kind == "encoder" and is_sentence_model(model):
        return [_encoder(model, ["input_ids", "attention_mask"], VECTOR)]
    if kind == "encoder" and type(model).__name__.endswith("ForSequenceClassification"):
        types = ["token_type_ids"] if takes_types(model.config.to_dict()) else []
        return [_encoder(model, ["input_ids", "attention_mask", *types], "logits")]
    known = "; ".join(f"for {task} {', '.join(names)}" for task, names in BY_TASK.items())
    raise InputError(
        f"{article(type(model).__name__)} cannot be exported to ONNX yet. Known: {known}.",
        code="unsupported-family",
    )


def _encoder(model: Any, names: list[str], output: str) -> Graph:
    # three tensors, not one three times: torch.export takes the same object for the same input
    ids = tuple(torch.ones(2, 7, dtype=torch.int64) for _ in names)
    axes = ({0: "batch", 1: "length"},) * len(names)
    return Graph("model", Encoder(model), ids, names, [output], axes)


def _image_encoder(model: Any, size: tuple[int, int] | None) -> Graph:
    if size is None:
        raise InputError(
            "onnx: a graph takes images of one size, and preprocessor_config.json gives none: set size with"
            " height and width, or do_center_crop with crop_size.",
            code="missing-image-size",
            file="preprocessor_config.json",
        )
    fold_batch_norms(model)
    pixels = torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(0))
    return Graph("model", ImageEncoder(model), (pixels,), [INPUT], ["logits"], ({0: "batch"},))


def _prepare(graph: Graph, target: str) -> None:
    """Make the packed products and bring codes and scales into the graph's form, before they are traced."""
    graph.module.eval()
    pack_projections(graph.module.attentions)
    layers = [module for module in graph.module.modules() if is_quantized(module)]
    # lookups first: a product leaves otherwise where its matrix is looked up in, too
    for layer in sorted(layers, key=lambda layer: not isinstance(layer, QuantizedEmbedding)):
        layer.prepare_export(target)


def export_graph(graph: Graph, target: emit.Target, opset: int) -> Any:
    """Trace `graph`; return it as an onnx.ModelProto that holds its weights.

    Raises:
        RunError: torch's exporter failed.
    """
    _prepare(graph, target)
    try:
        # tracing makes millions of objects that live on: looking through them took 22 % of the time
        with (
            uncollected(),
            table_read_once(),
            one_trace(),
            known_types(),
            rules_by_operator(),
            nothing_unread(),
            emit.exporting_to(target),
            torch.no_grad(),
            _silence(),
        ):
            program = torch.onnx.export(
                graph.module, graph.inputs, None, dynamo=True, opset_version=opset, verbose=False,
                input_names=graph.input_names, output_names=graph.output_names, dynamic_shapes=graph.axes,
                optimize=True,
            )  # fmt: skip
        assert program is not None
        model = program.model_proto
        store_once(model)
        _name_kept(model.graph)
        return model
    except (torch.onnx.errors.OnnxExporterError, RuntimeError, ValueError) as error:
        raise RunError(f"{graph.name}: torch.onnx.export failed: {error}", code="export-failed") from error


@contextmanager
def _silence() -> Iterator[None]:
    """Hide what torch warns of: its own deprecated calls, shared axes, and that torchvision is not there."""
    logging.getLogger("torch.onnx._internal.exporter._registration").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _name_kept(graph: Any) -> None:
    """Name the dimension of logits that an input decides; torch calls it u0."""
    for value in (*graph.output, *graph.value_info):
        for dimension in value.type.tensor_type.shape.dim:
            if re.fullmatch(r"u\d+", dimension.dim_param):
                dimension.dim_param = "num_logits"

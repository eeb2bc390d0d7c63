"""The graphs that a model leaves as, and their export.

Seq2seq models leave as `encoder_model`, which also computes the keys and values of cross-attention
(once for a sentence, not at each step), and `decoder_with_past_model`, which takes one token.
Classifiers leave as `model`. File and tensor names are Optimum's.

Shapes: B = batch, L = source length, P = past length, H = heads, d = width of a head, V = vocabulary.
"""

from __future__ import annotations

import gc
import logging
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from smelt.core.errors import InputError, RunError
from smelt.export.attention import Pack, Scope, graph_attention, is_attention, pack_projections, split_heads
from smelt.runtime import emit
from smelt.runtime.quantized import QuantizedLinear

_ATTENTION = "smelt"  # a name that transformers has no mask for: it then builds none


@dataclass(frozen=True)
class Graph:
    """One graph to export: the module, its example inputs, and the names on its outside.

    axes: for each input the names of its dynamic dimensions, by place.
    """

    name: str
    module: nn.Module
    inputs: tuple[Any, ...]
    input_names: list[str]
    output_names: list[str]
    axes: tuple[Any, ...]


class Classifier(nn.Module):
    """input_ids, attention_mask, token_type_ids [B, L] -> logits float32 [B, C]."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model, self.scope = model, Scope()

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor) -> Tensor:
        """Return the logits."""
        self.scope.mask = attention_mask
        with graph_attention(self.model, self.scope):
            logits = self.model(
                input_ids, attention_mask=attention_mask, token_type_ids=token_type_ids
            ).logits
        out: Tensor = logits.float()
        return out


class Encoder(nn.Module):
    """input_ids, attention_mask [B, L] -> last_hidden_state [B, L, D], keys and values [B, H, L, d]."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.encoder, self.scope = model.get_encoder(), Scope()
        self.heads = [layer.encoder_attn.num_heads for layer in model.get_decoder().layers]
        attentions = [layer.encoder_attn for layer in model.get_decoder().layers]
        self.pack = Pack([linear for a in attentions for linear in (a.k_proj, a.v_proj)])

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, ...]:
        """Return the hidden states and each decoder layer's cross-attention keys and values."""
        self.scope.mask = attention_mask
        with graph_attention(self.encoder, self.scope):
            hidden = self.encoder(input_ids, attention_mask=attention_mask).last_hidden_state
        heads = [h for h in self.heads for _ in "kv"]
        caches = [split_heads(t, h).contiguous() for t, h in zip(self.pack(hidden), heads, strict=True)]
        return hidden, *caches


class DecoderStep(nn.Module):
    """One token and the caches -> logits float32 [B, V], the self-attention caches one longer."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.decoder, self.head, self.scope = model.get_decoder(), model.get_output_embeddings(), Scope()
        self.width = model.config.d_model
        bias = getattr(model, "final_logits_bias", None)
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
        with graph_attention(self.decoder, self.scope):
            hidden = self.decoder(
                input_ids,
                # only says that cross-attention takes place; its keys and values are in the caches
                encoder_hidden_states=past[0],
                past_key_values=_Past(past[0].shape[2]),
                use_cache=True,
            ).last_hidden_state
        logits = self.head(hidden.flatten(0, 1))
        caches = [t for i in range(len(self.scope.present)) for t in self.scope.present[i]]
        return logits.float(), *caches


class _Past:
    """As much of a transformers cache as a decoder asks for: how long it is."""

    is_updated: dict[int, bool] = {}  # noqa: RUF012
    is_compileable = False

    def __init__(self, length: int) -> None:
        self.length = length

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.length


def _with_bias(head: nn.Module, bias: Tensor) -> nn.Module:
    """Return a head that shares its matrix with `head` and adds `bias`."""
    if isinstance(head, QuantizedLinear):
        new = QuantizedLinear(head.in_features, head.out_features, True, head.scheme, torch.device("meta"))
        new.matrix = head.matrix
    elif isinstance(head, nn.Linear):
        new = nn.Linear(head.in_features, head.out_features, True, device="meta")  # type: ignore[assignment]
        new.weight = head.weight
    else:
        return nn.Sequential(head, _Shift(bias))
    old = head.bias
    new.bias = nn.Parameter(
        bias.detach() if old is None else bias.detach() + old.detach(), requires_grad=False
    )
    return new


class _Shift(nn.Module):
    def __init__(self, bias: Tensor) -> None:
        super().__init__()
        self.bias = nn.Buffer(bias.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        return x + self.bias


def graphs_of(model: Any) -> list[Graph]:
    """Return the graphs of `model`, with small example inputs.

    Raises:
        InputError: a family of models that this stage does not know.
    """
    family = model.config.model_type
    model.config._attn_implementation = _ATTENTION
    if family == "marian":
        return _seq2seq(model)
    if family == "bert" and type(model).__name__.endswith("ForSequenceClassification"):
        return [_classifier(model)]
    raise InputError(
        f"a {type(model).__name__} cannot be exported to ONNX yet."
        " Known: MarianMTModel, BertForSequenceClassification."
    )


def _classifier(model: Any) -> Graph:
    names = ["input_ids", "attention_mask", "token_type_ids"]
    # three tensors, not one three times: torch.export takes the same object for the same input
    ids = tuple(torch.ones(2, 7, dtype=torch.int64) for _ in names)
    axes = ({0: "batch", 1: "length"},) * 3
    return Graph("model", Classifier(model), ids, names, ["logits"], axes)


def _seq2seq(model: Any) -> list[Graph]:
    layers = model.get_decoder().layers
    ids, mask, token = (torch.ones(2, n, dtype=torch.int64) for n in (7, 7, 1))
    two = {0: "batch", 1: "encoder_length"}
    pairs = [(i, kind) for i in range(len(layers)) for kind in ("key", "value")]
    cross = [f"{i}.encoder.{kind}" for i, kind in pairs]
    own = [f"{i}.decoder.{kind}" for i, kind in pairs]
    encoder = Graph(
        "encoder_model", Encoder(model), (ids, mask), ["input_ids", "attention_mask"],
        ["last_hidden_state", *(f"present.{n}" for n in cross)], (two, two),
    )  # fmt: skip

    def caches(attention: str, length: int) -> list[Tensor]:
        modules = [getattr(layer, attention) for layer in layers]
        dtype = model.final_logits_bias.dtype
        return [torch.zeros(2, m.num_heads, length, m.head_dim, dtype=dtype) for m in modules for _ in "kv"]

    decoder = Graph(
        "decoder_with_past_model", DecoderStep(model),
        (token, mask, caches("self_attn", 5), caches("encoder_attn", 7)),
        ["input_ids", "encoder_attention_mask", *(f"past_key_values.{n}" for n in [*own, *cross])],
        ["logits", *(f"present.{n}" for n in own)],
        (
            {0: "batch"}, two,
            [{0: "batch", 2: "past_length"}] * len(own), [{0: "batch", 2: "encoder_length"}] * len(cross),
        ),
    )  # fmt: skip
    return [encoder, decoder]


def _prepare(graph: Graph) -> None:
    """Make the packed products and turn the codes of quantized layers around, before they are traced."""
    graph.module.eval()
    for module in list(graph.module.modules()):
        if is_attention(module):
            pack_projections(module)
    for module in graph.module.modules():
        if isinstance(module, QuantizedLinear):
            module.matrix.prepare_export()


def export_graph(graph: Graph, target: emit.Target, opset: int, path: Path) -> None:
    """Trace `graph` and write it to `path`.

    Raises:
        RunError: torch's exporter failed.
    """
    _prepare(graph)
    gc.disable()  # tracing makes millions of objects that live on: looking through them took 22 % of the time
    try:
        with emit.exporting_to(target), torch.no_grad(), warnings.catch_warnings():
            # torch warns of its own deprecated calls, of shared axes, and that torchvision is not there
            warnings.simplefilter("ignore")
            logging.getLogger("torch.onnx._internal.exporter._registration").setLevel(logging.ERROR)
            program = torch.onnx.export(
                graph.module, graph.inputs, None, dynamo=True, opset_version=opset, verbose=False,
                input_names=graph.input_names, output_names=graph.output_names, dynamic_shapes=graph.axes,
                optimize=True,
            )  # fmt: skip
        assert program is not None
        program.save(path)
    except (torch.onnx.errors.OnnxExporterError, RuntimeError, ValueError) as error:
        raise RunError(f"{graph.name}: torch.onnx.export failed: {error}") from error
    finally:
        gc.enable()

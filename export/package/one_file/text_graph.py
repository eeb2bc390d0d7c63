"""Build a graph from strings to strings: a tokenizer before a model's graph, and decoding after it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from smelt.export.generation_graph.graph_builder import GraphBuilder, value_info
from smelt.export.package.one_file.bert_normalizer import EXTENSIONS_DOMAIN, string_constant
from smelt.export.package.one_file.detokenize_nodes import TokenTexts, detokenize
from smelt.export.package.one_file.tokenize_nodes import RowLayout, TokenizerNodes, pad_rows
from smelt.runtime.generate.generation_config import MAX_NEW_TOKENS, GenerationConfig

TEXTS_INPUT, GENERATED_OUTPUT, LABELS_OUTPUT, SEQUENCES_OUTPUT = "texts", "generated", "labels", "sequences"
_NAME_PREFIX = "text/"  # prefix of the names of all new values
_OPSET, _CONTRIB = 20, 1


@dataclass(frozen=True)
class TextPlan:
    """The nodes around a model's graph.

    tokenizer_nodes, rows: from texts to tokens. prefix: added before each text. lower: texts are lowercased.
    token_texts: from tokens to texts, for models that generate. labels: of a classifier's classes, if a text
    has one of them.
    """

    tokenizer_nodes: TokenizerNodes
    rows: RowLayout
    prefix: str = ""
    lower: bool = False
    token_texts: TokenTexts | None = None
    labels: tuple[str, ...] = ()


def tokenizer_graph(plan: TextPlan) -> Any:
    """Return an onnx.ModelProto from `texts` to only `input_ids` and `attention_mask`, for comparison."""
    b = GraphBuilder(first=_NAME_PREFIX)
    made = _add_tokenizer(b, plan)
    outputs = [value_info(name, np.int64, (None, None)) for name in made]
    return _make_model(b.graph("read", [_string_value_info(TEXTS_INPUT)], outputs))


def detokenizer_graph(surfaces: TokenTexts, eos: list[int]) -> Any:
    """Return an onnx.ModelProto from `sequences` to texts only, for comparison."""
    b = GraphBuilder(first=_NAME_PREFIX)
    made = detokenize(b, SEQUENCES_OUTPUT, surfaces, eos)
    return _make_model(
        b.graph("write", [value_info(SEQUENCES_OUTPUT, np.int64, (None, None))], [_string_value_info(made)])
    )


def text_graph(model: Any, plan: TextPlan, decoding: GenerationConfig | None, causal: bool) -> Any:
    """Return `model`, an onnx.ModelProto with its weights inside, with string inputs and outputs.

    Its previous outputs follow the strings.

    Args:
        model: of opset 20; it is changed.
        plan: the nodes around it.
        decoding: of models that generate.
        causal: whether it is a decoder-only model, whose sequences begin with the prompt.
    """
    graph = model.graph
    b = GraphBuilder(first=_NAME_PREFIX)
    ids, mask = _add_tokenizer(b, plan)
    before = {"input_ids": ids, "attention_mask": mask, "token_type_ids": b.op("Sub", ids, ids)}
    if causal and decoding is not None and decoding.max_new_tokens is None:
        before["max_new_tokens"] = _max_new_tokens(b, b.dimension(ids, 1), decoding)
        _remove_named(graph.initializer, "max_new_tokens")
    inputs = [one for one in graph.input if one.name not in before]
    bound = [one.name for one in graph.input if one.name in before]
    for name in bound:
        b.nodes.append(_identity_node(before[name], name))
    first = list(b.nodes)
    b.nodes.clear()
    outputs = _add_detokenizer(b, plan, decoding, ids if causal else None)
    nodes = [*first, *graph.node, *b.nodes]
    for field, values in (("node", nodes), ("input", [_string_value_info(TEXTS_INPUT), *inputs])):
        graph.ClearField(field)
        getattr(graph, field).extend(values)
    kept = list(graph.output)
    graph.ClearField("output")
    graph.output.extend([*outputs, *kept])
    graph.initializer.extend(b.initializers)
    model.opset_import.add(domain=EXTENSIONS_DOMAIN, version=_CONTRIB)
    return model


def _add_tokenizer(b: GraphBuilder, plan: TextPlan) -> tuple[str, str]:
    texts = TEXTS_INPUT
    if plan.prefix:
        texts = b.op("StringConcat", string_constant(b, plan.prefix), texts)
    if plan.lower:
        texts = b.op("StringLower", texts, domain=EXTENSIONS_DOMAIN)
    return pad_rows(b, *plan.tokenizer_nodes(b, texts), plan.rows)


def _add_detokenizer(
    b: GraphBuilder, plan: TextPlan, decoding: GenerationConfig | None, prompts: str | None
) -> list[Any]:
    """Append nodes that convert the model's outputs to strings; return the graph's new outputs."""
    if decoding is not None and plan.token_texts is not None:
        begin = b.const([1]) if prompts is None else b.op("Shape", prompts, start=1, end=2)
        new = b.op("Slice", SEQUENCES_OUTPUT, begin, b.const([2**31 - 1]), b.const([1]))
        text = detokenize(b, new, plan.token_texts, decoding.eos)
        text = text if prompts is None else b.op("StringConcat", TEXTS_INPUT, text)
        b.nodes.append(_identity_node(text, GENERATED_OUTPUT))
        return [_string_value_info(GENERATED_OUTPUT)]
    if plan.labels:
        table = string_constant(b, *plan.labels)
        b.nodes.append(
            _identity_node(b.op("Gather", table, b.op("ArgMax", "logits", axis=1, keepdims=0)), LABELS_OUTPUT)
        )
        return [_string_value_info(LABELS_OUTPUT)]
    return []


def _max_new_tokens(b: GraphBuilder, length: str, decoding: GenerationConfig) -> str:
    """Return the number of new tokens after a prompt of `length` tokens, as `GenerationConfig` does."""
    asked = b.const(MAX_NEW_TOKENS)
    if decoding.max_length is not None:
        rest = b.op("Sub", b.const(decoding.max_length), length)
        asked = b.op("Where", b.op("Greater", rest, b.const(0)), rest, asked)
    if decoding.positions is not None:
        asked = b.op("Min", asked, b.op("Sub", b.const(decoding.positions + 1), length))
    return b.op("Max", asked, b.const(1))


def _string_value_info(name: str) -> Any:
    import onnx

    return onnx.helper.make_tensor_value_info(name, onnx.TensorProto.STRING, ["batch_size"])


def _identity_node(made: str, name: str) -> Any:
    import onnx

    return onnx.helper.make_node("Identity", [made], [name], f"{_NAME_PREFIX}{name}.node")


def _remove_named(tensors: Any, name: str) -> None:
    for at, tensor in enumerate(tensors):
        if tensor.name == name:
            del tensors[at]
            return


def _make_model(graph: Any) -> Any:
    from onnx import helper

    domains = [helper.make_opsetid("", _OPSET), helper.make_opsetid(EXTENSIONS_DOMAIN, _CONTRIB)]
    return helper.make_model(graph, opset_imports=domains, ir_version=10)

"""A graph from strings to strings: a tokenizer before a model's graph, and what reads its outputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from smelt.export.loop.builder import Builder, value
from smelt.export.package.one_file.bert_letters import DOMAIN, strings
from smelt.export.package.one_file.read_texts import Cutter, Rows, dense
from smelt.export.package.one_file.write_texts import Surfaces, joined
from smelt.runtime.generate.decoding import MAX_NEW_TOKENS, Decoding

TEXTS, GENERATED, LABELS, TOKENS = "texts", "generated", "labels", "sequences"
_OURS = "text/"  # what the names of all new values begin with
_OPSET, _CONTRIB = 20, 1


@dataclass(frozen=True)
class TextPlan:
    """What stands around a model's graph.

    cutter, rows: from texts to tokens. prefix: put before each text. lower: texts are lowercased.
    surfaces: from tokens to texts, of models that generate. labels: of a classifier's classes, where a
    text has one of them.
    """

    cutter: Cutter
    rows: Rows
    prefix: str = ""
    lower: bool = False
    surfaces: Surfaces | None = None
    labels: tuple[str, ...] = ()


def reading_graph(plan: TextPlan) -> Any:
    """Return an onnx.ModelProto from `texts` to `input_ids` and `attention_mask` alone, to be compared."""
    b = Builder(first=_OURS)
    made = _read(b, plan)
    outputs = [value(name, np.int64, (None, None)) for name in made]
    return _model(b.graph("read", [_strings(TEXTS)], outputs))


def writing_graph(surfaces: Surfaces, eos: list[int]) -> Any:
    """Return an onnx.ModelProto from `sequences` to texts alone, to be compared."""
    b = Builder(first=_OURS)
    made = joined(b, TOKENS, surfaces, eos)
    return _model(b.graph("write", [value(TOKENS, np.int64, (None, None))], [_strings(made)]))


def text_graph(model: Any, plan: TextPlan, decoding: Decoding | None, causal: bool) -> Any:
    """Let `model`, an onnx.ModelProto with its weights inside, take strings and give strings; return it.

    What it gave stays an output, behind the strings.

    Args:
        model: of opset 20; it is changed.
        plan: what stands around it.
        decoding: of models that generate.
        causal: whether it continues texts, and its sequences begin with the prompt.
    """
    graph = model.graph
    b = Builder(first=_OURS)
    ids, mask = _read(b, plan)
    before = {"input_ids": ids, "attention_mask": mask, "token_type_ids": b.op("Sub", ids, ids)}
    if causal and decoding is not None and decoding.max_new_tokens is None:
        before["max_new_tokens"] = _room(b, b.size(ids, 1), decoding)
        _remove(graph.initializer, "max_new_tokens")
    inputs = [one for one in graph.input if one.name not in before]
    bound = [one.name for one in graph.input if one.name in before]
    for name in bound:
        b.nodes.append(_identity(before[name], name))
    first = list(b.nodes)
    b.nodes.clear()
    outputs = _write(b, plan, decoding, ids if causal else None)
    nodes = [*first, *graph.node, *b.nodes]
    for field, values in (("node", nodes), ("input", [_strings(TEXTS), *inputs])):
        graph.ClearField(field)
        getattr(graph, field).extend(values)
    kept = list(graph.output)
    graph.ClearField("output")
    graph.output.extend([*outputs, *kept])
    graph.initializer.extend(b.initializers)
    model.opset_import.add(domain=DOMAIN, version=_CONTRIB)
    return model


def _read(b: Builder, plan: TextPlan) -> tuple[str, str]:
    texts = TEXTS
    if plan.prefix:
        texts = b.op("StringConcat", strings(b, plan.prefix), texts)
    if plan.lower:
        texts = b.op("StringLower", texts, domain=DOMAIN)
    return dense(b, *plan.cutter(b, texts), plan.rows)


def _write(b: Builder, plan: TextPlan, decoding: Decoding | None, prompts: str | None) -> list[Any]:
    """Append what makes strings of the model's outputs; return the graph's new outputs."""
    if decoding is not None and plan.surfaces is not None:
        begin = b.const([1]) if prompts is None else b.op("Shape", prompts, start=1, end=2)
        new = b.op("Slice", TOKENS, begin, b.const([2**31 - 1]), b.const([1]))
        text = joined(b, new, plan.surfaces, decoding.eos)
        text = text if prompts is None else b.op("StringConcat", TEXTS, text)
        b.nodes.append(_identity(text, GENERATED))
        return [_strings(GENERATED)]
    if plan.labels:
        table = strings(b, *plan.labels)
        b.nodes.append(_identity(b.op("Gather", table, b.op("ArgMax", "logits", axis=1, keepdims=0)), LABELS))
        return [_strings(LABELS)]
    return []


def _room(b: Builder, length: str, decoding: Decoding) -> str:
    """Return how many new tokens follow a prompt of `length` tokens, as `Decoding.longest` counts them."""
    asked = b.const(MAX_NEW_TOKENS)
    if decoding.max_length is not None:
        rest = b.op("Sub", b.const(decoding.max_length), length)
        asked = b.op("Where", b.op("Greater", rest, b.const(0)), rest, asked)
    if decoding.positions is not None:
        asked = b.op("Min", asked, b.op("Sub", b.const(decoding.positions + 1), length))
    return b.op("Max", asked, b.const(1))


def _strings(name: str) -> Any:
    import onnx

    return onnx.helper.make_tensor_value_info(name, onnx.TensorProto.STRING, ["batch_size"])


def _identity(made: str, name: str) -> Any:
    import onnx

    return onnx.helper.make_node("Identity", [made], [name], f"{_OURS}{name}.node")


def _remove(tensors: Any, name: str) -> None:
    for at, tensor in enumerate(tensors):
        if tensor.name == name:
            del tensors[at]
            return


def _model(graph: Any) -> Any:
    from onnx import helper

    domains = [helper.make_opsetid("", _OPSET), helper.make_opsetid(DOMAIN, _CONTRIB)]
    return helper.make_model(graph, opset_imports=domains, ir_version=10)

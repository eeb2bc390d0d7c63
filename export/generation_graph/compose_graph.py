"""Compose the generation graph from the graphs of one step."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from smelt.export.generation_graph.beam_search_graph import BEAM_SEARCH_INPUTS, add_beam_search
from smelt.export.generation_graph.graph_builder import GraphBuilder, value_info
from smelt.export.generation_graph.greedy_search_graph import add_greedy_search
from smelt.export.generation_graph.hoist_nodes import GraphLevel
from smelt.export.generation_graph.rule_nodes import GENERATION_INPUTS
from smelt.export.generation_graph.step_model import DecoderOnlyModel, EncoderDecoderModel, StepModel

START_TOKEN_INPUT = "decoder_start_token_id"


def compose_generation_graph(
    encoder: Any | None,
    decoder: Any,
    defaults: Mapping[str, Any],
    beams: bool,
    shortlist: Path | None = None,
) -> Any:
    """Return the onnx.ModelProto from `input_ids` to `sequences`.

    Args:
        encoder: onnx.ModelProto of the encoder; None for a decoder-only model.
        decoder: onnx.ModelProto of one step.
        defaults: default values of optional inputs, by name.
        beams: beam search instead of greedy search.
        shortlist: the folder with the model's shortlist, if it has one.

    Raises:
        RunError: a graph cannot be part of a loop, or its output layer cannot be restricted.
    """
    from onnx import helper, numpy_helper

    versions = {item.domain: item for model in (encoder, decoder) if model for item in model.opset_import}
    b = GraphBuilder(opset=versions[""].version)
    root = GraphLevel(b)
    inputs = GENERATION_INPUTS | (BEAM_SEARCH_INPUTS if beams else {})
    vocabulary = defaults["rule_biases"].shape[1]
    source: StepModel
    if encoder is None:
        source = DecoderOnlyModel(b, decoder.graph)
    else:
        inputs = inputs | {START_TOKEN_INPUT: (np.int64, ())}
        source = translator = EncoderDecoderModel(b, encoder.graph, decoder.graph, START_TOKEN_INPUT)
        if shortlist is not None:
            translator.use_shortlist(root, shortlist, vocabulary)
    found = (
        add_beam_search(root, source, vocabulary) if beams else add_greedy_search(root, source, vocabulary)
    )
    b.nodes.append(helper.make_node("Identity", [found], ["sequences"], "sequences"))
    outside = [value_info(name, np.int64, ("batch", "length")) for name in ("input_ids", "attention_mask")]
    for name, (dtype, shape) in inputs.items():
        outside.append(value_info(name, dtype, shape))
        b.initializers.append(numpy_helper.from_array(np.asarray(defaults[name], dtype=dtype), name))
    graph = b.graph("generate", outside, [value_info("sequences", np.int64, ("batch", "tokens"))])
    return helper.make_model(
        graph, opset_imports=list(versions.values()), ir_version=decoder.ir_version, producer_name="smelt"
    )

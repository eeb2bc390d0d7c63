"""From the graphs of one step to the graph of all steps."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from smelt.export.loop.beams import BEAM_INPUTS, beam
from smelt.export.loop.builder import Builder, value
from smelt.export.loop.greedy import greedy
from smelt.export.loop.place import Level
from smelt.export.loop.rules import INPUTS
from smelt.export.loop.source import Source, Translator, Writer

START = "decoder_start_token_id"


def compose(
    encoder: Any | None,
    decoder: Any,
    defaults: Mapping[str, Any],
    beams: bool,
    shortlist: Path | None = None,
) -> Any:
    """Return the onnx.ModelProto that takes `input_ids` to `sequences`.

    Args:
        encoder: onnx.ModelProto of the encoder; None for a decoder-only model.
        decoder: onnx.ModelProto of one step.
        defaults: what the inputs are that a caller leaves out, by name.
        beams: search with beams, else greedily.
        shortlist: the folder with the model's shortlist, where it has one.

    Raises:
        RunError: a graph cannot go into a loop, or its head cannot be restricted.
    """
    from onnx import helper, numpy_helper

    versions = {item.domain: item for model in (encoder, decoder) if model for item in model.opset_import}
    b = Builder(opset=versions[""].version)
    root = Level(b)
    inputs = INPUTS | (BEAM_INPUTS if beams else {})
    vocabulary = defaults["rule_biases"].shape[1]
    source: Source
    if encoder is None:
        source = Writer(b, decoder.graph)
    else:
        inputs = inputs | {START: (np.int64, ())}
        source = translator = Translator(b, encoder.graph, decoder.graph, START)
        if shortlist is not None:
            translator.restrict(root, shortlist, vocabulary)
    found = beam(root, source, vocabulary) if beams else greedy(root, source, vocabulary)
    b.nodes.append(helper.make_node("Identity", [found], ["sequences"], "sequences"))
    outside = [value(name, np.int64, ("batch", "length")) for name in ("input_ids", "attention_mask")]
    for name, (dtype, shape) in inputs.items():
        outside.append(value(name, dtype, shape))
        b.initializers.append(numpy_helper.from_array(np.asarray(defaults[name], dtype=dtype), name))
    graph = b.graph("generate", outside, [value("sequences", np.int64, ("batch", "tokens"))])
    return helper.make_model(
        graph, opset_imports=list(versions.values()), ir_version=decoder.ir_version, producer_name="smelt"
    )

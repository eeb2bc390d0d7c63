"""A translator's graphs driven by hand: smelt's two, and the layouts of others, step by step."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnxruntime

IDS = np.array([[5, 9, 7, 12], [8, 6, 3, 3]])
MASK = np.array([[1, 1, 1, 1], [1, 1, 0, 0]])
TOKENS = [np.array([[4], [6]]), np.array([[7], [7]]), np.array([[2], [9]])]


def open_session(model: Any) -> Any:
    """Open a path, or an onnx.ModelProto that holds its weights."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 3, 1
    source = model if isinstance(model, str) else model.SerializeToString()
    return onnxruntime.InferenceSession(source, options)


def run_session(opened: Any, feeds: dict[str, Any]) -> dict[str, Any]:
    """Return the outputs by name; all inputs that are read have to be in `feeds`."""
    names = [o.name for o in opened.get_outputs()]
    input_names = {i.name for i in opened.get_inputs()}
    outputs = opened.run(names, {n: v for n, v in feeds.items() if n in input_names})
    return dict(zip(names, outputs, strict=True))


def cache_inputs(outputs: dict[str, Any]) -> dict[str, Any]:
    """Return what a step left as what the next one takes."""
    return {
        n.replace("present.", "past_key_values."): v for n, v in outputs.items() if n.startswith("present.")
    }


def run_smelt_graphs(encoder: Any, decoder: Any) -> list[Any]:
    """Return float32 [2, V] for each of `TOKENS`, from the graphs of an artifact."""
    encoder, decoder = open_session(encoder), open_session(decoder)
    feeds = cache_inputs(run_session(encoder, {"input_ids": IDS, "attention_mask": MASK}))
    for i in (i for i in decoder.get_inputs() if ".decoder." in i.name):
        feeds[i.name] = np.zeros((2, i.shape[1], 0, i.shape[3]), np.float32)
    logits = []
    for token in TOKENS:
        outputs = run_session(decoder, feeds | {"input_ids": token, "encoder_attention_mask": MASK})
        feeds |= cache_inputs(outputs)
        logits.append(outputs["logits"])
    return logits


def run_optimum_graphs(encoder: Any, first: Any, following: Any) -> list[Any]:
    """Return the same [2, 1, V] from Optimum's layout of two graphs."""
    encoder, first, following = open_session(encoder), open_session(first), open_session(following)
    states = run_session(encoder, {"input_ids": IDS, "attention_mask": MASK})["last_hidden_state"]
    always = {"encoder_attention_mask": MASK, "encoder_hidden_states": states}
    outputs = run_session(first, always | {"input_ids": TOKENS[0]})
    logits, feeds = [outputs["logits"]], cache_inputs(outputs)
    for token in TOKENS[1:]:
        outputs = run_session(following, always | feeds | {"input_ids": token})
        feeds |= cache_inputs(outputs)
        logits.append(outputs["logits"])
    return logits


def run_merged_graph(
    encoder: Any, decoder: Any, heads: int | None = None, width: int | None = None
) -> list[Any]:
    """Return the same from the merged layout; `heads` and `width` of the caches that a first step gets."""
    encoder, decoder = open_session(encoder), open_session(decoder)
    states = run_session(encoder, {"input_ids": IDS, "attention_mask": MASK})["last_hidden_state"]
    always = {"encoder_attention_mask": MASK, "encoder_hidden_states": states}
    caches = [i for i in decoder.get_inputs() if i.name.startswith("past_")]
    feeds = {i.name: np.zeros((2, heads or i.shape[1], 0, width or i.shape[3]), np.float32) for i in caches}
    logits = []
    for index, token in enumerate(TOKENS):
        outputs = run_session(
            decoder, always | feeds | {"input_ids": token, "use_cache_branch": np.array([index > 0])}
        )
        feeds |= cache_inputs(outputs)
        logits.append(outputs["logits"])
    return logits

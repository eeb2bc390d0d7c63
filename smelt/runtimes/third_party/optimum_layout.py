"""Recognizes the generating graphs of a folder in Optimum's layout, and reports missing ones.

| layout | files |
|---|---|
| two decoders | encoder_model, decoder_model, decoder_with_past_model |
| one decoder | encoder_model, decoder_model_merged (input `use_cache_branch`) |
| a language model | model, with past_key_values.* |

Source: optimum/onnxruntime/modeling_seq2seq.py and modeling_decoder.py (optimum-onnx 0.1.0).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from smelt.runtimes.third_party.signature import GraphSignature

ENCODER_GRAPH, FIRST_DECODER_GRAPH, DECODER_WITH_PAST_GRAPH, MERGED_DECODER_GRAPH, MODEL_GRAPH = (
    "encoder_model",
    "decoder_model",
    "decoder_with_past_model",
    "decoder_model_merged",
    "model",
)
USE_CACHE_BRANCH, ENCODER_HIDDEN_STATES = "use_cache_branch", "encoder_hidden_states"
PAST_PREFIX, PRESENT_PREFIX = "past_key_values.", "present."
GeneratorKind = Literal["encoder-decoder", "decoder"]
_EXPORT_COMMAND = "optimum-cli export onnx --model FOLDER --task"


def required_graphs(names: Collection[str]) -> tuple[GeneratorKind, tuple[str, ...]] | str:
    """Return the kind of the graphs `names` (without `.onnx`), and those to read; else an error text."""
    if ENCODER_GRAPH in names:
        if {FIRST_DECODER_GRAPH, DECODER_WITH_PAST_GRAPH} <= set(names):
            return "encoder-decoder", (ENCODER_GRAPH, FIRST_DECODER_GRAPH, DECODER_WITH_PAST_GRAPH)
        if MERGED_DECODER_GRAPH in names:
            return "encoder-decoder", (ENCODER_GRAPH, MERGED_DECODER_GRAPH)
        return _missing_decoder_message(names)
    old = [
        name for name in (FIRST_DECODER_GRAPH, DECODER_WITH_PAST_GRAPH, MERGED_DECODER_GRAPH) if name in names
    ]
    if old:
        return (
            f"{', '.join(f'{name}.onnx' for name in old)} and no {ENCODER_GRAPH}.onnx. For translation or"
            " summarization, copy that file too; otherwise this is Optimum's layout of language models"
            f" before 1.14: export it again, as one model.onnx: {_EXPORT_COMMAND} text-generation-with-past"
            " OUT"
        )
    if MODEL_GRAPH in names:
        return "decoder", (MODEL_GRAPH,)
    return f"no {MODEL_GRAPH}.onnx and no {ENCODER_GRAPH}.onnx"


def _missing_decoder_message(names: Collection[str]) -> str:
    """Return what is missing for an encoder's graph in `names`, and how to export it."""
    export = f"{_EXPORT_COMMAND} text2text-generation-with-past OUT"
    if DECODER_WITH_PAST_GRAPH in names:
        return (
            f"{ENCODER_GRAPH}.onnx and {DECODER_WITH_PAST_GRAPH}.onnx without {FIRST_DECODER_GRAPH}.onnx,"
            " which computes the first token. If smelt wrote this folder, use `smelt package FOLDER --format"
            f" optimum`; otherwise export it again: {export}"
        )
    lacks = (
        f"{FIRST_DECODER_GRAPH}.onnx only, without caches" if FIRST_DECODER_GRAPH in names else "no decoder"
    )
    return (
        f"{ENCODER_GRAPH}.onnx and {lacks}: {DECODER_WITH_PAST_GRAPH}.onnx with {FIRST_DECODER_GRAPH}.onnx is"
        f" needed, or {MERGED_DECODER_GRAPH}.onnx. Export it with caches: {export}"
    )


def layout_problems(graph: str, signature: GraphSignature) -> Iterator[str]:
    """Yield why the graph `graph` of a layout has other inputs or outputs than expected."""
    inputs, outputs = ({v.name for v in values} for values in (signature.inputs, signature.outputs))
    needs, gives = _REQUIRED_INPUTS[graph], {"last_hidden_state"} if graph == ENCODER_GRAPH else {"logits"}
    if lacking := (needs - inputs) | (gives - outputs):
        yield (
            f"no {', '.join(sorted(lacking))}; its inputs are {_listed_names(inputs)}, its outputs"
            f" {_listed_names(outputs)}"
        )
        return
    known = needs | _OPTIONAL_INPUTS[graph]
    if odd := sorted(name for name in inputs - known if not name.startswith(PAST_PREFIX)):
        yield f"its inputs {', '.join(odd[:4])} are not supported by smelt"
    if graph != ENCODER_GRAPH and not any(name.startswith(PRESENT_PREFIX) for name in outputs):
        yield (
            f"it returns no caches ({PRESENT_PREFIX}*) for the next token: export it for a task that ends in"
            " -with-past"
        )
    past = {name.removeprefix(PAST_PREFIX) for name in inputs if name.startswith(PAST_PREFIX)}
    if graph in (DECODER_WITH_PAST_GRAPH, MERGED_DECODER_GRAPH, MODEL_GRAPH) and not past:
        yield f"it takes no caches ({PAST_PREFIX}*): export it with a task that ends in -with-past"
    left = {name.removeprefix(PRESENT_PREFIX) for name in outputs if name.startswith(PRESENT_PREFIX)}
    if lost := sorted(name for name in past - left if ".encoder." not in name):
        yield f"it takes {PAST_PREFIX}{lost[0]} but does not return {PRESENT_PREFIX}{lost[0]}"
    ids = next(value for value in signature.inputs if value.name == "input_ids")
    if ids.dtype != "int64":
        yield f"its input_ids are {ids.dtype}, but must be int64: export it again with int64"


_REQUIRED_INPUTS = {
    ENCODER_GRAPH: {"input_ids", "attention_mask"},
    FIRST_DECODER_GRAPH: {"input_ids", ENCODER_HIDDEN_STATES},
    DECODER_WITH_PAST_GRAPH: {"input_ids"},
    MERGED_DECODER_GRAPH: {"input_ids", ENCODER_HIDDEN_STATES, USE_CACHE_BRANCH},
    MODEL_GRAPH: {"input_ids", "attention_mask"},
}
_OPTIONAL_INPUTS = {
    ENCODER_GRAPH: set[str](),
    FIRST_DECODER_GRAPH: {"encoder_attention_mask"},
    DECODER_WITH_PAST_GRAPH: {"encoder_attention_mask", ENCODER_HIDDEN_STATES},
    MERGED_DECODER_GRAPH: {"encoder_attention_mask"},
    MODEL_GRAPH: {"position_ids", "num_logits_to_keep"},
}


def _listed_names(names: Collection[str]) -> str:
    kept = sorted(names)[:6]
    return ", ".join(kept) + (" ..." if len(names) > 6 else "")

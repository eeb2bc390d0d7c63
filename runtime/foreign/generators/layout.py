"""Which graphs of a folder in Optimum's layout generate text together, and what of them is missing.

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
    from smelt.runtime.foreign.signature import Signature

ENCODER, FIRST, NEXT, MERGED, MODEL = (
    "encoder_model",
    "decoder_model",
    "decoder_with_past_model",
    "decoder_model_merged",
    "model",
)
BRANCH, STATES = "use_cache_branch", "encoder_hidden_states"
PAST, PRESENT = "past_key_values.", "present."
Kind = Literal["encoder-decoder", "decoder"]
_EXPORT = "optimum-cli export onnx --model FOLDER --task"


def parts_of(names: Collection[str]) -> tuple[Kind, tuple[str, ...]] | str:
    """Return what the graphs `names` (without `.onnx`) are, and which are read; else why not."""
    if ENCODER in names:
        if {FIRST, NEXT} <= set(names):
            return "encoder-decoder", (ENCODER, FIRST, NEXT)
        if MERGED in names:
            return "encoder-decoder", (ENCODER, MERGED)
        return _no_first_or_next(names)
    old = [name for name in (FIRST, NEXT, MERGED) if name in names]
    if old:
        return (
            f"{', '.join(f'{name}.onnx' for name in old)} and no {ENCODER}.onnx. If it translates or"
            " summarizes, copy that file too; else this is how Optimum laid out language models before 1.14:"
            f" export it again, which writes one model.onnx: {_EXPORT} text-generation-with-past OUT"
        )
    if MODEL in names:
        return "decoder", (MODEL,)
    return f"no {MODEL}.onnx and no {ENCODER}.onnx"


def _no_first_or_next(names: Collection[str]) -> str:
    """Return what an encoder's graph needs beside `names`, and how to get it."""
    export = f"{_EXPORT} text2text-generation-with-past OUT"
    if NEXT in names:
        return (
            f"{ENCODER}.onnx and {NEXT}.onnx without {FIRST}.onnx, which makes the first token. Where smelt"
            " wrote this folder, `smelt package FOLDER --format optimum` writes one that is read; else"
            " export it"
            f" again: {export}"
        )
    lacks = f"{FIRST}.onnx alone, without caches from step to step" if FIRST in names else "no decoder"
    return (
        f"{ENCODER}.onnx and {lacks}: {NEXT}.onnx beside {FIRST}.onnx is needed, or {MERGED}.onnx."
        f" Export it with caches: {export}"
    )


def misfits(part: str, signature: Signature) -> Iterator[str]:
    """Yield what keeps the graph `part` of a layout from being that, by its inputs and outputs."""
    inputs, outputs = ({v.name for v in values} for values in (signature.inputs, signature.outputs))
    needs, gives = _NEEDS[part], {"last_hidden_state"} if part == ENCODER else {"logits"}
    if lacking := (needs - inputs) | (gives - outputs):
        yield (
            f"it has no {', '.join(sorted(lacking))}; its inputs are {_some(inputs)}, its outputs"
            f" {_some(outputs)}"
        )
        return
    known = needs | _MAY[part]
    if odd := sorted(name for name in inputs - known if not name.startswith(PAST)):
        yield f"its inputs {', '.join(odd[:4])} are none that smelt knows what to feed"
    if part != ENCODER and not any(name.startswith(PRESENT) for name in outputs):
        yield (
            f"it leaves no caches ({PRESENT}*) for the next token: export it for a task that ends in"
            " -with-past"
        )
    past = {name.removeprefix(PAST) for name in inputs if name.startswith(PAST)}
    if part in (NEXT, MERGED, MODEL) and not past:
        yield f"it takes no caches ({PAST}*): export it with a task that ends in -with-past"
    left = {name.removeprefix(PRESENT) for name in outputs if name.startswith(PRESENT)}
    if lost := sorted(name for name in past - left if ".encoder." not in name):
        yield f"it takes {PAST}{lost[0]} and leaves no {PRESENT}{lost[0]}"
    ids = next(value for value in signature.inputs if value.name == "input_ids")
    if ids.dtype != "int64":
        yield f"its input_ids are {ids.dtype}, and caches pass between graphs that take int64: export it so"


_NEEDS = {
    ENCODER: {"input_ids", "attention_mask"},
    FIRST: {"input_ids", STATES},
    NEXT: {"input_ids"},
    MERGED: {"input_ids", STATES, BRANCH},
    MODEL: {"input_ids", "attention_mask"},
}
_MAY = {
    ENCODER: set[str](),
    FIRST: {"encoder_attention_mask"},
    NEXT: {"encoder_attention_mask", STATES},
    MERGED: {"encoder_attention_mask"},
    MODEL: {"position_ids", "num_logits_to_keep"},
}


def _some(names: Collection[str]) -> str:
    kept = sorted(names)[:6]
    return ", ".join(kept) + (" ..." if len(names) > 6 else "")

"""The table of stages: the word in a recipe and the class behind it, imported when it is asked for."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from smelt.core.errors import InputError, nearest
from smelt.core.stage import Stage
from smelt.recipe.other_names import called

TABLE: dict[str, str] = {
    "finetune": "smelt.compress.finetune:Finetune",
    "distill": "smelt.compress.distill.logits:Distill",
    "trim-vocabulary": "smelt.compress.vocabulary.stage:TrimVocabulary",
    "drop-layers": "smelt.compress.depth.stage:DropLayers",
    "prune": "smelt.compress.prune.structured:Prune",
    "sparsify": "smelt.compress.sparsify.stage:Sparsify",
    "factorize": "smelt.compress.factorize.stage:Factorize",
    "share-weights": "smelt.compress.share.layers:ShareWeights",
    "shortlist": "smelt.compress.shortlist.stage:ShortlistStage",
    "quantize": "smelt.compress.quantize.stage:Quantize",
    "onnx": "smelt.export.onnx_stage:Onnx",
    "simplify": "smelt.export.foreign.simplify:Simplify",
    "quantize-onnx": "smelt.export.foreign.quantize:QuantizeOnnx",
    "fp16": "smelt.export.foreign.fp16:Fp16",
    "tensorrt": "smelt.export.tensorrt.stage:TensorrtStage",
}
# What a word means behind an ONNX graph that a recipe starts from.
ON_GRAPHS = {"quantize": "quantize-onnx"}


def load_stage(word: str) -> type[Stage[Any]]:
    """Return the class behind `word`.

    Raises:
        InputError: there is no such stage; the message names the nearest.
    """
    if word not in TABLE:
        raise InputError(unknown_stage(word), code="unknown-stage")
    module, _, name = TABLE[word].partition(":")
    stage: type[Stage[Any]] = getattr(import_module(module), name)
    return stage


def stages() -> dict[str, type[Stage[Any]]]:
    """Return every stage by its word, in the order in which they are usually used."""
    return {word: load_stage(word) for word in TABLE}


def unknown_stage(word: str) -> str:
    """Return the sentence that says that `word` is no stage."""
    hint = called(word, TABLE) or nearest(word, TABLE)
    return f"unknown stage '{word[:60]}'. Known: {', '.join(TABLE)}.{hint}"

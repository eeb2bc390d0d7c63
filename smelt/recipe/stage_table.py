"""Map the names of stages in a recipe to their classes, which are imported on demand."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from smelt.core.errors import InputError, did_you_mean
from smelt.core.stage import Stage
from smelt.recipe.other_names import other_name_hint

STAGE_CLASSES: dict[str, str] = {
    "finetune": "smelt.compress.finetune:Finetune",
    "distill": "smelt.compress.distill.stage:Distill",
    "trim-vocabulary": "smelt.compress.trim_vocabulary.stage:TrimVocabulary",
    "drop-layers": "smelt.compress.drop_layers.stage:DropLayers",
    "prune": "smelt.compress.prune.stage:Prune",
    "sparsify": "smelt.compress.sparsify.stage:Sparsify",
    "factorize": "smelt.compress.factorize.stage:Factorize",
    "share-weights": "smelt.compress.share_weights.stage:ShareWeights",
    "shortlist": "smelt.compress.shortlist.stage:ShortlistStage",
    "quantize": "smelt.compress.quantize.stage:Quantize",
    "onnx": "smelt.export.onnx_stage:Onnx",
    "simplify": "smelt.export.third_party.simplify_stage:Simplify",
    "quantize-onnx": "smelt.export.third_party.quantize_onnx:QuantizeOnnx",
    "fp16": "smelt.export.third_party.fp16:Fp16",
    "tensorrt": "smelt.export.tensorrt.stage:TensorrtStage",
}
# Stages that have another class in recipes that start from an ONNX file.
ONNX_EQUIVALENTS = {"quantize": "quantize-onnx"}


def load_stage(word: str) -> type[Stage[Any]]:
    """Return the class of the stage `word`.

    Raises:
        InputError: no such stage; the message suggests the closest name.
    """
    if word not in STAGE_CLASSES:
        raise InputError(unknown_stage_text(word), code="unknown-stage")
    module, _, name = STAGE_CLASSES[word].partition(":")
    stage: type[Stage[Any]] = getattr(import_module(module), name)
    return stage


def all_stages() -> dict[str, type[Stage[Any]]]:
    """Return every stage class by name, in the usual order of use."""
    return {word: load_stage(word) for word in STAGE_CLASSES}


def unknown_stage_text(name: str) -> str:
    """Return the message that `name` is not a stage."""
    hint = other_name_hint(name, STAGE_CLASSES) or did_you_mean(name, STAGE_CLASSES)
    return f"unknown stage '{name[:60]}'. Known stages: {', '.join(STAGE_CLASSES)}.{hint}"

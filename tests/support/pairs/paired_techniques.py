"""One small setting of each technique, and a tiny model of each kind: what pairs of stages are made of.

A new stage gets its row in `TECHNIQUES`, a scheme has one with its default options. Which of them fit which
model and can follow which other one, the stages and the plan say.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from smelt.data.tasks import Task
from smelt.models.families.registry import FAMILIES
from smelt.quantization.schemes.registry import SCHEMES
from tests.support.models import (
    causal,
    embedders,
    every_family,
    image_text,
    images,
    masked,
    questions,
    speech,
    taggers,
    tiny,
)
from tests.support.schemes import small_settings


@dataclass(frozen=True)
class TinyModel:
    """A tiny random model. kind: the name of its family."""

    kind: str
    task: Task
    make: Callable[[Path], Any]

    @property
    def is_encoder_decoder(self) -> bool:
        """Whether it has an encoder and a decoder."""
        return FAMILIES[self.kind].architecture == "seq2seq"


TASKS: dict[str, Task] = {"t5": "summarization"}  # others have the first task of their family
MODELS: dict[str, TinyModel] = {
    name: TinyModel(
        name, TASKS.get(name, FAMILIES[name].tasks[0]), partial(every_family.make_model, family=name)
    )
    for name in every_family.MODELS
}
MODELS["embedder"] = TinyModel("bert", "sentence-similarity", embedders.write_embedder)
MODELS["masked"] = TinyModel("bert", masked.TASK, masked.write_model)
MODELS["tagger"] = TinyModel("bert", taggers.TASK, taggers.write_model)
MODELS["reader"] = TinyModel("bert", questions.TASK, questions.write_model)
"""Each family, and an embedder, a masked language model, a token classifier and one that marks answers."""
LANGUAGES = {
    "mbart": {"source_language": "en_XX", "target_language": "de_DE"},
    "m2m_100": {"source_language": "eng_Latn", "target_language": "deu_Latn"},
}
DATA: dict[str, Callable[[Path], Any]] = {
    "translation": tiny.write_pairs, "summarization": tiny.write_pairs,
    "text-classification": tiny.write_labeled, images.TASK: images.write_rows,
    "language-modeling": lambda path: causal.write_lines(path, 1),
    "sentence-similarity": embedders.write_rows, masked.TASK: masked.write_lines,
    taggers.TASK: taggers.write_rows, questions.TASK: questions.write_rows, speech.TASK: speech.write_rows,
    image_text.TASK: image_text.write_pairs,
}  # fmt: skip


@dataclass(frozen=True)
class Technique:
    """A stage with one small setting.

    shrinks: whether a tiny model must have fewer parameters afterwards, or fewer bytes if quantized.
    applied_after: the technique that is applied first if it needs quantized weights; "" for the model itself.
    usable_on: for a technique that changes the structure, a family and its layers per stack, with which
        `test_what_follows.py` checks that the result can be saved, trained, quantized and exported.
    """

    stage: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    shrinks: bool = False
    applied_after: str = ""
    usable_on: tuple[str, int] | None = None

    def settings_for(self, model: TinyModel) -> dict[str, Any]:
        """Return the settings for `model`.

        A student's layers are called otherwise where there are two stacks, of models of images nothing inside
        is compared, and an embedder gives vectors.
        """
        options = dict(self.settings)
        if "student" in options and model.is_encoder_decoder:
            # of layers whose parts are removed with equal losses, the first loses its parts
            options["student"] = {"decoder_layers": options["student"]["layers"], "layer_selection": "last"}
        if model.task in ("image-classification", speech.TASK):
            options.pop("losses", None)
        if "student" in options and model.task == image_text.TASK:
            options["student"] = {"text_layers": options["student"]["layers"]}
        if model.task == image_text.TASK:
            options.pop("losses", None)
        if model.task == "sentence-similarity" and "losses" in options:
            options["losses"] = {"sentence_embedding": 1, **INTERMEDIATE_LOSSES}
        elif "losses" in options:
            options["losses"] = {"logits": 1, **INTERMEDIATE_LOSSES}
        return options


TRAINING_SETTINGS: dict[str, Any] = {"max_steps": 2, "batch_size": 4, "num_evals": 0, "precision": "fp32"}
FEW_SAMPLES: dict[str, Any] = {"calibration_samples": 4}
INTERMEDIATE_LOSSES = {"hidden_states": 1, "input_embeddings": 1, "self_attention_relations": 1}
TECHNIQUES: dict[str, Technique] = {
    "finetune": Technique("finetune", TRAINING_SETTINGS),
    "lora": Technique("finetune", {"lora": {"r": 2}, **TRAINING_SETTINGS}),
    "masks": Technique("finetune",
        {"learned_masks": {"learning_rate": 5, "warmup": 0.5, "multiple_of": 4}, **TRAINING_SETTINGS}, True),
    "masks-parts": Technique("finetune", {"learned_masks": {"parts": ["attention", "ffn"],
        "learning_rate": 5, "warmup": 0.5, "multiple_of": 4}, **TRAINING_SETTINGS}, True),
    "masks-width": Technique("finetune", {"learned_masks": {"targets": ["heads", "width"],
        "learning_rate": 5, "warmup": 0.5}, **TRAINING_SETTINGS}, True),
    "lsq": Technique("finetune", {"qat": {"scales": "lsq"}, **TRAINING_SETTINGS}, applied_after="int4"),
    "split": Technique("finetune", {"qat": {"weight_splitting": True}, **TRAINING_SETTINGS},
        applied_after="ternary"),
    "movement": Technique("finetune", {"sparsify": {"start": 0, "end": 1}, **TRAINING_SETTINGS}),
    "distill": Technique("distill", TRAINING_SETTINGS),
    "student": Technique("distill",
        {"student": {"layers": 1}, "losses": INTERMEDIATE_LOSSES, **TRAINING_SETTINGS}, True),
    "vocabulary": Technique("trim-vocabulary", {"coverage": 0.5, "multiple_of": 1}, True,
        usable_on=("qwen2", 1)),
    "depth": Technique("drop-layers", {"keep_ratio": 0.5, **FEW_SAMPLES}, True, usable_on=("t5", 2)),
    "experts": Technique("drop-experts", {"keep_ratio": 0.5, **FEW_SAMPLES}, True, usable_on=("mixtral", 1)),
    "prune": Technique("prune", {"targets": ["heads", "ffn"], "keep_ratio": 0.5, **FEW_SAMPLES}, True,
        usable_on=("bert", 1)),
    "prune-budget": Technique("prune",
        {"budget": {"parameters": 0.9}, "importance": "fisher", **FEW_SAMPLES}, True),
    # of both kinds of two layers no layer may be whole, which a student of one layer needs
    "depth-parts": Technique("drop-layers", {"targets": ["attention"], **FEW_SAMPLES}, True,
        usable_on=("marian", 2)),
    "width": Technique("prune", {"targets": ["width"], "keep_ratio": 0.5, **FEW_SAMPLES}, True,
        usable_on=("pegasus", 1)),
    "channels": Technique("prune",
        {"targets": ["channels"], "keep_ratio": 0.5, "multiple_of": 4, **FEW_SAMPLES}, True),
    "sparsify": Technique("sparsify", {"method": "sparsegpt", "pattern": "2:4", **FEW_SAMPLES},
        usable_on=("qwen3", 1)),
    "factorize": Technique("factorize", {"rank": 12, "optimize_for": "size", **FEW_SAMPLES}, True,
        usable_on=("gpt2", 1)),
    "factorize-embeddings": Technique("factorize", {"targets": ["embeddings"], "rank": 12}, True,
        usable_on=("marian", 1)),
    "tucker": Technique("factorize", {"method": "tucker", "keep_ratio": 0.5}, True),
    "share": Technique("share-weights", {}, True, usable_on=("mistral", 2)),
    "share-all": Technique("share-weights", {"targets": ["layers", "embeddings"], "groups": 1}, True,
        usable_on=("llama", 2)),
    "share-difference": Technique("share-weights", {"low_rank_delta": {"rank": 2}}, True,
        usable_on=("gemma", 2)),
    "shortlist": Technique("shortlist", {"candidates_per_token": 3, "frequent_tokens": 6},
        usable_on=("t5", 1)),
    "rotate": Technique("rotate", usable_on=("opt", 1)),
    "rotate-heads": Technique("rotate", {"targets": ["heads"]}, usable_on=("marian", 1)),
    "int8-static": Technique("quantize", {"smoothquant_alpha": 0.5, **small_settings("int8-static")}, True),
    "int8-plain": Technique("quantize", small_settings("int8-static"), True),
    "gptq": Technique("quantize", {"scheme": "int4", "group_size": 32, "method": "gptq", **FEW_SAMPLES},
        True),
    "awq": Technique("quantize",
        {"scheme": "int4", "group_size": 32, "method": "awq", "clip": "awq", **FEW_SAMPLES}, True),
    "autoround": Technique("quantize", {"scheme": "int4", "group_size": 32, "method": "autoround",
        "iterations": 2, **FEW_SAMPLES}, True),
    "hqq": Technique("quantize", {"scheme": "int4", "group_size": 32, "method": "hqq"}, True),
    "bits": Technique("quantize", {"mixed_precision": {"target_bits": 8.5, "bit_widths": [4, 8]},
        "group_size": 16, "sensitivity_samples": 1, **FEW_SAMPLES}, True),
    "low-rank": Technique("quantize",
        {"scheme": "int4", "group_size": 32, "low_rank_correction": {"rank": 2}}, True),
}  # fmt: skip
TECHNIQUES |= {
    name: Technique("quantize", small_settings(name), True) for name in SCHEMES if name not in TECHNIQUES
}


def with_prerequisite(first: str, *others: str) -> tuple[str, ...]:
    """Return these techniques, and in front of them what the first one goes on from."""
    stem = TECHNIQUES[first].applied_after
    return (*((stem,) if stem else ()), first, *others)


def write_recipe(folder: Path, model: TinyModel, stages: Sequence[str], target: str | None = None) -> Path:
    """Write a recipe for the model in `folder / "model"` with small data; return it.

    Args:
        folder: gets the recipe and the data.
        model: the model.
        stages: techniques.
        target: of an `onnx` behind them; None: none.
    """
    file = folder / ("data.txt" if model.task == "language-modeling" else "data.jsonl")
    if not file.exists():
        DATA[model.task](file)
    data: dict[str, Any] = dict.fromkeys(("train", "validation", "test"), file.name)
    if model.task == "language-modeling":
        data["windows"] = {"length": 32}
    if FAMILIES[model.kind].language_selection == "codes":
        data |= LANGUAGES[model.kind]
    steps = [{TECHNIQUES[stage].stage: TECHNIQUES[stage].settings_for(model)} for stage in stages]
    steps += [{"onnx": {"target": target}}] if target else []
    recipe = folder / "recipe.yaml"
    recipe.write_text(
        f"model: model\ntask: {model.task}\ndata: {json.dumps(data)}\nthreads: 1\n"
        "score: {latency: false, generation: {max_new_tokens: 6}}\n"
        "stages:\n" + "".join(f"  - {json.dumps(step)}\n" for step in steps)
    )
    return recipe

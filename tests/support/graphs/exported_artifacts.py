"""Tiny models that went through a run, as artifacts to open: a torch step and its ONNX graphs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import causal
import classifiers
import embedders
import every_family
import images
import seq2seq
import tiny
from shared_folders import make_once

RECIPE = """
model: m
task: {task}
data: {{test: {data}{more}}}
stages: [onnx: {{{settings}}}]
score: {{latency: false{score}}}
"""

# translator: Marian, whose tokenizer has no tokenizer.json; classifier: BERT; writer: Llama; int8-caches: the
# same with these.
KINDS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "translator": (tiny.write_marian, "translation"),
    "t5": (seq2seq.write_t5, "translation"),
    "bart": (seq2seq.write_bart, "summarization"),
    "classifier": (tiny.write_bert, "text-classification"),
    "roberta": (classifiers.roberta, "text-classification"),
    "writer": (lambda folder: causal.write_model(folder, "llama"), "language-modeling"),
    "gpt2": (lambda folder: causal.write_model(folder, "gpt2"), "language-modeling"),
    "int8-caches": (lambda folder: causal.write_model(folder, "llama"), "language-modeling"),
    "embedder": (embedders.write_embedder, embedders.TASK),
    "vit": (lambda folder: images.write_model(folder, "vit"), images.TASK),
    "resnet": (lambda folder: images.write_model(folder, "resnet"), images.TASK),
    "mbart": (lambda folder: seq2seq.write_bart(folder, kind="mbart"), "translation"),
    "m2m_100": (lambda folder: every_family.write_model(folder, "m2m_100"), "translation"),
    "pegasus": (lambda folder: every_family.write_model(folder, "pegasus"), "summarization"),
}
TEXT_KINDS = [kind for kind, (_, task) in KINDS.items() if task != images.TASK]
EXPORT_SETTINGS = {"int8-caches": "kv_cache: int8"}
EXTRA_DATA_SETTINGS = {
    "int8-caches": ", train: data.txt",
    "mbart": ", source_language: en_XX, target_language: de_DE",
    "m2m_100": ", source_language: eng_Latn, target_language: deu_Latn",
}


def exported_artifact(kind: str, step: str = "onnx") -> Path:
    """Return the artifact of the step `model` or `onnx` of a run with a model of `kind`; read only."""
    return make_once(f"run-{kind}", lambda home: _run(home, kind)) / "run" / "artifacts" / step


def _run(home: Path, kind: str) -> None:
    import smelt

    home.mkdir()
    make, task = KINDS[kind]
    make(home / "m")
    if task == "text-classification":
        data = tiny.write_labelled(home / "data.jsonl", 6)
    elif task == "language-modeling":
        data = causal.write_lines(home / "data.txt", 1)
    elif task == images.TASK:
        data = images.write_rows(home / "data.jsonl")
    elif task == embedders.TASK:
        data = embedders.write_rows(home / "data.jsonl", 6)
    else:
        data = tiny.write_pairs(home / "data.jsonl", 6)
    score = "" if task == images.TASK else ", generation: {max_new_tokens: 4}"
    options = {
        "task": task,
        "data": data.name,
        "more": EXTRA_DATA_SETTINGS.get(kind, ""),
        "settings": EXPORT_SETTINGS.get(kind, ""),
    }
    options["score"] = score
    (home / "recipe.yaml").write_text(RECIPE.format(**options))
    smelt.run(home / "recipe.yaml", out=home / "run", quiet=True)

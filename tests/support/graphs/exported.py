"""Tiny models that went through a run, as artifacts to open: a torch step and its ONNX graphs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import causal
import classifiers
import every_family
import images
import sentences
import seq2seq
import tiny
from once import made_once

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
    "translator": (tiny.marian, "translation"),
    "t5": (seq2seq.t5, "translation"),
    "bart": (seq2seq.bart, "summarization"),
    "classifier": (tiny.bert, "text-classification"),
    "roberta": (classifiers.roberta, "text-classification"),
    "writer": (lambda folder: causal.model(folder, "llama"), "language-modeling"),
    "gpt2": (lambda folder: causal.model(folder, "gpt2"), "language-modeling"),
    "int8-caches": (lambda folder: causal.model(folder, "llama"), "language-modeling"),
    "embedder": (sentences.embedder, sentences.TASK),
    "vit": (lambda folder: images.model(folder, "vit"), images.TASK),
    "resnet": (lambda folder: images.model(folder, "resnet"), images.TASK),
    "mbart": (lambda folder: seq2seq.bart(folder, kind="mbart"), "translation"),
    "m2m_100": (lambda folder: every_family.make(folder, "m2m_100"), "translation"),
    "pegasus": (lambda folder: every_family.make(folder, "pegasus"), "summarization"),
}
TEXTS = [kind for kind, (_, task) in KINDS.items() if task != images.TASK]
SETTINGS = {"int8-caches": "kv_cache: int8"}
MORE = {
    "int8-caches": ", train: data.txt",
    "mbart": ", source_language: en_XX, target_language: de_DE",
    "m2m_100": ", source_language: eng_Latn, target_language: deu_Latn",
}


def artifact(kind: str, step: str = "onnx") -> Path:
    """Return the artifact of the step `model` or `onnx` of a run with a model of `kind`; read only."""
    return made_once(f"run-{kind}", lambda home: _run(home, kind)) / "run" / "artifacts" / step


def _run(home: Path, kind: str) -> None:
    import smelt

    home.mkdir()
    make, task = KINDS[kind]
    make(home / "m")
    if task == "text-classification":
        data = tiny.labelled(home / "data.jsonl", 6)
    elif task == "language-modeling":
        data = causal.lines(home / "data.txt", 1)
    elif task == images.TASK:
        data = images.rows(home / "data.jsonl")
    elif task == sentences.TASK:
        data = sentences.rows(home / "data.jsonl", 6)
    else:
        data = tiny.pairs(home / "data.jsonl", 6)
    score = "" if task == images.TASK else ", generation: {max_new_tokens: 4}"
    said = {"task": task, "data": data.name, "more": MORE.get(kind, ""), "settings": SETTINGS.get(kind, "")}
    said["score"] = score
    (home / "recipe.yaml").write_text(RECIPE.format(**said))
    smelt.run(home / "recipe.yaml", out=home / "run", quiet=True)

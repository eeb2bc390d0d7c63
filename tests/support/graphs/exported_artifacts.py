"""Tiny models that went through a run, as artifacts to open: a torch step and its ONNX graphs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from tests.support.models import causal, classifiers, embedders, every_family, images, seq2seq, tiny
from tests.support.shared_folders import make_once

RECIPE = """
model: m
task: {task}
data: {{test: {data}{more}}}
stages: [onnx: {{{settings}}}]
score: {{latency: false{score}}}
"""

SHORT: dict[str, Any] = {"num_hidden_layers": 1}
SHORT_STACKS: dict[str, Any] = {"encoder_layers": 1, "decoder_layers": 1}
"""One layer a stack: a second would only be traced once more. Of decoders alone tests compare two layers."""
# translator: Marian, whose tokenizer has no tokenizer.json; classifier: BERT; writer: Llama; int8-caches: the
# same with these.
KINDS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "translator": (partial(tiny.write_marian, **SHORT_STACKS), "translation"),
    "t5": (partial(seq2seq.write_t5, num_layers=1, num_decoder_layers=1), "translation"),
    "bart": (partial(seq2seq.write_bart, **SHORT_STACKS), "summarization"),
    "classifier": (partial(tiny.write_bert, **SHORT), "text-classification"),
    "roberta": (partial(classifiers.roberta, **SHORT), "text-classification"),
    "writer": (partial(causal.write_model, family="llama"), "language-modeling"),
    "gpt2": (partial(causal.write_model, family="gpt2"), "language-modeling"),
    "int8-caches": (partial(causal.write_model, family="llama"), "language-modeling"),
    "embedder": (embedders.write_embedder, embedders.TASK),
    "vit": (lambda folder: images.write_model(folder, "vit"), images.TASK),
    "resnet": (lambda folder: images.write_model(folder, "resnet"), images.TASK),
    "mbart": (partial(seq2seq.write_bart, kind="mbart", **SHORT_STACKS), "translation"),
    "m2m_100": (partial(every_family.write_model, family="m2m_100", **SHORT_STACKS), "translation"),
    "pegasus": (partial(every_family.write_model, family="pegasus", **SHORT_STACKS), "summarization"),
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
        data = tiny.write_labeled(home / "data.jsonl", 6)
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

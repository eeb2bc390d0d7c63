"""Tiny models that went through a run, as artifacts to open: a torch step and its ONNX graphs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import causal
import classifiers
import seq2seq
import tiny

RECIPE = """
model: m
task: {task}
data: {{test: {data}}}
stages: [{stages}]
score: {{latency: false, generation: {{max_new_tokens: 4}}}}
"""

# translator: Marian, whose tokenizer has no tokenizer.json; classifier: BERT; writer: Llama.
KINDS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "translator": (tiny.marian, "translation"),
    "t5": (seq2seq.t5, "translation"),
    "classifier": (tiny.bert, "text-classification"),
    "roberta": (classifiers.roberta, "text-classification"),
    "writer": (lambda folder: causal.model(folder, "llama"), "language-modeling"),
    "gpt2": (lambda folder: causal.model(folder, "gpt2"), "language-modeling"),
}


def run(home: Path, kind: str, stages: str = "onnx") -> Any:
    """Run a model of `kind`, one of `KINDS`, through `stages`; return the `Result`."""
    import smelt

    home.mkdir(exist_ok=True)
    make, task = KINDS[kind]
    make(home / "m")
    if task == "text-classification":
        data = tiny.labelled(home / "data.jsonl", 6)
    elif task == "language-modeling":
        data = causal.lines(home / "data.txt", 1)
    else:
        data = tiny.pairs(home / "data.jsonl", 6)
    (home / "recipe.yaml").write_text(RECIPE.format(task=task, data=Path(data).name, stages=stages))
    return smelt.run(home / "recipe.yaml", out=home / "run", quiet=True)

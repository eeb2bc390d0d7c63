"""Tiny models of several families as graphs for TensorRT, each exported once for all tests of a session."""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import causal
import classifiers
import seq2seq
import tiny

from smelt.core.data import Example, Split, Task
from smelt.core.stage import Context

ROWS = tuple(Example(s, label=0, references=(tiny.SENTENCES[i - 1],)) for i, s in enumerate(tiny.SENTENCES))
# how a tiny model is made, its task, and how many graphs it leaves as
FAMILIES: dict[str, tuple[Callable[[Path], Path], Task, int]] = {
    "marian": (tiny.marian, "translation", 2),
    "t5": (seq2seq.t5, "summarization", 2),
    "roberta": (classifiers.roberta, "text-classification", 1),
    "gpt2": (lambda folder: causal.model(folder, "gpt2"), "language-modeling", 1),
    "llama": (lambda folder: causal.model(folder, "llama"), "language-modeling", 1),
}


def context(out: Path, task: Task) -> Context:
    """Return what a stage is given that writes to `out`: sentences as validation data, one thread."""
    data = {"validation": Split("made", ROWS)}
    return Context(out=out, task=task, data=data, seed=0, ancestors={}, score=lambda artifact: {}, threads=1)


@functools.cache
def exported(family: str) -> Path:
    """Return a folder with the fp32 graphs of a family, its config and tokenizer; read only."""
    from smelt.export.onnx_stage import Onnx, OnnxSettings

    make, task, _ = FAMILIES[family]
    folder = Path(tempfile.mkdtemp(prefix=f"smelt-{family}-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    model, out = folder / "model", folder / "onnx"
    model.mkdir()
    out.mkdir()
    source: Any = tiny.artifact(make(model), task)
    Onnx()(source, OnnxSettings(target="tensorrt"), context(out, task))
    return out


def copy(family: str, out: Path, half: bool = False) -> Path:
    """Copy the graphs and all else to the new folder `out`; with `half` in fp16, as `dtype: fp16` does."""
    import onnx

    from smelt.export.half import to_half

    shutil.copytree(exported(family), out)
    for path in sorted(out.glob("*.onnx")) if half else ():
        model = onnx.load(path)
        to_half(model, path.stem)
        onnx.save(model, path)
    return out

"""Tiny models of several families, exported once for all tests, with what parity asks of them."""

from __future__ import annotations

import functools
import json
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import causal
import classifiers
import every_family
import harness
import images
import pytest
import sentences
import seq2seq
import tiny
from once import made_once

from smelt.core.data import Example, Split
from smelt.core.stage import Context

ROWS = tuple(Example(s, label=0, references=(s,)) for s in tiny.SENTENCES)
BOTH: dict[str, Any] = dict.fromkeys(every_family.BOTH, 1)
"""One layer a stack, where no test takes one of two away; a second would only be traced once more."""
ONE: dict[str, Any] = {"num_hidden_layers": 1}
FAMILIES: dict[str, tuple[Callable[[Path], Path], str]] = {
    "marian": (tiny.marian, "translation"),
    "t5": (seq2seq.t5, "summarization"),
    "bart": (partial(seq2seq.bart, **BOTH), "summarization"),
    "bert": (classifiers.bert, "text-classification"),
    "distilbert": (partial(classifiers.distilbert, n_layers=1), "text-classification"),
    "gpt2": (partial(causal.model, family="gpt2", n_embd=64), "language-modeling"),
    "qwen2": (partial(causal.model, family="qwen2"), "language-modeling"),
    "roberta": (partial(classifiers.roberta, **ONE), "text-classification"),
    "llama": (lambda folder: causal.model(folder, "llama"), "language-modeling"),
    "embedder": (sentences.embedder, sentences.TASK),
    "mbart": (partial(seq2seq.bart, kind="mbart", **BOTH), "translation"),
    **{f: (partial(every_family.make, family=f, **layers), t) for f, t, layers in (
        ("m2m_100", "translation", BOTH), ("pegasus", "summarization", BOTH),
        ("mpnet", "text-classification", ONE), ("modernbert", "text-classification", {}),
        ("mistral", "language-modeling", ONE), ("gemma", "language-modeling", ONE),
        ("qwen3", "language-modeling", ONE), ("phi3", "language-modeling", ONE),
        ("opt", "language-modeling", {}),
    )},
    **{f: (partial(images.model, family=f), images.TASK) for f in images.CONFIGS},
    **{
        f"embedder-{f}": (partial(sentences.embedder, family=f), sentences.TASK)
        for f in sentences.FAMILIES[1:]
    },
}  # fmt: skip
SCHEMES: dict[str, dict[str, Any] | None] = {
    "fp32": None,
    "int8": {},
    "static": {"scheme": "int8-static"},
    "groupwise": {"scheme": "int8-groupwise", "group_size": 32},
    "int4": {"scheme": "int4", "group_size": 16, "symmetric": False},
    # as TensorRT takes it
    "signed": {"scheme": "int4", "group_size": 64, "symmetric": "positive", "accuracy_level": 0},
    "binary": {"scheme": "binary", "group_size": 32},
    "nf4": {"scheme": "bnb-nf4"},
}


@dataclass(frozen=True)
class Exported:
    """A folder with graphs, and the arguments with which `check_graphs` was called on them."""

    folder: Path
    subject: Any
    reference: Any
    details: dict[str, Any]


def context(out: Path, task: str) -> Context:
    """Return what a stage is given that writes to the new folder `out`: sentences as validation data."""
    if task == images.TASK:
        rows = images.split(images.rows(out.with_name(f"{out.name}-rows.jsonl")))
    else:
        rows = Split("made", ROWS)
    return harness.context(out, task, {"validation": rows, "calibration": rows})


@functools.cache
def exported(family: str, scheme: str, target: str = "ort-cpu", dtype: str = "fp32") -> Exported:
    """Return the graphs of a family in a scheme; read only. One process of a run traces them."""
    traced: list[Exported] = []

    def make(folder: Path) -> None:
        traced.append(export(folder, family, scheme, target, dtype))
        (folder / "details.json").write_text(json.dumps(traced[0].details))
        kept = {name: sorted(modules) for name, modules in traced[0].subject.float32.items()}
        (folder / "float32.json").write_text(json.dumps(kept))

    folder = made_once(f"graphs-{family}-{scheme}-{target}-{dtype}", make)
    return traced[0] if traced else reopened(folder, family, target, dtype)


def export(folder: Path, family: str, scheme: str, target: str = "ort-cpu", dtype: str = "fp32") -> Exported:
    """Make the model of a family, code it and trace its graphs, all in the new folder `folder`."""
    from smelt.compress.quantize.stage import Quantize, QuantizeSettings
    from smelt.export.stage.settings import OnnxSettings

    make, task = FAMILIES[family]
    source = make(folder / "model")
    give_biases(source)
    if (settings := SCHEMES[scheme]) is not None:
        ctx = context(folder / "codes", task)
        Quantize()(tiny.artifact(source, task), QuantizeSettings(**settings), ctx)
    ctx = context(folder / "onnx", task)
    settings = OnnxSettings(target=target, dtype=dtype, generation_graph=False)
    subject, reference = captured(parent_in(folder), settings, ctx)
    return Exported(ctx.out, subject, without_exact(reference, dtype), ctx.details)


def parent_in(folder: Path) -> Path:
    codes = folder / "codes"
    return codes if codes.is_dir() else folder / "model"


def without_exact(reference: Any, dtype: str) -> Any:
    """In fp16 the comparison rounds the model's weights: it is no longer what it was before."""
    return replace(reference, exact=None) if dtype == "fp16" else reference


def reopened(folder: Path, family: str, target: str, dtype: str) -> Exported:
    """Return what `export` left in `folder`: the stage runs again, and takes the graphs as they are."""
    from smelt.export.graphs.of_model import _prepare
    from smelt.export.parity import check
    from smelt.export.precision import choose
    from smelt.export.stage import write
    from smelt.export.stage.settings import OnnxSettings

    details = json.loads((folder / "details.json").read_text())

    def take(graph: Any, settings: Any, tokens: Any, ctx: Context, *more: Any) -> Any:
        _prepare(graph, settings.graphs_of)
        shutil.copyfile(folder / "onnx" / f"{graph.name}.onnx", ctx.out / f"{graph.name}.onnx")
        return details["graphs"][graph.name]

    settings = OnnxSettings(target=target, dtype=dtype, generation_graph=False)
    with tempfile.TemporaryDirectory() as out, pytest.MonkeyPatch.context() as patch:
        patch.setattr(write, "_write", take)
        kept = json.loads((folder / "float32.json").read_text())
        patch.setattr(choose, "narrow_graphs", lambda *_: kept)
        patch.setattr(check, "check_graphs", lambda *_: details["parity"])
        found = captured(parent_in(folder), settings, context(Path(out) / "onnx", FAMILIES[family][1]))
    subject = replace(found[0], folder=folder / "onnx")
    return Exported(subject.folder, subject, without_exact(found[1], dtype), details)


def captured(source: Path, settings: Any, ctx: Context) -> tuple[Any, Any]:
    """Run the onnx stage; return what its last comparison was called with."""
    from smelt.export.onnx_stage import Onnx
    from smelt.export.parity import check

    seen: list[Any] = []
    real = check.check_graphs

    def spy(subject: Any, reference: Any) -> Any:
        seen.extend([subject, reference])
        return real(subject, reference)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(check, "check_graphs", spy)
        Onnx()(tiny.artifact(source, ctx.task), settings, ctx)
    return seen[0], seen[1]


def give_biases(folder: Path) -> None:
    """Draw all biases and norms of the model in `folder`: a bias of zeros is missed by nobody."""
    import torch

    from smelt.runtime.models.checkpoint import load_model, save_model

    model, edits = load_model(folder)
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, 0.3)
            elif parameter.dim() == 1:
                parameter.normal_(1, 0.2)
    other = folder.with_name(f"{folder.name}-saved")
    other.mkdir()
    save_model(model, edits, other, folder)
    shutil.rmtree(folder)
    other.rename(folder)

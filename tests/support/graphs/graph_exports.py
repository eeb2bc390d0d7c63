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

import pytest

from smelt.data.splits import Example, Split
from smelt.models.families.registry import FAMILIES as REGISTERED
from smelt.stage import Context
from tests.support import harness
from tests.support.models import causal, classifiers, embedders, every_family, images, seq2seq, tiny
from tests.support.shared_folders import make_once

ROWS = tuple(Example(s, label=0, references=(s,)) for s in tiny.SENTENCES)
ONE_LAYER_PER_STACK: dict[str, Any] = dict.fromkeys(every_family.ENCODER_DECODER_LAYERS, 1)
"""One layer a stack, where no test takes one of two away; a second would only be traced once more."""
ONE_LAYER: dict[str, Any] = {"num_hidden_layers": 1}
_TWO_LAYERS = ("albert", "gemma3_text", "modernbert", "opt", "smollm3")
"""Families whose layers differ, or are one block that is called for each."""


def _exported_family(name: str, tiny_family: every_family.TinyFamily) -> tuple[Callable[[Path], Path], str]:
    """Return the maker of a family's tiny model, and its task."""
    layers = {} if name in _TWO_LAYERS else dict.fromkeys(tiny_family.layers, 1)
    return partial(every_family.write_model, family=name, **layers), REGISTERED[name].tasks[0]


FAMILIES: dict[str, tuple[Callable[[Path], Path], str]] = {
    "marian": (tiny.write_marian, "translation"),
    "t5": (seq2seq.write_t5, "summarization"),
    "bart": (partial(seq2seq.write_bart, **ONE_LAYER_PER_STACK), "summarization"),
    "bert": (classifiers.write_bert, "text-classification"),
    "distilbert": (partial(classifiers.distilbert, n_layers=1), "text-classification"),
    "gpt2": (partial(causal.write_model, family="gpt2", n_embd=64), "language-modeling"),
    "qwen2": (partial(causal.write_model, family="qwen2"), "language-modeling"),
    "roberta": (partial(classifiers.roberta, **ONE_LAYER), "text-classification"),
    "llama": (partial(causal.write_model, family="llama", **ONE_LAYER), "language-modeling"),
    "embedder": (embedders.write_embedder, embedders.TASK),
    "mbart": (partial(seq2seq.write_bart, kind="mbart", **ONE_LAYER_PER_STACK), "translation"),
    **{name: _exported_family(name, tiny_family) for name, tiny_family in every_family.MODELS.items()
       if tiny_family.config},
    **{f: (partial(images.write_model, family=f), images.TASK) for f in images.CONFIGS},
    **{
        f"embedder-{f}": (partial(embedders.write_embedder, family=f), embedders.TASK)
        for f in embedders.FAMILIES[1:]
    },
}  # fmt: skip
SCHEMES: dict[str, dict[str, Any] | None] = {
    "fp32": None, "int8": {}, "static": {"scheme": "int8-static"},
    "symmetric static": {"scheme": "int8-static", "activations_symmetric": True},
    "fp8": {"scheme": "fp8"},
    "nvfp4": {"scheme": "nvfp4"},
    "nvfp4 weights": {"scheme": "nvfp4", "activation_bits": 16, "embeddings": True, "output_layer": True},
    "groupwise": {"scheme": "int8-groupwise", "group_size": 32},
    "int4": {"scheme": "int4", "group_size": 16, "symmetric": False},
    # as TensorRT takes it
    "signed": {"scheme": "int4", "group_size": 64, "symmetric": "positive", "accuracy_level": 0},
    "binary": {"scheme": "binary", "group_size": 32, "embedding_scheme": "binary"},
    "nf4": {"scheme": "bnb-nf4", "embedding_scheme": "bnb-nf4"},
}  # fmt: skip


@dataclass(frozen=True)
class ExportedGraphs:
    """A folder with graphs, and the arguments with which `check_exported_graphs` was called on them."""

    folder: Path
    subject: Any
    reference: Any
    details: dict[str, Any]


def make_context(out: Path, task: str) -> Context:
    """Return what a stage is given that writes to the new folder `out`: sentences as validation data."""
    if task == images.TASK:
        rows = images.read_rows(images.write_rows(out.with_name(f"{out.name}-rows.jsonl")))
    else:
        rows = Split("made", ROWS)
    return harness.make_context(out, task, {"validation": rows, "calibration": rows})


@functools.cache
def exported_graphs(family: str, scheme: str, target: str = "ort-cpu", dtype: str = "fp32") -> ExportedGraphs:
    """Return the graphs of a family in a scheme; read only. One process of a run traces them."""
    traced: list[ExportedGraphs] = []

    def make(folder: Path) -> None:
        traced.append(export_graphs(folder, family, scheme, target, dtype))
        (folder / "details.json").write_text(json.dumps(traced[0].details))
        fp32_modules = {name: sorted(modules) for name, modules in traced[0].subject.fp32_modules.items()}
        (folder / "float32.json").write_text(json.dumps(fp32_modules))

    folder = make_once(f"graphs-{family}-{scheme}-{target}-{dtype}", make)
    return traced[0] if traced else reopen_graphs(folder, family, target, dtype)


def export_graphs(
    folder: Path, family: str, scheme: str, target: str = "ort-cpu", dtype: str = "fp32"
) -> ExportedGraphs:
    """Make the model of a family, code it and trace its graphs, all in the new folder `folder`."""
    from smelt.compress.quantize.stage import Quantize, QuantizeSettings
    from smelt.export.settings import OnnxSettings

    make, task = FAMILIES[family]
    source = make(folder / "model")
    randomize_biases(source)
    if (settings := SCHEMES[scheme]) is not None:
        ctx = make_context(folder / "codes", task)
        Quantize()(tiny.as_artifact(source, task), QuantizeSettings(**settings), ctx)
    ctx = make_context(folder / "onnx", task)
    settings = OnnxSettings(target=target, dtype=dtype, generation_graph=False)
    subject, reference = capture_comparison(exported_model_folder(folder), settings, ctx)
    return ExportedGraphs(ctx.out, subject, drop_exact_reference(reference, dtype), ctx.details)


def exported_model_folder(folder: Path) -> Path:
    codes = folder / "codes"
    return codes if codes.is_dir() else folder / "model"


def drop_exact_reference(reference: Any, dtype: str) -> Any:
    """In fp16 the comparison rounds the model's weights: it is no longer what it was before."""
    return replace(reference, exact_states=None) if dtype == "fp16" else reference


def reopen_graphs(folder: Path, family: str, target: str, dtype: str) -> ExportedGraphs:
    """Return what `export` left in `folder`: the stage runs again, and takes the graphs as they are."""
    from smelt.export import half_graphs, onnx_stage
    from smelt.export.graphs.export_graph import _prepare_layers
    from smelt.export.parity import check_parity
    from smelt.export.settings import OnnxSettings

    details = json.loads((folder / "details.json").read_text())

    def take(graph: Any, settings: Any, tokens: Any, ctx: Context, *more: Any) -> Any:
        _prepare_layers(graph, settings.graph_target)
        shutil.copyfile(folder / "onnx" / f"{graph.name}.onnx", ctx.out / f"{graph.name}.onnx")
        return details["graphs"][graph.name]

    settings = OnnxSettings(target=target, dtype=dtype, generation_graph=False)
    with tempfile.TemporaryDirectory() as out, pytest.MonkeyPatch.context() as patch:
        patch.setattr(onnx_stage, "_write_graph", take)
        fp32_modules = json.loads((folder / "float32.json").read_text())
        patch.setattr(half_graphs, "convert_graphs_to_half", lambda *_: fp32_modules)
        patch.setattr(check_parity, "check_exported_graphs", lambda *_: details["parity"])
        comparison = capture_comparison(
            exported_model_folder(folder), settings, make_context(Path(out) / "onnx", FAMILIES[family][1])
        )
    subject = replace(comparison[0], folder=folder / "onnx")
    return ExportedGraphs(subject.folder, subject, drop_exact_reference(comparison[1], dtype), details)


def capture_comparison(source: Path, settings: Any, ctx: Context) -> tuple[Any, Any]:
    """Run the onnx stage; return what its last comparison was called with."""
    from smelt.export.onnx_stage import Onnx
    from smelt.export.parity import check_parity

    comparisons: list[Any] = []
    real = check_parity.check_exported_graphs

    def spy(subject: Any, reference: Any) -> Any:
        comparisons.extend([subject, reference])
        return real(subject, reference)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(check_parity, "check_exported_graphs", spy)
        Onnx()(tiny.as_artifact(source, ctx.task), settings, ctx)
    return comparisons[0], comparisons[1]


def randomize_biases(folder: Path) -> None:
    """Draw all biases and norms of the model in `folder`: a bias of zeros is missed by nobody."""
    import torch

    from smelt.models.checkpoint import load_model, save_model

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

"""A checkpoint of 16 bits through the stages that change a torch model: what comes out is of 16 bits too."""

import json

import numpy as np
import onnx
import onnx.numpy_helper
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from smelt.compress.distill.settings import DistillSettings
from smelt.compress.distill.stage import Distill
from smelt.compress.factorize.settings import FactorizeSettings
from smelt.compress.factorize.stage import Factorize
from smelt.compress.finetune import Finetune, FinetuneSettings
from smelt.compress.prune.stage import Prune, PruneSettings
from smelt.compress.quantize.stage import Quantize, QuantizeSettings
from smelt.data.splits import Columns, Example, Split
from smelt.export.onnx_stage import Onnx
from smelt.export.settings import OnnxSettings
from smelt.models.checkpoint import load_model, save_model
from smelt.tasks.read_split import read_split
from tests.support import harness
from tests.support.models import causal, seq2seq, tiny
from tests.support.pairs.matrix import matrix_cells

PAIRS = zip(tiny.SENTENCES, tiny.SENTENCES[4:], strict=False)
MADE = {
    "marian": ("translation", tiny.write_marian),
    "t5": ("summarization", seq2seq.write_t5),
    "bert": ("text-classification", tiny.write_bert),
    "gpt2": ("language-modeling", lambda folder: causal.write_model(folder, "gpt2")),
    "llama": ("language-modeling", lambda folder: causal.write_model(folder, "llama")),
}
TEXTS = Split("x", tuple(Example(s, (t,)) for s, t in PAIRS))
LABELS = Split("x", tuple(Example(s, label=i % 2) for i, s in enumerate(tiny.SENTENCES)))
SHORT = {"max_steps": 2, "batch_size": 4, "precision": "fp32", "learning_rate": 1e-3, "num_evals": 1}
STAGES = {
    "prune": (Prune, PruneSettings, {"keep_ratio": 0.5, "importance": "magnitude"}),
    "factorize": (Factorize, FactorizeSettings, {"rank": 4, "optimize_for": "size"}),
    "finetune": (Finetune, FinetuneSettings, SHORT),
    "distill": (Distill, DistillSettings, SHORT),
    "quantize": (Quantize, QuantizeSettings, {"scheme": "int4", "group_size": 16}),
}


def half(folder, dtype):
    path = folder / "model.safetensors"
    save_file({n: t.to(dtype) for n, t in load_file(path).items()}, path, metadata={"format": "pt"})
    return folder


def run(stage, source, task, out, **more):
    stage_type, settings, values = STAGES[stage]
    out.mkdir(parents=True)
    rows = LABELS if task == "text-classification" else TEXTS
    if task == "language-modeling":
        text = causal.write_lines(out.parent / "text.txt", 1)
        rows = read_split(str(text), task, Columns(), out)
    ctx = harness.run_stage(stage_type(), settings(**(values | more)), source, out, task, rows)
    return ctx, load_file(out / "model.safetensors")


@pytest.mark.parametrize(
    ("family", "stage"), matrix_cells(list(MADE), ["prune", "factorize", "finetune", "distill"])
)
def test_stages_keep_16_bit_weights_and_file_size(tmp_path, family, stage):
    task, make = MADE[family]
    dtype = torch.bfloat16 if family in ("bert", "llama") else torch.float16
    source = half(make(tmp_path / "model"), dtype)
    ctx, tensors = run(stage, source, task, tmp_path / "out")
    assert {t.dtype for t in tensors.values()} == {dtype}
    assert json.loads((ctx.out / "config.json").read_text())["dtype"] == str(dtype).removeprefix("torch.")
    sizes = [
        sum(t.nbytes for t in stored.values())
        for stored in (tensors, load_file(source / "model.safetensors"))
    ]
    assert sizes[0] <= sizes[1]
    model, edits = load_model(ctx.out)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    if not edits:
        kind = getattr(transformers, model.config.architectures[0])
        reference = kind.from_pretrained(ctx.out)
        assert reference.dtype == dtype
        state_dict = reference.state_dict()
        assert all(torch.equal(t, state_dict[n].to(dtype)) for n, t in tensors.items())


@pytest.mark.parametrize("stage", ["prune", "factorize", "finetune", "distill"])
def test_output_dtype_can_be_set(tmp_path, stage):
    source = half(tiny.write_marian(tmp_path / "model"), torch.float16)
    for dtype_name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        _, tensors = run(stage, source, "translation", tmp_path / dtype_name, dtype=dtype_name)
        assert {t.dtype for t in tensors.values()} == {dtype}


@pytest.mark.parametrize("scheme", ["int8-dynamic", "int4", "binary"])
def test_float_weights_of_quantized_model_keep_16_bits(tmp_path, scheme):
    source = half(tiny.write_marian(tmp_path / "model"), torch.float16)
    options = {} if scheme == "int8-dynamic" else {"group_size": 32}
    STAGES["quantize"] = (Quantize, QuantizeSettings, {"scheme": scheme, **options})
    ctx, tensors = run("quantize", source, "translation", tmp_path / "out")
    before = load_file(source / "model.safetensors")
    floats = {n: t for n, t in tensors.items() if t.is_floating_point() and not n.endswith(".scales")}
    assert {t.dtype for t in floats.values()} == {torch.float16}
    assert all(torch.equal(t, before[n]) for n, t in floats.items())
    rows = {t.dtype for n, t in tensors.items() if n.endswith("layers.0.fc1.matrix.scales")}
    assert rows == {torch.float32 if scheme == "int8-dynamic" else torch.float16}
    files = [(folder / "model.safetensors").stat().st_size for folder in (source, ctx.out)]
    assert [ctx.details["bytes_before"], ctx.details["bytes_after"]] == files
    trained, stored = run("finetune", ctx.out, "translation", tmp_path / "trained")
    assert {n: t.dtype for n, t in stored.items()} == {n: t.dtype for n, t in tensors.items()}
    assert "rounding" in trained.details["training"]  # of biases and norms, which are no codes


def test_onnx_graph_does_not_depend_on_stored_dtype(tmp_path):
    """The export computes in float32, whatever the checkpoint is stored in."""
    source, task = half(tiny.write_bert(tmp_path / "model"), torch.float16), "text-classification"
    (tmp_path / "wide").mkdir()
    model, edits = load_model(source)
    save_model(model, edits, tmp_path / "wide", source, "fp32")
    graphs = []
    for folder in (source, tmp_path / "wide"):
        out = tmp_path / f"onnx-{folder.name}"
        harness.run_stage(Onnx(), OnnxSettings(simplify=False), folder, out, task, {"validation": LABELS})
        graphs.append({p.name: onnx.load(p).graph.initializer for p in sorted(out.glob("*.onnx"))})
    assert graphs[0].keys() == graphs[1].keys()
    for name, tensors in graphs[0].items():
        wide = [onnx.numpy_helper.to_array(t) for t in graphs[1][name]]
        narrow = [onnx.numpy_helper.to_array(t) for t in tensors]
        assert {a.dtype for a in narrow} == {a.dtype for a in wide}
        assert all(np.array_equal(a, b) for a, b in zip(narrow, wide, strict=True))
        assert np.float16 not in {a.dtype.type for a in narrow}

"""Every family of models leaves as graphs of which a real TensorRT builder makes engines.

Export and profiles as in a recipe; the engines are built on the rig (tests/support/tensorrt_rig.py).
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import causal
import classifiers
import families
import pytest
import tensorrt_rig
import tiny

from smelt.core.artifact import Artifact
from smelt.core.data import Example, Split, Task
from smelt.core.stage import Context
from smelt.export.onnx_stage import Onnx, OnnxSettings
from smelt.export.tensorrt_stage import TensorrtSettings, dimension_ranges, plan_graphs

ROWS = tuple(Example(s, label=0, references=(tiny.SENTENCES[i - 1],)) for i, s in enumerate(tiny.SENTENCES))
BYTES = {"fp32": 4, "fp16": 2}
Case = tuple[Callable[[Path], Path], Task, str, int]
# how a tiny model is made, its task, the precision, and how many graphs it leaves as
CASES: dict[str, Case] = {
    "marian": (tiny.marian, "translation", "fp32", 2),
    "t5": (families.t5, "summarization", "fp32", 2),
    "roberta": (classifiers.roberta, "text-classification", "fp16", 1),
    "gpt2": (lambda folder: causal.model(folder, "gpt2"), "language-modeling", "fp32", 1),
    "llama": (lambda folder: causal.model(folder, "llama"), "language-modeling", "fp16", 1),
}


def context(out: Path, task: Task) -> Context:
    data = {"validation": Split("made", ROWS)}
    return Context(out=out, task=task, data=data, seed=0, ancestors={}, score=lambda artifact: {}, threads=1)


@pytest.mark.parametrize("family", CASES)
def test_engines_of_the_family_are_built(family: str, tmp_path: Path) -> None:
    tensorrt_rig.require()
    make, task, dtype, graphs = CASES[family]
    (tmp_path / "model").mkdir()
    source: Artifact = tiny.artifact(make(tmp_path / "model"), task)
    out = tmp_path / "onnx"
    out.mkdir()
    ctx = context(out, task)
    Onnx()(source, OnnxSettings(target="tensorrt", dtype=dtype), ctx)
    settings = TensorrtSettings(max_batch_size=4, max_new_tokens=12)
    ranges, limit = dimension_ranges(out, settings, ctx)
    shapes = plan_graphs(out, ranges, limit, ctx.warnings)
    assert len(shapes) == graphs
    assert all(
        min(least) in (0, 1) and max(most) > 1
        for graph in shapes.values()
        for least, _, most in graph.values()
    )
    for path, answer in zip(shapes, tensorrt_rig.build_all(shapes), strict=True):
        assert answer.get("bytes", 0) > weights(path, BYTES[dtype]), answer
        assert not [line for line in answer["warnings"] if "profile" in line]


def weights(path: Path, width: int) -> int:
    """Return the bytes of the floating initializers of a graph, each of `width` bytes a number."""
    import onnx

    initializers: Any = onnx.load(path).graph.initializer
    kinds = {onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16}
    return sum(width * len(t.raw_data) // width for t in initializers if t.data_type in kinds)

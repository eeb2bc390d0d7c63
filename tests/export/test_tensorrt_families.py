"""Every family of models leaves as graphs of which a real TensorRT builder makes engines.

Export and profiles as in a recipe; the engines are built on the rig (tests/support/tensorrt_rig.py).
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import causal
import classifiers
import families
import onnx
import pytest
import tensorrt_rig
import tiny

from smelt.core.artifact import Artifact
from smelt.core.data import Example, Split, Task
from smelt.core.stage import Context
from smelt.export.half import to_half
from smelt.export.onnx_stage import Onnx, OnnxSettings
from smelt.export.tensorrt_profile import Shapes
from smelt.export.tensorrt_stage import TensorrtSettings, dimension_ranges, plan_graphs

ROWS = tuple(Example(s, label=0, references=(tiny.SENTENCES[i - 1],)) for i, s in enumerate(tiny.SENTENCES))
Case = tuple[Callable[[Path], Path], Task, int]
# how a tiny model is made, its task, and how many graphs it leaves as
CASES: dict[str, Case] = {
    "marian": (tiny.marian, "translation", 2),
    "t5": (families.t5, "summarization", 2),
    "roberta": (classifiers.roberta, "text-classification", 1),
    "gpt2": (lambda folder: causal.model(folder, "gpt2"), "language-modeling", 1),
    "llama": (lambda folder: causal.model(folder, "llama"), "language-modeling", 1),
}


def context(out: Path, task: Task) -> Context:
    data = {"validation": Split("made", ROWS)}
    return Context(out=out, task=task, data=data, seed=0, ancestors={}, score=lambda artifact: {}, threads=1)


@pytest.mark.parametrize("family", CASES)
def test_engines_of_the_family_are_built_in_both_precisions(family: str, tmp_path: Path) -> None:
    tensorrt_rig.require()
    make, task, count = CASES[family]
    (tmp_path / "model").mkdir()
    source: Artifact = tiny.artifact(make(tmp_path / "model"), task)
    out = tmp_path / "onnx"
    out.mkdir()
    ctx = context(out, task)
    Onnx()(source, OnnxSettings(target="tensorrt"), ctx)
    graphs = planned(out, ctx)
    assert len(graphs) == count
    for name in [path.name for path in graphs]:  # as `dtype: fp16` does
        model = onnx.load(out / name)
        to_half(model, name)
        onnx.save(model, out / name.replace(".onnx", "-half.onnx"))
    graphs = planned(out, ctx)
    assert len(graphs) == 2 * count
    assert ctx.warnings == []
    for path, answer in zip(graphs, tensorrt_rig.build_all(graphs), strict=True):
        assert answer.get("bytes", 0) > weights(path), (path.name, answer)
        assert not [line for line in answer["warnings"] if "profile" in line]


def planned(folder: Path, ctx: Context) -> dict[Path, Shapes]:
    """Return the graphs that passed the preflight, with the shapes to build each for."""
    ranges, limit = dimension_ranges(folder, TensorrtSettings(max_batch_size=4, max_new_tokens=12), ctx)
    return plan_graphs(folder, ranges, limit, ctx.warnings)


def weights(path: Path) -> int:
    """Return the bytes of the floating initializers of a graph."""
    initializers: Any = onnx.load(path).graph.initializer
    kinds = {onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16}
    return sum(len(t.raw_data) for t in initializers if t.data_type in kinds)

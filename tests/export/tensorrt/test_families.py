"""Every family of models leaves as graphs of which a real TensorRT builder makes engines.

Export and profiles as in a recipe; the engines are built on the rig (tests/support/tensorrt_rig.py).
"""

from pathlib import Path
from typing import Any

import onnx
import pytest
import tensorrt_graphs
import tensorrt_rig

from smelt.export.tensorrt.profile import Shapes
from smelt.export.tensorrt.stage import TensorrtSettings, dimension_ranges, plan_graphs


@pytest.mark.parametrize("family", tensorrt_graphs.FAMILIES)
def test_engines_of_the_family_are_built_in_both_precisions(family: str, tmp_path: Path) -> None:
    tensorrt_rig.require()
    _, _, count = tensorrt_graphs.FAMILIES[family]
    whole = planned(family, tensorrt_graphs.exported(family))
    half = planned(family, tensorrt_graphs.copy(family, tmp_path / "half", half=True))
    assert (len(whole), len(half)) == (count, count)
    graphs = whole | half
    for path, answer in zip(graphs, tensorrt_rig.build_all(graphs), strict=True):
        assert answer.get("bytes", 0) > weights(path), (path.name, answer)
        assert not [line for line in answer["warnings"] if "profile" in line]
    assert weights(next(iter(half))) < 0.6 * weights(next(iter(whole)))


def planned(family: str, folder: Path) -> dict[Path, Shapes]:
    """Return the graphs that passed the preflight, with the shapes to build each for."""
    ctx = tensorrt_graphs.context(folder, tensorrt_graphs.FAMILIES[family][1])
    ranges, limit = dimension_ranges(folder, TensorrtSettings(max_batch_size=4, max_new_tokens=12), ctx)
    shapes = plan_graphs(folder, ranges, limit, ctx.warnings)
    assert ctx.warnings == []
    return shapes


def weights(path: Path) -> int:
    """Return the bytes of the floating initializers of a graph."""
    initializers: Any = onnx.load(path).graph.initializer
    kinds = {onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16}
    return sum(len(t.raw_data) for t in initializers if t.data_type in kinds)

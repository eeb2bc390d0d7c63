"""float16 where it holds the values, float32 where it does not."""

from pathlib import Path
from typing import Any

import foreign_graphs as graphs
import harness
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from smelt.core.data import split_of
from smelt.core.rows.arrays import Arrays
from smelt.export.foreign.fp16 import Fp16, Fp16Settings


def run(folder: Path, model: Any, **settings: Any) -> Any:
    source = graphs.artifact(folder / "src", model)
    data = {"calibration": graphs.split()}
    return harness.run(Fp16(), Fp16Settings(**settings), source, folder / "out", data=data)


def types(folder: Path) -> dict[str, int]:
    return {t.name: t.data_type for t in onnx.load(folder / "out/model.onnx").graph.initializer}


def test_weights_are_float16_and_what_goes_in_and_out_float32(tmp_path: Path) -> None:
    ctx = run(tmp_path, graphs.two_layers(width=64))
    model = onnx.load(tmp_path / "out/model.onnx")
    ends = [v.type.tensor_type.elem_type for v in (*model.graph.input, *model.graph.output)]
    assert ends == [TensorProto.FLOAT] * 2
    assert set(types(tmp_path).values()) == {TensorProto.FLOAT16}
    rows = graphs.split(seed=9)
    got, wanted = (graphs.classes(tmp_path / side / "model.onnx", rows) for side in ("out", "src"))
    assert 0 < np.abs(got - wanted).max() / wanted.std() < 0.01
    assert (ctx.facts["dtype"], ctx.facts["kept_float32"], ctx.warnings) == ("fp16", 0, [])


def test_what_would_overflow_stays_float32(tmp_path: Path) -> None:
    """The first layer gives values of a million, the second brings them back."""
    model = graphs.two_layers()
    for tensor, factor in ((model.graph.initializer[0], 1e6), (model.graph.initializer[2], 1e-6)):
        tensor.CopyFrom(
            numpy_helper.from_array(numpy_helper.to_array(tensor) * np.float32(factor), tensor.name)
        )
    ctx = run(tmp_path, model)
    rows = graphs.split(seed=9)
    got, wanted = (graphs.classes(tmp_path / side / "model.onnx", rows) for side in ("out", "src"))
    assert np.abs(got - wanted).max() / wanted.std() < 0.01
    assert ctx.facts["kept_float32"] >= 3
    assert "stay float32, with values that float16" in ctx.warnings[0]
    assert types(tmp_path)["b2"] == TensorProto.FLOAT16


def test_operators_that_are_named_stay_float32(tmp_path: Path) -> None:
    run(tmp_path, graphs.two_layers(), keep=["MatMul"])
    assert types(tmp_path)["w1"] == TensorProto.FLOAT
    assert types(tmp_path)["b1"] == TensorProto.FLOAT16


def test_whole_numbers_may_change_and_are_told(tmp_path: Path) -> None:
    """A map of labels has some at every border that float16 chooses otherwise; that is no broken graph."""
    ctx = run(tmp_path, graphs.with_whole_numbers())
    assert ctx.facts["parity"]["relative"] < 0.01
    assert any("of the whole numbers or texts that it gives are others" in text for text in ctx.warnings)


@pytest.mark.parametrize("opset", [11, 13, 17, 18])
@pytest.mark.parametrize("operator", ["ReduceMean", "ReduceSum", "ReduceL2"])
def test_reductions_with_axes_as_attribute_and_as_input(tmp_path: Path, opset: int, operator: str) -> None:
    """A mean has its axes as an input from opset 18 on, a sum from 13 on: the bound of a mean is a sum."""
    given = opset >= (13 if operator == "ReduceSum" else 18)
    weights = [numpy_helper.from_array(np.eye(8, dtype=np.float32), "w")]
    weights += [numpy_helper.from_array(np.array([-1]), "axes")] if given else []
    attributes = {} if given else {"axes": [-1]}
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["m"], "m"),
        helper.make_node(operator, ["m", "axes"] if given else ["m"], ["y"], "r", **attributes),
    ]
    x, y = graphs.value("x", ["N", 8]), graphs.value("y", ["N", 1])
    model = graphs.model_of(nodes, [x], [y], weights, opset=opset)
    source = graphs.artifact(tmp_path / "src", model)
    large = np.full((4, 8), 30_000.0, np.float32)  # whose sums float16 does not hold
    for rows, kept in ((np.ones((4, 8), np.float32), 0), (large, 1)):
        data = {"calibration": split_of("rows.npz", Arrays({"x": rows}, len(rows)))}
        ctx = harness.run(Fp16(), Fp16Settings(), source, tmp_path / f"out{kept}", data=data)
        assert bool(ctx.facts["kept_float32"]) == bool(kept)
        assert ctx.facts["parity"]["relative"] < 0.01

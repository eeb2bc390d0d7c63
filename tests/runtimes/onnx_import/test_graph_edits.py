"""A branch that is always taken stands in the place of its If, under names that no other branch has."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from smelt.runtimes.onnx_import.convert_optimum import resolve_if_branch
from tests.support.graphs import imported_graphs as graphs

pytestmark = pytest.mark.quick


def branch(operator: str, number: float, out: str) -> Any:
    """A graph that computes `x operator number`; its names are those of other branches, and of the If."""
    weight = numpy_helper.from_array(np.float32(number), "w")
    nodes = [helper.make_node(operator, ["x", "w"], ["t"], "n"), helper.make_node("Abs", ["t"], [out], "m")]
    return helper.make_graph(nodes, operator, [], [graphs.value_info(out, ["N"])], [weight])


def choosing() -> Any:
    """Two Ifs one after another that one input chooses for."""
    nodes = [
        helper.make_node(
            "If", ["flag"], ["y"], "a", then_branch=branch("Add", 1, "y"), else_branch=branch("Sub", 3, "y")
        ),
        helper.make_node(
            "If", ["flag"], ["z"], "b", then_branch=branch("Mul", 2, "z"), else_branch=branch("Div", 4, "z")
        ),
        helper.make_node("Sum", ["y", "z"], ["out"], "sum"),
    ]
    inputs = [graphs.value_info("flag", [1], TensorProto.BOOL), graphs.value_info("x", ["N"])]
    return graphs.make_model(nodes, inputs, [graphs.value_info("out", ["N"])])


@pytest.mark.parametrize(("flag", "expected"), [(True, [7.0, 10.0]), (False, [1.5, 0.75])])
def test_extracted_graph_computes_the_branch(flag: bool, expected: list[float], tmp_path: Path) -> None:
    from smelt.runtimes.onnx_session import open_onnx_session

    full_model = choosing()
    branch = resolve_if_branch(full_model.graph, "flag", flag)
    assert [i.name for i in branch.input] == ["x"]
    assert "If" not in {node.op_type for node in branch.node}
    branch_model = helper.make_model(
        branch, opset_imports=list(full_model.opset_import), ir_version=full_model.ir_version
    )
    x = np.array([2.0, 3.0], np.float32)
    feeds = {"x": x, "flag": np.array([flag])}
    for model in (full_model, branch_model):
        session = open_onnx_session(graphs.save_model(model, tmp_path / "m.onnx"), 1)
        names = {i.name for i in session.get_inputs()}
        actual = session.run(None, {name: feeds[name] for name in names})[0]
        np.testing.assert_allclose(actual, expected)

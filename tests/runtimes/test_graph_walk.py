"""Walks follow both kinds of inner graphs, at every depth."""

import numpy as np
import pytest
from onnx import AttributeProto, helper, numpy_helper

from smelt.runtimes.graph_walk import all_nodes, iter_graphs, iter_initializers, node_inputs, opset_versions

pytestmark = pytest.mark.quick


def body(name, nodes):
    weight = numpy_helper.from_array(np.ones(1, np.float32), f"w.{name}")
    return helper.make_graph(nodes, name, [], [helper.make_tensor_value_info("y", 1, [1])], [weight])


def test_graphs_in_both_kinds_of_attributes_are_walked():
    add = helper.make_node("Add", ["outer", "w.inner"], ["y"], "add")
    relu = helper.make_node("Relu", ["other"], ["y"], "relu")
    several = helper.make_node("Several", ["x"], ["z"], "several", domain="test")
    attribute = AttributeProto(name="bodies", type=AttributeProto.GRAPHS)
    attribute.graphs.extend([body("inner", [add]), body("second", [relu])])
    several.attribute.append(attribute)
    nested = body("whole", [helper.make_node("If", ["c"], ["y"], "if", then_branch=body("then", [several]))])
    assert [graph.name for graph in iter_graphs(nested)] == ["whole", "then", "inner", "second"]
    assert {node.name for node in all_nodes(nested.node)} == {"if", "several", "add", "relu"}
    names = ["w.whole", "w.then", "w.inner", "w.second"]
    assert [tensor.name for tensor in iter_initializers(nested)] == names
    assert node_inputs(nested.node[0]) == {"c", "x", "y", "outer", "other"}


@pytest.mark.parametrize("domain", ["", "ai.onnx"])
def test_both_names_of_the_standard_domain_are_equal(domain):
    sets = [helper.make_opsetid("com.microsoft", 1), helper.make_opsetid(domain, 20)]
    model = helper.make_model(body("g", []), opset_imports=sets)
    assert opset_versions(model) == {"": 20, "com.microsoft": 1}

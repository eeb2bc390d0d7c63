"""What a quantizer left float is told with its size and who reads it."""

import numpy as np
from onnx import TensorProto, numpy_helper

from smelt.runtimes.onnx_import.float_matrices import float_matrices_message
from tests.support.graphs import imported_graphs as graphs


def test_float_matrices_are_counted_and_largest_is_named() -> None:
    model = graphs.two_layer_classifier(width=256)
    message = float_matrices_message([model])
    assert message is not None
    assert message.startswith("2 ")
    assert message.index("'w1' of MatMul 'first' (0.00819 MB)") < message.index("'w2' of MatMul 'second'")


def test_matrix_that_is_stored_several_times_is_counted_once() -> None:
    model = graphs.two_layer_classifier(width=256)
    copy = model.graph.initializer.add()
    copy.CopyFrom(next(tensor for tensor in model.graph.initializer if tensor.name == "w1"))
    copy.name = "w1.copy"
    model.graph.node.add(op_type="MatMul", input=["x", "w1.copy"], output=["again"])
    message = float_matrices_message([model])
    assert message is not None
    assert message.startswith("2 ")
    assert message == float_matrices_message([model, model])


def test_quantized_weights_vectors_and_unused_tensors_are_not_counted() -> None:
    model = graphs.two_layer_classifier()
    for tensor in model.graph.initializer:
        if len(tensor.dims) > 1:
            tensor.CopyFrom(numpy_helper.from_array(np.zeros(tuple(tensor.dims), np.int8), tensor.name))
    assert float_matrices_message([model]) is None
    model.graph.initializer.add(name="lonely", data_type=TensorProto.FLOAT, dims=[100, 100])
    assert float_matrices_message([model]) is None


def test_scales_of_blocks_are_not_counted() -> None:
    model = graphs.two_layer_classifier()
    for tensor in list(model.graph.initializer):
        if len(tensor.dims) > 1:
            codes = np.zeros(tuple(tensor.dims), np.int8)
            model.graph.initializer.append(numpy_helper.from_array(codes, f"{tensor.name}.codes"))
            model.graph.node.add(
                op_type="DequantizeLinear",
                input=[f"{tensor.name}.codes", tensor.name],
                output=["d" + tensor.name],
            )
    del model.graph.node[:6]
    assert float_matrices_message([model]) is None

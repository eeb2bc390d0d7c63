"""Small graphs in a session of ONNX Runtime."""

from __future__ import annotations

from typing import Any

from onnx import helper


def ort_session(nodes: Any, inputs: Any, outputs: Any, initializers: Any = ()) -> Any:
    """Open a graph of `nodes`; inputs and outputs are pairs of name and type."""
    import onnxruntime

    from smelt.runtime.backends.onnx_session import session_options

    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info(n, t, None) for n, t in inputs],
        [helper.make_tensor_value_info(n, t, None) for n, t in outputs],
        list(initializers),
    )
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    return onnxruntime.InferenceSession(
        model.SerializeToString(), session_options(), providers=["CPUExecutionProvider"]
    )

"""Small graphs in a session of ONNX Runtime, and what its int8 products can do on this processor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from onnx import helper

from smelt.runtimes.onnx_session import lacks_vnni, session_options

HAS_NO_VNNI = lacks_vnni(Path("/proc/cpuinfo"))
# docs/reference/stages/quantize.md#int8-dynamic says what that means for a user
needs_vnni = pytest.mark.skipif(
    HAS_NO_VNNI,
    reason="without VNNI ONNX Runtime 1.31 and OpenVINO 2026 add pairs of int8 products in 16 bits",
)


def ort_session(nodes: Any, inputs: Any, outputs: Any, initializers: Any = ()) -> Any:
    """Open a graph of `nodes`; inputs and outputs are pairs of name and type."""
    import onnxruntime

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

"""Files of half precision are opened in the runtime that they are for, which knows what an operator takes."""

import pytest
from onnx import TensorProto, helper

from smelt.core.errors import ParityError
from smelt.export.parity.check_parity import _require_opens
from tests.support.graphs import imported_graphs


@pytest.mark.parametrize(("operator", "opset", "target", "opens"), [
    ("Sin", 20, "ort-cuda", False),  # takes bfloat16 from opset 22 on
    ("Sin", 22, "ort-cuda", True),  # that a CPU has no kernel for it says nothing of a GPU
    ("Relu", 17, "ort-cuda", True), ("Relu", 17, "ort-cpu", False), ("Relu", 17, "openvino", True),
])  # fmt: skip
def test_bfloat16_graph_is_opened_for_its_target(tmp_path, operator, opset, target, opens):
    ends = [[imported_graphs.value_info(name, [2, 2], TensorProto.BFLOAT16)] for name in "xy"]
    model = imported_graphs.make_model([helper.make_node(operator, ["x"], ["y"])], *ends, opset=opset)
    path = imported_graphs.save_model(model, tmp_path / "model.onnx")
    if opens:
        _require_opens(path, target)
        return
    with pytest.raises(ParityError) as error:
        _require_opens(path, target)
    assert error.value.code == "unopened-graph"

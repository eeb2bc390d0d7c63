import re

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper

from smelt.core.errors import ParityError
from smelt.export import graph_files
from smelt.export.parity.references import check_constants
from tests.support.expected_errors import raises_code


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = torch.nn.Linear(300, 2)
        self.register_buffer("table", torch.arange(6.0).reshape(2, 3), persistent=False)


def graph(module, **other):
    """A graph that holds the module's tensors under their names; `other` replaces some."""
    tensors = {"fc.weight": module.fc.weight, "fc.bias": module.fc.bias, "table": module.table}
    values = {name: t.detach().numpy().copy() for name, t in tensors.items()} | {
        "val_1": np.ones(3, np.float32)
    }
    values |= {name.replace("_dot_", "."): value for name, value in other.items()}
    node = helper.make_node("Gemm", ["x", "fc.weight", "fc.bias"], ["y"], "product", transB=1)
    signature = [helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in "xy"]
    constants = [numpy_helper.from_array(v, n) for n, v in values.items()]
    return helper.make_model(helper.make_graph([node], "g", signature[:1], signature[1:], constants))


def test_named_constants_are_compared_bitwise(tmp_path):
    module = Layer()
    assert check_constants("model", graph(module), module, tmp_path) == 3
    bias = module.fc.bias.detach().numpy().copy()
    bias[1] = np.nextafter(bias[1], np.float32(9))
    with raises_code("constant-mismatch", ParityError) as excinfo:
        check_constants("model", graph(module, fc_dot_bias=bias), module, tmp_path)
    assert excinfo.value.file == "model.onnx"
    assert "'fc.bias'" in str(excinfo.value)
    assert "'product' (Gemm)" in str(excinfo.value)
    assert re.search(r"\bfc\b(?!\.)", str(excinfo.value))  # the layer
    assert "1 of 2 " in str(excinfo.value)
    with raises_code("constant-mismatch", ParityError) as excinfo:
        check_constants("model", graph(module, table=module.table.numpy() + 1), module, tmp_path)
    assert "'table'" in str(excinfo.value)
    assert "6 of 6 " in str(excinfo.value)


def test_half_constants_are_compared_with_rounded_tensors(tmp_path):
    module = Layer()
    weight = module.fc.weight.detach().numpy().astype(np.float16)
    assert check_constants("model", graph(module, fc_dot_weight=weight), module, tmp_path) == 3
    with raises_code("constant-mismatch", ParityError) as excinfo:
        check_constants("model", graph(module, fc_dot_weight=weight * 2), module, tmp_path)
    assert "'fc.weight'" in str(excinfo.value)


def test_reshaped_constants_are_not_compared(tmp_path):
    module = Layer()
    transposed = np.ascontiguousarray(module.fc.weight.detach().numpy().T)
    assert check_constants("model", graph(module, fc_dot_weight=transposed), module, tmp_path) == 2


def test_external_weights_are_compared(tmp_path, monkeypatch):
    monkeypatch.setattr(graph_files, "MAX_INLINE_BYTES", 100)
    module = Layer()
    graph_files.write_graph(graph(module), tmp_path / "model.onnx")
    model = onnx.load(tmp_path / "model.onnx", load_external_data=False)
    assert check_constants("model", model, module, tmp_path) == 3
    with torch.no_grad():
        module.fc.weight[1, 7] += 1
    with raises_code("constant-mismatch", ParityError) as excinfo:
        check_constants("model", model, module, tmp_path)
    assert "'fc.weight'" in str(excinfo.value)
    assert "1 of 600 " in str(excinfo.value)

"""Graphs in opsets before 18, which torch does not export, for older runtimes."""

from contextlib import nullcontext

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import layer_norm as builtin_layer_norm
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.functional import layer_norm

from smelt.core.errors import InputError
from smelt.export.lower_opset import elementwise_layer_norms, lower_opset
from smelt.export.onnx_stage import Onnx, required_opset
from smelt.export.settings import OnnxSettings
from tests.support.expected_errors import raises_code
from tests.support.models import every_family

OPSETS = (13, 15, 17)


@pytest.mark.parametrize("opset", OPSETS)
@pytest.mark.parametrize("family", ["bert", "llama"])
def test_exported_graph_has_the_opset_and_equals_its_model(family, opset, tmp_path):
    source = every_family.model_with_layers(family, 1)
    settings = OnnxSettings(target="tensorrt", opset=opset)
    ctx = every_family.run_stage(Onnx(), settings, source, family, tmp_path / "out")
    model = onnx.load(ctx.out / "model.onnx")
    assert [(item.domain, item.version) for item in model.opset_import] == [("", opset)]
    assert model.ir_version == helper.find_min_ir_version_for(model.opset_import)
    used = {node.op_type for node in model.graph.node}
    assert ("LayerNormalization" in used) == (family == "bert" and opset == 17)
    assert ctx.details["parity"]["model"]["largest"] < 1e-4
    assert ctx.details["opset"] == opset


def graph_of(nodes, inputs, output, constants=(), shape=None):
    values = [helper.make_tensor_value_info(n, TensorProto.FLOAT, shape) for n, shape in inputs.items()]
    kind = TensorProto.INT64 if output == "shape" else TensorProto.FLOAT
    graph = helper.make_graph(
        nodes, "g", values, [helper.make_tensor_value_info(output, kind, shape)], list(constants)
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)


def run(model, feeds):
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, feeds)[0]


X = np.arange(24, dtype=np.float32).reshape(2, 3, 4) + 1
AXES = numpy_helper.from_array(np.array([-1]), "axes")
NO_AXES = numpy_helper.from_array(np.array([], dtype=np.int64), "no_axes")
CHANGED = {
    "split": [helper.make_node("Split", ["x"], ["a", "y"], "n", axis=2, num_outputs=2)],
    "uneven": [helper.make_node("Split", ["x"], ["a", "y"], "n", axis=-2, num_outputs=2)],
    "all": [helper.make_node("ReduceMean", ["x"], ["y"], "n", keepdims=0, noop_with_empty_axes=0)],
    "empty": [helper.make_node("ReduceMean", ["x", "no_axes"], ["y"], "n", keepdims=0)],
    "noop": [helper.make_node("ReduceMean", ["x", "axes"], ["y"], "n", noop_with_empty_axes=1)],
    "mean": [helper.make_node("ReduceMean", ["x", "axes"], ["y"], "n", keepdims=0, noop_with_empty_axes=0)],
    "max": [helper.make_node("ReduceMax", ["x", "axes"], ["y"], "n", keepdims=1)],
    "shape": [helper.make_node("Shape", ["x"], ["shape"], "n", start=1, end=2)],
    "last": [helper.make_node("Shape", ["x"], ["shape"], "n", start=-1)],
}


@pytest.mark.quick
@pytest.mark.parametrize("name", CHANGED)
def test_changed_forms_compute_the_same(name):
    output = "shape" if name in ("shape", "last") else "y"
    constants = [AXES, NO_AXES]
    model = graph_of(CHANGED[name], {"x": list(X.shape)}, output, constants)
    expected = run(model, {"x": X})
    model = graph_of(CHANGED[name], {"x": list(X.shape)}, output, constants, expected.shape)
    lower_opset(model, 13, "model")
    onnx.checker.check_model(model, full_check=True)
    assert model.opset_import[0].version == 13
    np.testing.assert_array_equal(run(model, {"x": X}), expected)


@pytest.mark.quick
@pytest.mark.parametrize("node", [
    helper.make_node("LayerNormalization", ["x", "scale"], ["y"], "late"),  # from opset 17 on
    helper.make_node("Trilu", ["x"], ["y"], "late"),  # 14
    helper.make_node("ReduceMean", ["x", "given"], ["y"], "late"),  # computed axes: 18
    helper.make_node("ScatterND", ["x", "i", "u"], ["y"], "late", reduction="add"),  # 16
    helper.make_node("ReduceMean", ["x"], ["y"], "late", noop_with_empty_axes=1),  # 18
    helper.make_node("Split", ["unknown"], ["y", "z"], "late", num_outputs=2),  # 18, parts of unknown sizes
    helper.make_node("Relu", ["integers"], ["y"], "late"),  # 14
    helper.make_node("Add", ["bytes", "bytes"], ["y"], "late"),  # 14
])  # fmt: skip
def test_node_of_a_later_opset_is_an_error_with_its_name(node):
    constants = [
        numpy_helper.from_array(np.ones(2, np.int32), "integers"),
        numpy_helper.from_array(np.ones(2, np.int8), "bytes"),
    ]
    model = graph_of([node], {"x": [2, 3]}, "y", constants)
    with raises_code("opset-too-low", InputError) as error:
        lower_opset(model, 13, "model")
    assert "'late'" in str(error.value)
    assert error.value.setting == "opset"


class NormOfChannels(nn.LayerNorm):
    def forward(self, x):
        return super().forward(x.movedim(1, -1)).movedim(-1, 1)


class NormWithWeightPlusOne(nn.LayerNorm):
    def forward(self, x):
        weight = self.weight + 1
        return nn.functional.layer_norm(x, self.normalized_shape, weight, bias=self.bias, eps=self.eps)


class NormByImportedName(nn.LayerNorm):
    def forward(self, x):
        return layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)


class NormByBuiltin(nn.LayerNorm):
    def forward(self, x):
        return builtin_layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)


@pytest.mark.quick
@pytest.mark.parametrize(
    "norm_type", [nn.LayerNorm, NormOfChannels, NormWithWeightPlusOne, NormByImportedName, NormByBuiltin]
)
def test_layer_norm_of_elementwise_operators_equals_torch(norm_type):
    torch.manual_seed(0)
    norm, x = norm_type(6, eps=1e-3), torch.randn(2, 6, 6)
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    expected = norm(x)
    with elementwise_layer_norms(16):
        torch.testing.assert_close(norm(x), expected)
        operators = [str(node.target) for node in make_fx(norm)(x).graph.nodes]
        assert not [name for name in operators if "layer_norm" in name]
    for context in (elementwise_layer_norms(17), nullcontext()):  # and no longer after the block
        with context:
            operators = [str(node.target) for node in make_fx(norm)(x).graph.nodes]
        assert [name for name in operators if "layer_norm" in name]


@pytest.mark.parametrize("eps", [1e-12, 1e-5])
def test_exported_layer_norm_of_equal_values_is_its_bias(eps):
    """A variance of 0 divides by 0 where an optimizer drops a small epsilon."""
    torch.manual_seed(0)
    norm = nn.LayerNorm(6, eps=eps).eval()
    nn.init.normal_(norm.bias)
    x = torch.randn(3, 6)
    x[0] = 1
    x[1] *= eps**0.5  # a variance that is close to epsilon
    expected = norm(x).detach().numpy()
    with elementwise_layer_norms(13):
        model = torch.onnx.export(norm, (x,), None, dynamo=True, verbose=False, opset_version=18).model_proto
    lower_opset(model, 13, "model")
    result = run(model, {model.graph.input[0].name: x.numpy()})
    np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.quick
def test_operators_of_a_newer_opset_are_refused_where_an_old_one_was_set():
    module = nn.Linear(2, 2)
    with raises_code("opset-too-low", InputError):
        required_opset(OnnxSettings(target="tensorrt", dtype="bf16", opset=17), module)
    assert required_opset(OnnxSettings(target="tensorrt", dtype="bf16"), module) == 22
    assert required_opset(OnnxSettings(target="tensorrt", opset=17), module) == 17


@pytest.mark.quick
@pytest.mark.parametrize(
    ("layer", "settings", "expected"),
    [
        (nn.ReLU(), {}, 23),
        (nn.MaxPool2d(2), {}, 20),
        (nn.InstanceNorm2d(2), {}, 20),
        (nn.MaxPool2d(2), {"dtype": "bf16"}, 22),
    ],
)
def test_layers_without_newer_cuda_kernels_keep_the_opset_of_the_settings(layer, settings, expected):
    """In a newer one the CPU would compute them, with copies of their inputs and outputs."""
    module = nn.Sequential(nn.Linear(2, 2), layer)
    assert required_opset(OnnxSettings(target="ort-cuda", **settings), module) == expected


@pytest.mark.quick
@pytest.mark.parametrize(
    ("settings", "codes"),
    [
        ({"opset": 17}, ["opset-too-low"]),
        ({"opset": 18}, []),
        ({"opset": 17, "generation_graph": False}, []),
        ({"opset": 17, "target": "tensorrt"}, []),
    ],
)
def test_generation_graph_needs_opset_18(settings, codes):
    errors = Onnx.check_rows(OnnxSettings(**settings), "translation", {})
    assert [error.code for error in errors] == codes

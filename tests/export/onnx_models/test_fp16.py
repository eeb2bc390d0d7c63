"""float16 where it holds the values, float32 where it does not."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from smelt.core.errors import InputError, ParityError
from smelt.core.messages import message_codes
from smelt.data.npz_arrays import SampleArrays
from smelt.data.splits import split_from_arrays
from smelt.export import fp16_range, graph_files
from smelt.export.convert_to_half import convert_to_half
from smelt.export.onnx_models.fp16 import Fp16, Fp16Settings, float32_nodes
from smelt.export.onnx_models.prepare_for_quantizer import constants_to_initializers
from tests.support import harness
from tests.support.expected_errors import raises_code
from tests.support.graphs import imported_graphs as graphs

pytestmark = pytest.mark.quick


def run(folder: Path, model: Any, **settings: Any) -> Any:
    source = graphs.make_artifact(folder / "src", model)
    data = {"calibration": graphs.make_split()}
    return harness.run_stage(Fp16(), Fp16Settings(**settings), source, folder / "out", data=data)


def types(folder: Path) -> dict[str, int]:
    return {t.name: t.data_type for t in onnx.load(folder / "out/model.onnx").graph.initializer}


def test_weights_are_float16_and_inputs_outputs_float32(tmp_path: Path) -> None:
    ctx = run(tmp_path, graphs.two_layer_classifier(width=64))
    model = onnx.load(tmp_path / "out/model.onnx")
    ends = [v.type.tensor_type.elem_type for v in (*model.graph.input, *model.graph.output)]
    assert ends == [TensorProto.FLOAT] * 2
    assert set(types(tmp_path).values()) == {TensorProto.FLOAT16}
    split = graphs.make_split(seed=9)
    actual, expected = (graphs.class_logits(tmp_path / side / "model.onnx", split) for side in ("out", "src"))
    assert 0 < np.abs(actual - expected).max() / expected.std() < 0.01
    assert (ctx.details["dtype"], ctx.details["kept_float32"], ctx.warnings) == ("fp16", 0, [])


def test_overflowing_nodes_are_kept_float32(tmp_path: Path) -> None:
    """The first layer gives values of a million, the second ordinary ones."""
    model = graphs.two_layer_classifier()
    for tensor, factor in ((model.graph.initializer[0], 1e6), (model.graph.initializer[2], 1e-4)):
        tensor.CopyFrom(
            numpy_helper.from_array(numpy_helper.to_array(tensor) * np.float32(factor), tensor.name)
        )
    ctx = run(tmp_path, model)
    split = graphs.make_split(seed=9)
    actual, expected = (graphs.class_logits(tmp_path / side / "model.onnx", split) for side in ("out", "src"))
    assert np.abs(actual - expected).max() / expected.std() < 0.01
    assert ctx.details["kept_float32"] >= 3
    assert message_codes(ctx.warnings)[0] == "kept-float32"
    assert types(tmp_path)["b2"] == TensorProto.FLOAT16


@pytest.mark.parametrize(
    ("keep", "floats"), [("MatMul", {"w1", "w2"}), ("first", {"w1"}), ("secon?", {"w2"})]
)
def test_operators_and_nodes_in_keep_fp32_are_kept_float32(
    tmp_path: Path, keep: str, floats: set[str]
) -> None:
    run(tmp_path, graphs.two_layer_classifier(), keep_fp32=[keep])
    assert {name for name, dtype in types(tmp_path).items() if dtype == TensorProto.FLOAT} == floats


def test_keep_fp32_without_matching_node_is_rejected(tmp_path: Path) -> None:
    with raises_code("unknown-node", InputError):
        run(tmp_path, graphs.two_layer_classifier(), keep_fp32=["MatMul", "thrid"])


def test_changed_integer_outputs_are_reported(tmp_path: Path) -> None:
    """A map of labels has some at every border that float16 chooses otherwise; that is no broken graph."""
    ctx = run(tmp_path, graphs.classifier_with_integer_output())
    assert ctx.details["parity"]["relative"] < 0.01
    assert "outputs-changed" in message_codes(ctx.warnings)


@pytest.mark.parametrize("opset", [11, 13, 17, 18])
@pytest.mark.parametrize("operator", ["ReduceMean", "ReduceSum", "ReduceL2"])
def test_reductions_with_axes_as_attribute_and_as_input(tmp_path: Path, opset: int, operator: str) -> None:
    """A mean has its axes as an input from opset 18 on, a sum from 13 on: the bound of a mean is a sum."""
    axes_as_input = opset >= (13 if operator == "ReduceSum" else 18)
    weights = [numpy_helper.from_array(np.eye(8, dtype=np.float32), "w")]
    weights += [numpy_helper.from_array(np.array([-1]), "axes")] if axes_as_input else []
    attributes = {} if axes_as_input else {"axes": [-1]}
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["m"], "m"),
        helper.make_node(operator, ["m", "axes"] if axes_as_input else ["m"], ["y"], "r", **attributes),
    ]
    x, y = graphs.value_info("x", ["N", 8]), graphs.value_info("y", ["N", 1])
    model = graphs.make_model(nodes, [x], [y], weights, opset=opset)
    source = graphs.make_artifact(tmp_path / "src", model)
    large = np.full((4, 8), 30_000.0, np.float32)  # whose sums float16 does not hold
    for samples, num_float32 in ((np.ones((4, 8), np.float32), int(operator == "ReduceL2")), (large, 1)):
        data = {"calibration": split_from_arrays("rows.npz", SampleArrays({"x": samples}, len(samples)))}
        ctx = harness.run_stage(Fp16(), Fp16Settings(), source, tmp_path / f"out{samples[0, 0]}", data=data)
        assert bool(ctx.details["kept_float32"]) == bool(num_float32)
        assert ctx.details["parity"]["relative"] < 0.01


NODE = helper.make_node
# each gives `o`, [8, 8] or [8], which is added to what a product gives
FIXED = {
    "HannWindow": [NODE("HannWindow", ["size"], ["o"])],
    "HammingWindow": [NODE("HammingWindow", ["size"], ["o"], output_datatype=1)],
    "BlackmanWindow": [NODE("BlackmanWindow", ["size"], ["o"])],
    "EyeLike": [NODE("EyeLike", ["w"], ["e"], dtype=1), NODE("MatMul", ["x", "e"], ["o"])],
    "EyeLike of its input": [NODE("EyeLike", ["w"], ["e"]), NODE("MatMul", ["x", "e"], ["o"])],
    "ConstantOfShape": [NODE("ConstantOfShape", ["eight"], ["o"])],
    "Constant value_float": [NODE("Constant", [], ["o"], value_float=0.3)],
    "Constant value_floats": [NODE("Constant", [], ["o"], value_floats=[0.1] * 8)],
    "Cast": [NODE("Cast", ["x"], ["i"], to=7), NODE("Cast", ["i"], ["o"], to=1)],
    "CastLike": [NODE("Cast", ["x"], ["i"], to=7), NODE("CastLike", ["i", "m"], ["o"])],
    "RandomNormal": [
        NODE("RandomNormal", [], ["r"], shape=[8], dtype=1, seed=1.0), NODE("Mul", ["r", "zero"], ["o"])
    ],
    "RandomNormalLike": [
        NODE("RandomNormalLike", ["m"], ["r"], dtype=1, seed=1.0), NODE("Mul", ["r", "zero"], ["o"])
    ],
    "Bernoulli": [
        NODE("Bernoulli", ["zero"], ["r"], dtype=1, seed=1.0), NODE("Add", ["r", "m"], ["o"])
    ],
    "LayerNormalization": [
        NODE("LayerNormalization", ["m", "scale"], ["l", "mean"]), NODE("Add", ["l", "mean"], ["o"])
    ],
    "DequantizeLinear": [
        NODE("DynamicQuantizeLinear", ["x"], ["q", "s", "z"]),
        NODE("DequantizeLinear", ["q", "s", "z"], ["o"]),
    ],
    "OneHotEncoder": [
        NODE("Cast", ["x"], ["i"], to=7),
        NODE("OneHotEncoder", ["i"], ["h"], domain="ai.onnx.ml", cats_int64s=[-1, 0, 1], zeros=1),
        NODE("ReduceMax", ["h"], ["o"], axes=[2], keepdims=0),
    ],
    "Scaler beside a Concat": [
        NODE("Scaler", ["x"], ["s"], domain="ai.onnx.ml", offset=[0.1] * 8, scale=[2.0] * 8),
        NODE("Concat", ["s", "m"], ["c"], axis=1),
        NODE("MatMul", ["c", "wide"], ["o"]),
    ],
    "Normalizer": [
        NODE("Normalizer", ["m"], ["n"], domain="ai.onnx.ml", norm="L2"), NODE("Mul", ["n", "m"], ["o"])
    ],
    "LabelEncoder": [
        NODE("Cast", ["x"], ["i"], to=7),
        NODE("LabelEncoder", ["i"], ["o"], domain="ai.onnx.ml", keys_int64s=[0, 1], values_floats=[0.5, 1.5]),
    ],
    "a sequence": [
        NODE("SequenceConstruct", ["m", "x"], ["s"]), NODE("Constant", [], ["i"], value_int=1),
        NODE("SequenceAt", ["s", "i"], ["o"]),
    ],
    "ScatterND with a reduction": [NODE("ScatterND", ["m", "place", "more"], ["o"], reduction="add")],
    "MeanVarianceNormalization": [NODE("MeanVarianceNormalization", ["m"], ["o"], axes=[0, 1])],
    "a weight that comes out": [NODE("Identity", ["w"], ["o"])],
}  # fmt: skip


@pytest.mark.parametrize("name", FIXED)
def test_float32_only_operators_are_kept_float32(name: str) -> None:
    random = np.random.default_rng(0)
    arrays = {
        "w": random.normal(0, 0.3, (8, 8)).astype(np.float32),
        "wide": random.normal(size=(16, 8)).astype(np.float32),
        "scale": np.ones(8, np.float32), "zero": np.zeros(8, np.float32), "size": np.int64(8),
        "eight": np.array([8]), "place": np.array([[0, 0]]),
        "more": np.array([1.5], np.float32),
    }  # fmt: skip
    nodes = [NODE("MatMul", ["x", "w"], ["m"]), *FIXED[name], NODE("Add", ["o", "m"], ["y"])]
    used_names = {tensor_name for node in nodes for tensor_name in node.input}
    weights = [
        numpy_helper.from_array(value, tensor_name)
        for tensor_name, value in arrays.items()
        if tensor_name in used_names
    ]
    x = random.normal(size=(8, 8)).astype(np.float32)
    model = graphs.make_model(
        nodes, [graphs.value_info("x", [8, 8])], [graphs.value_info("y", [8, 8])], weights, opset=17
    )
    model.opset_import.append(helper.make_opsetid("ai.onnx.ml", 3))
    if name == "a weight that comes out":
        model.graph.output.append(graphs.value_info("w", [8, 8]))
    reference_outputs = ReferenceEvaluator(model).run(None, {"x": x}) if name not in LEFT_OUT else None
    expected = answers(model, x)
    constants_to_initializers(model)
    convert_to_half(model, "model", "fp16", float32_nodes(model), {"x", "y", "w"})
    actual = answers(model, x)
    for output, other in zip(actual, expected, strict=True):
        assert (output.dtype, output.shape) == (other.dtype, other.shape)
        np.testing.assert_allclose(output, other, atol=0.01 * np.abs(other).max())
    for output, other in zip(expected, reference_outputs or expected, strict=True):
        np.testing.assert_allclose(output, other, atol=1e-4)


def test_transposed_batch_before_matmul_does_not_crash(tmp_path: Path) -> None:
    """ONNX Runtime 1.31 crashes on the CPU where the Transpose is float16."""
    nodes = [NODE("Transpose", ["x"], ["t"], perm=[1, 0, 2]), NODE("MatMul", ["t", "w"], ["y"])]
    random = np.random.default_rng(0)
    weight = numpy_helper.from_array(random.normal(size=(8, 4)).astype(np.float32), "w")
    model = graphs.make_model(
        nodes, [graphs.value_info("x", ["N", "T", 8])], [graphs.value_info("y", ["T", "N", 4])], [weight]
    )
    source = graphs.make_artifact(tmp_path / "src", model)
    x = random.normal(size=(8, 6, 8)).astype(np.float32)
    data = {"calibration": split_from_arrays("rows.npz", SampleArrays({"x": x}, 8))}
    ctx = harness.run_stage(Fp16(), Fp16Settings(), source, tmp_path / "out", data=data)
    assert ctx.details["parity"]["relative"] < 0.01
    assert types(tmp_path) == {"w": TensorProto.FLOAT16}


# the reference has none of these, or other random numbers
LEFT_OUT = ("RandomNormal", "RandomNormalLike", "Bernoulli", "DequantizeLinear")


def answers(model: Any, x: Any) -> Any:
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, {"x": x})


@pytest.mark.parametrize(("weight", "bias", "warned"), [(1, 1, False), (0, 1e-7, True)])
def test_fp16_warns_of_weights_that_become_zero(
    tmp_path: Path, weight: float, bias: float, warned: bool
) -> None:
    """The small elements of a bias are usually nothing next to a product, but here it is 0."""
    model = graphs.two_layer_classifier()
    for tensor in model.graph.initializer:
        values = numpy_helper.to_array(tensor) * np.float32(weight if len(tensor.dims) > 1 else bias)
        tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))
    ctx = run(tmp_path, model)
    assert (ctx.details["parity"]["error"] > 0.02) == warned
    assert (
        [warning.code for warning in ctx.warnings if "'logits'" in warning.message] == ["outputs-changed"]
    ) == warned


def test_small_constant_is_preserved_for_uncalibrated_samples(
    tmp_path: Path,
) -> None:
    """Unit length, divided by max(norm, 1e-12): in float16 a zero row was 0 / 0."""
    matrix = np.diag([*[1.0] * 7, -1.0]).astype(np.float32)  # with signs, as trained weights have
    weights = [numpy_helper.from_array(matrix, "w"), numpy_helper.from_array(np.float32(1e-12), "epsilon")]
    nodes = [
        NODE("MatMul", ["x", "w"], ["h"]), NODE("ReduceL2", ["h"], ["norm"], axes=[-1]),
        NODE("Clip", ["norm", "epsilon"], ["size"]), NODE("Div", ["h", "size"], ["logits"]),
    ]  # fmt: skip
    ends = [graphs.value_info("x", ["N", 8])], [graphs.value_info("logits", ["N", 8])]
    ctx = run(tmp_path, graphs.make_model(nodes, *ends, weights))
    assert types(tmp_path) == {"w": TensorProto.FLOAT16, "epsilon": TensorProto.FLOAT}
    assert (ctx.details["kept_float32"], ctx.warnings) == (3, [])
    x = np.zeros((2, 8), np.float32)
    x[1, 0] = 1e-4
    (actual,) = answers(onnx.load(tmp_path / "out/model.onnx"), x)
    np.testing.assert_allclose(actual, (x > 0).astype(np.float32), atol=1e-3)


def test_first_non_finite_node_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sum of 1e-8 and zeros is 0 in float16."""
    monkeypatch.setattr(fp16_range, "nodes_outside_fp16", lambda model: set())
    values = {"small": np.float32(1e-8), "zero": np.float32(0)}
    weights = [numpy_helper.from_array(np.asarray(value), name) for name, value in values.items()]
    nodes = [
        NODE("Mul", ["x", "zero"], ["z"], "zeros"), NODE("Add", ["z", "small"], ["s"], "sum"),
        NODE("Div", ["x", "s"], ["r"], "ratio"), NODE("Mul", ["r", "zero"], ["logits"], "last"),
    ]  # fmt: skip
    signature = [graphs.value_info("x", ["N", 8])], [graphs.value_info("logits", ["N", 8])]
    with raises_code("non-finite-outputs", ParityError) as excinfo:
        run(tmp_path, graphs.make_model(nodes, *signature, weights))
    assert "ratio" in str(excinfo.value)


def test_random_outputs_are_reported(tmp_path: Path) -> None:
    model = graphs.two_layer_classifier()
    model.graph.node[-1].output[0] = "certain"
    model.graph.node.append(NODE("RandomNormalLike", ["certain"], ["noise"], "noise"))
    model.graph.node.append(NODE("Add", ["certain", "noise"], ["logits"], "noisy"))
    ctx = run(tmp_path, model)
    assert message_codes(ctx.warnings) == ["random-outputs"]


@pytest.mark.parametrize("name", ["logits_inner", "x.float16"])
def test_new_node_names_do_not_collide(tmp_path: Path, name: str) -> None:
    model = graphs.two_layer_classifier()
    model.graph.node[0].output[0] = model.graph.node[1].input[0] = name
    ctx = run(tmp_path, model)
    assert ctx.details["parity"]["relative"] < 0.01


def test_single_row_graph_gets_one_row_per_call(tmp_path: Path) -> None:
    """Its batch has a name, and a Reshape inside has its size."""
    model = graphs.two_layer_classifier()
    model.graph.initializer.append(numpy_helper.from_array(np.array([1, 8]), "shape"))
    model.graph.node[0].input[0] = "row"
    model.graph.node.insert(0, helper.make_node("Reshape", ["x", "shape"], ["row"]))
    assert run(tmp_path, model).details["parity"]["relative"] < 0.01


def test_external_weights_above_file_limit_are_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Writing such a graph moves its weights out of the model, which is converted afterwards."""
    monkeypatch.setattr(graph_files, "MAX_INLINE_BYTES", 500)
    ctx = run(tmp_path, graphs.two_layer_classifier(width=64))
    assert (tmp_path / "out/model.onnx_data").is_file()
    assert ctx.details["parity"]["relative"] < 0.01


@pytest.mark.parametrize("node", [
    NODE("Gemm", ["x", "w", ""], ["y"], "product"),
    NODE("Gemm", ["x", "w", ""], ["y"], "product", transB=1, alpha=0.5),
    NODE("MatMul", ["x", "w"], ["y"], "product"),
])  # fmt: skip
def test_nodes_without_an_optional_input_are_measured(tmp_path: Path, node: Any) -> None:
    weight = numpy_helper.from_array(np.eye(8, dtype=np.float32), "w")
    signature = [graphs.value_info("x", ["N", 8])], [graphs.value_info("y", ["N", 8])]
    source = graphs.make_artifact(tmp_path / "src", graphs.make_model([node], *signature, [weight]))
    samples = np.full((4, 8), 3.0, np.float32)
    data = {"calibration": split_from_arrays("rows.npz", SampleArrays({"x": samples}, len(samples)))}
    ctx = harness.run_stage(Fp16(), Fp16Settings(), source, tmp_path / "out", data=data)
    assert ctx.details["kept_float32"] == 0
    assert ctx.details["parity"]["relative"] < 0.01

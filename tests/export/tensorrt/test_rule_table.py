"""Every rule on the smallest graph that it is about, and what a real builder makes of that graph.

The builder is TensorRT for RTX 1.7 under the bindings of 11.4 (tests/support/processes/tensorrt_rig.py): a
graph that a rule calls rejected is rejected by it, one that is built otherwise or wrong is built.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from smelt.core.errors import RunError
from smelt.export.tensorrt.operator_rules import _INTEGER_OPS, OUTCOMES, RULES, UNSUPPORTED_OPS
from smelt.export.tensorrt.preflight import load_graph, preflight
from smelt.export.tensorrt.value_rules import NVIDIA_OPS
from tests.support.expected_errors import raises_code
from tests.support.processes import tensorrt_rig

FLOAT, HALF, INT8, INT32, INT64 = (
    TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.INT8, TensorProto.INT32, TensorProto.INT64,
)  # fmt: skip
NOTHING = onnx.helper.make_model(onnx.helper.make_graph([], "nothing", [], []))
W = np.ones((4, 4), np.float32)
ZERO = np.int8(0)
ROWS = {"x": ((1, 4), (2, 4), (8, 4))}


def node(kind: str, inputs: str, outputs: str = "y", **more: Any) -> Any:
    return helper.make_node(kind, inputs.split(), outputs.split(), name=f"the {kind}", **more)


def value(name: str, kind: int = FLOAT, shape: Any = ("batch", 4)) -> Any:
    return helper.make_tensor_value_info(name, kind, shape)


def named(tensor: Any, name: str) -> Any:
    tensor.name = name
    return tensor


def graph(nodes: Any, weights: Any = None, kind: int = FLOAT, out: Any = None, **more: Any) -> Any:
    """Return a model; more: `inputs`, `opset`, `domain`."""
    tensors = [
        named(w, name) if isinstance(w, onnx.TensorProto) else numpy_helper.from_array(np.asarray(w), name)
        for name, w in (weights or {}).items()
    ]
    inputs = more.get("inputs") or [value("x", kind)]
    opsets = [helper.make_opsetid("", more.get("opset", 21))]
    opsets += [helper.make_opsetid(more["domain"], 1)] if "domain" in more else []
    outputs = [value("y", out or kind, None)]
    body = helper.make_graph(nodes if isinstance(nodes, list) else [nodes], "g", inputs, outputs, tensors)
    return helper.make_model(body, opset_imports=opsets, ir_version=10)


WIDE = {"x": ((1, 128), (2, 128), (8, 128))}


def nibbles(shape: tuple[int, ...], kind: int = TensorProto.INT4, fill: int = 0x21) -> Any:
    """Return codes of 4 bits (else 8), the first two of which are 1 and 2."""
    count = int(np.prod(shape))
    size = count if kind == INT8 else (count + 1) // 2
    raw = bytes([fill]) * size if shape else b"\0"
    return helper.make_tensor("codes", kind, shape, raw, raw=True)


def four_bits(shape: Any, scales: Any, kind: int = TensorProto.INT4, **more: Any) -> Any:
    """Return a product with codes of `shape` [..., K, N]; more: `axis`, `zero`, `floats`, `scale`."""
    floats, axis = more.get("floats", np.float32), more.get("axis", 0)
    scale = np.full(scales, more.get("scale", 0.1), floats)
    weights: dict[str, Any] = {"c": nibbles(shape, kind), "s": scale}
    if "zero" in more:
        weights["z"] = nibbles(scales, kind, more["zero"])
    block_attributes = {"block_size": -(-shape[axis] // scales[axis])} if len(scales) == len(shape) else {}
    nodes = [
        node("DequantizeLinear", "c s z" if "zero" in more else "c s", "w", axis=axis, **block_attributes)
    ]
    float_kind = HALF if floats is np.float16 else FLOAT
    inputs = [value("x", float_kind, [*shape[:-2], "batch", shape[-2]])]
    return graph([*nodes, node("MatMul", "x w")], weights, float_kind, inputs=inputs)


def sizes(model: Any) -> Any:
    """Return the shapes to build a graph of FINE for: batches of 1, 2 and 8."""
    (x,) = model.graph.input
    other_dims = [dim.dim_value for dim in x.type.tensor_type.shape.dim][1:]
    return {"x": tuple((batch_size, *other_dims) for batch_size in (1, 2, 8))}


def pair(zero: Any = ZERO, scale: float = 0.1, **more: Any) -> Any:
    nodes = [
        node("QuantizeLinear", "x s z", "q", **more),
        node("DequantizeLinear", "q s z", "d"),
        node("MatMul", "d w"),
    ]
    return graph(nodes, {"s": np.float32(scale), "z": zero, "w": W})


def image(nodes: Any, weights: Any = None) -> Any:
    return graph(nodes, weights, inputs=[value("x", FLOAT, [1, 1, 8, 8])])


def overflowed() -> Any:
    weight = W.astype(np.float16)
    weight[1, 2] = np.inf
    return weight


def norm() -> list[Any]:
    return [
        node("Pow", "x two", "squares"), node("ReduceMean", "squares last", "mean"),
        node("Add", "mean small", "more"), node("Sqrt", "more", "root"), node("Div", "x root"),
    ]  # fmt: skip


NORM = {"two": np.float16(2), "last": np.array([-1]), "small": np.float16(1e-3)}
STAGES = [node("DynamicQuantizeLinear", "x", "q s z"), node("DequantizeLinear", "q s z")]
TRAINED = {name: np.ones(4, np.float32) for name in "abmv"}

# rule, values that its finding names, the graph, the profile
CASES: dict[str, tuple[str, tuple[str, ...], Any, Any]] = {
    "a newer opset": ("opset", ("opset 26", " 9 ", " 25,"),
                      graph(node("Abs", "x"), opset=26), ROWS),
    "nodes that wait for each other": (
        "circle", ("'the Add' (Add)",),
        graph([node("Add", "x b", "a"), node("Mul", "a x", "b"), node("Abs", "b")]), ROWS,
    ),
    "an operator of ONNX Runtime": (
        "foreign-operator", ("com.microsoft::QuickGelu",),
        graph(node("QuickGelu", "x", domain="com.microsoft"), domain="com.microsoft"), ROWS,
    ),
    "a namesake": (
        "foreign-namesake", ("com.microsoft::Gelu",),
        graph(node("Gelu", "x", domain="com.microsoft"), domain="com.microsoft"), ROWS,
    ),
    "int8 of ONNX Runtime": ("integer-operator", ("'the DynamicQuantizeLinear'",),
                             graph(STAGES), ROWS),
    "an operator that is not there": (
        "missing-operator", ("'the Det' (Det)",), graph(node("Det", "x")),
        {"x": ((4, 4), (4, 4), (4, 4))},
    ),
    "dropout of training": (
        "training-mode", ("(Dropout)",),
        graph(node("Dropout", "x r t"), {"r": np.float32(0.5), "t": np.array(True)}), ROWS,
    ),
    "batch norm of training": (
        "training-mode", ("(BatchNormalization)",),
        graph(node("BatchNormalization", "x a b m v", "y mm vv", training_mode=1), TRAINED), ROWS,
    ),
    "antialias": (
        "attribute", ("(Resize)", "antialias: 1"),
        image(node("Resize", "x  s".replace("  ", " n "), mode="cubic", antialias=1),
              {"s": np.array([1, 1, 2, 2], np.float32), "n": np.zeros(0, np.float32)}), {},
    ),
    "crop and resize": (
        "attribute", ("(Resize)", "tf_crop_and_resize", "align_corners"),
        image(node("Resize", "x r s", coordinate_transformation_mode="tf_crop_and_resize"),
              {"r": np.zeros(8, np.float32), "s": np.array([1, 1, 2, 2], np.float32)}), {},
    ),
    "indices of a pool": (
        "attribute", ("(MaxPool)",), image(node("MaxPool", "x", "y i", kernel_shape=[2, 2])), {},
    ),
    "a convolution in four dimensions": (
        "attribute", ("(Conv)", " 4 "),
        graph(node("Conv", "x w"), {"w": np.ones([1] * 6, np.float32)},
              inputs=[value("x", FLOAT, [1, 1, 4, 4, 4, 4])]), {},
    ),
    "many largest": (
        "attribute", ("(TopK)", "5000", "3840"),
        graph(node("TopK", "x k", "y i"), {"k": np.array([5000])},
              inputs=[value("x", FLOAT, ["batch", 8000])]),
        {"x": ((1, 8000), (2, 8000), (8, 8000))},
    ),
    "int16": ("missing-type", ("'x'", "int16"),
              graph(node("Abs", "x"), kind=TensorProto.INT16), ROWS),
    "a cast to uint32": (
        "missing-type", ("(Cast)", "uint32"),
        graph([node("Cast", "x", "m", to=TensorProto.UINT32), node("Cast", "m", to=FLOAT)]), ROWS,
    ),
    "two types": ("mixed-types", ("(MatMul)", "float ('x')", "float16 ('w')"),
                  graph(node("MatMul", "x w"), {"w": W.astype(np.float16)}), ROWS),
    "a product of integers": ("refused-type", ("(MatMul)", "int64"),
                              graph(node("MatMul", "x w"), {"w": W.astype(np.int64)}, INT64), ROWS),
    "the largest of bools": ("refused-type", ("(ReduceMax)", "bool"),
                             graph(node("ReduceMax", "x"), kind=TensorProto.BOOL), ROWS),
    "uint8 between operators": (
        "uint8-inside", ("(Cast)", "uint8"),
        graph([node("Cast", "x", "m", to=TensorProto.UINT8), node("Cast", "m", to=FLOAT)]), ROWS,
    ),
    "arithmetic in uint8": ("uint8-inside", ("(Add)", "'x'", "uint8"),
                            graph(node("Add", "x x"), kind=TensorProto.UINT8), ROWS),
    "a cast to float8": (
        "cast-to-float8", ("(Cast)", "float8"),
        graph([node("Cast", "x", "m", to=TensorProto.FLOAT8E4M3FN), node("Cast", "m", to=FLOAT)]), ROWS,
    ),
    "uint8 codes": ("unsigned-codes", ("(QuantizeLinear)", "uint8"), pair(np.uint8(0)),
                    ROWS),
    "int16 codes": ("codes", ("(QuantizeLinear)", "int16"), pair(np.int16(0)), ROWS),
    "a quantized bias": (
        "codes", ("(DequantizeLinear)", "(int32)"),
        graph([node("DequantizeLinear", "b s", "bias"), node("Add", "x bias")],
              {"b": np.ones(4, np.int32), "s": np.float32(0.1)}), ROWS,
    ),
    "asymmetric codes": ("zero-point", ("(QuantizeLinear)",), pair(np.int8(3)), ROWS),
    "a negative scale of 4 bits": ("scale", ("(DequantizeLinear)",),
                                   four_bits((128, 4), (2, 4), scale=-0.1), WIDE),
    "a scale of zero": ("scale", ("(QuantizeLinear)",), pair(scale=0.0), ROWS),
    "blocks along the first of three axes": (
        "blocks", ("(DequantizeLinear)", " 0 ", " 3;"),
        four_bits((128, 4, 4), (2, 4, 4)), {"x": ((128, 1, 4), (128, 2, 4), (128, 8, 4))},
    ),
    "blocks that do not fill their axis": (
        "blocks", ("(DequantizeLinear)", "4 ", "250"),
        four_bits((250, 4), (4, 4)), {"x": ((1, 250), (2, 250), (8, 250))},
    ),
    "blocks of 32": ("other-blocks", ("4-bit", " 32", " 64 ", " 128"),
                     four_bits((128, 4), (4, 4)), WIDE),
    "4 bits without blocks": ("other-blocks", ("4-bit", " 64 ", " 128"),
                              four_bits((128, 4), (4,), axis=1), WIDE),
    "blocks of 8 bits": ("other-blocks", ("(DequantizeLinear)", "int8"),
                         four_bits((128, 4), (2, 4), INT8), WIDE),
    "activations in 4 bits": ("other-blocks", ("(DequantizeLinear)", "4-bit"), pair(nibbles(())), ROWS),
    "4 bits with zero points": (
        "zero-point", ("(DequantizeLinear)",), four_bits((128, 4), (2, 4), zero=1), WIDE,
    ),
    "4 bits that are read as they are": (
        "codes-without-scale", ("(Cast)", "int4", "'w'"),
        graph([node("Cast", "w", "f", to=FLOAT), node("MatMul", "x f")], {"w": nibbles((4, 4))}), ROWS,
    ),
    "codes that are read as they are": (
        "codes-without-scale", ("(Gather)", "int8", "'w'"),
        graph([node("Gather", "w x", "g"), node("Cast", "g", to=FLOAT)], {"w": W.astype(np.int8)},
              inputs=[value("x", INT64, ["batch"])]), {"x": ((1,), (2,), (8,))},
    ),
    "nine axes": ("axes", ("(Reshape)", " 9 ", " 8"),
                  graph(node("Reshape", "x s"), {"s": np.array([-1, *[1] * 7, 4])}), ROWS),
    "an infinite weight": ("infinite", ("'w' (float16)", " 1 "),
                           graph(node("MatMul", "x w"), {"w": overflowed()}, HALF), ROWS),
    "a mask with -inf": ("mask", ("'m' (float)",),
                         graph(node("Add", "x m"), {"m": np.array([0, -np.inf, 0, 0], np.float32)}), ROWS),
    "a cast that overflows": (
        "overflowing-cast", ("(Cast)", "'c'", "-3.4e+38", "float16"),
        graph([node("Cast", "c", "h", to=HALF), node("Add", "x h")], {"c": np.float32(-3.4e38)}, HALF), ROWS,
    ),
    "a norm in float16": ("norm-in-half", ("(ReduceMean)", "float16"), graph(norm(), NORM, HALF), ROWS),
    "a double": ("double", ("constant 'w'",),
                 graph(node("MatMul", "x w"), {"w": W.astype(np.float64)}, TensorProto.DOUBLE), ROWS),
    "an input with a default": (
        "default-input", ("'k'",),
        graph(node("Mul", "x k"), {"k": np.float32(3)}, inputs=[value("x"), value("k", FLOAT, [])]), ROWS,
    ),
    "a seed": ("seed", ("(RandomUniformLike)",),
               graph([node("RandomUniformLike", "x", "r", seed=3.0), node("Add", "x r")]), ROWS),
    "a size without a name": ("unnamed-size", ("'x'", "[0]"),
                              graph(node("Abs", "x"), inputs=[value("x", FLOAT, [None, 4])]), ROWS),
}  # fmt: skip
# NonZero is a plugin of the full TensorRT, which the rig has not: only the rule is asked.
SILENT = {"a size from the data": ("size-from-data", ("(NonZero)",),
                                   graph(node("NonZero", "x"), out=INT64)),
          "a graph without outputs": ("no-output", (), NOTHING, {})}  # fmt: skip
FINE = {
    "floats": graph(node("MatMul", "x w"), {"w": W}),
    "float16": graph(node("MatMul", "x w"), {"w": W.astype(np.float16)}, HALF), "int8 pairs": pair(),
    "int8 weights": graph([node("DequantizeLinear", "c s", "w", axis=1), node("MatMul", "x w")],
        {"c": np.ones((4, 4), np.int8), "s": np.ones(4, np.float32)}),
    "4 bits in blocks of 64": four_bits((128, 4), (2, 4)),
    "4 bits in blocks of 128 in float16": four_bits((128, 4), (1, 4), floats=np.float16),
    "a table of 4 bits": graph([node("DequantizeLinear", "c s", "t", axis=1, block_size=64), node("Gather",
        "t x")], {"c": nibbles((4, 128)), "s": np.ones((4, 2), np.float32)},
        inputs=[value("x", INT64, ["batch"])]),
    "a power of an integer": graph(node("Pow", "x k"), {"k": np.int64(2)}),
    "int64 arithmetic": graph(node("Div", "x x"), kind=INT64),
    "fp8 of Model Optimizer": graph(
        [node("TRT_FP8QuantizeLinear", "x s", "q", domain="trt"),
         node("TRT_FP8DequantizeLinear", "q s", "d", domain="trt"), node("MatMul", "d w")],
        {"s": np.float16(0.1), "w": W.astype(np.float16)}, HALF, domain="trt"),
    "4 bits of Model Optimizer": graph(
        [node("DequantizeLinear", "c s", "d", domain="trt", axis=0, block_size=64), node("MatMul", "x d")],
        {"c": nibbles((64, 64)), "s": np.ones((1, 64), np.float16)}, HALF,
        inputs=[value("x", HALF, ("batch", 64))], domain="trt"),
    "uint8 at the door": graph(node("Cast", "x", to=FLOAT), inputs=[value("x", TensorProto.UINT8)]),
}  # fmt: skip
_PARTS = {
    **{name: (model, shapes) for name, (_, _, model, shapes) in CASES.items()},
    **{name: (model, sizes(model)) for name, model in FINE.items()},
}


def found(model: Any, folder: Path) -> list[Any]:
    path = folder / "model.onnx"
    onnx.save(model, path)
    return preflight(load_graph(path), path)


@pytest.mark.quick
@pytest.mark.parametrize("name", [*CASES, *SILENT])
def test_rule_reports_location_reason_and_hint(name: str, tmp_path: Path) -> None:
    rule, values, model = (CASES.get(name) or SILENT[name])[:3]
    problems = found(model, tmp_path)
    matching = [problem for problem in problems if problem.rule == rule]
    has_values = [all(value in problem.text for value in values) for problem in matching]
    assert any(has_values), [problem.text for problem in problems]
    assert {problem.as_message().code for problem in matching} == {f"tensorrt-{rule}"}
    assert all(problem.graph == "model.onnx" and problem.location for problem in matching)
    assert all(problem.hint for problem in matching) or rule == "mask"


@pytest.mark.parametrize("name", FINE)
def test_supported_graph_passes(name: str, tmp_path: Path) -> None:
    assert found(FINE[name], tmp_path) == []


def test_every_rule_has_a_case() -> None:
    assert {rule.name for rule in RULES} == {rule for rule, *_ in (*CASES.values(), *SILENT.values())}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the builder made of each graph: all in one process."""
    folder = tmp_path_factory.mktemp("rules")
    graphs = {}
    for case_index, (model, shapes) in enumerate(_PARTS.values()):
        onnx.save(model, folder / f"{case_index}.onnx")
        graphs[folder / f"{case_index}.onnx"] = shapes
    return dict(zip(_PARTS, tensorrt_rig.build_all(graphs), strict=True))


# what the parser of TensorRT rejects, and that of TensorRT for RTX, which builds here, does not
LENIENT = {"a negative scale of 4 bits"}


@pytest.mark.parametrize("name", sorted({*CASES, *FINE} - LENIENT))
def test_builder_outcome_equals_rule_table(name: str, built: dict[str, Any]) -> None:
    is_rejected = name in CASES and OUTCOMES[CASES[name][0]] == "rejected"
    assert ("error" in built[name]) is is_rejected, built[name]


def test_unsupported_operators_equal_rule_table() -> None:
    code = (
        "import json, onnx.defs, tensorrt as t\n"
        "log = t.Logger(t.Logger.ERROR); parser = t.OnnxParser(t.Builder(log).create_network(0), log)\n"
        "names = {s.name for s in onnx.defs.get_all_schemas() if s.domain == ''}\n"
        "print(json.dumps([n for n in names if not parser.supports_operator(n)]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=tensorrt_rig.rig_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert set(json.loads(done.stdout.splitlines()[-1])) == UNSUPPORTED_OPS | _INTEGER_OPS


def test_operators_of_model_optimizer_are_known_to_the_parser() -> None:
    code = (
        "import json, sys, tensorrt as t\n"
        "log = t.Logger(t.Logger.ERROR); parser = t.OnnxParser(t.Builder(log).create_network(0), log)\n"
        "print(json.dumps([n for n in sys.argv[1:] if not parser.supports_operator(n)]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *NVIDIA_OPS, "TRT_Nothing"],
        env=tensorrt_rig.rig_environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(done.stdout.splitlines()[-1]) == ["TRT_Nothing"]


def test_other_operators_of_nvidias_domain_are_foreign(tmp_path: Path) -> None:
    for name, rule in (("TRT_Nothing", "foreign-operator"), ("Relu", "foreign-namesake")):
        problems = found(graph(node(name, "x", domain="trt"), domain="trt"), tmp_path)
        assert rule in {problem.rule for problem in problems}


def test_zero_points_of_nvidias_domain_are_checked(tmp_path: Path) -> None:
    nodes = [node("DequantizeLinear", "c s z", "w", domain="trt", axis=1), node("MatMul", "x w")]
    weights = {"c": np.ones((4, 4), np.int8), "s": np.ones(4, np.float32), "z": np.ones(4, np.int8)}
    problems = found(graph(nodes, weights, domain="trt"), tmp_path)
    assert "zero-point" in {problem.rule for problem in problems}


@pytest.mark.parametrize("location", ["../weights", "/etc/passwd"])
def test_weights_outside_of_the_folder_are_not_read(location: str, tmp_path: Path) -> None:
    (tmp_path / "weights").write_bytes(W.tobytes())
    (tmp_path / "in").mkdir()
    model = graph(node("MatMul", "x w"), {"w": W})
    model.graph.initializer[0].ClearField("raw_data")
    model.graph.initializer[0].data_location = TensorProto.EXTERNAL
    model.graph.initializer[0].external_data.add(key="location", value=location)
    path = tmp_path / "in" / "model.onnx"
    path.write_bytes(model.SerializeToString())
    (problem,) = preflight(load_graph(path), path)
    assert problem.rule == "external-data"
    assert f" {location}" in problem.text


def test_constant_of_wrong_size_is_named(tmp_path: Path) -> None:
    model = graph(node("MatMul", "x w"), {"w": W})
    model.graph.initializer[0].dims[0] = 1 << 40
    with raises_code("damaged-weights", RunError) as excinfo:
        found(model, tmp_path)
    assert "'w'" in str(excinfo.value)

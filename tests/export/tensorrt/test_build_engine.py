"""The build against a real TensorRT builder; see tests/support/processes/tensorrt_rig.py.

Every error stands with what smelt's preflight says of the file and with what smelt makes of the
parser's and the builder's words: the second is what a user reads where the first overlooks something.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from smelt.export.tensorrt.preflight import check_profile, load_graph, preflight
from tests.support.processes.tensorrt_rig import build, build_all

FLOAT, HALF, INT64 = TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.INT64
SHAPES = {"x": ((1, 4), (1, 4), (8, 4))}
W = np.ones((4, 4), np.float32)


def node(kind: str, inputs: str, outputs: str = "y", **attributes: Any) -> Any:
    return helper.make_node(kind, inputs.split(), outputs.split(), **attributes)


def value(name: str, kind: int, dimensions: list[Any] | None) -> Any:
    return helper.make_tensor_value_info(name, kind, dimensions)


@dataclass
class Case:
    """A graph and a profile.

    preflight: the rule that finds an error, and values that it names. builder: the code of the builder's
    error, and values that it names; nothing where it builds.
    """

    nodes: list[Any]
    weights: dict[str, Any]
    preflight: tuple[str, ...]
    builder: tuple[str, ...]
    shapes: dict[str, Any] = field(default_factory=lambda: SHAPES)
    inputs: list[Any] = field(default_factory=lambda: [value("x", FLOAT, ["batch", 4])])
    domain: str = ""
    positions: int | None = None

    def save(self, path: Path) -> Path:
        tensors = [numpy_helper.from_array(np.asarray(v), n) for n, v in self.weights.items()]
        kind = HALF if any(v.dtype == np.float16 for v in self.weights.values()) else FLOAT
        graph = helper.make_graph(self.nodes, "g", self.inputs, [value("y", kind, None)], tensors)
        opsets = [helper.make_opsetid("", 21)] + (
            [helper.make_opsetid(self.domain, 1)] if self.domain else []
        )
        onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=10), path)
        return path


MATMUL = node("MatMul", "x w", name="dense")


def pair(zero: Any, scale: float = 0.1) -> tuple[list[Any], dict[str, Any]]:
    nodes = [
        node("QuantizeLinear", "x s z", "q", name="quantize"),
        node("DequantizeLinear", "q s z", "d", name="dequantize"),
        node("MatMul", "d w", name="dense"),
    ]
    return nodes, {"s": np.float32(scale), "z": zero, "w": W}


def overflowed() -> Any:
    weight = W.astype(np.float16)
    weight[1, 2] = np.inf
    return weight


def ids(length: str = "length") -> Any:
    return value("ids", INT64, ["batch", length])


LOOK_UP = [
    node("Shape", "ids", "n", start=1, end=2, name="length"),
    node("Slice", "table zero n zero", "rows", name="positions"),
    node("Gather", "words ids", "w", name="words"),
    node("Add", "w rows", name="sum"),
]
TABLES = {
    "table": np.ones((16, 4), np.float32),
    "words": np.ones((9, 4), np.float32),
    "zero": np.zeros(1, np.int64),
}
BITS = {"w": np.zeros((4, 1, 8), np.uint8), "s": np.ones(4, np.float32)}
MASKED = [ids(), value("mask", INT64, ["batch", "length"])]
TWO = [node("Add", "ids mask", "y", name="sum")]

CASES = {
    "two types in one operator": Case(
        [MATMUL], {"w": W.astype(np.float16)},
        ("mixed-types", "'dense' (MatMul)"), ("tensorrt-mixed-types", "'dense' (MatMul)"),
    ),
    "asymmetric int8": Case(
        *pair(np.int8(3)), ("zero-point", "'quantize' (QuantizeLinear)"),
        ("tensorrt-zero-point", "(QuantizeLinear)"),
    ),
    "uint8": Case(
        *pair(np.uint8(128)), ("unsigned-codes", "'quantize' (QuantizeLinear)"),
        ("tensorrt-zero-point", "(QuantizeLinear)"),
    ),
    "dynamic int8": Case(
        [
            node("DynamicQuantizeLinear", "x", "q s z", name="dynamic"),
            node("DequantizeLinear", "q s z", name="back"),
        ],
        {}, ("integer-operator", "'dynamic': DynamicQuantizeLinear"),
        ("tensorrt-dynamic-quantization", "'dynamic' (DynamicQuantizeLinear)"),
    ),
    "an operator of ONNX Runtime": Case(
        [node("MatMulNBits", "x w s", name="bits", domain="com.microsoft", K=4, N=4, bits=4, block_size=16)],
        BITS, ("foreign-operator", "'bits': com.microsoft::MatMulNBits"),
        ("tensorrt-foreign-operator", "'bits' (MatMulNBits)", "onnx: {target: tensorrt}"),
        domain="com.microsoft",
    ),
    "a custom operator": Case(
        [node("Mystery", "x", name="riddle", domain="somebody")], {},
        ("foreign-operator", "'riddle': somebody::Mystery"),
        ("tensorrt-foreign-operator", "'riddle' (Mystery)"), domain="somebody",
    ),
    "a quantized bias": Case(
        [
            node("MatMul", "x w", "m", name="dense"),
            node("DequantizeLinear", "b s", "bias", name="bias"),
            node("Add", "m bias", name="sum"),
        ],
        {"w": W, "b": np.ones(4, np.int32), "s": np.float32(0.1)},
        ("codes", "'bias' (DequantizeLinear)", "(int32)"), ("tensorrt-quantized-bias", "'bias'"),
    ),
    "no profile": Case(
        [MATMUL], {"w": W}, ("profile-missing-input", "'x'"),
        ("tensorrt-no-profile", "m.onnx: ", "tensorrt: {lengths"), shapes={},
    ),
    "another input's profile": Case(
        TWO, {}, ("profile-missing-input", "'mask'"), ("tensorrt-profile-missing-input", "mask"),
        shapes={"ids": ((1, 1), (1, 4), (2, 8))}, inputs=MASKED,
    ),
    "opt differs": Case(
        TWO, {}, ("profile-conflict", "'mask'", "'ids'", "'length'", "(1, 5, 8)", "(1, 4, 8)"),
        ("tensorrt-profile-conflict",),
        shapes={"ids": ((1, 1), (1, 4), (2, 8)), "mask": ((1, 1), (1, 5), (2, 8))}, inputs=MASKED,
    ),
    "max differs": Case(
        TWO, {}, ("profile-conflict", "'mask'", "'ids'", "'length'", "(1, 4, 9)", "(1, 4, 8)"), (),
        shapes={"ids": ((1, 1), (1, 4), (2, 8)), "mask": ((1, 1), (1, 4), (2, 9))}, inputs=MASKED,
    ),
    "longer than the position table": Case(
        LOOK_UP, TABLES, ("profile-too-long", "'ids'", " 64 ", " 16 "), (),
        shapes={"ids": ((1, 1), (1, 8), (2, 64))}, inputs=[ids()], positions=16,
    ),
    "an infinite constant": Case(
        [MATMUL], {"w": overflowed()}, ("infinite", "'w' (float16)", " 1 "), (),
        inputs=[value("x", HALF, ["batch", 4])],
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the builder made of every case, and of a file that was cut off; all in one process."""
    folder = tmp_path_factory.mktemp("cases")
    graphs = {}
    for case_index, (name, case) in enumerate(CASES.items()):
        (folder / str(case_index)).mkdir()
        graphs[name] = case.save(folder / str(case_index) / "m.onnx"), case.shapes
    (folder / "cut").mkdir()
    complete_path = Case([MATMUL], {"w": W}, (), ()).save(folder / "cut" / "m.onnx")
    complete_path.write_bytes(complete_path.read_bytes()[:60])
    graphs["cut off"] = complete_path, SHAPES
    build_results = build_all(dict(graphs.values()))
    return dict(zip(graphs, build_results, strict=True))


@pytest.mark.parametrize("name", CASES)
def test_preflight_reports_error_with_node_and_remedy(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    path = case.save(tmp_path / "m.onnx")
    model = load_graph(path)
    problems = [*preflight(model, path), *check_profile(model, case.shapes, case.positions)]
    rule, *values = case.preflight
    errors = [problem.text for problem in problems if (problem.severity, problem.rule) == ("error", rule)]
    assert any(all(value in error for value in values) for error in errors), problems


@pytest.mark.parametrize("name", CASES)
def test_builder_errors_are_explained(name: str, answers: dict[str, Any]) -> None:
    answer = answers[name]
    if not CASES[name].builder:
        assert answer.get("bytes", 0) > 0, answer  # which is why the preflight looks for it
        return
    code, *values = CASES[name].builder
    assert code in answer["codes"], answer
    for value in values:
        assert value in answer["error"]


def test_truncated_file_error_is_explained(answers: dict[str, Any]) -> None:
    assert answers["cut off"]["codes"] == ["damaged-file"]
    assert "m.onnx: " in answers["cut off"]["error"]


def test_engine_is_built_with_progress_and_timing_cache(tmp_path: Path) -> None:
    cache = tmp_path / "cache" / "timings"
    path = Case([MATMUL], {"w": W}, (), ()).save(tmp_path / "m.onnx")
    answer = build(path, SHAPES, timing_cache=cache, plan=tmp_path / "m.plan")
    assert answer["bytes"] == (tmp_path / "m.plan").stat().st_size > W.nbytes
    assert answer["progress"] > 0
    assert cache.stat().st_size > 0
    assert list(cache.parent.iterdir()) == [cache]
    cache.write_bytes(b"damaged")
    assert build(path, SHAPES, timing_cache=cache)["bytes"] > W.nbytes


def test_every_profile_is_passed_to_the_builder(tmp_path: Path) -> None:
    inputs = CASES["another input's profile"]
    path = inputs.save(tmp_path / "m.onnx")
    valid_shapes = {"ids": ((1, 1), (1, 4), (2, 8)), "mask": ((1, 1), (1, 4), (2, 8))}
    invalid_shapes = valid_shapes | {"mask": ((1, 1), (1, 5), (2, 8))}
    assert build(path, [valid_shapes, valid_shapes])["bytes"] > 0
    for profiles in ([invalid_shapes, valid_shapes], [valid_shapes, invalid_shapes]):
        assert build(path, profiles)["codes"] == ["tensorrt-profile-conflict"]


def test_weights_use_four_two_or_one_byte_in_the_engine(tmp_path: Path) -> None:
    """fp32, fp16, and int8 as explicit symmetric Q/DQ with weights quantized per output channel."""
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((512, 2048)).astype(np.float32)
    scales = np.abs(weight).max(axis=0) / 127
    codes = np.rint(weight / scales).astype(np.int8)
    int8 = [
        node("QuantizeLinear", "x s z", "q", name="quantize"),
        node("DequantizeLinear", "q s z", "d", name="dequantize"),
        node("DequantizeLinear", "codes scales zeros", "w", name="weights", axis=1),
        node("MatMul", "d w", name="dense"),
    ]
    quantized = {
        "s": np.float32(0.02), "z": np.int8(0),
        "codes": codes, "scales": scales, "zeros": np.zeros(2048, np.int8),
    }  # fmt: skip
    shapes = {"x": ((1, 512), (1, 512), (8, 512))}
    wide_inputs = [value("x", FLOAT, ["batch", 512])]
    half = [value("x", HALF, ["batch", 512])]
    cases = [
        Case([MATMUL], {"w": weight}, (), (), shapes, wide_inputs),
        Case([MATMUL], {"w": weight.astype(np.float16)}, (), (), shapes, half),
        Case(int8, quantized, (), (), shapes, wide_inputs),
    ]
    graphs = {case.save(tmp_path / f"{i}.onnx"): shapes for i, case in enumerate(cases)}
    for path in graphs:
        assert preflight(load_graph(path), path) == []
    sizes = [answer.get("bytes", answer) for answer in build_all(graphs)]
    for size, width in zip(sizes, (4, 2, 1), strict=True):
        assert width * weight.size < size < width * weight.size + 500_000  # kernels, names

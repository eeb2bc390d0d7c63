"""The build against a real TensorRT builder; see tests/support/tensorrt_rig.py."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from tensorrt_rig import build

SHAPES = {"x": ((1, 4), (1, 4), (8, 4))}
W = np.ones((4, 4), np.float32)


def save(path: Path, nodes: list[Any], weights: dict[str, Any], domain: str = "") -> Path:
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 4])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    tensors = [numpy_helper.from_array(np.asarray(v), n) for n, v in weights.items()]
    opsets = [helper.make_opsetid("", 17)] + ([helper.make_opsetid(domain, 1)] if domain else [])
    model = helper.make_model(helper.make_graph(nodes, "g", [x], [y], tensors), opset_imports=opsets)
    onnx.save(model, path)
    return path


MATMUL = helper.make_node("MatMul", ["x", "w"], ["y"], name="dense")


def test_engine_is_built_with_progress_and_a_timing_cache(tmp_path: Path) -> None:
    cache = tmp_path / "cache" / "timings"
    answer = build(save(tmp_path / "m.onnx", [MATMUL], {"w": W}), SHAPES, timing_cache=cache)
    assert answer["bytes"] > W.nbytes
    assert answer["progress"] > 0
    assert cache.stat().st_size > 0
    assert list(cache.parent.iterdir()) == [cache]
    cache.write_bytes(b"damaged")
    assert build(tmp_path / "m.onnx", SHAPES, timing_cache=cache)["bytes"] > W.nbytes


def quantized(zero: Any) -> tuple[list[Any], dict[str, Any]]:
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"], name="quantize"),
        helper.make_node("DequantizeLinear", ["q", "s", "z"], ["d"], name="dequantize"),
        helper.make_node("MatMul", ["d", "w"], ["y"], name="dense"),
    ]
    return nodes, {"s": np.float32(0.1), "z": zero, "w": W}


def test_symmetric_int8_builds(tmp_path: Path) -> None:
    answer = build(save(tmp_path / "m.onnx", *quantized(np.int8(0))), SHAPES)
    assert answer.get("bytes", 0) > 0, answer


CUSTOM = helper.make_node("Mystery", ["x"], ["y"], name="riddle", domain="somebody")
DYNAMIC = [
    helper.make_node("DynamicQuantizeLinear", ["x"], ["q", "s", "z"], name="dynamic"),
    helper.make_node("DequantizeLinear", ["q", "s", "z"], ["y"], name="back"),
]


@pytest.mark.parametrize(
    ("nodes", "weights", "domain", "words"),
    [
        (
            [MATMUL],
            {"w": W.astype(np.float16)},
            "",
            ["'dense' (MatMul)", "two data types meet in one operator"],
        ),
        (*quantized(np.int8(3)), "", ["asymmetric quantization"]),
        ([CUSTOM], {}, "somebody", ["'riddle' (Mystery)"]),
        (DYNAMIC, {}, "", ["'dynamic' (DynamicQuantizeLinear)", "quantized at run time"]),
    ],
)
def test_what_the_parser_refuses_is_explained(
    tmp_path: Path,
    nodes: list[Any],
    weights: dict[str, Any],
    domain: str,
    words: list[str],
) -> None:
    error = build(save(tmp_path / "m.onnx", nodes, weights, domain), SHAPES)["error"]
    for word in words:
        assert word in error


def test_truncated_file_and_missing_profile_are_explained(tmp_path: Path) -> None:
    path = save(tmp_path / "m.onnx", [MATMUL], {"w": W})
    assert "no lengths are known" in build(path, {})["error"]
    path.write_bytes(path.read_bytes()[:60])
    assert "cut off or is no ONNX file" in build(path, SHAPES)["error"]

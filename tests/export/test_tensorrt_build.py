"""The build against a real TensorRT builder; see tensorrt_rig.py for how to get one without a GPU."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

RIG = os.environ.get("SMELT_TENSORRT_RIG")
SCRIPT = Path(__file__).with_name("tensorrt_rig.py")
pytestmark = pytest.mark.skipif(
    RIG is None,
    reason="SMELT_TENSORRT_RIG is not set: no TensorRT builder here (see tests/export/tensorrt_rig.py)",
)
SHAPES = {"x": ((1, 4), (1, 4), (8, 4))}
W = np.ones((4, 4), np.float32)


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    spec = importlib.util.spec_from_file_location("tensorrt_rig", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    rig = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(rig)
    assert RIG is not None
    found: dict[str, str] = rig.assemble(Path(RIG).resolve(), tmp_path_factory.mktemp("rig"))
    return found


def build(
    environment: dict[str, str], path: Path, shapes: dict[str, Any], cache: Path | None = None
) -> dict[str, Any]:
    request = {"onnx": str(path), "shapes": shapes, "timing_cache": str(cache) if cache else None}
    done = subprocess.run(
        [sys.executable, str(SCRIPT)],
        input=json.dumps(request),
        env=environment,
        text=True,
        capture_output=True,
        timeout=120,
        check=True,
    )
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def save(path: Path, nodes: list[Any], weights: dict[str, Any], domain: str = "") -> Path:
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 4])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    tensors = [numpy_helper.from_array(np.asarray(v), n) for n, v in weights.items()]
    opsets = [helper.make_opsetid("", 17)] + ([helper.make_opsetid(domain, 1)] if domain else [])
    model = helper.make_model(helper.make_graph(nodes, "g", [x], [y], tensors), opset_imports=opsets)
    onnx.save(model, path)
    return path


MATMUL = helper.make_node("MatMul", ["x", "w"], ["y"], name="dense")


def test_engine_is_built_with_progress_and_a_timing_cache(
    environment: dict[str, str], tmp_path: Path
) -> None:
    cache = tmp_path / "cache" / "timings"
    answer = build(environment, save(tmp_path / "m.onnx", [MATMUL], {"w": W}), SHAPES, cache)
    assert answer["bytes"] > W.nbytes
    assert answer["progress"] > 0
    assert cache.stat().st_size > 0
    assert list(cache.parent.iterdir()) == [cache]
    cache.write_bytes(b"damaged")
    assert build(environment, tmp_path / "m.onnx", SHAPES, cache)["bytes"] > W.nbytes


def quantized(zero: Any) -> tuple[list[Any], dict[str, Any]]:
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"], name="quantize"),
        helper.make_node("DequantizeLinear", ["q", "s", "z"], ["d"], name="dequantize"),
        helper.make_node("MatMul", ["d", "w"], ["y"], name="dense"),
    ]
    return nodes, {"s": np.float32(0.1), "z": zero, "w": W}


def test_symmetric_int8_builds(environment: dict[str, str], tmp_path: Path) -> None:
    answer = build(environment, save(tmp_path / "m.onnx", *quantized(np.int8(0))), SHAPES)
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
    environment: dict[str, str],
    tmp_path: Path,
    nodes: list[Any],
    weights: dict[str, Any],
    domain: str,
    words: list[str],
) -> None:
    error = build(environment, save(tmp_path / "m.onnx", nodes, weights, domain), SHAPES)["error"]
    for word in words:
        assert word in error


def test_truncated_file_and_missing_profile_are_explained(
    environment: dict[str, str], tmp_path: Path
) -> None:
    path = save(tmp_path / "m.onnx", [MATMUL], {"w": W})
    assert "no lengths are known" in build(environment, path, {})["error"]
    path.write_bytes(path.read_bytes()[:60])
    assert "cut off or is no ONNX file" in build(environment, path, SHAPES)["error"]

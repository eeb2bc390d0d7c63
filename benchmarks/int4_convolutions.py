"""Convolutions with weights of 4 and 8 bits, dequantized in ONNX Runtime at each call, compared with float32.

    OMP_NUM_THREADS=1 python benchmarks/int4_convolutions.py

Prints the size of each file, the operators after ONNX Runtime's optimizations, and the median processor time
of a call on one thread, in rounds that alternate.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

LAYERS, CHANNELS, SIZE, BLOCK = 8, 256, 14, 32
ROUNDS, CALLS = 25, 4


def _weights(bits: int, index: int, draw: np.random.Generator) -> tuple[list[Any], list[Any]]:
    """Return the constants of a 3 x 3 convolution, and the nodes that compute its weights."""
    weights = (draw.normal(size=(CHANNELS, CHANNELS, 3, 3)) / 48).astype(np.float32)
    name, names = f"w{index}", [f"q{index}", f"s{index}"]
    if bits == 32:
        return [numpy_helper.from_array(weights, name)], []
    if bits == 8:
        scales = np.abs(weights).max((1, 2, 3)) / 127
        codes = np.rint(weights / scales[:, None, None, None]).astype(np.int8)
        node = helper.make_node("DequantizeLinear", names, [name], axis=0)
        return [numpy_helper.from_array(codes, names[0]), numpy_helper.from_array(scales, names[1])], [node]
    blocks = weights.reshape(CHANNELS, -1, BLOCK, 3, 3)
    scales = np.abs(blocks).max(2) / 7
    codes = np.rint(blocks / scales[:, :, None]).astype(np.int8).reshape(-1)
    packed = (codes[::2] & 15 | (codes[1::2] & 15) << 4).astype(np.uint8).tobytes()
    tensor = helper.make_tensor(names[0], TensorProto.INT4, weights.shape, packed, raw=True)
    node = helper.make_node("DequantizeLinear", names, [name], axis=1, block_size=BLOCK)
    return [tensor, numpy_helper.from_array(scales, names[1])], [node]


def _model(bits: int) -> Any:
    draw, nodes, constants = np.random.default_rng(0), list[Any](), list[Any]()
    for index in range(LAYERS):
        tensors, dequantize = _weights(bits, index, draw)
        constants += tensors
        convolution = helper.make_node("Conv", [f"x{index}", f"w{index}"], [f"y{index}"], pads=[1] * 4)
        nodes += [*dequantize, convolution, helper.make_node("Relu", [f"y{index}"], [f"x{index + 1}"])]
    shape: list[str | int | None] = ["batch", CHANNELS, SIZE, SIZE]
    ends = [helper.make_tensor_value_info(f"x{n}", TensorProto.FLOAT, shape) for n in (0, LAYERS)]
    graph = helper.make_graph(nodes, "convolutions", ends[:1], ends[1:], constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def main() -> int:
    """Measure; return 0."""
    pixels = np.random.default_rng(1).normal(size=(1, CHANNELS, SIZE, SIZE)).astype(np.float32)
    sessions: dict[int, Any] = {}
    with TemporaryDirectory() as folder:
        for bits in (32, 8, 4):
            path, optimized = Path(folder) / f"{bits}.onnx", Path(folder) / f"{bits}-optimized.onnx"
            onnx.save(_model(bits), path)
            options: Any = onnxruntime.SessionOptions()
            options.intra_op_num_threads, options.log_severity_level = 1, 3
            options.optimized_model_filepath = str(optimized)
            sessions[bits] = onnxruntime.InferenceSession(path, options, ["CPUExecutionProvider"])
            operators = Counter(node.op_type for node in onnx.load(optimized).graph.node)
            print(f"{bits} bits: {path.stat().st_size:,} bytes; {dict(operators)}")
    times: dict[int, list[float]] = {bits: [] for bits in sessions}
    for _ in range(ROUNDS):
        for bits, session in sessions.items():
            start = time.process_time()
            for _ in range(CALLS):
                session.run(None, {"x0": pixels})
            times[bits].append((time.process_time() - start) / CALLS * 1e3)
    base = statistics.median(times[32])
    for bits, values in times.items():
        median = statistics.median(values)
        print(f"{bits} bits: {median:.2f} ms of processor time, {median / base:.2f} times float32")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Small graphs of the kinds that other tools write, each with samples."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from tests.support.graphs import imported_graphs as graphs

Samples = dict[str, np.ndarray]
Kind = tuple[Any, Samples]
COUNT = 30
_N = helper.make_node


def _weights(**shapes: tuple[int, ...]) -> list[Any]:
    random = np.random.default_rng(0)
    arrays = {name: random.normal(0, 0.3, shape).astype(np.float32) for name, shape in shapes.items()}
    return [numpy_helper.from_array(value, name) for name, value in arrays.items()]


def _integers(**values: list[int]) -> list[Any]:
    return [numpy_helper.from_array(np.array(value, np.int64), name) for name, value in values.items()]


def _draw(*shape: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def lstm_in_if() -> Kind:
    """An LSTM in both branches of an If, as PyTorch scripts write it."""

    def branch(direction: str) -> Any:
        nodes = [
            _N("LSTM", ["by_time", "w", "r"], ["all", "state"], hidden_size=8, direction=direction),
            _N("Squeeze", ["state", "axis0"], ["result"]),
        ]
        return helper.make_graph(nodes, direction, [], [graphs.value_info("result", [None, 8])])

    nodes = [
        _N("Transpose", ["x"], ["by_time"], perm=[1, 0, 2]),
        _N("ReduceMean", ["x"], ["mean"], keepdims=0),
        _N("Greater", ["mean", "limit"], ["is_high"]),
        _N("If", ["is_high"], ["h"], then_branch=branch("forward"), else_branch=branch("reverse")),
        _N("MatMul", ["h", "out"], ["y"]),
    ]
    weights = [*_weights(w=(1, 32, 4), r=(1, 32, 8), out=(8, 3)), *_integers(axis0=[0])]
    weights.append(numpy_helper.from_array(np.float32(-9), "limit"))
    inputs, outputs = [graphs.value_info("x", ["batch", 5, 4])], [graphs.value_info("y", ["batch", 3])]
    return graphs.make_model(nodes, inputs, outputs, weights), {"x": _draw(COUNT, 5, 4)}


def gru() -> Kind:
    """A GRU with a state of its own."""
    model = graphs.gru_model(["batch", 6, 4], [1, "batch", 8], [1, "batch", 8])
    return model, {"x": _draw(COUNT, 6, 4), "state": _draw(1, COUNT, 8, seed=2)}


def weights_as_inputs() -> Kind:
    """Opset 9 and IR version 3, in which every weight is an input too."""
    nodes = [
        _N("Conv", ["x", "kernel"], ["h"], pads=[1, 1, 1, 1]),
        _N("Relu", ["h"], ["r"]),
        _N("GlobalAveragePool", ["r"], ["pooled"]),
        _N("Flatten", ["pooled"], ["flat"]),
        _N("Gemm", ["flat", "w", "b"], ["y"]),
    ]
    weights = _weights(kernel=(8, 3, 3, 3), w=(8, 5), b=(5,))
    inputs = [graphs.value_info("x", ["batch", 3, 8, 8])]
    inputs += [graphs.value_info(tensor.name, list(tensor.dims)) for tensor in weights]
    model = graphs.make_model(nodes, inputs, [graphs.value_info("y", ["batch", 5])], weights, opset=9)
    model.ir_version = 3
    return model, {"x": _draw(COUNT, 3, 8, 8)}


def fixed_batch() -> Kind:
    """A batch size of 1 that a Reshape has as a constant too."""
    nodes = [
        _N("MatMul", ["x", "w"], ["h"]),
        _N("Relu", ["h"], ["r"]),
        _N("Reshape", ["r", "to"], ["flat"]),
        _N("MatMul", ["flat", "out"], ["y"]),
    ]
    weights = [*_weights(w=(4, 8), out=(24, 3)), *_integers(to=[1, 24])]
    inputs, outputs = [graphs.value_info("x", [1, 3, 4])], [graphs.value_info("y", [1, 3])]
    return graphs.make_model(nodes, inputs, outputs, weights), {"x": _draw(COUNT, 3, 4)}


def qdq() -> Kind:
    """Quantized already, by QuantizeLinear and DequantizeLinear; the last matrix is float."""
    random = np.random.default_rng(0)
    nodes = [
        _N("QuantizeLinear", ["x", "x_scale", "x_zero"], ["xq"]),
        _N("DequantizeLinear", ["xq", "x_scale", "x_zero"], ["xd"]),
        _N("DequantizeLinear", ["wq", "w_scale", "w_zero"], ["wd"]),
        _N("MatMul", ["xd", "wd"], ["h"]),
        _N("Relu", ["h"], ["r"]),
        _N("MatMul", ["r", "out"], ["y"]),
    ]
    constants = {
        "x_scale": np.float32(0.03),
        "x_zero": np.int8(0),
        "wq": random.integers(-127, 127, (8, 16)).astype(np.int8),
        "w_scale": np.float32(0.01),
        "w_zero": np.int8(0),
    }
    weights = [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()]
    inputs, outputs = [graphs.value_info("x", ["batch", 8])], [graphs.value_info("y", ["batch", 4])]
    return graphs.make_model(nodes, inputs, outputs, [*weights, *_weights(out=(16, 4))]), {
        "x": _draw(COUNT, 8)
    }


def float16() -> Kind:
    """float16 inside, float32 at the ends, as tf2onnx writes it."""
    nodes = [
        _N("Cast", ["x"], ["x16"], to=TensorProto.FLOAT16),
        _N("MatMul", ["x16", "w"], ["h"]),
        _N("Add", ["h", "b"], ["h1"]),
        _N("Relu", ["h1"], ["r"]),
        _N("MatMul", ["r", "out"], ["y16"]),
        _N("Cast", ["y16"], ["y"], to=TensorProto.FLOAT),
    ]
    weights = [
        numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float16), tensor.name)
        for tensor in _weights(w=(8, 32), b=(32,), out=(32, 4))
    ]
    inputs, outputs = [graphs.value_info("x", ["batch", 8])], [graphs.value_info("y", ["batch", 4])]
    return graphs.make_model(nodes, inputs, outputs, weights), {"x": _draw(COUNT, 8)}


def unrolled_recurrence() -> Kind:
    """Five steps that share their matrices."""
    nodes = [_N("Mul", ["state", "decay"], ["h0"])]
    for step in range(5):
        nodes += [
            _N("Gather", ["x", f"step{step}"], [f"x{step}"], axis=1),
            _N("Gemm", [f"x{step}", "w", "b"], [f"a{step}"]),
            _N("MatMul", [f"h{step}", "u"], [f"c{step}"]),
            _N("Add", [f"a{step}", f"c{step}"], [f"s{step}"]),
            _N("Tanh", [f"s{step}"], [f"h{step + 1}"]),
        ]
    nodes.append(_N("Identity", ["h5"], ["y"]))
    steps = [numpy_helper.from_array(np.array(step), f"step{step}") for step in range(5)]
    weights = [*_weights(w=(4, 64), b=(64,), u=(64, 64), decay=(64,)), *steps]
    inputs = [graphs.value_info("x", ["batch", 5, 4]), graphs.value_info("state", ["batch", 64])]
    outputs = [graphs.value_info("y", ["batch", 64])]
    model = graphs.make_model(nodes, inputs, outputs, weights)
    return model, {"x": _draw(COUNT, 5, 4), "state": _draw(COUNT, 64, seed=2)}


def detector() -> Kind:
    """Boxes and scores by linear layers, then NonMaxSuppression: as many boxes as it selects."""
    nodes = [
        _N("MatMul", ["x", "to_boxes"], ["flat_boxes"]),
        _N("Reshape", ["flat_boxes", "box_shape"], ["centers"]),
        _N("Add", ["centers", "sizes"], ["boxes"]),
        _N("MatMul", ["x", "to_scores"], ["flat_scores"]),
        _N("Sigmoid", ["flat_scores"], ["probabilities"]),
        _N("Reshape", ["probabilities", "score_shape"], ["scores"]),
        _N("NonMaxSuppression", ["boxes", "scores", "most", "overlap", "least"], ["selected"]),
        _N("Gather", ["selected", "last"], ["indices"], axis=1),
        _N("Squeeze", ["boxes", "axis0"], ["all_boxes"]),
        _N("Gather", ["all_boxes", "indices"], ["detected_boxes"]),
        _N("Squeeze", ["scores", "axes01"], ["all_scores"]),
        _N("Gather", ["all_scores", "indices"], ["detected_scores"]),
    ]
    weights = [
        *_weights(to_boxes=(8, 48), to_scores=(8, 12)),
        *_integers(box_shape=[1, 12, 4], score_shape=[1, 1, 12], axis0=[0], axes01=[0, 1], most=[20]),
        numpy_helper.from_array(np.array(2), "last"),
        numpy_helper.from_array(np.array([0.5], np.float32), "overlap"),
        numpy_helper.from_array(np.array([0.3], np.float32), "least"),
        numpy_helper.from_array(np.array([0, 0, 2, 2], np.float32), "sizes"),
    ]
    outputs = [
        graphs.value_info("detected_boxes", ["detections", 4]),
        graphs.value_info("detected_scores", ["detections"]),
    ]
    model = graphs.make_model(nodes, [graphs.value_info("x", [1, 8])], outputs, weights)
    return model, {"x": _draw(COUNT, 8)}


def external_data() -> Kind:
    """Weights in a file of their own."""
    return graphs.two_layer_classifier(width=256), {"x": _draw(COUNT, 8)}


def different_axes() -> Kind:
    """Samples on axis 0 of one input and on axis 1 of the other, without names of axes."""
    nodes = [
        _N("ReduceMean", ["x"], ["mean"], axes=[1], keepdims=0),
        _N("MatMul", ["mean", "w"], ["h"]),
        _N("Mul", ["state", "decay"], ["s"]),
        _N("Add", ["s", "h"], ["y"]),
    ]
    weights = _weights(w=(4, 16), decay=(2, 1, 16))
    inputs = [graphs.value_info("x", [None, None, 4]), graphs.value_info("state", [2, None, 16])]
    outputs = [graphs.value_info("y", [2, None, 16])]
    model = graphs.make_model(nodes, inputs, outputs, weights)
    return model, {"x": _draw(COUNT, 3, 4), "state": _draw(2, COUNT, 16, seed=2)}


KINDS: dict[str, Callable[[], Kind]] = {
    make.__name__: make
    for make in (
        lstm_in_if,
        gru,
        weights_as_inputs,
        fixed_batch,
        qdq,
        float16,
        unrolled_recurrence,
        detector,
        external_data,
        different_axes,
    )
}


def write_kind(folder: Path, name: str) -> Samples:
    """Write a graph of a kind as model.onnx, and its samples as samples.npz; return these."""
    model, samples = KINDS[name]()
    onnx.checker.check_model(model)
    graphs.save_model(model, folder / "model.onnx", "weights.bin" if name == "external_data" else None)
    np.savez(folder / "samples.npz", **samples)
    return samples

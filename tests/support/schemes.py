"""Matrices and layers of any scheme, for its tests."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from torch import nn

from smelt.compress.quantize.plan_layers import quantize_into, quantize_module
from smelt.quantization.layers import QuantizedLinear, QuantizedMatrix, empty_quantized
from smelt.quantization.scheme import QuantParams, Scheme, SchemeOptions, StoredTensor, UnpackedWeights
from smelt.quantization.schemes.int8 import Int8Dynamic
from smelt.quantization.schemes.registry import SCHEMES, default_options, find_scheme
from tests.support.pairs.matrix import is_full_matrix


def small_settings(name: str) -> dict[str, Any]:
    """Return settings of `quantize` with the default options of a scheme, for tiny models.

    The groups are small, because tiny matrices have few inputs.
    """
    scheme = SCHEMES[name]
    settings: dict[str, Any] = {"scheme": name}
    for option in scheme.option_specs:
        if option.name == "group_size":
            sizes = [size for size in option.allowed if isinstance(size, int)]
            settings["group_size"] = min((size for size in sizes if size >= 32), default=sizes[0])
    if scheme.requires_calibration:
        settings |= {"calibration_samples": 8, "sensitivity_samples": 1}
    return settings


def rounded_matrix(scheme: str, weight: torch.Tensor, **options: Any) -> QuantizedMatrix:
    """Return the matrix of `weight`, rounded to nearest; options that are not given have their defaults."""
    kind = find_scheme(scheme)
    matrix = QuantizedMatrix(kind, *weight.shape, default_options(kind) | options)
    quantize_into(matrix, weight)
    return matrix


def with_activation_range(
    module: nn.Module,
    scheme: str,
    options: dict[str, Any] | None = None,
    largest: float = 4.5,
    lowest: float | None = None,
) -> Any:
    """Return the quantized `module`; `largest`, `lowest`: the range of activations, if its scheme has one."""
    layer = quantize_module(module, scheme, default_options(find_scheme(scheme)) | (options or {}))
    layer.matrix.set_activation_range_(-largest if lowest is None else lowest, largest)
    return layer


def random_quantized_layer(
    scheme: str, codes: UnpackedWeights, inputs: int = 100, bias: bool = True, **options: Any
) -> QuantizedLinear:
    """Return a layer of these codes with a random bias."""
    full_layer = nn.Linear(inputs, len(codes.q_weight), bias)
    layer = empty_quantized(full_layer, scheme, default_options(find_scheme(scheme)) | options).eval()
    assert isinstance(layer, QuantizedLinear)
    layer.matrix.set_weight_(codes)
    if layer.bias is not None:
        layer.bias.data = torch.randn(len(codes.q_weight))
    return layer


def matmul_nbits(layer: QuantizedLinear, x: torch.Tensor, bits: int = 4) -> NDArray[np.float32]:
    """Return what ONNX Runtime's MatMulNBits computes for the very tensors of the layer."""
    import onnxruntime

    from smelt.runtimes.onnx_session import session_options

    constants = {"b": layer.matrix.codes.numpy(), "s": layer.matrix.scales.float().numpy()}
    names = ["x", "b", "s", "", "", "bias" if layer.bias is not None else ""]
    if layer.matrix.has("zeros"):
        names[3], constants["z"] = "z", layer.matrix.tensor("zeros").numpy()
    if layer.bias is not None:
        constants["bias"] = layer.bias.detach().numpy()
    node = helper.make_node(
        "MatMulNBits", names, ["y"], domain="com.microsoft", bits=bits, K=layer.in_features,
        N=layer.out_features, block_size=layer.matrix.options["group_size"],
        accuracy_level=layer.matrix.options["accuracy_level"],
    )  # fmt: skip
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        [node], "g", [value("x", TensorProto.FLOAT, None)], [value("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(v, n) for n, v in constants.items()],
    )  # fmt: skip
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), session_options(), providers=["CPUExecutionProvider"]
    )
    result: NDArray[np.float32] = session.run(None, {"x": x.numpy()})[0]
    return result


def scheme_options(scheme: Scheme) -> Iterator[dict[str, Any]]:
    """Yield options that a scheme can be given; all of them with SMELT_MATRIX=all."""
    names = [option.name for option in scheme.option_specs]
    allowed = [option.allowed for option in scheme.option_specs]
    if is_full_matrix():
        for values in itertools.product(*allowed):
            yield dict(zip(names, values, strict=True))
        return
    for index in range(max(map(len, allowed), default=1)):  # each value of each option at least once
        yield {
            name: values[(index + index // len(values)) % len(values)]
            for name, values in zip(names, allowed, strict=True)
        }


class PerTensor(Int8Dynamic):
    """int8 with one scale for the whole matrix, as a scheme with something that is not by row."""

    def compute_qparams(self, groups: torch.Tensor, width: int, options: SchemeOptions) -> QuantParams:
        """Let the largest magnitude of all be 127."""
        return {"scales": groups.abs().amax().reshape(1, 1) / 127}

    def stored_tensors(self, rows: int, width: int, options: SchemeOptions) -> dict[str, StoredTensor]:
        """Return one scale."""
        return super().stored_tensors(rows, width, options) | {
            "scales": StoredTensor((1,), "float32", per_row=False)
        }


def per_tensor(weight: torch.Tensor) -> QuantizedLinear:
    """Return a layer of `PerTensor` without a bias."""
    matrix = QuantizedMatrix(PerTensor(), *weight.shape, default_options(PerTensor()))
    quantize_into(matrix, weight)
    return QuantizedLinear(weight.shape[1], False, matrix)


SCHEME_CASES = [(name, options) for name, scheme in SCHEMES.items() for options in scheme_options(scheme)]
SCHEME_IDS = ["-".join([name, *(str(value) for value in options.values())]) for name, options in SCHEME_CASES]


class _ParallelLayers(nn.Module):
    """Layers of one input, whose outputs are joined."""

    def __init__(self, layers: list[QuantizedLinear]) -> None:
        super().__init__()
        self.attentions = ()  # a graph of a model has some
        self.layers = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([layer(x) for layer in self.layers], dim=-1)


def export_layers(
    layers: list[QuantizedLinear], x: torch.Tensor, target: Any = "ort-cpu", opset: int = 20
) -> Any:
    """Return the onnx.ModelProto of layers that read `x` [B, S, K], as the stage `onnx` writes it."""
    from smelt.export.graphs.attention import GraphSpec
    from smelt.export.graphs.export_graph import export_graph
    from smelt.export.simplify_graph import expand_placeholders

    exported = export_graph(
        GraphSpec("model", _ParallelLayers(layers).eval(), (x,), ["x"], ["y"], ({1: "length"},)),
        target,
        opset,
    )
    expand_placeholders(exported)
    return exported


def run_onnx_runtime(
    layers: list[QuantizedLinear], x: torch.Tensor, optimized: str = ""
) -> list[NDArray[np.float32]]:
    """Return what ONNX Runtime computes for each of `layers`; the graph that it runs goes to `optimized`."""
    import onnxruntime

    from smelt.runtimes.onnx_session import session_options

    options = session_options()
    if optimized:
        options.optimized_model_filepath, options.log_severity_level = optimized, 3
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    graph = export_layers(layers, x).SerializeToString()
    session = onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
    output: NDArray[np.float32] = session.run(None, {"x": x.numpy()})[0]
    return list(np.split(output, np.cumsum([layer.out_features for layer in layers])[:-1], axis=-1))


def fused_matmul_attributes(layers: list[QuantizedLinear], path: Path) -> list[dict[str, int]]:
    """Return the attributes of what ONNX Runtime keeps of each layer once a session has loaded it.

    Fails unless that is MatMulNBits alone, and computes what torch does. The loaded graph goes to `path`.
    """
    import onnx

    torch.manual_seed(1)
    x = torch.randn(2, 3, layers[0].in_features)
    for layer, actual in zip(layers, run_onnx_runtime(layers, x, str(path)), strict=True):
        with torch.inference_mode():
            expected = layer(x).numpy()
        assert np.abs(actual - expected).max() < 1e-5 * expected.std()
    nodes = [node for node in onnx.load(path).graph.node if node.op_type != "Concat"]
    assert {node.op_type for node in nodes} == {"MatMulNBits"}
    return [{"accuracy_level": 0} | {a.name: a.i for a in node.attribute} for node in nodes]


def random_affine(
    scheme: str, group: int = 32, symmetric: bool = True, level: int = 4, inputs: int = 100, outputs: int = 24
) -> QuantizedLinear:
    """Return a layer with random codes in groups, by a scheme of whole-number codes."""
    torch.manual_seed(0)
    num_levels = 2 ** find_scheme(scheme).bits
    groups = -(-inputs // group)
    codes = torch.randint(0, num_levels, (outputs, groups, group), dtype=torch.uint8)
    grid = {"scales": torch.rand(outputs, groups) + 0.5}
    if not symmetric:
        grid["zeros"] = torch.randint(0, num_levels, (outputs, groups), dtype=torch.uint8)
    options = {"group_size": group, "symmetric": symmetric, "accuracy_level": level}
    return random_quantized_layer(scheme, UnpackedWeights(codes, grid), inputs, **options)

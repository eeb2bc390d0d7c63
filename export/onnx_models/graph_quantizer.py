"""Quantize a graph with any of its nodes excluded, and make the quantizers' result valid.

The graph is prepared once and its activations are calibrated once. The quantizers' graphs are corrected in
node order, domains and scales of stacked matrices.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from smelt.core.errors import RunError, SmeltError
from smelt.export.onnx_models.normalize_graph import (
    make_node_names_unique,
    rename_reserved,
    restore_names,
    value_names,
)
from smelt.export.onnx_models.ort_quantizers import (
    ActivationCalibration,
    calibrate_graph,
    run_ort_quantizer,
)
from smelt.export.onnx_models.output_comparison import remove_passthrough_outputs, restore_passthrough_outputs
from smelt.export.onnx_models.prepare_for_quantizer import prepare_for_quantizer
from smelt.export.onnx_models.settings import AUTO, PER_CHANNEL_OPSET, QuantizeOnnxSettings
from smelt.export.onnx_models.weight_only import quantize_weights
from smelt.runtimes.graph_walk import all_nodes, node_inputs, separate_int8_readers, subgraphs
from smelt.stage import Context

_MIN_REPEATED = 0.05  # fraction of the bytes of all weights, above which equal ones are stored once
_FUSED_OPS = ("Relu", "Clip")  # quantized only with the convolution before them


class GraphQuantizer:
    """A graph that can be quantized several times, each time with other nodes excluded."""

    def __init__(
        self, path: Path, settings: QuantizeOnnxSettings, feeds: list[Any], folder: Path, ctx: Context
    ) -> None:
        """Prepare the graph.

        Args:
            path: the float graph.
            settings: of the stage; `exclude` has names of nodes, not patterns.
            feeds: calibration samples, call by call.
            folder: an empty one for files.
            ctx: gets a warning if the graph's opset does not support scales per channel.

        Raises:
            InputError: the graph cannot be converted to an opset that was set or is needed.
            RunError: it cannot be prepared.
        """
        self.path, self._folder = path, folder
        ready_in, named_in = folder / "prepared", folder / "named"
        ready_in.mkdir()
        named_in.mkdir()
        with _as_run_errors(path.name):
            source, self._passed = remove_passthrough_outputs(path, folder / "passed")
            ready, opset = prepare_for_quantizer(source, ready_in, settings.min_opset, settings.opset)
            self._source, self._names = rename_reserved(ready, named_in, settings.exclude)
            if AUTO in settings.exclude:
                self._name_nodes(settings.exclude)
        self.settings = _per_tensor_settings(opset, settings, ctx)
        renamed = {original_name: safe_name for safe_name, original_name in self._names.items()}
        self._feeds = [{renamed.get(name, name): v for name, v in inputs.items()} for inputs in feeds]
        self._calibration: ActivationCalibration | None = None

    def _name_nodes(self, keep: Collection[str]) -> None:
        """Give each node a name of its own, so that it can be excluded alone."""
        from smelt.export.graph_files import read_graph, write_graph

        model = read_graph(self._source)
        make_node_names_unique(model.graph, set(keep), value_names(model.graph))
        self._source = self._folder / self.path.name
        write_graph(model, self._source)

    def quantizable_nodes(self) -> list[str]:
        """Return the names of the nodes that may be quantized."""
        from smelt.export.graph_files import read_graph

        graph = read_graph(self._source, values=False).graph
        operators = set(self.settings.quantized_op_types) - {*_FUSED_OPS}
        nodes = graph.node if self.settings.uses_calibration else all_nodes(graph.node)
        return [
            node.name
            for node in nodes
            if node.op_type in operators and node.name not in self.settings.exclude
        ]

    def fused_nodes(self) -> list[str]:
        """Return the names of the activations that are quantized with the operator before them."""
        from smelt.export.graph_files import read_graph

        graph = read_graph(self._source, values=False).graph
        return [node.name for node in graph.node if node.op_type in _FUSED_OPS]

    def write(self, target: Path, exclude: Collection[str], ctx: Context) -> None:
        """Write the quantized graph to `target`.

        Args:
            target: its name and that of the float graph are equal.
            exclude: names of nodes that are kept float.
            ctx: gets warnings about what is kept float.

        Raises:
            RunError: the quantizer fails.
        """
        from smelt.export.graph_files import (
            external_data_path,
            inline_weight_bytes,
            share_weights,
            write_graph,
        )
        from smelt.runtimes.onnx_session import silence_onnxruntime

        settings = self.settings.model_copy(update={"exclude": tuple(n for n in exclude if n != AUTO)})
        with (
            TemporaryDirectory(dir=self._folder) as folder,
            _as_run_errors(self.path.name),
            silence_onnxruntime(),
        ):
            quantized = Path(folder, self.path.name)
            if settings.is_weight_only:
                quantize_weights(self._source, quantized, settings, ctx)
            else:
                run_ort_quantizer(self._source, quantized, settings, self._calibrate, ctx)
            model = finalize_quantized(quantized, self._source)
            restore_names(model, self._names)
        model = restore_passthrough_outputs(model, self._passed)
        shared = _repeated_bytes(model) > _MIN_REPEATED * inline_weight_bytes(model)
        write_graph(model, target)
        if shared:
            share_weights([target], external_data_path(Path(target.name)).name)

    def _calibrate(self, model: Any) -> ActivationCalibration:
        if self._calibration is None:
            self._calibration = calibrate_graph(self._source, model, self.settings, self._feeds, self._folder)
        return self._calibration


@contextmanager
def _as_run_errors(name: str) -> Iterator[None]:
    """Raise errors of ONNX Runtime's quantizers as RunErrors; their log is disabled."""
    disabled = logging.root.manager.disable  # the level of the caller
    try:
        # it always logs that a graph can be preprocessed first, which `simplify` does
        logging.disable(max(disabled, logging.WARNING))
        yield
    except SmeltError:
        raise
    except Exception as error:  # a library with many classes of errors; no graph is written
        error_text = " ".join(str(error).split())[:400]
        raise RunError(
            f"onnxruntime.quantization failed on {name}: {error_text}", code="quantizer-failed"
        ) from error
    finally:
        logging.disable(disabled)


def _repeated_bytes(model: Any) -> int:
    """Return the bytes of the weights that are equal to another one.

    Nodes that share a weight have a copy each (`prepare_for_quantizer`, `finalize_quantized`), which the
    data file stores once.
    """
    from smelt.export.graph_files import MIN_EXTERNAL_BYTES

    seen: set[bytes] = set()
    repeated = 0
    for tensor in model.graph.initializer:
        content = tensor.raw_data
        if len(content) < MIN_EXTERNAL_BYTES:  # remains in the graph
            continue
        key = hashlib.sha256(content).digest()
        repeated += len(content) if key in seen else 0
        seen.add(key)
    return repeated


def _per_tensor_settings(opset: int, settings: QuantizeOnnxSettings, ctx: Context) -> QuantizeOnnxSettings:
    """Return `settings` as the opset allows: its DequantizeLinear may not support scales per output."""
    by_channel = settings.uses_calibration or (settings.is_weight_only and not settings.uses_nbits)
    if opset >= PER_CHANNEL_OPSET or not by_channel or not settings.is_per_channel:
        return settings
    ctx.warn(
        "per-tensor-weights",
        f"Weights have one scale per matrix, because opset {opset} does not support per-channel scales and"
        f" onnx cannot convert this model. Export it with opset {PER_CHANNEL_OPSET} or newer.",
    )
    return settings.model_copy(update={"granularity": "tensor"})


def finalize_quantized(quantized: Path, source: Path) -> Any:
    """Return the quantized graph in `quantized` as a valid onnx.ModelProto.

    - The quantizers sort nodes without considering outer values that inner graphs (If, Loop, Scan) read.
    - They drop the domain of nodes that contain graphs (com.microsoft.BeamSearch).
    - A stack of matrices has one scale per column of all its matrices; MatMulInteger requires zero points and
      scales of the shape of the stack, with one row.
    - Of int8 weights and zero points each node reads its own (`separate_int8_readers`).

    Args:
        quantized: the output of a quantizer.
        source: its input.
    """
    from smelt.export.graph_files import read_graph

    model = read_graph(quantized)
    domains = {
        node.output[0]: node.domain
        for node in all_nodes(read_graph(source, values=False).graph.node)
        if subgraphs(node)
    }
    for node in all_nodes(model.graph.node):
        if subgraphs(node):
            node.domain = domains.get(node.output[0], node.domain)
    _sort_topologically(model.graph)
    _broadcast_scales(model.graph)
    separate_int8_readers(model.graph)
    return model


def _sort_topologically(graph: Any) -> None:
    """Sort nodes topologically and otherwise keep their order; also in inner graphs."""
    # not onnx_ir 1.1's TopologicalSortPass: reading a graph, onnx_ir drops its sparse initializers
    producers = {
        name: node_index for node_index, node in enumerate(graph.node) for name in node.output if name
    }
    nodes = list(graph.node)
    dependencies = [
        sorted({producers[name] for name in node_inputs(node) if name in producers}) for node in nodes
    ]
    done: set[int] = set()
    order: list[int] = []
    for first in range(len(nodes)):
        stack = [first]
        while stack:
            node_index = stack[-1]
            open_ends = [source for source in dependencies[node_index] if source not in done]
            if node_index in done or not open_ends:
                stack.pop()
                if node_index not in done:
                    done.add(node_index)
                    order.append(node_index)
            else:
                stack += open_ends[::-1]
    if order != sorted(order):
        del graph.node[:]
        graph.node.extend([nodes[node_index] for node_index in order])
    for node in graph.node:
        for body in subgraphs(node):
            _sort_topologically(body)


def _broadcast_scales(graph: Any) -> None:
    """Give the zero points and scales of stacked matrices the shape that MatMulInteger requires."""
    tensors = {tensor.name: tensor for tensor in graph.initializer}
    for node in all_nodes(graph.node):
        if node.op_type != "MatMulInteger" or len(node.input) < 4:
            continue
        matrix, zero = tensors.get(node.input[1]), tensors.get(node.input[3])
        if matrix is None or zero is None or len(matrix.dims) < 3 or len(zero.dims) != 1:
            continue
        scale = tensors.get(f"{node.input[3].removesuffix('_zero_point')}_scale")
        shape = [*matrix.dims[:-2], 1, matrix.dims[-1]]
        for tensor in (zero, scale):
            if tensor is not None and list(tensor.dims) == [shape[-1]]:
                _broadcast_tensor(tensor, shape)


def _broadcast_tensor(tensor: Any, shape: Sequence[int]) -> None:
    from onnx import numpy_helper

    values = np.broadcast_to(numpy_helper.to_array(tensor), shape)
    tensor.CopyFrom(numpy_helper.from_array(np.ascontiguousarray(values), tensor.name))

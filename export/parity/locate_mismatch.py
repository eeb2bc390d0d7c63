"""Locate the first layer of a graph whose output differs from torch.

Called only after an output differed, with dequantized weights. Nodes are matched with layers by the names of
their constants; the graph is run with their outputs exposed, on the inputs on which it differed.

Shapes: B = batch, L = source length or prompt, S = new tokens.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor, nn

from smelt.export.graph_files import read_graph, write_graph
from smelt.export.graphs.graph_spec import GraphSpec
from smelt.export.parity.operator_checks import GraphCall, TensorsByName, run_graph_calls
from smelt.export.parity.torch_reference import LOGITS_TOLERANCES, TorchReference, run_exact
from smelt.quantization.layers import QuantizedLinear


class LayerLocation(NamedTuple):
    """A layer of the model, and the graph's node that computes its output."""

    layer: str
    node: str


def locate_first_mismatch(
    folder: Path, graph: GraphSpec, model: Any, reference: TorchReference
) -> LayerLocation | None:
    """Return the first layer of a graph whose output differs; None if none is found.

    Args:
        folder: with the graphs, in float32.
        graph: the one that differs.
        model: the parent.
        reference: the batch and tokens on which it differs.
    """
    name = graph.name
    places = _layer_outputs_in_graph(read_graph(folder / f"{name}.onnx", values=False), graph.module)
    expected = _layer_outputs(model, reference, {id(graph.module.get_submodule(p)): p for p in places})
    try:
        session = _open_with_outputs(folder, name, [value for _, value in places.values()])
        for call, got in run_graph_calls(session, folder, name, reference):
            for path, whole in expected.items():
                node, value = places[path]
                if value in got and _differs(whole, got[value], call):
                    return LayerLocation(path, node)
    except Exception:  # the graph with exposed values cannot be run; the layer is not reported
        return None
    return None


def _layer_outputs_in_graph(model: Any, module: nn.Module) -> dict[str, tuple[str, str]]:
    """Return for each layer (norm or linear) the names of its last node and of that node's output.

    A constant with several readers identifies no layer: optimizers merge equal ones, such as norms' ones.
    """
    constants = {tensor.name for tensor in model.graph.initializer}
    readers = Counter(name for node in model.graph.node for name in node.input)
    layers = {name for name, layer in module.named_modules() if _is_layer(layer)}
    found: dict[str, tuple[str, str]] = {}
    below: dict[str, list[str]] = {name: [name] for name in constants}  # the constants of a value
    for node in model.graph.node:
        given = [name for name in node.input if name]
        sources = [source for name in given for source in below.get(name, ())]
        if given and all(name in below for name in given):
            below.update(dict.fromkeys(node.output, sources))
            continue
        for source in sources:
            path = _owning_layer(source, layers)
            if path is not None and readers[source] == 1:
                found[path] = (node.name, node.output[0])
    return found


def _owning_layer(constant: str, layers: set[str]) -> str | None:
    parts = constant.split(".")
    return next((path for i in range(len(parts), 0, -1) if (path := ".".join(parts[:i])) in layers), None)


def _is_layer(module: nn.Module) -> bool:
    if isinstance(module, QuantizedLinear | nn.Linear):
        return True
    weight = getattr(module, "weight", None)
    return isinstance(weight, Tensor) and weight.dim() == 1  # a norm


def _layer_outputs(model: Any, reference: TorchReference, wanted: dict[int, str]) -> TensorsByName:
    """Return the outputs of the modules in `wanted` (by identity), in the order of torch's calls.

    Outputs [B L, K], as in OPT's feed-forward blocks, are returned as [B, L, K].
    """
    outputs: TensorsByName = {}
    texts = reference.logits.shape[-2]

    def keep(path: str) -> Any:
        def hook(module: nn.Module, inputs: Any, output: Tensor) -> None:
            if path not in outputs:  # the first call covers all texts
                flat = output.dim() == 2 and len(output) > texts
                whole = output.unflatten(0, (texts, -1)) if flat else output
                outputs[path] = whole.detach().numpy()

        return hook

    hooks = [m.register_forward_hook(keep(wanted[id(m)])) for m in model.modules() if id(m) in wanted]
    try:
        run_exact(model, reference)
    finally:
        for hook in hooks:
            hook.remove()
    return outputs


def _differs(whole: Any, got: Any, call: GraphCall) -> bool:
    expected = whole[:, call.positions] if whole.ndim == 3 else whole
    if expected.size != got.size:
        return False  # of another part of the computation
    real = call.token_mask if whole.ndim == 3 and call.token_mask is not None else slice(None)
    expected, got = expected[real], got.reshape(expected.shape)[real]
    spread = float(np.std(expected, dtype=np.float64)) or 1.0
    largest = LOGITS_TOLERANCES["fp32"].max_difference or 0.0
    return bool(np.abs(expected - got).max(initial=0.0) > largest * spread)


def _open_with_outputs(folder: Path, name: str, values: list[str]) -> Any:
    """Open the graph `name` with the named values as additional outputs."""
    from onnx import ValueInfoProto

    from smelt.runtimes.onnx_session import open_onnx_session

    path = folder / f"{name}.onnx"
    model = read_graph(path)
    outputs = {output.name for output in model.graph.output}
    model.graph.output.extend(ValueInfoProto(name=v) for v in dict.fromkeys(values) if v not in outputs)
    with TemporaryDirectory(dir=folder) as temporary:
        write_graph(model, Path(temporary, path.name))
        return open_onnx_session(Path(temporary, path.name))

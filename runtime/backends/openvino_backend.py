"""OpenVINO: graphs of standard operators on the CPU, in float32 or bf16.

What a call leaves for the next one stays in OpenVINO's memory. A request writes its outputs where it wrote
them the last time, so a batch has two that take turns: each reads what the other has left. Making a request
takes 10 microseconds; graph and weights are the compiled model's, which all requests share.

Shapes: R = rows, S = tokens fed at once, P = tokens fed before, H = heads that cache, d = width of a head,
V = vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from smelt.core.errors import InputError
from smelt.runtime.backends.backend import PAST, PRESENT, Feeds, Graph, Graphs, StepByStep, past_of, take_rows
from smelt.runtime.backends.openvino_module import compile_graph, import_openvino, version_of
from smelt.runtime.batch import Logits, Tokens
from smelt.runtime.causal import KEEP

_MAKE_AGAIN = "Run the onnx stage again to make it anew."


@dataclass
class Held:
    """The two requests that take turns, the next one first, and the inputs that the next call takes.

    caches: input name -> OpenVINO tensor [R, H, P, d], what the call before has left. shared: input name ->
    tensor, what is the same in all calls, and for all beams of a sentence.
    """

    requests: tuple[Any, Any]
    caches: dict[str, Any]
    shared: dict[str, Any]


class OpenvinoBackend(StepByStep):
    """A `Backend` over models that OpenVINO has compiled for the CPU."""

    name = "openvino"
    device = "cpu"
    at_once = None
    in_all = None
    long_in_steps = False

    def __init__(
        self,
        folder: Path,
        graphs: Graphs,
        target: str | None,
        threads: int | None,
        device: str,
        dtype: str | None = None,
    ) -> None:
        self._ov = import_openvino()
        self.version = version_of(self._ov)
        self._folder, self._graphs = folder, graphs
        self.dtype = dtype or "fp32"
        for graph in graphs.in_order:
            if not (folder / f"{graph.name}.onnx").is_file():
                raise InputError(
                    f"{folder / graph.name}.onnx: no such graph. {_MAKE_AGAIN}", code="missing-graph"
                )
        self._models: dict[str, Any] | None = {
            graph.name: self._compile(graph, threads) for graph in graphs.in_order
        }
        if graphs.caches:
            self._pair_caches()

    def _compile(self, graph: Graph, threads: int | None) -> Any:
        path = self._folder / f"{graph.name}.onnx"
        model = compile_graph(path, self.dtype, threads)
        inputs, outputs = _names(model.inputs), _names(model.outputs)
        if lacking := (graph.inputs - inputs.keys()) | (graph.outputs - outputs.keys()):
            raise InputError(
                f"{path}: this graph has no {', '.join(sorted(lacking))}; it has the inputs"
                f" {', '.join(sorted(inputs))} and the outputs {', '.join(sorted(outputs))}. {_MAKE_AGAIN}",
                code="missing-graph-tensors",
            )
        return model

    def _pair_caches(self) -> None:
        """Find which output becomes which input of the next call, and what an empty cache looks like."""
        main, before = self._graphs.main, self._graphs.before
        model = self._model(main.name)
        left = {graph.name: _names(self._model(graph.name).outputs) for graph in self._graphs.in_order}
        self._present = [name for name in left[main.name] if name.startswith(PRESENT)]
        self._once = [name for name in left[before.name] if name.startswith(PRESENT)] if before else []
        inputs = _names(model.inputs)
        expected = main.inputs | {past_of(name) for name in (*self._present, *self._once)}
        if odd := (inputs.keys() ^ expected) - {KEEP}:
            files = " and ".join(f"{graph.name}.onnx" for graph in self._graphs.in_order)
            raise InputError(
                f"{self._folder}: {files}: inputs and outputs do not fit each other:"
                f" {', '.join(sorted(odd))}. {_MAKE_AGAIN}",
                code="mismatched-graphs",
            )
        if not self._present:
            raise InputError(
                f"{self._folder / main.name}.onnx: a graph without a cache: none of its inputs is"
                f" {PAST}*. {_MAKE_AGAIN}",
                code="missing-cache",
            )
        self._keeps = KEEP in inputs
        # heads and width of each; rows and places are the batch's
        shapes = {past_of(name): inputs[past_of(name)].partial_shape for name in self._present}
        self._empty = {n: (shape[1].get_length(), shape[3].get_length()) for n, shape in shapes.items()}

    def _model(self, graph: str) -> Any:
        if self._models is None:
            raise InputError(f"{self._folder}: this model was closed.", code="closed-model")
        return self._models[graph]

    def call(self, graph: str, feeds: Feeds) -> dict[str, NDArray[Any]]:
        """Run a graph once; return all of its outputs by name."""
        model = self._model(graph)
        request = model.create_infer_request()
        known = _names(model.inputs)
        self._run(request, {name: values for name, values in feeds.items() if name in known})
        return {name: np.array(request.get_tensor(name).data) for name in _names(model.outputs)}

    def _run(self, request: Any, feeds: Feeds) -> None:
        """Run `request`, whose other inputs are set; it reads arrays where they lie."""
        kept = {name: np.asarray(values, order="C") for name, values in feeds.items()}
        for name, values in kept.items():
            request.set_tensor(name, self._there(values))
        request.infer(share_outputs=True)  # else every output is copied

    def _there(self, array: NDArray[Any]) -> Any:
        """Return an array as a tensor in the array's own memory, which somebody must keep."""
        if array.size == 0:
            return self._ov.Tensor(array.dtype, array.shape)
        return self._ov.Tensor(array, shared_memory=True)

    def start(self, rows: int, feeds: Feeds | None = None, shared: Feeds | None = None) -> Held:
        """Run the graph that comes before, if there is one; start with empty caches."""
        model = self._model(self._graphs.main.name)
        common = {name: self._ov.Tensor(np.ascontiguousarray(v)) for name, v in (shared or {}).items()}
        if self._graphs.before is not None:
            request = self._model(self._graphs.before.name).create_infer_request()
            self._run(request, feeds or {})
            common |= {past_of(name): request.get_tensor(name) for name in self._once}
        caches = {
            name: self._ov.Tensor(self._ov.Type.f32, [rows, heads, 0, width])
            for name, (heads, width) in self._empty.items()
        }
        held = Held((model.create_infer_request(), model.create_infer_request()), caches, common)
        _share(held)
        return held

    def step(self, held: Held, feeds: Feeds, last: int = 1) -> Logits:
        """Feed int64 [R, S]; return the graph's logits, [R, V] or [R, last, V]."""
        self._model(self._graphs.main.name)
        request, other = held.requests
        for name, tensor in held.caches.items():
            request.set_tensor(name, tensor)
        keep = {KEEP: np.array(max(1, last), dtype=np.int64)} if self._keeps else {}  # 0 would be all
        self._run(request, {**feeds, **keep})
        held.caches = {past_of(name): request.get_tensor(name) for name in self._present}
        held.requests = (other, request)
        logits: Logits = np.array(request.get_tensor("logits").data)
        return logits

    def reorder(self, held: Held, rows: Tokens, shared: bool) -> None:
        """Make row i what row rows[i] was; what is shared is copied only where it must be."""
        held.caches = {name: self._moved(tensor, rows) for name, tensor in held.caches.items()}
        if shared:
            held.shared = {name: self._moved(tensor, rows) for name, tensor in held.shared.items()}
            _share(held)

    def _moved(self, tensor: Any, rows: Tokens) -> Any:
        if tensor.size == 0:
            return self._ov.Tensor(tensor.element_type, [len(rows), *tensor.shape[1:]])
        return self._ov.Tensor(take_rows(tensor.data, rows))

    def close(self) -> None:
        """Free the compiled graphs and their threads."""
        self._models = None


def _share(held: Held) -> None:
    """Set what is the same in all calls."""
    for request in held.requests:
        for name, tensor in held.shared.items():
            request.set_tensor(name, tensor)


def _names(ports: Any) -> dict[str, Any]:
    """Return a graph's inputs or outputs under the names that they have in the file."""
    return {name: port for port in ports for name in port.get_names()}

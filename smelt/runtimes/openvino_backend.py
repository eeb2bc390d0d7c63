"""OpenVINO backend: graphs of standard operators on the CPU, in float32 or bf16. API: OpenVINO 2026.

Caches stay in OpenVINO's memory. A request writes its outputs to the same memory each time, so a batch has
two that alternate: each reads the outputs of the other. Creating a request takes 10 microseconds; graph and
weights belong to the compiled model, which all requests share.

Shapes: R = rows, S = input tokens of one call, P = tokens of previous calls, H = heads of a cache, d = width
of a head, V = vocabulary.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from smelt.core.errors import InputError, MissingDependencyError
from smelt.generation.backend import (
    PAST_PREFIX,
    PRESENT_PREFIX,
    Feeds,
    GraphInterface,
    Logits,
    ModelGraphs,
    NoGenerationGraphs,
    Tokens,
    gather_rows,
    past_input_name,
)
from smelt.generation.generating_runners import NUM_LOGITS_INPUT
from smelt.runtimes.graph_timer import timed_graph

OPENVINO_INSTALL = "pip install 'openvino>=2026'"
_MISSING = (
    f"OpenVINO is not installed: {OPENVINO_INSTALL}. To continue without it, mark the step `optional: true`,"
    " or use target: ort-cpu."
)
_OLDEST = 2026
_TELEMETRY = "openvino_telemetry"
# values of `dtype` -> OpenVINO's
OPENVINO_PRECISIONS = {"fp32": "f32", "bf16": "bf16"}
# graph metadata: block size of int8 activations; missing or 0: none
ACTIVATION_BLOCKS = "smelt.activation_blocks"


def has_openvino() -> bool:
    """Return whether the package is installed, without importing it."""
    return importlib.util.find_spec("openvino") is not None


def import_openvino() -> Any:
    """Import OpenVINO, without its telemetry.

    Raises:
        MissingDependencyError: it is not installed, or its libraries cannot be loaded.
        InputError: it is older than 2026.
    """
    if not has_openvino():
        raise MissingDependencyError(_MISSING, code="not-installed")
    try:
        with _without_telemetry():
            module = importlib.import_module("openvino")
    except (ImportError, OSError, RuntimeError) as error:
        raise MissingDependencyError(
            f"openvino is installed but cannot be loaded: {error}. {OPENVINO_INSTALL}",
            code="broken-installation",
        ) from error
    installed = release_version(module)
    if int(installed.split(".", maxsplit=1)[0]) < _OLDEST:
        raise InputError(
            f"OpenVINO {installed} is installed; smelt needs {_OLDEST} or newer. {OPENVINO_INSTALL}",
            code="outdated-package",
        )
    return module


@contextmanager
def _without_telemetry() -> Iterator[None]:
    """Hide `openvino_telemetry` from the first import of openvino.

    That import sends an event to Google Analytics, and writes to ~/intel, wherever that package is installed
    (openvino/tools/ovc/__init__.py, 2026.4). Where it is missing, openvino uses its own stub. smelt sends no
    data from any machine. An earlier import of openvino is not changed.
    """
    if "openvino" in sys.modules or _TELEMETRY in sys.modules:
        yield
        return
    sys.modules[_TELEMETRY] = None  # type: ignore[assignment]  # an import of it then fails
    try:
        yield
    finally:
        del sys.modules[_TELEMETRY]


def release_version(module: Any) -> str:
    """Return the release, for example 2026.4.1, of a version such as 2026.4.1-22982-e213a147257-..."""
    return str(module.__version__).split("-", maxsplit=1)[0]


@cache
def has_bf16() -> bool:
    """Return whether OpenVINO lists bf16 among the supported types on this processor."""
    core = import_openvino().Core()
    return "BF16" in core.get_property("CPU", "OPTIMIZATION_CAPABILITIES")


def cpu_plugin_options(dtype: str, threads: int | None, block_size: int = 0) -> dict[str, Any]:
    """Return the CPU plugin's options to compute in `dtype` with `threads` threads.

    One call at a time gets all threads: calls of several threads queue. Threads are not pinned to cores,
    where they would compete with those of other runtimes that are timed too. No cache of compiled graphs is
    written, since CACHE_DIR is not set.

    Args:
        dtype: fp32 or bf16. It must be set: by default OpenVINO uses bf16 where the processor has it.
        threads: None for OpenVINO's default.
        block_size: block size of activations that become int8 for quantized weights; 0: none.
    """
    options: dict[str, Any] = {
        "PERFORMANCE_HINT": "LATENCY",
        "NUM_STREAMS": 1,
        "ENABLE_CPU_PINNING": False,
        "INFERENCE_PRECISION_HINT": OPENVINO_PRECISIONS[dtype],
        # The attention that it compiles itself (2026.4.1, AVX-512) is wrong from 16 keys on, in bf16 not even
        # finite, once it was called with one key, as a first step is. Nothing was slower without it.
        "SNIPPETS_MODE": "DISABLE",
        # by default activations that meet compressed weights become int8, whatever the precision
        "DYNAMIC_QUANTIZATION_GROUP_SIZE": block_size,
    }
    return options if threads is None else options | {"INFERENCE_NUM_THREADS": threads}


def compile_graph(path: Path, dtype: str, threads: int | None) -> Any:
    """Read and compile the graph `path` for the CPU; return OpenVINO's CompiledModel.

    Raises:
        InputError: OpenVINO cannot read the file, or does not support one of its operators.
    """
    core = import_openvino().Core()
    try:
        model = core.read_model(path)
        return core.compile_model(
            model, "CPU", cpu_plugin_options(dtype, threads, _activation_block_size(model))
        )
    except Exception as error:  # RuntimeError and openvino's own, which share no base
        raise InputError(
            f"{path}: OpenVINO cannot load this graph: {_error_cause(error)} Export it again: run the onnx"
            " stage with target: openvino.",
            code="unopened-graph",
        ) from error


def _activation_block_size(model: Any) -> int:
    """Return the block size of a graph's int8 activations from its metadata; 0 where it has none."""
    path = ["framework", ACTIVATION_BLOCKS]  # where OpenVINO keeps the metadata of an ONNX file
    return int(model.get_rt_info(path).value) if model.has_rt_info(path) else 0


def _error_cause(error: BaseException) -> str:
    """Return the message of an OpenVINO error, without the source locations at its beginning."""
    lines = [line.strip() for line in str(error).splitlines()]
    message = [line for line in lines if line and not line.startswith(("Exception from", "Check '"))]
    return " ".join(message or lines)[:600]


_REEXPORT_HINT = "Run the onnx stage again to export it."


@dataclass
class OpenvinoDecodeState:
    """The two alternating requests, the next one first, and the inputs of the next call.

    caches: input name -> OpenVINO tensor [R, H, P, d], outputs of the previous call. shared: input name ->
    tensor, the same in all calls, and for all beams of a sentence.
    """

    requests: tuple[Any, Any]
    caches: dict[str, Any]
    shared: dict[str, Any]


class OpenvinoBackend(NoGenerationGraphs):
    """A `Backend` over models that OpenVINO has compiled for the CPU."""

    name = "openvino"
    device = "cpu"
    max_tokens_per_call = None
    max_total_tokens = None
    reduces_logits = False
    prefers_stepwise = False

    def __init__(
        self,
        folder: Path,
        graphs: ModelGraphs,
        target: str | None,
        threads: int | None,
        device: str,
        dtype: str | None = None,
    ) -> None:
        self._ov = import_openvino()
        self.version = release_version(self._ov)
        self._folder, self._graphs = folder, graphs
        self.dtype = dtype or "fp32"
        for graph in graphs.call_order:
            if not (folder / f"{graph.name}.onnx").is_file():
                raise InputError(
                    f"{folder / graph.name}.onnx: no such graph. {_REEXPORT_HINT}", code="missing-graph"
                )
        self._models: dict[str, Any] | None = {
            graph.name: self._compile(graph, threads) for graph in graphs.call_order
        }
        if graphs.uses_cache:
            self._pair_caches()

    def _compile(self, graph: GraphInterface, threads: int | None) -> Any:
        path = self._folder / f"{graph.name}.onnx"
        model = compile_graph(path, self.dtype, threads)
        inputs, outputs = _ports_by_name(model.inputs), _ports_by_name(model.outputs)
        if missing := (graph.inputs - inputs.keys()) | (graph.outputs - outputs.keys()):
            raise InputError(
                f"{path}: this graph has no {', '.join(sorted(missing))}; it has the inputs"
                f" {', '.join(sorted(inputs))} and the outputs {', '.join(sorted(outputs))}."
                f" {_REEXPORT_HINT}",
                code="missing-graph-tensors",
            )
        return model

    def _pair_caches(self) -> None:
        """Find which output is which input of the next call, and the shape of an empty cache."""
        main, before = self._graphs.main, self._graphs.encoder
        model = self._model(main.name)
        outputs_by_graph = {
            graph.name: _ports_by_name(self._model(graph.name).outputs) for graph in self._graphs.call_order
        }
        self._present = [name for name in outputs_by_graph[main.name] if name.startswith(PRESENT_PREFIX)]
        self._once = (
            [name for name in outputs_by_graph[before.name] if name.startswith(PRESENT_PREFIX)]
            if before
            else []
        )
        inputs = _ports_by_name(model.inputs)
        expected = main.inputs | {past_input_name(name) for name in (*self._present, *self._once)}
        if mismatched := (inputs.keys() ^ expected) - {NUM_LOGITS_INPUT}:
            files = " and ".join(f"{graph.name}.onnx" for graph in self._graphs.call_order)
            raise InputError(
                f"{self._folder}: {files}: inputs and outputs do not match: {', '.join(sorted(mismatched))}."
                f" {_REEXPORT_HINT}",
                code="mismatched-graphs",
            )
        if not self._present:
            raise InputError(
                f"{self._folder / main.name}.onnx: this graph has no cache: none of its inputs is"
                f" {PAST_PREFIX}*. {_REEXPORT_HINT}",
                code="missing-cache",
            )
        self._keeps = NUM_LOGITS_INPUT in inputs
        # heads and width of each; rows and positions are the batch's
        shapes = {
            past_input_name(name): inputs[past_input_name(name)].partial_shape for name in self._present
        }
        self._empty = {n: (shape[1].get_length(), shape[3].get_length()) for n, shape in shapes.items()}

    def _model(self, graph: str) -> Any:
        if self._models is None:
            raise InputError(f"{self._folder}: this model is closed. Load it again.", code="closed-model")
        return self._models[graph]

    def input_shapes(self, graph: str) -> dict[str, tuple[int | None, ...]]:
        """Return the shape of each input of a graph; None: a dynamic size."""
        ports = _ports_by_name(self._model(graph).inputs)
        return {
            name: tuple(n.get_length() if n.is_static else None for n in port.partial_shape)
            for name, port in ports.items()
        }

    def call(self, graph: str, feeds: Feeds) -> dict[str, NDArray[Any]]:
        """Run a graph once; return all of its outputs by name."""
        model = self._model(graph)
        request = model.create_infer_request()
        model_inputs = _ports_by_name(model.inputs)
        self._run(request, {name: values for name, values in feeds.items() if name in model_inputs})
        return {name: np.array(request.get_tensor(name).data) for name in _ports_by_name(model.outputs)}

    def _run(self, request: Any, feeds: Feeds) -> None:
        """Run `request`, whose other inputs are set; arrays are read without copies."""
        arrays = {name: np.asarray(values, order="C") for name, values in feeds.items()}
        for name, values in arrays.items():
            request.set_tensor(name, self._wrap_tensor(values))
        with timed_graph():
            request.infer(share_outputs=True)  # else every output is copied

    def _wrap_tensor(self, array: NDArray[Any]) -> Any:
        """Return an array as a tensor in the array's own memory, which must be kept alive."""
        if array.size == 0:
            return self._ov.Tensor(array.dtype, array.shape)
        return self._ov.Tensor(array, shared_memory=True)

    def start(
        self, rows: int, feeds: Feeds | None = None, shared: Feeds | None = None
    ) -> OpenvinoDecodeState:
        """Run the graph before `main`, if there is one; start with empty caches."""
        model = self._model(self._graphs.main.name)
        common = {name: self._ov.Tensor(np.ascontiguousarray(v)) for name, v in (shared or {}).items()}
        if self._graphs.encoder is not None:
            request = self._model(self._graphs.encoder.name).create_infer_request()
            self._run(request, feeds or {})
            common |= {past_input_name(name): request.get_tensor(name) for name in self._once}
        caches = {
            name: self._ov.Tensor(self._ov.Type.f32, [rows, heads, 0, width])
            for name, (heads, width) in self._empty.items()
        }
        state = OpenvinoDecodeState(
            (model.create_infer_request(), model.create_infer_request()), caches, common
        )
        _set_shared_inputs(state)
        return state

    def step(self, held: OpenvinoDecodeState, feeds: Feeds, last: int = 1) -> Logits:
        """Run int64 [R, S]; return the graph's logits, [R, V] or [R, last, V]."""
        self._model(self._graphs.main.name)
        request, spare_request = held.requests
        for name, tensor in held.caches.items():
            request.set_tensor(name, tensor)
        keep = (
            {NUM_LOGITS_INPUT: np.array(max(1, last), dtype=np.int64)} if self._keeps else {}
        )  # 0 would mean all
        self._run(request, {**feeds, **keep})
        held.caches = {past_input_name(name): request.get_tensor(name) for name in self._present}
        held.requests = (spare_request, request)
        logits: Logits = np.array(request.get_tensor("logits").data)
        return logits

    def reorder_cache(self, held: OpenvinoDecodeState, rows: Tokens, shared: bool) -> None:
        """Replace row i by row rows[i]; shared tensors are copied only where necessary."""
        held.caches = {name: self._reorder_tensor(tensor, rows) for name, tensor in held.caches.items()}
        if shared:
            held.shared = {name: self._reorder_tensor(tensor, rows) for name, tensor in held.shared.items()}
            _set_shared_inputs(held)

    def _reorder_tensor(self, tensor: Any, rows: Tokens) -> Any:
        if tensor.size == 0:
            return self._ov.Tensor(tensor.element_type, [len(rows), *tensor.shape[1:]])
        return self._ov.Tensor(gather_rows(tensor.data, rows))

    def close(self) -> None:
        """Free the compiled graphs and their threads."""
        self._models = None


def _set_shared_inputs(held: OpenvinoDecodeState) -> None:
    """Set the inputs that are the same in all calls."""
    for request in held.requests:
        for name, tensor in held.shared.items():
            request.set_tensor(name, tensor)


def _ports_by_name(ports: Any) -> dict[str, Any]:
    """Return a graph's inputs or outputs by their names in the file."""
    return {name: port for port in ports for name in port.get_names()}

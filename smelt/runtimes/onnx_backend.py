"""ONNX Runtime backend: graphs as sessions, on the CPU, or on CUDA for graphs exported for it.

Caches and encoder outputs stay OrtValues that are bound without copies; only requested outputs become numpy
arrays.

A graph that appends to its caches returns new, longer ones, so each step copies them. ONNX Runtime's
GroupQueryAttention on the CPU does not where a cache's input and its output are one buffer with free room:
it writes the new positions, and reads as many as the attention mask has. So caches can grow in place. The
graph file is the same, and so are the results, bit for bit.

Shapes: R = rows, S = input tokens of one call, P = tokens of previous calls, H = heads of a cache, C = buffer
positions, d = width of a head, V = vocabulary.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from smelt.core.errors import InputError, RunError
from smelt.generation.backend import (
    PAST_PREFIX,
    PRESENT_PREFIX,
    Feeds,
    GraphInterface,
    Logits,
    ModelGraphs,
    Tokens,
    TopLogits,
    gather_rows,
    past_input_name,
)
from smelt.generation.generating_runners import NUM_LOGITS_INPUT
from smelt.runtimes.cuda_graph import CapturedGraph
from smelt.runtimes.device import gpu_index, onnx_device
from smelt.runtimes.device_operators import DeviceOperators
from smelt.runtimes.fixed_caches import WRITE_INDICES, cache_feeds, fixed_cache_length
from smelt.runtimes.graph_timer import timed_graph
from smelt.runtimes.onnx_session import (
    REEXPORT_HINT,
    full_huge_pages,
    open_onnx_session,
    use_huge_pages,
)

# A full buffer is copied into one that is longer by this share: one copy for many steps, and little of
# it is empty
_MORE, _LEAST = 8, 16


def grow_cache(cache: NDArray[Any], used: int, needed: int) -> NDArray[Any]:
    """Return [R, H, C, d] with the first `used` positions of `cache`, and room for `needed` and some more."""
    num_rows, heads, _, width = cache.shape
    larger_cache = np.zeros(
        (num_rows, heads, needed + max(_LEAST, needed // _MORE), width), dtype=cache.dtype
    )
    larger_cache[:, :, :used] = cache[:, :, :used]
    return larger_cache


def supports_inplace_cache(
    session: Any, past: Sequence[str], present: Sequence[str], empty: Sequence[tuple[int, int, Any]]
) -> bool:
    """Return whether caches can be input and output at once, by appending one token both ways.

    Args:
        session: of a graph that takes the tokens, mask and positions of a language model.
        past: names of the input caches.
        present: names of the output caches, in the same order.
        empty: heads, width and type of each.
    """
    feeds = {
        "input_ids": np.zeros((1, 1), dtype=np.int64),
        "attention_mask": np.ones((1, 2), dtype=np.int64),
        "position_ids": np.ones((1, 1), dtype=np.int64),
    }
    run_options = onnxruntime.RunOptions()
    run_options.log_severity_level = 4  # a failure is no error here
    small_caches = {
        name: np.zeros((1, heads, 1, width), kind)
        for name, (heads, width, kind) in zip(past, empty, strict=True)
    }
    grown_caches = [grow_cache(cache, 1, 2) for cache in small_caches.values()]
    binding = session.io_binding()
    try:
        logits, *caches = session.run(["logits", *present], {**feeds, **small_caches}, run_options)
        for name, value in feeds.items():
            binding.bind_cpu_input(name, value)
        binding.bind_output("logits", "cpu")
        bind_inplace_cache(
            binding, past, present, [onnxruntime.OrtValue.ortvalue_from_numpy(c) for c in grown_caches]
        )
        session.run_with_iobinding(binding, run_options)
    except Exception:  # onnxruntime's errors have no common base
        return False
    return np.array_equal(binding.get_outputs()[0].numpy(), logits) and all(
        np.array_equal(grown_cache[:, :, :2], cache)
        for grown_cache, cache in zip(grown_caches, caches, strict=True)
    )


def bind_inplace_cache(
    binding: Any, past: Sequence[str], present: Sequence[str], caches: Sequence[Any]
) -> None:
    """Bind each of `caches`, OrtValues [R, H, C, d], as input and as output of a call."""
    for name, output_name, value in zip(past, present, caches, strict=True):
        binding.bind_ortvalue_input(name, value)
        binding.bind_ortvalue_output(output_name, value)


# Size of graph files, in bytes, from which a second copy of their weights matters (every session packs its
# own), and the kind of memory pages
_LARGE_GRAPH_BYTES = 32 * 2**20
# numpy has no bfloat16; this is ONNX's number of it (TensorProto.DataType)
_BFLOAT16 = 16
_CACHE_DTYPES: dict[str, Any] = {
    "tensor(float)": np.float32, "tensor(float16)": np.float16, "tensor(int8)": np.int8,
    "tensor(bfloat16)": _BFLOAT16,
}  # fmt: skip


@dataclass
class OnnxDecodeState:
    """The bound inputs of the next call.

    caches: OrtValues [R, H, P, d], in the order of the backend's names; where they grow in place they may
    have room after the `cache_length` used positions. shared: input name -> OrtValue, the same in all calls,
    and for all beams of a sentence.
    """

    binding: Any
    caches: list[Any]
    shared: dict[str, Any]
    cache_length: int = 0


class OnnxBackend:
    """A `Backend` over ONNX Runtime sessions: CPU, or CUDA where the target is ort-cuda.

    opener: opens a graph on CUDA with another provider, given its path and the threads.
    cuda_graph: on CUDA, `call` runs graphs as CUDA graphs; their inputs have fixed shapes.
    """

    name = "onnxruntime"
    version: str = onnxruntime.__version__
    max_tokens_per_call = None
    max_total_tokens: int | None = None

    def __init__(
        self,
        folder: Path,
        graphs: ModelGraphs,
        target: str | None,
        threads: int | None,
        device: str,
        dtype: str | None = None,
        opener: Callable[[Path, int | None], Any] | None = None,
        tf32: bool = False,
        cuda_graph: bool = False,
    ) -> None:
        self._folder, self._graphs, self._threads = folder, graphs, threads
        self.device = onnx_device(device, target) if opener is None else "cuda"
        self._device_id = gpu_index() if self.device == "cuda" else 0
        self._operators = DeviceOperators(self.device, self._device_id)
        self._captures_calls = cuda_graph and self.device == "cuda"
        self._captured: dict[str, CapturedGraph] = {}
        self._opens = opener or partial(
            open_onnx_session, device=self.device, tf32=tf32, cuda_graph=self._captures_calls
        )
        if dtype == "bf16" and self.device == "cpu":
            raise InputError(
                f"{folder}: ONNX Runtime runs bf16 graphs on CUDA only (target ort-cuda). Export with dtype:"
                " fp32 for this machine.",
                code="unsupported-dtype",
            )
        self.generation_graphs = frozenset(
            name for name in graphs.generation_graphs if (folder / f"{name}.onnx").is_file()
        )
        self._large = sum(path.stat().st_size for path in folder.glob("*.onnx*")) >= _LARGE_GRAPH_BYTES
        self._sessions: dict[str, Any] | None = {}
        # closed, except for the calls that already hold them
        self._leaving: WeakValueDictionary[str, Any] = WeakValueDictionary()
        self._inputs: dict[str, set[str]] = {}
        self._narrow: dict[str, frozenset[str]] = {}
        self._lock = threading.Lock()  # protects the opening of graphs
        # the fused attention of this target takes several tokens with a filled cache only for one row
        self._by_row = (target or "ort-cpu") == "ort-cpu"
        # ... and appends to a buffer that is input and output
        self._may_append = self._by_row and self.device == "cpu" and graphs.encoder is None
        for graph in graphs.call_order:
            _require_graph_file(folder, graph)
        # tried once the step graphs are open, determined from the file only
        self.prefers_stepwise = (
            bool(self.generation_graphs)
            and self._may_append
            and (b"GroupQueryAttention" in _require_graph_file(folder, graphs.main).read_bytes())
        )
        if not self.generation_graphs:  # else they are opened at the first single step
            self._open_step_graphs()

    @contextmanager
    def acquire_graph(self, graph: str) -> Iterator[bool]:
        """Return whether a generation graph can run without a second copy of large weights.

        ONNX Runtime shares packed weights between sessions in its C API only, so the sessions of a greedy
        search, of a beam search and of single steps hold a copy each. Small models may do so. Of a large one
        only the graph that was requested first is kept; once anything else is requested, the step graphs are
        used for everything.
        """
        # held until the call inside has ended, so that it stays available although other threads have closed
        # it
        session = self._exclusive_session(graph) if self._large else None
        yield not self._large or session is not None

    def _exclusive_session(self, graph: str) -> Any | None:
        """Return the session of `graph`, opened now if none is open; None where others are open."""
        with self._lock:
            open_now = self._sessions
            if open_now and graph not in open_now:
                return None
            return self._session_locked(graph)

    def _open_step_graphs(self) -> None:
        """Open the graphs of a single step; other threads see them once they are complete."""
        if self._large and self._sessions is not None:
            self._leaving.update(self._sessions)
            self._sessions = {}  # running calls keep them until they end
        sessions = {g.name: self._open(g) for g in self._graphs.call_order}
        main = sessions[self._graphs.main.name]
        # graphs exported before this input existed return the logits of all tokens
        self._may_keep = any(i.name == NUM_LOGITS_INPUT for i in main.get_overridable_initializers())
        # for TensorRT, whose inputs have no default
        self._must_keep = any(i.name == NUM_LOGITS_INPUT for i in main.get_inputs())
        if self._graphs.uses_cache:
            self._pair_caches(sessions)
        self._record_inputs(sessions)
        self._publish_sessions(sessions)

    def _record_inputs(self, sessions: dict[str, Any]) -> None:
        for name, session in sessions.items():
            all_inputs = (*session.get_inputs(), *session.get_overridable_initializers())
            self._inputs[name] = {i.name for i in all_inputs}
            # some exporters use 32-bit ids; ours have 64
            self._narrow[name] = frozenset(i.name for i in all_inputs if i.type == "tensor(int32)")

    def _publish_sessions(self, sessions: dict[str, Any]) -> None:
        if self._sessions is not None:
            self._sessions = {**self._sessions, **sessions}

    def _pair_caches(self, sessions: dict[str, Any]) -> None:
        """Find which output is which input of the next call, and the shape of an empty cache."""
        main = self._graphs.main
        outputs_by_graph = {
            name: [o.name for o in session.get_outputs()] for name, session in sessions.items()
        }
        self._present = [name for name in outputs_by_graph.pop(main.name) if name.startswith(PRESENT_PREFIX)]
        self._once = [
            name for names in outputs_by_graph.values() for name in names if name.startswith(PRESENT_PREFIX)
        ]
        self._past = [past_input_name(name) for name in self._present]
        inputs = {i.name: i for i in sessions[main.name].get_inputs()}
        expected = main.inputs | {*self._past, *map(past_input_name, self._once)}
        if mismatched := (set(inputs) ^ expected) - {NUM_LOGITS_INPUT, WRITE_INDICES}:
            files = " and ".join(f"{graph.name}.onnx" for graph in self._graphs.call_order)
            raise InputError(
                f"{self._folder}: {files}: inputs and outputs do not match: {', '.join(sorted(mismatched))}."
                f" {REEXPORT_HINT}",
                code="mismatched-graphs",
            )
        if not self._past:
            raise InputError(
                f"{self._folder / main.name}.onnx: this graph has no cache: none of its inputs is"
                f" {PAST_PREFIX}*. {REEXPORT_HINT}",
                code="missing-cache",
            )
        self._empty = [
            (i.shape[1], i.shape[3], _CACHE_DTYPES[i.type]) for i in map(inputs.get, self._past) if i
        ]
        self._fixed_length = fixed_cache_length({name: value.shape for name, value in inputs.items()})
        self.max_total_tokens = self._fixed_length
        self._in_place = self._fixed_length is not None or (
            self._may_append
            and supports_inplace_cache(sessions[main.name], self._past, self._present, self._empty)
        )

    def input_shapes(self, graph: str) -> dict[str, tuple[int | None, ...]]:
        """Return the shape of each input of a graph; None: a dynamic size."""
        inputs = self._session(graph).get_inputs()
        return {i.name: tuple(n if isinstance(n, int) else None for n in i.shape) for i in inputs}

    def call(self, graph: str, feeds: Feeds) -> dict[str, NDArray[Any]]:
        """Run a graph once; return all of its outputs by name."""
        session = self._session(graph)
        int32_names = self._narrow.get(graph, frozenset())
        inputs = {
            name: values.astype(np.int32) if name in int32_names else values
            for name, values in feeds.items()
            if name in self._inputs[graph]
        }
        names = [output.name for output in session.get_outputs()]
        try:
            if self._captures_calls:
                return self._captured_graph(graph, session)(inputs)
            with timed_graph():
                results = session.run(names, inputs)
        except Exception as error:  # onnxruntime's errors have no base of their own
            raise RunError(
                f"{self._folder / graph}.onnx: ONNX Runtime could not run this graph: {error}",
                code="graph-failed",
            ) from error
        return dict(zip(names, results, strict=True))

    def _captured_graph(self, graph: str, session: Any) -> CapturedGraph:
        with self._lock:
            if graph not in self._captured:
                self._captured[graph] = CapturedGraph(session, self.device, self._device_id)
            return self._captured[graph]

    def start(self, rows: int, feeds: Feeds | None = None, shared: Feeds | None = None) -> OnnxDecodeState:
        """Run the graph before `main`, if there is one; bind its outputs, and empty caches."""
        tensors = {name: self._to_ortvalue(values) for name, values in (shared or {}).items()}
        if self._graphs.encoder is not None:
            tensors |= self._run_encoder(self._graphs.encoder.name, feeds or {})
        caches = [
            self._empty_cache((rows, heads, self._fixed_length or 0, width), kind)
            for heads, width, kind in self._empty_caches()
        ]
        return self._bind_state(caches, tensors)

    def _empty_cache(self, shape: tuple[int, ...], kind: Any) -> Any:
        if kind == _BFLOAT16:  # copied to the device by an operator
            zeros = np.zeros(shape, dtype=np.uint16)
            value = onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(zeros, kind)
            return self._operators.gather(value, np.arange(shape[0]))
        return self._to_ortvalue(np.zeros(shape, dtype=kind))

    def _empty_caches(self) -> list[Any]:
        self._session(self._graphs.main.name)  # so that its graphs are open
        return self._empty

    def _bind_state(self, caches: list[Any], shared: dict[str, Any]) -> OnnxDecodeState:
        """Bind the inputs of the next call; OrtValues."""
        state = OnnxDecodeState(self._session(self._graphs.main.name).io_binding(), caches, shared)
        for name, value in shared.items():
            state.binding.bind_ortvalue_input(name, value)
        self._bind_caches(state)
        return state

    def _bind_caches(self, held: OnnxDecodeState) -> None:
        if self._in_place:
            held.binding.bind_output("logits", "cpu")  # the first of the outputs
            bind_inplace_cache(held.binding, self._past, self._present, held.caches)
        else:
            for name, value in zip(self._past, held.caches, strict=True):
                held.binding.bind_ortvalue_input(name, value)

    def _grow_caches(self, held: OnnxDecodeState, needed: int) -> None:
        """Grow the caches to `needed` tokens."""
        if held.caches[0].shape()[2] < needed:
            for index, value in enumerate(held.caches):
                held.caches[index] = self._to_ortvalue(grow_cache(value.numpy(), held.cache_length, needed))
            self._bind_caches(held)

    def select_rows(
        self, parts: Sequence[OnnxDecodeState], rows: Tokens, shared: dict[str, Any] | None
    ) -> OnnxDecodeState:
        """Return the state of the rows `rows` of all `parts`, concatenated.

        Args:
            parts: with the same number of previous calls, and caches that do not grow in place.
            rows: int64 [R], counted through all parts.
            shared: the shared tensors; None: those of `parts` at the same rows.
        """
        # caches that grow in place would have different amounts of free room
        assert not self._in_place
        caches = [
            _gather_values([state_part.caches[i] for state_part in parts], rows)
            for i in range(len(self._past))
        ]
        if shared is None:
            names = parts[0].shared
            shared = {
                n: self._to_ortvalue(_gather_values([state_part.shared[n] for state_part in parts], rows))
                for n in names
            }
        return self._bind_state([self._to_ortvalue(array) for array in caches], shared)

    def _run_encoder(self, graph: str, feeds: Feeds) -> dict[str, Any]:
        """Return the outputs of `graph` for all calls, on the device where they were computed."""
        session = self._session(graph)
        binding = session.io_binding()
        for name, values in feeds.items():
            binding.bind_cpu_input(name, np.ascontiguousarray(values))
        for name in self._once:
            binding.bind_output(name, self.device, self._device_id)
        with timed_graph():
            session.run_with_iobinding(binding)
        return {past_input_name(name): v for name, v in zip(self._once, binding.get_outputs(), strict=True)}

    def step(self, held: OnnxDecodeState, feeds: Feeds, last: int = 1) -> Logits:
        """Run int64 [R, S]; return the graph's logits, [R, V] or [R, S or last, V]."""
        # on a GPU the logits of a prompt's part that is followed by another one are not needed
        is_needed = last > 0 or self.device == "cpu"
        logits = self._advance(held, feeds, last, "cpu" if is_needed else self.device)
        result: Logits = logits.numpy() if is_needed else _no_logits(logits)
        return result

    def step_top(self, held: OnnxDecodeState, feeds: Feeds, count: int) -> TopLogits:
        """Run int64 [R, S]; return the `count` highest logits of the last token, chosen on the device."""
        return self._operators.top_logits(self._advance(held, feeds, 1, self.device), count)

    @property
    def reduces_logits(self) -> bool:
        """Return whether the logits are on a GPU."""
        return self.device == "cuda"

    def _advance(self, held: OnnxDecodeState, feeds: Feeds, last: int, logits_device: str) -> Any:
        """Run a step; return its logits, an OrtValue on `logits_device`, cpu or cuda."""
        feeds = cache_feeds(feeds, self._fixed_length)
        num_rows, tokens = feeds["input_ids"].shape
        if tokens > 1 and num_rows > 1 and self._by_row and feeds["attention_mask"].shape[1] > tokens:
            raise InputError(
                "With a non-empty cache, this graph accepts several tokens only at batch size 1.",
                code="unsupported-batch",
            )
        num_logits = max(1, last)  # 0 would mean all
        is_partial = self._may_keep and num_logits < tokens
        if self._in_place and not (
            is_partial and held.cache_length == 0
        ):  # else caches are returned in the needed length
            self._grow_caches(held, feeds["attention_mask"].shape[1])
        if is_partial:
            logits, *held.caches = self._run_partial_logits(held, feeds, num_logits, logits_device)
        else:
            logits, *new_caches = self._run(held.binding, feeds, num_logits, logits_device)
            held.caches = held.caches if self._in_place else new_caches
        if is_partial or not self._in_place:
            self._bind_caches(held)
        if self._in_place:
            held.cache_length = feeds["attention_mask"].shape[1]
        return logits

    def _run(self, binding: Any, feeds: Feeds, wanted: int, logits_device: str) -> Any:
        for name, values in feeds.items():
            binding.bind_cpu_input(name, np.ascontiguousarray(values))
        if self._must_keep:
            binding.bind_cpu_input(NUM_LOGITS_INPUT, np.array(wanted, dtype=np.int64))
        # outputs are bound again: they grow, and the last outputs are now inputs
        binding.bind_output("logits", logits_device, self._device_id if logits_device == "cuda" else 0)
        for name in () if self._in_place else self._present:
            binding.bind_output(name, self.device, self._device_id)
        session = self._session(self._graphs.main.name)
        with timed_graph():
            session.run_with_iobinding(binding)
        return binding.get_outputs()

    def _run_partial_logits(
        self, held: OnnxDecodeState, feeds: Feeds, wanted: int, logits_device: str
    ) -> list[Any]:
        """Run with the logits of some tokens: a binding does not take inputs that have a default."""
        inputs = {**feeds, NUM_LOGITS_INPUT: np.array(wanted, dtype=np.int64)}
        values = {
            n: onnxruntime.OrtValue.ortvalue_from_numpy(np.asarray(v, order="C")) for n, v in inputs.items()
        }
        values |= dict(zip(self._past, held.caches, strict=True)) | held.shared
        session = self._session(self._graphs.main.name)
        names = ["logits", *self._present]
        if self.device == "cpu":
            with timed_graph():
                return list(session.run_with_ort_values(names, values))
        # the other calls return their outputs on the CPU
        on_device = [self._device_type(each) for each in (logits_device, *[self.device] * len(self._present))]
        inputs_vector, outputs_vector = (onnxruntime.capi._pybind_state.OrtValueVector() for _ in range(2))
        for value in values.values():
            inputs_vector.push_back(value._get_c_value())
        with timed_graph():
            session.run_with_ortvaluevector(
                onnxruntime.RunOptions(), list(values), inputs_vector, names, outputs_vector, on_device
            )
        return [onnxruntime.OrtValue(value) for value in outputs_vector]

    def _device_type(self, device: str) -> Any:
        return onnxruntime.OrtDevice.make(device, self._device_id if device == "cuda" else 0)._get_c_device()

    def reorder_cache(self, held: OnnxDecodeState, rows: Tokens, shared: bool) -> None:
        """Replace row i by row rows[i], and bind it; shared tensors are copied only where necessary."""
        if shared:
            held.shared = {name: self._reorder_value(value, rows) for name, value in held.shared.items()}
        held.caches = [self._reorder_value(value, rows) for value in held.caches]
        for name, value in held.shared.items() if shared else ():
            held.binding.bind_ortvalue_input(name, value)
        self._bind_caches(held)

    def _reorder_value(self, value: Any, rows: Tokens) -> Any:
        if self.device == "cuda":
            return self._operators.gather(value, rows)
        # on the CPU `numpy` returns a view: `gather_rows` makes the only copy
        return self._to_ortvalue(gather_rows(value.numpy(), rows))

    def _to_ortvalue(self, array: NDArray[Any]) -> Any:
        values = np.ascontiguousarray(array)
        return onnxruntime.OrtValue.ortvalue_from_numpy(values, self.device, self._device_id)

    def _session(self, graph: str) -> Any:
        """Return the session of a graph, opened now if not yet open."""
        sessions = self._sessions
        if sessions and graph in sessions:
            return sessions[graph]
        leaving_session = self._leaving.get(graph)
        if sessions is not None and leaving_session is not None:
            return leaving_session
        del sessions  # a large model's are freed before others are opened
        with self._lock:
            return self._session_locked(graph)

    def _session_locked(self, graph: str) -> Any:
        """Return the session of a graph; the caller holds the lock."""
        sessions = self._sessions
        if sessions is not None and graph not in sessions:
            del sessions
            sessions = self._open_deferred(graph)
        if sessions is None:
            raise InputError(f"{self._folder}: this model is closed. Load it again.", code="closed-model")
        return sessions[graph]

    def _open_deferred(self, graph: str) -> dict[str, Any] | None:
        if graph not in self.generation_graphs:
            self._open_step_graphs()
            return self._sessions
        encoder = self._graphs.encoder
        inputs = frozenset({"input_ids", "attention_mask"}) if encoder is None else encoder.inputs
        shape = GraphInterface(graph, inputs, frozenset({"sequences"}))
        sessions = {graph: self._open(shape)}
        self._record_inputs(sessions)
        if not (self._large and self._sessions):  # else it is for this call only
            self._publish_sessions(sessions)
        return None if self._sessions is None else sessions

    def _open(self, graph: GraphInterface) -> Any:
        path = _require_graph_file(self._folder, graph)
        is_moved = self._large and self.device == "cpu"
        pages_before = full_huge_pages() if is_moved else frozenset()
        session = self._opens(path, self._threads)
        if is_moved:
            use_huge_pages(besides=pages_before)
        inputs, outputs = {i.name for i in session.get_inputs()}, {o.name for o in session.get_outputs()}
        if missing := (graph.inputs - inputs) | (graph.outputs - outputs):
            raise InputError(
                f"{path}: this graph has no {', '.join(sorted(missing))}; it has the inputs"
                f" {', '.join(sorted(inputs))} and the outputs {', '.join(sorted(outputs))}. {REEXPORT_HINT}",
                code="missing-graph-tensors",
            )
        return session

    def free_large_graphs(self) -> None:
        """Free the sessions of a large model; each is opened again when it is needed."""
        with self._lock:
            if self._large and self._sessions is not None:
                self._sessions = {}
                self._captured.clear()

    def close(self) -> None:
        """Free the sessions and their threads."""
        self._sessions = None
        self._captured.clear()


def _require_graph_file(folder: Path, graph: GraphInterface) -> Path:
    path = folder / f"{graph.name}.onnx"
    if not path.is_file():
        raise InputError(f"{path}: no such graph. {REEXPORT_HINT}", code="missing-graph")
    return path


def _no_logits(logits: Any) -> Logits:
    rows, *_, vocabulary = logits.shape()
    return np.empty((rows, 0, vocabulary), dtype=np.float32)


def _gather_values(values: Sequence[Any], rows: Tokens) -> NDArray[Any]:
    return gather_rows(np.concatenate([value.numpy() for value in values]), rows)

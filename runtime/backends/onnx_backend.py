"""ONNX Runtime: graphs as sessions, on the CPU, or on CUDA where they were made for it.

What a graph leaves for its next call, and what an encoder leaves for all calls, stays an OrtValue that is
bound as it is; only what is asked for becomes a numpy array.

Shapes: R = rows, S = tokens fed at once, P = tokens fed before, H = heads that cache, d = width of a head,
V = vocabulary.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from smelt.core.errors import InputError, RunError
from smelt.runtime.backends.backend import PAST, PRESENT, Feeds, Graph, Graphs, past_of, take_rows
from smelt.runtime.backends.device import Place, onnx_device
from smelt.runtime.backends.onnx_caches import bind_in_place, grows_in_place, with_room
from smelt.runtime.backends.onnx_session import MAKE_AGAIN, open_session
from smelt.runtime.batch import Logits, Tokens
from smelt.runtime.causal import KEEP

# Bytes of graph files from which a second copy of their weights counts: every session packs its own
_LARGE = 32 * 2**20
_KINDS = {"tensor(float)": np.float32, "tensor(float16)": np.float16, "tensor(int8)": np.int8}


class Opener(NamedTuple):
    """How graphs are opened elsewhere than on the CPU or CUDA: a provider of another kind.

    session: gives the session of a graph, by its path and the threads. memory: where what a graph leaves
    lies, cpu or cuda.
    """

    session: Callable[[Path, int | None], Any]
    memory: Place


@dataclass
class Held:
    """The bound inputs of the next call.

    caches: OrtValues [R, H, P, d], in the order of the backend's names; where they grow in place there may be
    room behind the P places that are `used`. shared: input name -> OrtValue, what is the same in all calls,
    and for all beams of a sentence.
    """

    binding: Any
    caches: list[Any]
    shared: dict[str, Any]
    used: int = 0


class OnnxBackend:
    """A `Backend` over ONNX Runtime sessions: CPU, or CUDA where the target is ort-cuda."""

    name = "onnxruntime"
    version: str = onnxruntime.__version__
    at_once = None
    in_all = None

    def __init__(
        self,
        folder: Path,
        graphs: Graphs,
        target: str | None,
        threads: int | None,
        device: str,
        dtype: str | None = None,
        opener: Opener | None = None,
        tf32: bool = False,
    ) -> None:
        self._folder, self._graphs, self._threads = folder, graphs, threads
        self.device = onnx_device(device, target) if opener is None else "cuda"
        self._memory = self.device if opener is None else opener.memory
        self._opens = (
            partial(open_session, device=self.device, tf32=tf32) if opener is None else opener.session
        )
        if dtype == "bf16" and self.device == "cpu":
            raise InputError(
                f"{folder}: ONNX Runtime runs bf16 graphs on CUDA only, of target ort-cuda. Export with"
                " dtype: fp32 for this machine.",
                code="unsupported-dtype",
            )
        self.whole = frozenset(name for name in graphs.whole if (folder / f"{name}.onnx").is_file())
        self._large = sum(path.stat().st_size for path in folder.glob("*.onnx*")) >= _LARGE
        self._sessions: dict[str, Any] | None = {}
        # closed, but for the calls that were promised them
        self._leaving: WeakValueDictionary[str, Any] = WeakValueDictionary()
        self._inputs: dict[str, set[str]] = {}
        self._narrow: dict[str, frozenset[str]] = {}
        self._lock = threading.Lock()  # around the opening of graphs
        # the fused attention of this target takes several tokens on top of a past only for one row
        self._by_row = (target or "ort-cpu") == "ort-cpu"
        # ... and appends to a buffer that is input and output
        self._may_append = self._by_row and self._memory == "cpu" and graphs.before is None
        for graph in graphs.in_order:
            _require(folder, graph)
        # what is tried once the steps are open, told from the file alone
        self.long_in_steps = bool(self.whole) and self._may_append and _is_fused(folder, graphs.main)
        if not self.whole:  # else they wait until somebody asks for a single step
            self._open_steps()

    @contextmanager
    def using(self, graph: str) -> Iterator[bool]:
        """Say whether a graph of a whole generation can run without a second copy of large weights.

        ONNX Runtime shares packed weights between sessions in its C API only, so the sessions of a greedy
        search, of a beam search and of single steps hold a copy each. Small models may. Of a large one the
        graph that was asked for first stays alone; once anything else is asked for, the graphs of a step do
        all.
        """
        # held until the call inside has ended, so that it finds it although others have closed it
        session = self._alone(graph) if self._large else None
        yield not self._large or session is not None

    def _alone(self, graph: str) -> Any | None:
        """Return the session of `graph`, opened now if none is; None where others are open."""
        with self._lock:
            open_now = self._sessions
            if open_now and graph not in open_now:
                return None
            return self._there(graph)

    def _open_steps(self) -> None:
        """Open the graphs of a single step; others see them once all is known of them."""
        if self._large and self._sessions is not None:
            self._leaving.update(self._sessions)
            self._sessions = {}  # their calls that are on the way end with them
        made = {g.name: self._open(g) for g in self._graphs.in_order}
        main = made[self._graphs.main.name]
        # graphs made before there was such an input give the logits of all tokens
        self._may_keep = any(i.name == KEEP for i in main.get_overridable_initializers())
        # for TensorRT, where inputs have no default
        self._must_keep = any(i.name == KEEP for i in main.get_inputs())
        if self._graphs.caches:
            self._pair_caches(made)
        self._note_inputs(made)
        self._publish(made)

    def _note_inputs(self, made: dict[str, Any]) -> None:
        for name, session in made.items():
            both = (*session.get_inputs(), *session.get_overridable_initializers())
            self._inputs[name] = {i.name for i in both}
            # some exporters make ids of 32 bits; ours are of 64
            self._narrow[name] = frozenset(i.name for i in both if i.type == "tensor(int32)")

    def _publish(self, made: dict[str, Any]) -> None:
        if self._sessions is not None:
            self._sessions = {**self._sessions, **made}

    def _pair_caches(self, sessions: dict[str, Any]) -> None:
        """Find which output becomes which input of the next call, and what an empty cache looks like."""
        main = self._graphs.main
        left = {name: [o.name for o in session.get_outputs()] for name, session in sessions.items()}
        self._present = [name for name in left.pop(main.name) if name.startswith(PRESENT)]
        self._once = [name for names in left.values() for name in names if name.startswith(PRESENT)]
        self._past = [past_of(name) for name in self._present]
        inputs = {i.name: i for i in sessions[main.name].get_inputs()}
        expected = main.inputs | {*self._past, *map(past_of, self._once)}
        if odd := (set(inputs) ^ expected) - {KEEP}:
            files = " and ".join(f"{graph.name}.onnx" for graph in self._graphs.in_order)
            raise InputError(
                f"{self._folder}: {files}: inputs and outputs do not fit each other:"
                f" {', '.join(sorted(odd))}. {MAKE_AGAIN}",
                code="mismatched-graphs",
            )
        if not self._past:
            raise InputError(
                f"{self._folder / main.name}.onnx: a graph without a cache: none of its inputs is"
                f" {PAST}*. {MAKE_AGAIN}",
                code="missing-cache",
            )
        self._empty = [(i.shape[1], i.shape[3], _KINDS[i.type]) for i in map(inputs.get, self._past) if i]
        self._in_place = self._may_append and grows_in_place(
            sessions[main.name], self._past, self._present, self._empty
        )

    def call(self, graph: str, feeds: Feeds) -> dict[str, NDArray[Any]]:
        """Run a graph once; return all of its outputs by name."""
        session = self._session(graph)
        narrow = self._narrow.get(graph, frozenset())
        known = {
            name: values.astype(np.int32) if name in narrow else values
            for name, values in feeds.items()
            if name in self._inputs[graph]
        }
        names = [output.name for output in session.get_outputs()]
        try:
            found = session.run(names, known)
        except Exception as error:  # onnxruntime's errors have no base of their own
            raise RunError(
                f"{self._folder / graph}.onnx: ONNX Runtime could not run it: {error}", code="graph-failed"
            ) from error
        return dict(zip(names, found, strict=True))

    def start(self, rows: int, feeds: Feeds | None = None, shared: Feeds | None = None) -> Held:
        """Run the graph that comes before, if there is one; bind what it leaves, and empty caches."""
        made = {name: self._value(values) for name, values in (shared or {}).items()}
        if self._graphs.before is not None:
            made |= self._run_before(self._graphs.before.name, feeds or {})
        empty = [np.zeros((rows, heads, 0, width), dtype=kind) for heads, width, kind in self._empty_caches()]
        return self._holding([self._value(array) for array in empty], made)

    def _empty_caches(self) -> list[Any]:
        self._session(self._graphs.main.name)  # so that its graphs are open
        return self._empty

    def _holding(self, caches: list[Any], shared: dict[str, Any]) -> Held:
        """Bind what the next call takes; OrtValues."""
        held = Held(self._session(self._graphs.main.name).io_binding(), caches, shared)
        for name, value in shared.items():
            held.binding.bind_ortvalue_input(name, value)
        self._bind_caches(held)
        return held

    def _bind_caches(self, held: Held) -> None:
        if self._in_place:
            held.binding.bind_output("logits", "cpu")  # the first of the outputs
            bind_in_place(held.binding, self._past, self._present, held.caches)
        else:
            for name, value in zip(self._past, held.caches, strict=True):
                held.binding.bind_ortvalue_input(name, value)

    def _make_room(self, held: Held, needed: int) -> None:
        """Let the caches have room for so many tokens."""
        if held.caches[0].shape()[2] < needed:
            for at, value in enumerate(held.caches):
                held.caches[at] = self._value(with_room(value.numpy(), held.used, needed))
            self._bind_caches(held)

    def taken(self, parts: Sequence[Held], rows: Tokens, shared: dict[str, Any] | None) -> Held:
        """Return what rows `rows` of all `parts`, one after another, hold.

        Args:
            parts: as many calls old as each other, with caches that do not grow in place.
            rows: int64 [R], counted through all parts.
            shared: what is to be shared, that of `parts` at the same rows if None.
        """
        # in place there would be room behind what is used, in one part more than in another
        assert not self._in_place
        caches = [_gathered([part.caches[i] for part in parts], rows) for i in range(len(self._past))]
        if shared is None:
            names = parts[0].shared
            shared = {n: self._value(_gathered([part.shared[n] for part in parts], rows)) for n in names}
        return self._holding([self._value(array) for array in caches], shared)

    def _run_before(self, graph: str, feeds: Feeds) -> dict[str, Any]:
        """Return what `graph` leaves for all calls, where it was made."""
        session = self._session(graph)
        binding = session.io_binding()
        for name, values in feeds.items():
            binding.bind_cpu_input(name, np.ascontiguousarray(values))
        for name in self._once:
            binding.bind_output(name, self._memory)
        session.run_with_iobinding(binding)
        return {past_of(name): v for name, v in zip(self._once, binding.get_outputs(), strict=True)}

    def step(self, held: Held, feeds: Feeds, last: int = 1) -> Logits:
        """Feed int64 [R, S]; return the graph's logits, [R, V] or [R, S or last, V]."""
        rows, tokens = feeds["input_ids"].shape
        if tokens > 1 and rows > 1 and self._by_row and feeds["attention_mask"].shape[1] > tokens:
            raise InputError(
                "Several tokens on top of a past can be fed to this graph only for one row.",
                code="unsupported-batch",
            )
        wanted = max(1, last)  # 0 would be all
        few = self._may_keep and wanted < tokens
        if self._in_place and not (few and held.used == 0):  # else caches come as long as they must be
            self._make_room(held, feeds["attention_mask"].shape[1])
        if few:
            logits, *held.caches = self._run_few(held, feeds, wanted)
        else:
            logits, *left = self._run(held.binding, feeds, wanted)
            held.caches = held.caches if self._in_place else left
        if few or not self._in_place:
            self._bind_caches(held)
        if self._in_place:
            held.used = feeds["attention_mask"].shape[1]
        found: Logits = logits.numpy()
        return found

    def _run(self, binding: Any, feeds: Feeds, wanted: int) -> Any:
        for name, values in feeds.items():
            binding.bind_cpu_input(name, np.ascontiguousarray(values))
        if self._must_keep:
            binding.bind_cpu_input(KEEP, np.array(wanted, dtype=np.int64))
        # outputs are bound anew: they grow, and what the last step left is now an input
        binding.bind_output("logits", "cpu")
        for name in () if self._in_place else self._present:
            binding.bind_output(name, self._memory)
        self._session(self._graphs.main.name).run_with_iobinding(binding)
        return binding.get_outputs()

    def _run_few(self, held: Held, feeds: Feeds, wanted: int) -> list[Any]:
        """As `_run`, with the logits of some tokens: a binding does not take inputs that have a default."""
        fed = {**feeds, KEEP: np.array(wanted, dtype=np.int64)}
        values = {
            n: onnxruntime.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(v)) for n, v in fed.items()
        }
        values |= dict(zip(self._past, held.caches, strict=True)) | held.shared
        session = self._session(self._graphs.main.name)
        logits, *caches = session.run_with_ort_values(["logits", *self._present], values)
        there = caches if self._memory == "cpu" else [self._value(cache.numpy()) for cache in caches]
        return [logits, *there]

    def reorder(self, held: Held, rows: Tokens, shared: bool) -> None:
        """Make row i what row rows[i] was, and bind it; what is shared is copied only where it must be."""
        if shared:
            held.shared = {name: self._moved(value, rows) for name, value in held.shared.items()}
        held.caches = [self._moved(value, rows) for value in held.caches]
        for name, value in held.shared.items() if shared else ():
            held.binding.bind_ortvalue_input(name, value)
        self._bind_caches(held)

    def _moved(self, value: Any, rows: Tokens) -> Any:
        # on the CPU `numpy` and `_value` only look at the memory: `take_rows` makes the one copy
        return self._value(take_rows(value.numpy(), rows))

    def _value(self, array: NDArray[Any]) -> Any:
        return onnxruntime.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(array), self._memory)

    def _session(self, graph: str) -> Any:
        """Return the session of a graph, opened now if it waited for that."""
        sessions = self._sessions
        if sessions and graph in sessions:
            return sessions[graph]
        promised = self._leaving.get(graph)
        if sessions is not None and promised is not None:
            return promised
        with self._lock:
            return self._there(graph)

    def _there(self, graph: str) -> Any:
        """As `_session`, for who holds the lock."""
        sessions = self._sessions
        if sessions is not None and graph not in sessions:
            sessions = self._open_late(graph)
        if sessions is None:
            raise InputError(f"{self._folder}: this model was closed.", code="closed-model")
        return sessions[graph]

    def _open_late(self, graph: str) -> dict[str, Any] | None:
        if graph not in self.whole:
            self._open_steps()
            return self._sessions
        shape = Graph(graph, frozenset({"input_ids", "attention_mask"}), frozenset({"sequences"}))
        made = {graph: self._open(shape)}
        self._note_inputs(made)
        if not (self._large and self._sessions):  # else it is for this call alone
            self._publish(made)
        return None if self._sessions is None else made

    def _open(self, graph: Graph) -> Any:
        path = _require(self._folder, graph)
        session = self._opens(path, self._threads)
        inputs, outputs = {i.name for i in session.get_inputs()}, {o.name for o in session.get_outputs()}
        if lacking := (graph.inputs - inputs) | (graph.outputs - outputs):
            raise InputError(
                f"{path}: this graph has no {', '.join(sorted(lacking))}; it has the inputs"
                f" {', '.join(sorted(inputs))} and the outputs {', '.join(sorted(outputs))}. {MAKE_AGAIN}",
                code="missing-graph-tensors",
            )
        return session

    def close(self) -> None:
        """Free the sessions and their threads."""
        self._sessions = None


def _is_fused(folder: Path, graph: Graph) -> bool:
    """Say whether a graph whose weights lie outside of its file has fused attention over caches."""
    return b"GroupQueryAttention" in _require(folder, graph).read_bytes()


def _require(folder: Path, graph: Graph) -> Path:
    path = folder / f"{graph.name}.onnx"
    if not path.is_file():
        raise InputError(f"{path}: no such graph. {MAKE_AGAIN}", code="missing-graph")
    return path


def _gathered(values: Sequence[Any], rows: Tokens) -> NDArray[Any]:
    return take_rows(np.concatenate([value.numpy() for value in values]), rows)

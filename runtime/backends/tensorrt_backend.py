"""TensorRT: engines on an NVIDIA GPU, with the caches kept there; buffers are torch CUDA tensors.

More rows than an engine takes at once go in parts, one after another. API: TensorRT 11.

Shapes: R = rows, S = tokens fed at once, P = tokens fed before, H = heads that cache, d = width of a head,
V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from smelt.core.errors import InputError
from smelt.core.rows.arrays import NO_AXES
from smelt.runtime.backends.backend import PAST, PRESENT, Feeds, Graphs, StepByStep, past_of
from smelt.runtime.backends.tensorrt_engine import DEVICE, Engine
from smelt.runtime.backends.tensorrt_module import import_tensorrt
from smelt.runtime.backends.torch_threads import TorchThreads
from smelt.runtime.batch import Logits, Tokens
from smelt.runtime.causal import KEEP
from smelt.runtime.foreign.signature import row_axes_in

_ROWS, _LENGTH = 0, 1  # places in input_ids [R, S]
_PLACES = 2  # the place in a cache [R, H, P, d]
_MAKE_AGAIN = "Run the tensorrt stage again to build it."


@dataclass
class Part:
    """Up to as many rows of a batch as an engine takes, on the GPU.

    caches: input name -> tensor [R, H, P, d], what the call before has left. shared: input name -> tensor,
    what is the same in all calls, and for all beams of a sentence.
    """

    rows: slice
    caches: dict[str, Tensor]
    shared: dict[str, Tensor]


@dataclass
class Held:
    """The parts of a batch, in the order of their rows."""

    parts: list[Part]


class TensorrtBackend(StepByStep):
    """A `Backend` over TensorRT engines."""

    name = "tensorrt"
    device = "cuda"

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
        trt = import_tensorrt()
        if not torch.cuda.is_available():
            raise InputError(
                "A TensorRT engine runs on an NVIDIA GPU, and torch sees none (smelt doctor says why).",
                code="no-gpu",
            )
        self.version: str = trt.__version__
        self._folder, self._graphs = folder, graphs
        paths = [folder / f"{graph.name}.plan" for graph in graphs.in_order]
        if lacking := [path for path in paths if not path.is_file()]:
            raise InputError(f"{lacking[0]}: no such engine. {_MAKE_AGAIN}", code="missing-engine")
        # all work and all memory on one stream of our own; on the default stream TensorRT synchronizes more
        self._stream = torch.cuda.Stream()
        with torch.cuda.stream(self._stream):
            self._engines = {path.stem: Engine(trt, path, self._stream) for path in paths}
        first, main = self._engines[paths[0].stem], self._engines[graphs.main.name]
        self._past = [past_of(name) for name in main.outputs if name.startswith(PRESENT)]
        if graphs.caches and not self._past:
            raise InputError(
                f"{paths[-1]}: an engine without a cache: it gives no {PRESENT}*. {_MAKE_AGAIN}",
                code="no-cache",
            )
        reads = "input_ids" in first.inputs  # a graph of arrays has other inputs
        self._axes = row_axes_in(folder)
        with_rows = (name for name in first.inputs if self._axes.get(name, _ROWS) is not None)
        self._lead = "input_ids" if reads else next(with_rows)
        self._most_rows = first.longest(self._lead, self._axes.get(self._lead) or _ROWS)
        self.at_once: int | None = first.longest("input_ids", _LENGTH) if reads else None
        # the last token of a text is never fed
        self.in_all = main.longest(self._past[0], _PLACES) + 1 if self._past else None
        self._threads = TorchThreads(threads)  # the last line: an engine that does not load changes nothing

    def _engine(self, name: str) -> Engine:
        if name not in self._engines:
            raise InputError(f"{self._folder}: this model was closed.", code="closed-model")
        return self._engines[name]

    def _slices(self, rows: int) -> list[slice]:
        return [slice(at, min(rows, at + self._most_rows)) for at in range(0, rows, self._most_rows)]

    @torch.inference_mode()
    def call(self, graph: str, feeds: Feeds) -> dict[str, NDArray[Any]]:
        """Run an engine once; return all of its outputs by name, floats as float32."""
        engine = self._engine(graph)
        with torch.cuda.stream(self._stream):
            count = feeds[self._lead].shape[self._axes.get(self._lead) or _ROWS]
            parts = [engine(_to_gpu(feeds, rows, self._axes)) for rows in self._slices(count)]
            return {
                name: _to_numpy([part[name] for part in parts], self._axes.get(name) or _ROWS)
                for name in engine.outputs
            }

    @torch.inference_mode()
    def start(self, rows: int, feeds: Feeds | None = None, shared: Feeds | None = None) -> Held:
        """Run the engine that comes before, if there is one; start with empty caches."""
        with torch.cuda.stream(self._stream):
            return Held([self._begin(part, feeds or {}, shared or {}) for part in self._slices(rows)])

    def _begin(self, rows: slice, feeds: Feeds, shared: Feeds) -> Part:
        main = self._engine(self._graphs.main.name)
        held = _to_gpu(shared, rows)
        if self._graphs.before is not None:
            outputs = self._engine(self._graphs.before.name)(_to_gpu(feeds, rows))
            held |= {past_of(name): t for name, t in outputs.items() if name.startswith(PRESENT)}
        caches = {}
        for name in (name for name in main.inputs if name.startswith(PAST) and name not in held):
            _, heads, _, width = main.engine.get_tensor_shape(name)
            shape = (rows.stop - rows.start, heads, 0, width)
            caches[name] = torch.empty(shape, dtype=main.types[name], device=DEVICE)
        return Part(rows, caches, held)

    @torch.inference_mode()
    def step(self, held: Held, feeds: Feeds, last: int = 1) -> Logits:
        """Feed int64 [R, S]; return logits, [R, V] or [R, last, V]; the caches stay on the GPU."""
        engine = self._engine(self._graphs.main.name)
        wanted = max(1, last)  # 0 would be all
        with torch.cuda.stream(self._stream):
            found = []
            for part in held.parts:
                # engines built before this input was there give the logits of all tokens
                fed = _to_gpu(feeds, part.rows) | {KEEP: torch.tensor(wanted)}
                outputs = engine(fed | part.shared | part.caches)
                part.caches = {name: outputs[PRESENT + name.removeprefix(PAST)] for name in self._past}
                logits = outputs["logits"]
                found.append(logits[:, -wanted:] if logits.dim() == 3 else logits)
            return _to_numpy(found)

    @torch.inference_mode()
    def reorder(self, held: Held, rows: Tokens, shared: bool) -> None:
        """Make row i what row rows[i] was, in parts of as many rows as the engine takes."""
        with torch.cuda.stream(self._stream):
            there = torch.from_numpy(np.ascontiguousarray(rows)).to(DEVICE)
            old = held.parts
            caches = _moved([part.caches for part in old], there)
            common = _moved([part.shared for part in old], there) if shared else {}
            held.parts = [
                Part(
                    at,
                    {name: tensor[at] for name, tensor in caches.items()},
                    {name: tensor[at] for name, tensor in common.items()} if shared else old[i].shared,
                )
                for i, at in enumerate(self._slices(len(rows)))
            ]

    def close(self) -> None:
        """Free engines and contexts."""
        self._engines.clear()
        self._threads.give_back()


def _to_gpu(feeds: Feeds, rows: slice, axes: Mapping[str, int | None] = NO_AXES) -> dict[str, Tensor]:
    """Return some rows of what is fed, on axis 0 or that of `axes`; an engine takes what it knows of it."""
    there = {}
    for name, values in feeds.items():
        axis = axes.get(name, _ROWS)
        part = values if axis is None else values[(slice(None),) * axis + (rows,)]
        there[name] = torch.from_numpy(np.ascontiguousarray(part).reshape(part.shape))
    return {name: tensor.to(DEVICE, non_blocking=True) for name, tensor in there.items()}


def _moved(parts: list[dict[str, Tensor]], rows: Tensor) -> dict[str, Tensor]:
    return {name: _joined([part[name] for part in parts]).index_select(0, rows) for name in parts[0]}


def _joined(parts: list[Tensor], axis: int = _ROWS) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, axis)


def _to_numpy(parts: list[Tensor], axis: int = _ROWS) -> NDArray[Any]:
    """Copy to the CPU, which waits for the GPU; the result may be written to, floats are float32."""
    whole = _joined(parts, axis)
    found: NDArray[Any] = (whole.float() if whole.is_floating_point() else whole).cpu().numpy()
    return found

"""TensorRT backend: engines on an NVIDIA GPU, with the caches stored there; buffers are torch CUDA tensors.

More rows than an engine takes at once are run in parts, in sequence. API: TensorRT 11.

Shapes: R = rows, S = input tokens of one call, P = tokens of previous calls, H = heads of a cache, d = width
of a head, V = vocabulary.
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
from smelt.data.batch import Logits, Tokens
from smelt.data.npz_arrays import NO_SAMPLE_AXES
from smelt.generation.runners import NUM_LOGITS_INPUT
from smelt.runtimes.backend import (
    PAST_PREFIX,
    PRESENT_PREFIX,
    Feeds,
    ModelGraphs,
    NoGenerationGraphs,
    past_input_name,
)
from smelt.runtimes.device import TorchThreads
from smelt.runtimes.tensorrt_engine import CUDA_DEVICE, TensorrtEngine
from smelt.runtimes.tensorrt_module import import_tensorrt
from smelt.runtimes.third_party.signature import read_batch_axes

_ROWS, _LENGTH = 0, 1  # axes of input_ids [R, S]
_PLACES = 2  # the axis of positions in a cache [R, H, P, d]
_REBUILD_HINT = "Run the tensorrt stage again to build it."


@dataclass
class EngineBatch:
    """At most as many rows of a batch as an engine takes, on the GPU.

    caches: input name -> tensor [R, H, P, d], outputs of the previous call. shared: input name -> tensor,
    the same in all calls, and for all beams of a sentence.
    """

    rows: slice
    caches: dict[str, Tensor]
    shared: dict[str, Tensor]


@dataclass
class TensorrtDecodeState:
    """The parts of a batch, in the order of their rows."""

    parts: list[EngineBatch]


class TensorrtBackend(NoGenerationGraphs):
    """A `Backend` over TensorRT engines."""

    name = "tensorrt"
    device = "cuda"

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
        trt = import_tensorrt()
        if not torch.cuda.is_available():
            raise InputError(
                "A TensorRT engine needs an NVIDIA GPU; torch finds none. `smelt doctor` shows why.",
                code="no-gpu",
            )
        self.version: str = trt.__version__
        self._folder, self._graphs = folder, graphs
        paths = [folder / f"{graph.name}.plan" for graph in graphs.call_order]
        if lacking := [path for path in paths if not path.is_file()]:
            raise InputError(f"{lacking[0]}: no such engine. {_REBUILD_HINT}", code="missing-engine")
        # all work and all memory on a separate stream; on the default stream TensorRT synchronizes more
        self._stream = torch.cuda.Stream()
        with torch.cuda.stream(self._stream):
            self._engines = {path.stem: TensorrtEngine(trt, path, self._stream) for path in paths}
        first, main = self._engines[paths[0].stem], self._engines[graphs.main.name]
        self._past = [past_input_name(name) for name in main.outputs if name.startswith(PRESENT_PREFIX)]
        if graphs.uses_cache and not self._past:
            raise InputError(
                f"{paths[-1]}: this engine has no cache: it has no output {PRESENT_PREFIX}*. {_REBUILD_HINT}",
                code="no-cache",
            )
        reads = "input_ids" in first.inputs  # a graph of arrays has other inputs
        self._axes = read_batch_axes(folder)
        with_rows = (name for name in first.inputs if self._axes.get(name, _ROWS) is not None)
        self._lead = "input_ids" if reads else next(with_rows)
        self._most_rows = first.max_dimension(self._lead, self._axes.get(self._lead) or _ROWS)
        self.max_tokens_per_call: int | None = first.max_dimension("input_ids", _LENGTH) if reads else None
        # the last token of a text is never an input
        self.max_total_tokens = main.max_dimension(self._past[0], _PLACES) + 1 if self._past else None
        self._threads = TorchThreads(threads)  # last, so that an engine that does not load changes nothing

    def _engine(self, name: str) -> TensorrtEngine:
        if name not in self._engines:
            raise InputError(f"{self._folder}: this model is closed. Load it again.", code="closed-model")
        return self._engines[name]

    def _split_rows(self, rows: int) -> list[slice]:
        return [slice(at, min(rows, at + self._most_rows)) for at in range(0, rows, self._most_rows)]

    @torch.inference_mode()
    def call(self, graph: str, feeds: Feeds) -> dict[str, NDArray[Any]]:
        """Run an engine once; return all of its outputs by name, floats as float32."""
        engine = self._engine(graph)
        with torch.cuda.stream(self._stream):
            count = feeds[self._lead].shape[self._axes.get(self._lead) or _ROWS]
            parts = [engine(_to_gpu(feeds, rows, self._axes)) for rows in self._split_rows(count)]
            return {
                name: _to_numpy([part[name] for part in parts], self._axes.get(name) or _ROWS)
                for name in engine.outputs
            }

    @torch.inference_mode()
    def start(
        self, rows: int, feeds: Feeds | None = None, shared: Feeds | None = None
    ) -> TensorrtDecodeState:
        """Run the engine before `main`, if there is one; start with empty caches."""
        with torch.cuda.stream(self._stream):
            return TensorrtDecodeState(
                [self._start_batch(part, feeds or {}, shared or {}) for part in self._split_rows(rows)]
            )

    def _start_batch(self, rows: slice, feeds: Feeds, shared: Feeds) -> EngineBatch:
        main = self._engine(self._graphs.main.name)
        held = _to_gpu(shared, rows)
        if self._graphs.encoder is not None:
            outputs = self._engine(self._graphs.encoder.name)(_to_gpu(feeds, rows))
            held |= {
                past_input_name(name): t for name, t in outputs.items() if name.startswith(PRESENT_PREFIX)
            }
        caches = {}
        for name in (name for name in main.inputs if name.startswith(PAST_PREFIX) and name not in held):
            _, heads, _, width = main.engine.get_tensor_shape(name)
            shape = (rows.stop - rows.start, heads, 0, width)
            caches[name] = torch.empty(shape, dtype=main.types[name], device=CUDA_DEVICE)
        return EngineBatch(rows, caches, held)

    @torch.inference_mode()
    def step(self, held: TensorrtDecodeState, feeds: Feeds, last: int = 1) -> Logits:
        """Run int64 [R, S]; return logits, [R, V] or [R, last, V]; the caches stay on the GPU."""
        engine = self._engine(self._graphs.main.name)
        wanted = max(1, last)  # 0 would mean all
        with torch.cuda.stream(self._stream):
            found = []
            for part in held.parts:
                # engines built before this input existed return the logits of all tokens
                inputs = _to_gpu(feeds, part.rows) | {NUM_LOGITS_INPUT: torch.tensor(wanted)}
                outputs = engine(inputs | part.shared | part.caches)
                part.caches = {
                    name: outputs[PRESENT_PREFIX + name.removeprefix(PAST_PREFIX)] for name in self._past
                }
                logits = outputs["logits"]
                found.append(logits[:, -wanted:] if logits.dim() == 3 else logits)
            return _to_numpy(found)

    @torch.inference_mode()
    def reorder_cache(self, held: TensorrtDecodeState, rows: Tokens, shared: bool) -> None:
        """Replace row i by row rows[i], in parts of at most the engine's number of rows."""
        with torch.cuda.stream(self._stream):
            indices = torch.from_numpy(np.ascontiguousarray(rows)).to(CUDA_DEVICE)
            old = held.parts
            caches = _reorder_rows([part.caches for part in old], indices)
            common = _reorder_rows([part.shared for part in old], indices) if shared else {}
            held.parts = [
                EngineBatch(
                    at,
                    {name: tensor[at] for name, tensor in caches.items()},
                    {name: tensor[at] for name, tensor in common.items()} if shared else old[i].shared,
                )
                for i, at in enumerate(self._split_rows(len(rows)))
            ]

    def close(self) -> None:
        """Free engines and contexts."""
        self._engines.clear()
        self._threads.release()


def _to_gpu(feeds: Feeds, rows: slice, axes: Mapping[str, int | None] = NO_SAMPLE_AXES) -> dict[str, Tensor]:
    """Return some rows of the inputs, on axis 0 or that of `axes`; an engine ignores unknown names."""
    tensors = {}
    for name, values in feeds.items():
        axis = axes.get(name, _ROWS)
        part = values if axis is None else values[(slice(None),) * axis + (rows,)]
        tensors[name] = torch.from_numpy(np.ascontiguousarray(part).reshape(part.shape))
    return {name: tensor.to(CUDA_DEVICE, non_blocking=True) for name, tensor in tensors.items()}


def _reorder_rows(parts: list[dict[str, Tensor]], rows: Tensor) -> dict[str, Tensor]:
    return {name: _concat_batches([part[name] for part in parts]).index_select(0, rows) for name in parts[0]}


def _concat_batches(parts: list[Tensor], axis: int = _ROWS) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, axis)


def _to_numpy(parts: list[Tensor], axis: int = _ROWS) -> NDArray[Any]:
    """Copy to the CPU, which waits for the GPU; the result may be written to, floats are float32."""
    whole = _concat_batches(parts, axis)
    found: NDArray[Any] = (whole.float() if whole.is_floating_point() else whole).cpu().numpy()
    return found

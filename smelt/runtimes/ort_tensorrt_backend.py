"""ONNX Runtime backend with its TensorRT provider: graphs of ONNX Runtime, size limits of engines.

Engines are built for the sizes in `provider.json`; more rows than they take are run in parts, in sequence.

Shapes: R = rows, S = input tokens of one call, V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from smelt.core.errors import InputError, RunError
from smelt.data.batch import Logits, Tokens
from smelt.runtimes.backend import Feeds, GraphInterface, ModelGraphs, NoGenerationGraphs
from smelt.runtimes.onnx_backend import OnnxBackend
from smelt.runtimes.onnx_backend import OnnxDecodeState as HeldPart
from smelt.runtimes.onnx_session import REEXPORT_HINT
from smelt.runtimes.ort_tensorrt_options import PROVIDER_OPTIONS_FILE, ProviderOptions, read_provider_options
from smelt.runtimes.ort_tensorrt_provider import provider_device
from smelt.runtimes.ort_tensorrt_session import open_provider_session

_ROWS, _LENGTH = 0, 1  # axes of input_ids [R, S]; of any other input the first are rows too
_PLACES = 2  # the axis of positions in a cache [R, H, P, d]
_PAST = "past_key_values."


@dataclass
class SplitDecodeState:
    """The parts of a batch, in the order of their rows."""

    parts: list[HeldPart]


class OrtTensorrtBackend(NoGenerationGraphs):
    """A `Backend`; on a machine without the provider its graphs run on ONNX Runtime's CPU provider."""

    name = "onnxruntime"
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
        self.version: str = onnxruntime.__version__
        self.device = provider_device(device, target)
        self.max_tokens_per_call: int | None = None
        self.max_total_tokens: int | None = None
        self._most_rows: int | None = None
        opener = None
        if self.device == "cuda":
            self.name = "onnxruntime-tensorrt"
            opener = self._session_opener(folder, graphs)
        where = "cpu" if opener is None else device
        self._inner = OnnxBackend(folder, graphs, "tensorrt", threads, where, dtype, opener)

    def _session_opener(self, folder: Path, graphs: ModelGraphs) -> Callable[[Path, int | None], Any]:
        """Read the sizes that engines are built for; return the function that opens a graph."""
        options = read_provider_options(folder)
        first, main = (
            _options_for_graph(options, graph, folder).max_shapes
            for graph in (graphs.call_order[0], graphs.main)
        )
        read = "input_ids" in first  # an image is not split
        sizes = first["input_ids"] if read else next(iter(first.values()), ())
        if len(sizes) <= _LENGTH:
            raise InputError(
                f"{folder / PROVIDER_OPTIONS_FILE}: no sizes for the inputs of the first graph."
                f" {REEXPORT_HINT}",
                code="missing-engine-sizes",
            )
        self._most_rows, self.max_tokens_per_call = sizes[_ROWS], sizes[_LENGTH] if read else None
        # a cache that only the previous graph fills is as long as the source text, not as the output
        grown = [name for name in main if name.startswith(_PAST) and ".encoder." not in name]
        if graphs.uses_cache and grown:
            self.max_total_tokens = main[grown[0]][_PLACES] + 1  # the last token of a text is never an input
        return lambda path, threads: open_provider_session(path, options[path.stem], threads)

    def _split_rows(self, rows: int) -> list[slice]:
        most = self._most_rows or max(1, rows)
        return [slice(at, min(rows, at + most)) for at in range(0, rows, most)]

    def call(self, graph: str, feeds: Feeds) -> dict[str, NDArray[Any]]:
        """Run a graph once; return all of its outputs by name."""
        count = len(next(iter(feeds.values())))  # axis 0 of all inputs is the row
        parts = [self._inner.call(graph, _select_rows(feeds, rows)) for rows in self._split_rows(count)]
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}

    def start(self, rows: int, feeds: Feeds | None = None, shared: Feeds | None = None) -> SplitDecodeState:
        """Run the graph before `main`, if there is one; start with empty caches."""
        return SplitDecodeState(
            [
                self._inner.start(
                    at.stop - at.start, _select_rows(feeds or {}, at), _select_rows(shared or {}, at)
                )
                for at in self._split_rows(rows)
            ]
        )

    def step(self, held: SplitDecodeState, feeds: Feeds, last: int = 1) -> Logits:
        """Run int64 [R, S]; return logits, [R, V] or [R, S or last, V].

        Raises:
            RunError: longer than the engines' size limit.
        """
        tokens = held.parts[0].caches[0].shape()[_PLACES] + feeds["input_ids"].shape[1]
        if self.max_total_tokens is not None and tokens > self.max_total_tokens:
            raise RunError(
                f"a text has {tokens} tokens, but the engines accept at most {self.max_total_tokens}."
                f" Export again with onnx: {{engine: {{max_new_tokens: ..., lengths: ...}}}}.",
                code="engine-limit",
            )
        slices = self._split_rows(len(feeds["input_ids"]))
        found = [
            self._inner.step(part, _select_rows(feeds, at), last)
            for part, at in zip(held.parts, slices, strict=True)
        ]
        return found[0] if len(found) == 1 else np.concatenate(found)

    def reorder_cache(self, held: SplitDecodeState, rows: Tokens, shared: bool) -> None:
        """Replace row i by row rows[i], in parts of at most the engine's number of rows."""
        slices = self._split_rows(len(rows))
        if len(held.parts) == len(slices) == 1:
            self._inner.reorder_cache(held.parts[0], rows, shared)
            return
        old = held.parts
        held.parts = [
            self._inner.select_rows(old, rows[at], None if shared else old[i].shared)
            for i, at in enumerate(slices)
        ]

    def close(self) -> None:
        """Free the sessions and their engines."""
        self._inner.close()


def _select_rows(feeds: Feeds, rows: slice) -> dict[str, NDArray[Any]]:
    return {name: values[rows] for name, values in feeds.items()}


def _options_for_graph(
    options_by_graph: dict[str, ProviderOptions], graph: GraphInterface, folder: Path
) -> ProviderOptions:
    if graph.name not in options_by_graph:
        raise InputError(
            f"{folder / PROVIDER_OPTIONS_FILE}: no entry for {graph.name}.onnx. {REEXPORT_HINT}",
            code="missing-engine-sizes",
        )
    return options_by_graph[graph.name]

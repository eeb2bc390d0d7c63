"""A `Backend` over ONNX Runtime with a provider of TensorRT: graphs as for ONNX Runtime, sizes as of engines.

Engines are built for the sizes in `provider.json`; more rows than they take go in parts, one after another.

Shapes: R = rows, S = tokens fed at once, V = vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from smelt.core.errors import InputError, RunError
from smelt.runtime.backends.backend import Feeds, Graph, Graphs, StepByStep
from smelt.runtime.backends.onnx_backend import Held as HeldPart
from smelt.runtime.backends.onnx_backend import OnnxBackend, Opener
from smelt.runtime.backends.onnx_session import MAKE_AGAIN
from smelt.runtime.backends.ort_tensorrt.provider import PROVIDERS, Provider, place_of
from smelt.runtime.backends.ort_tensorrt.session import open_session
from smelt.runtime.backends.ort_tensorrt.told import FILE, Told, read_told
from smelt.runtime.batch import Logits, Tokens

_ROWS, _LENGTH = 0, 1  # places in input_ids [R, S]; of any other input the first are rows too
_PLACES = 2  # the place in a cache [R, H, P, d]
_PAST = "past_key_values."


@dataclass
class Held:
    """The parts of a batch, in the order of their rows."""

    parts: list[HeldPart]


class OrtTensorrtBackend(StepByStep):
    """A `Backend`; on a machine without the provider its graphs run on the CPU, by ONNX Runtime itself."""

    name = "onnxruntime"
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
        self.version: str = onnxruntime.__version__
        self.device = place_of(device, target)
        self.at_once: int | None = None
        self.in_all: int | None = None
        self._most_rows: int | None = None
        opener = None
        if self.device == "cuda":
            provider = PROVIDERS[str(target)]
            self.name = provider.runner
            opener = self._opener(folder, graphs, provider)
        where = "cpu" if opener is None else device
        self._inner = OnnxBackend(folder, graphs, "tensorrt", threads, where, dtype, opener)

    def _opener(self, folder: Path, graphs: Graphs, provider: Provider) -> Opener:
        """Read the sizes that engines are built for; return how a graph is opened."""
        told = read_told(folder, provider.name)
        first, main = (_of(told, graph, folder).most for graph in (graphs.in_order[0], graphs.main))
        read = "input_ids" in first  # an image is not read piece by piece
        sizes = first["input_ids"] if read else next(iter(first.values()), ())
        if len(sizes) <= _LENGTH:
            raise InputError(
                f"{folder / FILE}: no sizes of what is fed first. {MAKE_AGAIN}", code="missing-engine-sizes"
            )
        self._most_rows, self.at_once = sizes[_ROWS], sizes[_LENGTH] if read else None
        # a cache that only the graph before fills is as long as a text, not as what was put out
        grown = [name for name in main if name.startswith(_PAST) and ".encoder." not in name]
        if graphs.caches and grown:
            self.in_all = main[grown[0]][_PLACES] + 1  # the last token of a text is never fed
        return Opener(
            lambda path, threads: open_session(provider, path, told[path.stem], threads), provider.memory
        )

    def _slices(self, rows: int) -> list[slice]:
        most = self._most_rows or max(1, rows)
        return [slice(at, min(rows, at + most)) for at in range(0, rows, most)]

    def call(self, graph: str, feeds: Feeds) -> dict[str, NDArray[Any]]:
        """Run a graph once; return all of its outputs by name."""
        count = len(next(iter(feeds.values())))  # axis 0 of all that is fed are the rows
        parts = [self._inner.call(graph, _rows(feeds, rows)) for rows in self._slices(count)]
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}

    def start(self, rows: int, feeds: Feeds | None = None, shared: Feeds | None = None) -> Held:
        """Run the graph that comes before, if there is one; start with empty caches."""
        return Held(
            [
                self._inner.start(at.stop - at.start, _rows(feeds or {}, at), _rows(shared or {}, at))
                for at in self._slices(rows)
            ]
        )

    def step(self, held: Held, feeds: Feeds, last: int = 1) -> Logits:
        """Feed int64 [R, S]; return logits, [R, V] or [R, S or last, V].

        Raises:
            RunError: longer than what the engines are built for.
        """
        fed = held.parts[0].caches[0].shape()[_PLACES] + feeds["input_ids"].shape[1]
        if self.in_all is not None and fed > self.in_all:
            raise RunError(
                f"a text of {fed} tokens; the engines take {self.in_all}. Export again with onnx: {{engine:"
                " {max_new_tokens: ..., lengths: ...}}.",
                code="engine-limit",
            )
        slices = self._slices(len(feeds["input_ids"]))
        found = [
            self._inner.step(part, _rows(feeds, at), last)
            for part, at in zip(held.parts, slices, strict=True)
        ]
        return found[0] if len(found) == 1 else np.concatenate(found)

    def reorder(self, held: Held, rows: Tokens, shared: bool) -> None:
        """Make row i what row rows[i] was, in parts of as many rows as an engine takes."""
        slices = self._slices(len(rows))
        if len(held.parts) == len(slices) == 1:
            self._inner.reorder(held.parts[0], rows, shared)
            return
        old = held.parts
        held.parts = [
            self._inner.taken(old, rows[at], None if shared else old[i].shared) for i, at in enumerate(slices)
        ]

    def close(self) -> None:
        """Free the sessions and their engines."""
        self._inner.close()


def _rows(feeds: Feeds, rows: slice) -> dict[str, NDArray[Any]]:
    return {name: values[rows] for name, values in feeds.items()}


def _of(told: dict[str, Told], graph: Graph, folder: Path) -> Told:
    if graph.name not in told:
        raise InputError(
            f"{folder / FILE}: nothing about {graph.name}.onnx. {MAKE_AGAIN}", code="missing-engine-sizes"
        )
    return told[graph.name]

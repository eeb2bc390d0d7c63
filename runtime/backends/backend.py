"""What every runtime is asked for: graphs that are called by name, and caches that pass from call to call.

A backend knows files, memory, threads and devices; what is fed when, the runners know (`runtime/generate/`,
`runtime/classifier.py`). Graphs, inputs and outputs have Optimum's names. What a graph leaves for its next
call is its output `present.*`, which that call takes as `past_key_values.*`.

Shapes: B = batch, R = rows, S = tokens fed at once, P = tokens fed before, V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from numpy.typing import NDArray

from smelt.runtime.batch import Logits, Tokens

PRESENT, PAST = "present.", "past_key_values."
# graphs that hold a whole generation, from `input_ids` to `sequences`
GREEDY, BEAMS = "generate", "generate_beams"
WHOLE = (GREEDY, BEAMS)
Feeds: TypeAlias = Mapping[str, NDArray[Any]]
"""Input name -> int64 array. What a graph does not know of them is left out."""


@dataclass(frozen=True)
class Graph:
    """A graph's name, and what must be among its inputs and outputs; caches are not counted."""

    name: str
    inputs: frozenset[str]
    outputs: frozenset[str]


@dataclass(frozen=True)
class Graphs:
    """The graphs of a model.

    main: what gives the logits. before: is called once for a batch; what it leaves, every call of `main`
    takes. caches: whether `main` is called again and again, each time with what the call before has left.
    whole: names of graphs that hold all calls, from `input_ids` to `sequences`; an export need not have them.
    """

    main: Graph
    before: Graph | None = None
    caches: bool = True
    whole: tuple[str, ...] = ()

    @property
    def in_order(self) -> tuple[Graph, ...]:
        """The graphs in the order in which they are called."""
        return (self.main,) if self.before is None else (self.before, self.main)


class Backend(Protocol):
    """The graphs of one model, opened in a runtime.

    It is made by `(folder, graphs, target, threads, device, dtype)`: where the files lie, which graphs are
    wanted, what they were exported for (None where that is not known), the threads of the processor (None: as
    many as the runtime likes), the device that was asked for, and the precision that the export was told
    (None: as the files have it), which only those look at that compute float32 graphs in another one.

    name and version (for example onnxruntime 1.31.1) are part of every score's key, as is the device,
    cpu or cuda. at_once: tokens of a text that one call takes. in_all: tokens that a text may have where
    its caches grow with every call. Both are None where the runtime sets no limit. long_in_steps: whether
    a long prompt is continued faster by single steps than by a graph of the whole generation.
    """

    name: str
    version: str
    at_once: int | None
    in_all: int | None
    long_in_steps: bool

    @property
    def whole(self) -> frozenset[str]:
        """Those of `Graphs.whole` that are there."""

    def using(self, graph: str) -> AbstractContextManager[bool]:
        """Say whether one of `whole` is to be called inside of this context; if not, the steps do it.

        Threads may ask at the same time: what was promised to one stays open for it until the context ends.

        Raises:
            InputError: it was closed, or the graph cannot be opened.
        """

    @property
    def device(self) -> str:
        """Where it runs: cpu or cuda."""

    def call(self, graph: str, feeds: Feeds) -> dict[str, NDArray[Any]]:
        """Run a graph once; return all of its outputs by name.

        Raises:
            InputError: it was closed.
        """

    def start(self, rows: int, feeds: Feeds | None = None, shared: Feeds | None = None) -> Any:
        """Return what is held for `rows` rows that have seen nothing, for `step` and `reorder` alone.

        Args:
            rows: of a batch.
            feeds: of the graph that comes before, which is run now.
            shared: inputs of `main` that are the same in every call.

        Raises:
            InputError: it was closed.
        """

    def step(self, held: Any, feeds: Feeds, last: int = 1) -> Logits:
        """Run `main` on `feeds`, keep in `held` what it leaves, return float32 logits that may be changed.

        Args:
            held: changed in place.
            feeds: input_ids, int64 [R, S], and what else the graph takes.
            last: of how many of the last tokens logits are wanted, 0 to S; more of them may come.

        Returns:
            [R, S or fewer, V] of a graph that takes whole prompts, [R, V] of one that takes a token.

        Raises:
            InputError: the graph cannot take several tokens for these rows.
            RunError: longer than what the runtime was built for, or the device failed.
        """

    def reorder(self, held: Any, rows: Tokens, shared: bool) -> None:
        """Make row i what row rows[i] (int64 [R]) was.

        Args:
            held: changed in place.
            rows: as many as before, or more, or fewer.
            shared: whether what is shared moves too. If not, beams have changed places within their
                sentences: there are as many rows as before, and what is shared stays as it is.
        """

    def close(self) -> None:
        """Free the memory and the runtime's threads."""


class StepByStep:
    """What a `Backend` says that has no graphs of whole generations."""

    whole: frozenset[str] = frozenset()

    def using(self, graph: str) -> AbstractContextManager[bool]:
        """Say no."""
        return nullcontext(False)


class Opens(Protocol):
    """What makes a `Backend`."""

    def __call__(
        self,
        folder: Path,
        graphs: Graphs,
        target: str | None,
        threads: int | None,
        device: str,
        dtype: str | None = None,
    ) -> Backend:
        """Open `graphs` in `folder`; see `Backend`.

        Raises:
            InputError: a file is missing or is not such a graph, or there is no such device.
            MissingDependencyError: the runtime or a part of it is not installed.
        """


def past_of(name: str) -> str:
    """Return the input that takes the output `name` in the next call."""
    return PAST + name.removeprefix(PRESENT)


def take_rows(array: NDArray[Any], rows: Tokens) -> NDArray[Any]:
    """Return `array[rows]`; over two dimensions `take` copies five times as fast as over four."""
    taken: NDArray[Any] = array.reshape(len(array), -1).take(rows, axis=0)
    return taken.reshape(len(rows), *array.shape[1:])

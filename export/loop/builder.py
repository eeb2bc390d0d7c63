"""A graph under construction: nodes, constants, and loops and branches that read its values.

Names of a graph and of those around it are one space, as ONNX wants it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Carried:
    """A value that a loop hands on from step to step.

    word: part of its name. first: the value that the first step gets. shape: a number or None for each
    dimension; None may differ from step to step.
    """

    word: str
    first: str
    dtype: Any
    shape: tuple[int | None, ...]


# what a step of a loop gives: whether to go on, and what the next step gets for each carried value
Body = Callable[["Builder", str, list[str]], tuple[str, list[str]]]


class Builder:
    """Nodes in the order in which they are asked for; methods return the names of values.

    around: the graph that this one lies in; None for the outermost. opset: of ONNX's own domain, which the
    outermost says for all. first: what all names begin with, so that the nodes can join another graph.
    """

    def __init__(self, around: Builder | None = None, opset: int = 20, first: str = "") -> None:
        self.nodes: list[Any] = []
        self.initializers: list[Any] = []
        self._root: Builder = self if around is None else around._root
        self._first: str = first if around is None else around._first
        self._opset: int = opset if around is None else around._opset
        self._count = 0
        self._constants: dict[tuple[Any, ...], str] = {}

    def name(self, word: str) -> str:
        """Return a new name that begins with `word`."""
        self._root._count += 1
        return f"{self._first}{word}_{self._root._count}"

    def op(self, kind: str, *inputs: str, **attributes: Any) -> str:
        """Append a node of ONNX's own domain; return its output. An empty input is one that is left out."""
        return self.ops(kind, *inputs, outputs=1, **attributes)[0]

    def ops(self, kind: str, *inputs: str, outputs: int, **attributes: Any) -> list[str]:
        """As `op`, for a node of several outputs."""
        from onnx import helper

        made = [self.name(kind.lower()) for _ in range(outputs)]
        self.nodes.append(helper.make_node(kind, inputs, made, self.name(f"{kind}.node"), **attributes))
        return made

    def const(self, value: Any, dtype: Any = np.int64) -> str:
        """Return the name of a constant of this graph; equal ones are one."""
        from onnx import numpy_helper

        array = np.asarray(value, dtype=dtype)
        key = (array.dtype.str, array.shape, array.tobytes())
        if key not in self._constants:
            self._constants[key] = self.op("Constant", value=numpy_helper.from_array(array))
        return self._constants[key]

    def graph(self, name: str, inputs: Sequence[Any], outputs: Sequence[Any]) -> Any:
        """Return the onnx.GraphProto; inputs and outputs are ValueInfoProto."""
        from onnx import helper

        return helper.make_graph(self.nodes, name, list(inputs), list(outputs), self.initializers)

    def loop(self, word: str, trips: str, carried: Sequence[Carried], body: Body) -> list[str]:
        """Append a Loop that runs at least once; return what its last step hands on.

        Args:
            word: part of its name.
            trips: int64 scalar, the most steps.
            carried: what it hands on from step to step.
            body: given a builder of the step's graph, the number of the step (int64 scalar) and the names
                of the carried values, makes the step.
        """
        inside = Builder(self)
        count, go_on = inside.name("step"), inside.name("going")
        names = [inside.name(one.word) for one in carried]
        again, after = body(inside, count, names)
        given = {*names, count, go_on}
        made = {name for node in inside.nodes for name in node.output}
        results: list[str] = []
        for name in (again, *after):  # each must be a value of the graph's own, and none stand twice
            fresh = name in made and name not in results and name not in given
            results.append(name if fresh else inside.op("Identity", name))
        kinds = [(np.bool_, ()), *((one.dtype, one.shape) for one in carried)]
        graph = inside.graph(
            word,
            [value(count, np.int64, ()), value(go_on, np.bool_, ())]
            + [value(name, one.dtype, one.shape) for name, one in zip(names, carried, strict=True)],
            [value(name, dtype, shape) for name, (dtype, shape) in zip(results, kinds, strict=True)],
        )
        firsts = [one.first for one in carried]
        true = self.const(True, np.bool_)
        return self.ops("Loop", trips, true, *firsts, outputs=len(firsts), body=graph)

    def choose(
        self, condition: str, then: Callable[[Builder], str], other: Callable[[Builder], str],
        dtype: Any, shape: tuple[int | None, ...],
    ) -> str:  # fmt: skip
        """Append an If: the value that `then` makes where `condition` (bool scalar) holds, else `other`'s."""
        branches = {}
        for key, make in (("then_branch", then), ("else_branch", other)):
            inside = Builder(self)
            made = make(inside)
            branches[key] = inside.graph(key, [], [value(made, dtype, shape)])
        return self.op("If", condition, **branches)

    # what is asked for again and again

    def rows(self, name: str) -> str:
        """Return int64 [1]: how many rows a value has."""
        return self.op("Shape", name, start=0, end=1)

    def size(self, name: str, axis: int) -> str:
        """Return int64 scalar: how long a value's dimension is."""
        return self.op("Squeeze", self.op("Shape", name, start=axis, end=axis + 1), self.const([0]))

    def any_of(self, name: str, axes: Sequence[int] = (), keep: bool = False) -> str:
        """Return bool: whether one is true, over `axes` or over all."""
        return self._reduced("ReduceMax", name, axes, keep)

    def all_of(self, name: str, axes: Sequence[int] = (), keep: bool = False) -> str:
        """Return bool: whether all are true, over `axes` or over all."""
        return self._reduced("ReduceMin", name, axes, keep)

    def _reduced(self, kind: str, name: str, axes: Sequence[int], keep: bool) -> str:
        over = (self.const(list(axes)),) if axes else ()
        if self._opset >= 20:
            return self.op(kind, name, *over, keepdims=int(keep))
        return self.cast(self.op(kind, self.cast(name, np.int32), *over, keepdims=int(keep)), np.bool_)

    def cast(self, name: str, dtype: Any) -> str:
        """Return the value in another type."""
        from onnx import helper

        return self.op("Cast", name, to=helper.np_dtype_to_tensor_dtype(np.dtype(dtype)))


def value(name: str, dtype: Any, shape: Sequence[int | str | None]) -> Any:
    """Return the ValueInfoProto of a graph's input or output."""
    from onnx import helper

    return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(np.dtype(dtype)), list(shape))

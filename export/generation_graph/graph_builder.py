"""Build a graph: nodes, constants, and loops and branches that read its values.

Names of a graph and of enclosing graphs are unique together, as ONNX requires.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class LoopCarried:
    """A value that a loop passes from step to step.

    name: part of its name. initial: the value of the first step. shape: a number or None for each
    dimension; None may differ from step to step.
    """

    name: str
    initial: str
    dtype: Any
    shape: tuple[int | None, ...]


# the results of a step of a loop: whether to continue, and the next value of each carried value
LoopBody = Callable[["GraphBuilder", str, list[str]], tuple[str, list[str]]]


class GraphBuilder:
    """Nodes in the order in which they are added; methods return the names of values.

    around: the enclosing graph; None for the outermost. opset: of ONNX's own domain, set by the outermost
    graph. first: prefix of all names, so that the nodes can be added to another graph.
    """

    def __init__(self, around: GraphBuilder | None = None, opset: int = 20, first: str = "") -> None:
        self.nodes: list[Any] = []
        self.initializers: list[Any] = []
        self._root: GraphBuilder = self if around is None else around._root
        self._first: str = first if around is None else around._first
        self._opset: int = opset if around is None else around._opset
        self._count = 0
        self._constants: dict[tuple[Any, ...], str] = {}

    def new_name(self, word: str) -> str:
        """Return a new name that begins with `word`."""
        self._root._count += 1
        return f"{self._first}{word}_{self._root._count}"

    def op(self, kind: str, *inputs: str, **attributes: Any) -> str:
        """Append a node of ONNX's own domain; return its output. An empty input is omitted."""
        return self.ops(kind, *inputs, outputs=1, **attributes)[0]

    def ops(self, kind: str, *inputs: str, outputs: int, **attributes: Any) -> list[str]:
        """Append a node with several outputs, as `op`."""
        from onnx import helper

        made = [self.new_name(kind.lower()) for _ in range(outputs)]
        self.nodes.append(helper.make_node(kind, inputs, made, self.new_name(f"{kind}.node"), **attributes))
        return made

    def const(self, value: Any, dtype: Any = np.int64) -> str:
        """Return the name of a constant of this graph; equal constants share one."""
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

    def loop(self, word: str, trips: str, carried: Sequence[LoopCarried], body: LoopBody) -> list[str]:
        """Append a Loop that runs at least once; return the carried values after its last step.

        Args:
            word: part of its name.
            trips: int64 scalar, the maximum number of steps.
            carried: the values passed from step to step.
            body: adds the nodes of a step; called with a builder of the step's graph, the number of the step
                (int64 scalar) and the names of the carried values.
        """
        inside = GraphBuilder(self)
        count, go_on = inside.new_name("step"), inside.new_name("going")
        names = [inside.new_name(one.name) for one in carried]
        again, after = body(inside, count, names)
        given = {*names, count, go_on}
        made = {name for node in inside.nodes for name in node.output}
        results: list[str] = []
        for name in (again, *after):  # each must be a value of the graph itself, without duplicates
            fresh = name in made and name not in results and name not in given
            results.append(name if fresh else inside.op("Identity", name))
        kinds = [(np.bool_, ()), *((one.dtype, one.shape) for one in carried)]
        graph = inside.graph(
            word,
            [value_info(count, np.int64, ()), value_info(go_on, np.bool_, ())]
            + [value_info(name, one.dtype, one.shape) for name, one in zip(names, carried, strict=True)],
            [value_info(name, dtype, shape) for name, (dtype, shape) in zip(results, kinds, strict=True)],
        )
        firsts = [one.initial for one in carried]
        true = self.const(True, np.bool_)
        return self.ops("Loop", trips, true, *firsts, outputs=len(firsts), body=graph)

    def if_else(
        self, condition: str, then: Callable[[GraphBuilder], str], other: Callable[[GraphBuilder], str],
        dtype: Any, shape: tuple[int | None, ...],
    ) -> str:  # fmt: skip
        """Append an If: the value of `then` where `condition` (bool scalar) is true, else of `other`."""
        branches = {}
        for key, make in (("then_branch", then), ("else_branch", other)):
            inside = GraphBuilder(self)
            made = make(inside)
            branches[key] = inside.graph(key, [], [value_info(made, dtype, shape)])
        return self.op("If", condition, **branches)

    # frequent operations

    def row_count(self, name: str) -> str:
        """Return int64 [1]: the number of rows of a value."""
        return self.op("Shape", name, start=0, end=1)

    def dimension(self, name: str, axis: int) -> str:
        """Return int64 scalar: the size of a value's dimension."""
        return self.op("Squeeze", self.op("Shape", name, start=axis, end=axis + 1), self.const([0]))

    def any_of(self, name: str, axes: Sequence[int] = (), keep: bool = False) -> str:
        """Return bool: whether any is true, over `axes` or over all."""
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


def value_info(name: str, dtype: Any, shape: Sequence[int | str | None]) -> Any:
    """Return the ValueInfoProto of a graph's input or output."""
    from onnx import helper

    return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(np.dtype(dtype)), list(shape))

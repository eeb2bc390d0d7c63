"""torch.onnx.export without its second trace, where the first one can be written in ONNX as it is.

torch.onnx.export traces a model again and again: `torch.export` gives a program, then `run_decompositions`
traces the program twice, to take operators apart that have no form in ONNX. That is more than half of the
time of an export (torch 2.13). Here each operator of that kind is replaced in the program, by what torch's
own definition makes of it. The graph is the same, node for node; a program with any other operator is left
to torch.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, Node

_ATEN = torch.ops.aten
# Operators that the second trace leaves as they are; torch.onnx.export itself removes `_assert_*`.
_NAMES = """
    _assert_scalar.default _assert_tensor_metadata.default abs.default add.Tensor amax.default
    arange.default arange.start cat.default clamp.default cos.default cumsum.default detach.default
    div.Tensor embedding.default eq.Scalar expand.default floor.default full.default full_like.default
    ge.Scalar gelu.default gt.Scalar gt.Tensor index.Tensor index_select.default layer_norm.default
    linalg_vector_norm.default linear.default log.default lt.Scalar matmul.default maximum.default
    mean.dim mul.Tensor ne.Scalar neg.default new_full.default new_zeros.default ones_like.default
    permute.default pow.Tensor_Scalar reciprocal.default relu.default select.int silu.default sin.default
    slice.Tensor softmax.int split_with_sizes.default sqrt.default stack.default sub.Tensor
    sum.dim_IntList sym_size.int tanh.default transpose.int type_as.default unsqueeze.default view.default
    where.ScalarSelf where.self
"""
_KEPT = {f"aten.{name}" for name in _NAMES.split()} | {
    "onnx_symbolic._symbolic.default",
    "onnx_symbolic._symbolic_multi_out.default",
}
# Of sizes, and of what gives several tensors.
_OF_SIZES = frozenset(
    vars(operator)[name] for name in ("add", "and_", "eq", "ge", "getitem", "le", "mul", "or_", "sub")
) | {torch.sym_not, torch.sym_min}

Sizes = dict[Any, "Node | _New"]
"""The node that gives a size, by the size's expression: those before the place that is looked at."""
Call = tuple[Any, tuple[Any, ...], dict[str, Any]]
"""An operator and what it is called with."""


class _UnknownError(Exception):
    """The program holds something that is not known here."""


@contextmanager
def one_trace() -> Iterator[None]:
    """Let torch.onnx.export trace once where that is enough.

    The function that traces again is none of torch's public ones. Where torch has no such function, nothing
    is changed.
    """
    try:
        from torch.onnx._internal.exporter import _fx_passes
    except ImportError:
        yield
        return
    passes: Any = _fx_passes
    again = getattr(passes, "decompose_with_registry", None)
    if again is None:
        yield
        return

    def decompose(program: Any, registry: Any) -> Any:
        return program if replaced(program) else again(program, registry)

    passes.decompose_with_registry = decompose
    try:
        yield
    finally:
        passes.decompose_with_registry = again


def replaced(program: Any) -> bool:
    """Replace in a torch.export.ExportedProgram what has no form in ONNX.

    Returns:
        Whether all is replaced; if not, the program is as it was.
    """
    graph = program.graph_module.graph
    sizes: Sizes = {}
    plan: list[tuple[Node, Call]] = []
    try:
        for node in graph.nodes:
            if call := _instead(node, sizes):
                plan.append((node, call))
            _note(node, sizes)
    except _UnknownError:
        return False
    made: dict[int, Node] = {}
    for node, (target, args, kwargs) in plan:
        with graph.inserting_before(node):
            node.args = _added(args, graph, node, made)
        node.target, node.kwargs = target, kwargs
    program.graph_module.recompile()
    return True


def _note(node: Node, sizes: Sizes) -> None:
    """Keep a node that is a size. Of inputs with one size it is the one that gave all of them its name."""
    value = node.meta.get("val")
    if isinstance(value, torch.SymInt):
        size = value.node.expr
        if value.node._expr == size or not size.is_Symbol:
            sizes.setdefault(size, node)


def _instead(node: Node, sizes: Sizes) -> Call | None:
    """Return what stands for a node; None: it stays.

    Raises:
        _UnknownError: that is not known.
    """
    if node.op in ("placeholder", "output") or node.target in _OF_SIZES or str(node.target) in _KEPT:
        return None
    if node.op != "call_function" or node.target not in _INSTEAD:
        raise _UnknownError
    return _INSTEAD[node.target](node, sizes)


def _same(node: Node, sizes: Sizes) -> Call:
    return _ATEN.clone.default, node.args[:1], {}


def _dropout(node: Node, sizes: Sizes) -> Call:
    if node.args[2]:  # it trains
        raise _UnknownError
    return _same(node, sizes)


def _to(node: Node, sizes: Sizes) -> Call:
    """Another type; another device means nothing to a graph."""
    before, after = node.args[0].meta["val"].dtype, node.meta["val"].dtype  # type: ignore[union-attr]
    return (
        _same(node, sizes) if before == after else (_ATEN._to_copy.default, node.args[:1], {"dtype": after})
    )


def _renamed(target: Any, node: Node, sizes: Sizes) -> Call:
    return target, node.args, dict(node.kwargs)


def _rsub(node: Node, sizes: Sizes) -> Call:
    if len(node.args) != 2 or node.kwargs:
        raise _UnknownError
    return _ATEN.sub.Tensor, node.args[::-1], {}


def _add_in_place(node: Node, sizes: Sizes) -> Call:
    """A tensor of its own that nothing else reads: whether it is changed or a new one made is the same."""
    changed: Any = node.args[0]
    own = str(changed.target) in _KEPT and not any(one.alias_info for one in changed.target._schema.returns)
    if not own or len(changed.users) > 1 or changed.meta["val"].dtype != node.meta["val"].dtype:
        raise _UnknownError
    return _renamed(_ATEN.add.Tensor, node, sizes)


def _narrow(node: Node, sizes: Sizes) -> Call:
    tensor, dim, start, length = node.args
    end = _expression(start) + _expression(length)
    return _ATEN.slice.Tensor, (tensor, dim, start, _size(end, sizes)), {}


def _chunk(node: Node, sizes: Sizes) -> Call:
    given: Any = node.args
    tensor, parts, dim = given if len(given) == 3 else (*given, 0)
    return _ATEN.chunk.default, (tensor, parts, dim % tensor.meta["val"].dim()), {}


def _flatten(node: Node, sizes: Sizes) -> Call:
    tensor, *places = node.args
    shape = tensor.meta["val"].shape  # type: ignore[union-attr]
    given: Any = (*places, *(0, -1)[len(places) :])
    first, last = (int(place) % len(shape) for place in given)
    if first == last:
        return _same(node, sizes)
    known = [_size(size, sizes) for size in shape]
    joined = _product(known[first : last + 1])
    if isinstance(joined, _New):
        sizes.setdefault(_expression(node.meta["val"].shape[first]), joined)
    return _viewed(node, [*known[:first], joined, *known[last + 1 :]])


def _reshape(node: Node, sizes: Sizes) -> Call:
    given: Any = node.args[1]
    shape = node.meta["val"].shape
    return _viewed(node, [_size(size, sizes, one) for size, one in zip(shape, given, strict=True)])


def _unflatten(node: Node, sizes: Sizes) -> Call:
    return _viewed(node, [_size(size, sizes) for size in node.meta["val"].shape])


def _viewed(node: Node, shape: list[Any]) -> Call:
    """Return a view in the shape; its tensor is made contiguous (nothing in ONNX), or torch may refuse."""
    kept = {"memory_format": torch.contiguous_format}
    return _ATEN._unsafe_view.default, (_New(_ATEN.clone.default, (node.args[0],), kept), shape), {}


def _product(factors: list[Any]) -> Any:
    """Return a size that is the product of others."""
    if all(isinstance(factor, int) for factor in factors):
        return math.prod(factors)
    rest = [factor for factor in factors if factor != 1]
    return functools.reduce(lambda a, b: _New(operator.mul, (a, b), {}), rest)


def _size(size: Any, sizes: Sizes, given: Any = -1) -> Any:
    """Return a size as an argument: a number, its node, or what is given where no node is known."""
    expression = _expression(size)
    if isinstance(expression, int) or expression.is_Integer:
        return int(expression)
    found = sizes.get(expression, given)
    if not isinstance(found, Node | _New):
        raise _UnknownError
    return found


def _expression(size: Any) -> Any:
    value = size.meta["val"] if isinstance(size, Node) else size
    return value.node.expr if isinstance(value, torch.SymInt) else value


class _New(NamedTuple):
    """A node that is not in the graph yet."""

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def add(self, graph: Graph, source: Node, made: dict[int, Node]) -> Node:
        """Put it into the graph, and before it what it takes; it belongs to the module of `source`."""
        node = graph.call_function(self.target, _added(self.args, graph, source, made), self.kwargs)
        # torch.onnx.export warns of each node that does not say it
        node.meta["nn_module_stack"] = source.meta.get("nn_module_stack", {})
        values = [arg.meta["val"] if isinstance(arg, Node) else arg for arg in node.args]
        node.meta["val"] = self.target(*values, **self.kwargs)
        return node


def _added(argument: Any, graph: Graph, source: Node, made: dict[int, Node]) -> Any:
    """Return an argument with each new node in it put into the graph, once."""
    if isinstance(argument, _New):
        if id(argument) not in made:
            made[id(argument)] = argument.add(graph, source, made)
        return made[id(argument)]
    if type(argument) in (list, tuple):
        return type(argument)(_added(a, graph, source, made) for a in argument)
    return argument


_INSTEAD: dict[Any, Callable[[Node, Sizes], Call]] = {
    _ATEN.add_.Tensor: _add_in_place,
    _ATEN.chunk.default: _chunk,
    _ATEN.contiguous.default: _same,
    _ATEN.dropout.default: _dropout,
    _ATEN.flatten.using_ints: _flatten,
    _ATEN.item.default: functools.partial(_renamed, _ATEN._local_scalar_dense.default),
    _ATEN.min.other: functools.partial(_renamed, _ATEN.minimum.default),
    _ATEN.narrow.default: _narrow,
    _ATEN.reshape.default: _reshape,
    _ATEN.rsub.Scalar: _rsub,
    _ATEN.to.device: _to,
    _ATEN.to.dtype: _to,
    _ATEN.to.dtype_layout: _to,
    _ATEN.unflatten.int: _unflatten,
}

"""Make torch.onnx.export faster: skip its second trace, and metadata that an export does not use.

torch.onnx.export traces a model repeatedly: `torch.export` gives a program, then `run_decompositions` traces
the program twice, to decompose operators without an ONNX equivalent. That is more than half of the time of an
export (torch 2.13). Here each operator of that kind is replaced in the program by torch's own decomposition.
The graph is the same, node for node; a program with any other operator is left to torch.

While torch.export traces a model, it records for each node the stack trace, reasons symbolically about memory
formats, and writes the program as Python code after each of its passes. The export uses none of it. Without
it the graph is the same and the export is a tenth faster (torch 2.13).
"""

from __future__ import annotations

import functools
import inspect
import math
import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, Node

_ATEN = torch.ops.aten
# Operators that the second trace does not change; torch.onnx.export itself removes `_assert_*`.
_CONVERTIBLE_OP_NAMES = """
    _assert_scalar.default _assert_tensor_metadata.default abs.default add.Tensor amax.default
    arange.default arange.start arange.start_step cat.default clamp.default cos.default cumsum.default
    detach.default div.Tensor embedding.default eq.Scalar expand.default floor.default full.default
    full_like.default gather.default ge.Scalar gelu.default gt.Scalar gt.Tensor index.Tensor
    index_select.default layer_norm.default linalg_vector_norm.default linear.default log.default lt.Scalar
    matmul.default maximum.default mean.dim mul.Tensor ne.Scalar neg.default new_full.default
    new_zeros.default ones_like.default pad.default permute.default pow.Scalar pow.Tensor_Scalar
    reciprocal.default relu.default select.int silu.default sin.default slice.Tensor softmax.int
    split_with_sizes.default sqrt.default squeeze.dim stack.default sub.Tensor sum.dim_IntList sym_size.int
    tanh.default transpose.int type_as.default unsqueeze.default view.default where.ScalarSelf where.self
"""
_CONVERTIBLE_OPS = {f"aten.{name}" for name in _CONVERTIBLE_OP_NAMES.split()} | {
    "onnx_symbolic._symbolic.default",
    "onnx_symbolic._symbolic_multi_out.default",
}
# Of sizes, and of what gives several tensors.
_SIZE_OPS = frozenset(
    vars(operator)[name] for name in ("add", "and_", "eq", "ge", "getitem", "le", "mul", "or_", "sub")
) | {torch.sym_not, torch.sym_min}

SizeNodes = dict[Any, "Node | _NewNode"]
"""The node that computes a size, by the size's expression: those before the current node."""
OpCall = tuple[Any, tuple[Any, ...], dict[str, Any]]
"""An operator and its arguments."""


class _UnsupportedNodeError(Exception):
    """The program contains an unsupported operator."""


@contextmanager
def single_trace() -> Iterator[None]:
    """Make torch.onnx.export trace only once if that is sufficient.

    The function that traces again is not public. If torch does not have it, nothing is changed.
    """
    try:
        from torch.onnx._internal.exporter import _fx_passes
    except ImportError:
        yield
        return
    passes: Any = _fx_passes
    decompose_program = getattr(passes, "decompose_with_registry", None)
    if decompose_program is None:
        yield
        return

    def decompose(program: Any, registry: Any) -> Any:
        return program if replace_unsupported_ops(program) else decompose_program(program, registry)

    passes.decompose_with_registry = decompose
    try:
        yield
    finally:
        passes.decompose_with_registry = decompose_program


def replace_unsupported_ops(program: Any) -> bool:
    """Replace in a torch.export.ExportedProgram the operators without an ONNX equivalent.

    Returns:
        Whether all were replaced; if not, the program is unchanged.
    """
    graph = program.graph_module.graph
    sizes: SizeNodes = {}
    plan: list[tuple[Node, OpCall]] = []
    try:
        for node in graph.nodes:
            if call := _replacement(node, sizes):
                plan.append((node, call))
            _record_size(node, sizes)
    except _UnsupportedNodeError:
        return False
    inserted: dict[int, Node] = {}
    for node, (target, args, kwargs) in plan:
        with graph.inserting_before(node):
            node.args = _insert_arguments(args, graph, node, inserted)
        node.target, node.kwargs = target, kwargs
    program.graph_module.recompile()
    return True


def _record_size(node: Node, sizes: SizeNodes) -> None:
    """Record a node that is a size. Of inputs with one size it is the one after which all are named."""
    value = node.meta.get("val")
    if isinstance(value, torch.SymInt):
        size = value.node.expr
        if value.node._expr == size or not size.is_Symbol:
            sizes.setdefault(size, node)


def _replacement(node: Node, sizes: SizeNodes) -> OpCall | None:
    """Return the replacement of a node; None if it is kept.

    Raises:
        _UnsupportedNodeError: the node is not supported.
    """
    if (
        node.op in ("placeholder", "output")
        or node.target in _SIZE_OPS
        or str(node.target) in _CONVERTIBLE_OPS
    ):
        return None
    if node.op != "call_function" or node.target not in _REPLACEMENTS:
        raise _UnsupportedNodeError
    return _REPLACEMENTS[node.target](node, sizes)


def _identity(node: Node, sizes: SizeNodes) -> OpCall:
    return _ATEN.clone.default, node.args[:1], {}


def _dropout(node: Node, sizes: SizeNodes) -> OpCall:
    if node.args[2]:  # training mode
        raise _UnsupportedNodeError
    return _identity(node, sizes)


def _to_dtype(node: Node, sizes: SizeNodes) -> OpCall:
    """Replace a conversion to another type; devices do not matter in a graph."""
    source_dtype, target_dtype = node.args[0].meta["val"].dtype, node.meta["val"].dtype  # type: ignore[union-attr]
    return (
        _identity(node, sizes)
        if source_dtype == target_dtype
        else (_ATEN._to_copy.default, node.args[:1], {"dtype": target_dtype})
    )


def _rename_target(target: Any, node: Node, sizes: SizeNodes) -> OpCall:
    return target, node.args, dict(node.kwargs)


def _rsub(node: Node, sizes: SizeNodes) -> OpCall:
    if len(node.args) != 2 or node.kwargs:
        raise _UnsupportedNodeError
    return _ATEN.sub.Tensor, node.args[::-1], {}


def _inplace_add(node: Node, sizes: SizeNodes) -> OpCall:
    """Replace an in-place addition to a tensor without other readers by an ordinary one."""
    updated_node: Any = node.args[0]
    is_convertible = str(updated_node.target) in _CONVERTIBLE_OPS and not any(
        value.alias_info for value in updated_node.target._schema.returns
    )
    if (
        not is_convertible
        or len(updated_node.users) > 1
        or updated_node.meta["val"].dtype != node.meta["val"].dtype
    ):
        raise _UnsupportedNodeError
    return _rename_target(_ATEN.add.Tensor, node, sizes)


def _narrow(node: Node, sizes: SizeNodes) -> OpCall:
    tensor, dim, start, length = node.args
    end = _size_expression(start) + _size_expression(length)
    return _ATEN.slice.Tensor, (tensor, dim, start, _size_argument(end, sizes)), {}


def _chunk(node: Node, sizes: SizeNodes) -> OpCall:
    arguments: Any = node.args
    tensor, parts, dim = arguments if len(arguments) == 3 else (*arguments, 0)
    return _ATEN.chunk.default, (tensor, parts, dim % tensor.meta["val"].dim()), {}


def _flatten(node: Node, sizes: SizeNodes) -> OpCall:
    tensor, *dims = node.args
    shape = tensor.meta["val"].shape  # type: ignore[union-attr]
    dim_range: Any = (*dims, *(0, -1)[len(dims) :])
    first, last = (int(dim) % len(shape) for dim in dim_range)
    if first == last:
        return _identity(node, sizes)
    size_arguments = [_size_argument(size, sizes) for size in shape]
    flat_size = _size_product(size_arguments[first : last + 1])
    if isinstance(flat_size, _NewNode):
        sizes.setdefault(_size_expression(node.meta["val"].shape[first]), flat_size)
    return _view(node, [*size_arguments[:first], flat_size, *size_arguments[last + 1 :]])


def _reshape(node: Node, sizes: SizeNodes) -> OpCall:
    size_arguments: Any = node.args[1]
    shape = node.meta["val"].shape
    return _view(
        node,
        [_size_argument(size, sizes, argument) for size, argument in zip(shape, size_arguments, strict=True)],
    )


def _unflatten(node: Node, sizes: SizeNodes) -> OpCall:
    return _view(node, [_size_argument(size, sizes) for size in node.meta["val"].shape])


def _view(node: Node, shape: list[Any]) -> OpCall:
    """Return a view of the shape; its tensor is made contiguous (no operation in ONNX), as torch requires."""
    clone_options = {"memory_format": torch.contiguous_format}
    return (
        _ATEN._unsafe_view.default,
        (_NewNode(_ATEN.clone.default, (node.args[0],), clone_options), shape),
        {},
    )


def _size_product(factors: list[Any]) -> Any:
    """Return a size that is the product of others."""
    if all(isinstance(factor, int) for factor in factors):
        return math.prod(factors)
    other_factors = [factor for factor in factors if factor != 1]
    return functools.reduce(lambda a, b: _NewNode(operator.mul, (a, b), {}), other_factors)


def _size_argument(size: Any, sizes: SizeNodes, default: Any = -1) -> Any:
    """Return a size as an argument: a number, its node, or `default` if no node is known."""
    expression = _size_expression(size)
    if isinstance(expression, int) or expression.is_Integer:
        return int(expression)
    size_node = sizes.get(expression, default)
    if not isinstance(size_node, Node | _NewNode):
        raise _UnsupportedNodeError
    return size_node


def _size_expression(size: Any) -> Any:
    value = size.meta["val"] if isinstance(size, Node) else size
    return value.node.expr if isinstance(value, torch.SymInt) else value


class _NewNode(NamedTuple):
    """A node that is not in the graph yet."""

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def insert(self, graph: Graph, source: Node, inserted: dict[int, Node]) -> Node:
        """Insert it into the graph after its arguments; it belongs to the module of `source`."""
        node = graph.call_function(
            self.target, _insert_arguments(self.args, graph, source, inserted), self.kwargs
        )
        # torch.onnx.export warns about nodes without it
        node.meta["nn_module_stack"] = source.meta.get("nn_module_stack", {})
        values = [arg.meta["val"] if isinstance(arg, Node) else arg for arg in node.args]
        node.meta["val"] = self.target(*values, **self.kwargs)
        return node


def _insert_arguments(argument: Any, graph: Graph, source: Node, inserted: dict[int, Node]) -> Any:
    """Return an argument with each new node in it inserted into the graph, once."""
    if isinstance(argument, _NewNode):
        if id(argument) not in inserted:
            inserted[id(argument)] = argument.insert(graph, source, inserted)
        return inserted[id(argument)]
    if type(argument) in (list, tuple):
        return type(argument)(_insert_arguments(a, graph, source, inserted) for a in argument)
    return argument


_REPLACEMENTS: dict[Any, Callable[[Node, SizeNodes], OpCall]] = {
    _ATEN.add_.Tensor: _inplace_add,
    _ATEN.chunk.default: _chunk,
    _ATEN.contiguous.default: _identity,
    _ATEN.dropout.default: _dropout,
    _ATEN.flatten.using_ints: _flatten,
    _ATEN.item.default: functools.partial(_rename_target, _ATEN._local_scalar_dense.default),
    _ATEN.min.other: functools.partial(_rename_target, _ATEN.minimum.default),
    _ATEN.narrow.default: _narrow,
    _ATEN.reshape.default: _reshape,
    _ATEN.rsub.Scalar: _rsub,
    _ATEN.to.device: _to_dtype,
    _ATEN.to.dtype: _to_dtype,
    _ATEN.to.dtype_layout: _to_dtype,
    _ATEN.unflatten.int: _unflatten,
}


@contextmanager
def skip_unused_metadata() -> Iterator[None]:
    """Make torch.onnx.export skip stack traces, memory formats, and code that is not run or printed.

    The function that computes the format, and the class with lazy code, are not public. If torch does not
    have such a function, class or setting, that part is not skipped.
    """
    with _skip_stack_traces(), _skip_memory_formats(), _lazy_graph_code():
        yield


@contextmanager
def _skip_stack_traces() -> Iterator[None]:
    from torch.fx import config

    settings: Any = config
    previous_setting = getattr(settings, "do_not_emit_stack_traces", None)
    if previous_setting is None:
        yield
        return
    settings.do_not_emit_stack_traces = True
    try:
        yield
    finally:
        settings.do_not_emit_stack_traces = previous_setting


@contextmanager
def _skip_memory_formats() -> Iterator[None]:
    """Omit `memory_format` from each node's `tensor_meta`; ONNX has only one format."""
    from torch.fx.experimental import proxy_tensor

    tracing: Any = proxy_tensor
    extract = getattr(tracing, "_extract_tensor_metadata", None)
    if extract is None or "include_contiguity" not in inspect.signature(extract).parameters:
        yield
        return
    tracing._extract_tensor_metadata = functools.partial(extract, include_contiguity=False)
    try:
        yield
    finally:
        tracing._extract_tensor_metadata = extract


@contextmanager
def _lazy_graph_code() -> Iterator[None]:
    """Use torch's class for programs that generates its code on access."""
    try:
        from torch.fx._lazy_graph_module import _use_lazy_graph_module
    except ImportError:
        yield
        return
    with _use_lazy_graph_module(True):
        yield

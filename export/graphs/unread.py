"""torch.onnx.export without what it makes for readers that no export has.

While torch.export traces a model, it keeps for each node the stack that led to it, reasons in symbols about
the order in which what the node gives would lie in memory, and writes the program as Python code after each
of its passes. Nobody reads any of it. Without them the graph is the same, after a tenth less time
(torch 2.13).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def nothing_unread() -> Iterator[None]:
    """Let torch.onnx.export leave out stacks, orders in memory, and code that is neither run nor printed.

    The function that finds the order, and the class whose code is written late, are none of torch's public
    ones. Where a torch has no such function, class or setting, that part is made as before.
    """
    with _no_stacks(), _no_orders(), _code_when_it_is_run():
        yield


@contextmanager
def _no_stacks() -> Iterator[None]:
    from torch.fx import config

    settings: Any = config
    before = getattr(settings, "do_not_emit_stack_traces", None)
    if before is None:
        yield
        return
    settings.do_not_emit_stack_traces = True
    try:
        yield
    finally:
        settings.do_not_emit_stack_traces = before


@contextmanager
def _no_orders() -> Iterator[None]:
    """Leave `memory_format` out of each node's `tensor_meta`; ONNX knows one order only."""
    from torch.fx.experimental import proxy_tensor

    tracing: Any = proxy_tensor
    told = getattr(tracing, "_extract_tensor_metadata", None)
    if told is None or "include_contiguity" not in inspect.signature(told).parameters:
        yield
        return
    tracing._extract_tensor_metadata = functools.partial(told, include_contiguity=False)
    try:
        yield
    finally:
        tracing._extract_tensor_metadata = told


@contextmanager
def _code_when_it_is_run() -> Iterator[None]:
    """Let programs be of torch's class that writes its code when someone asks for it."""
    try:
        from torch.fx._lazy_graph_module import _use_lazy_graph_module
    except ImportError:
        yield
        return
    with _use_lazy_graph_module(True):
        yield

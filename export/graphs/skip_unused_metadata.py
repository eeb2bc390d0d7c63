"""Make torch.onnx.export skip metadata that an export does not use.

While torch.export traces a model, it records for each node the stack trace, reasons symbolically about memory
formats, and writes the program as Python code after each of its passes. The export uses none of it. Without
it the graph is the same and the export is a tenth faster (torch 2.13).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


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

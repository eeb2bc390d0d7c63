"""torch.onnx.export without what it makes for readers that no export has.

While torch.export traces a model, it keeps for each node the stack that led to it, and writes the program as
Python code after each of its passes. Nobody reads either. Without them the graph is the same, after a tenth
less time (torch 2.13).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def nothing_unread() -> Iterator[None]:
    """Let torch.onnx.export leave out the stacks, and code of programs that are neither run nor printed.

    The class whose code is written late is none of torch's public ones. Where a torch has no such class, or
    no such setting, that part is made as before.
    """
    with _no_stacks(), _code_when_it_is_run():
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
def _code_when_it_is_run() -> Iterator[None]:
    """Let programs be of torch's class that writes its code when someone asks for it."""
    try:
        from torch.fx._lazy_graph_module import _use_lazy_graph_module
    except ImportError:
        yield
        return
    with _use_lazy_graph_module(True):
        yield

"""torch's table of the operators that it can write in ONNX, read once in a process.

torch.onnx.export reads it at each call: the source of a thousand functions is parsed for their names, 0.45 s
each time, a fifth of a small graph's export (torch 2.13, onnxscript 0.7). And for each node that it writes it
reads the definition of ONNX's operator anew, 2 % of that time.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_SIGNATURES: dict[Any, Any] = {}


@contextmanager
def table_read_once() -> Iterator[None]:
    """Let torch.onnx.export take a copy of the table that it read before; the first to ask reads it.

    The functions that read are no public ones. Where torch or onnx_ir has no such function, nothing is
    changed, and it reads each time.
    """
    with _signatures_read_once(), _torchs_table_read_once():
        yield


@contextmanager
def _signatures_read_once() -> Iterator[None]:
    """Let a definition of ONNX's be read once: what is read is changed by nobody."""
    try:
        from onnx_ir.schemas import OpSignature
    except ImportError:
        yield
        return
    signature: Any = OpSignature
    reads = vars(signature).get("from_op_schema")
    if not isinstance(reads, classmethod):
        yield
        return

    def from_op_schema(cls: Any, op_schema: Any) -> Any:
        name = (cls, op_schema.domain, op_schema.name, op_schema.since_version)
        if name not in _SIGNATURES:
            _SIGNATURES[name] = reads.__func__(cls, op_schema)
        return _SIGNATURES[name]

    signature.from_op_schema = classmethod(from_op_schema)
    try:
        yield
    finally:
        signature.from_op_schema = reads


@contextmanager
def _torchs_table_read_once() -> Iterator[None]:
    try:
        from torch.onnx._internal.exporter._registration import ONNXRegistry
    except ImportError:
        yield
        return
    registry: Any = ONNXRegistry
    reads = vars(registry).get("from_torchlib")
    if not isinstance(reads, classmethod):
        yield
        return
    registry.from_torchlib = classmethod(_with_a_memory(reads.__func__))
    try:
        yield
    finally:
        registry.from_torchlib = reads


@functools.cache
def _with_a_memory(read: Callable[..., Any]) -> Callable[..., Any]:
    """Return `read` such that the same question gets a copy of the first answer."""
    kept = functools.cache(read)

    @functools.wraps(read)
    def answer(*args: Any, **kwargs: Any) -> Any:
        table = copy.copy(kept(*args, **kwargs))
        # who adds an operator of his own adds it to his copy
        table.functions = {operator: list(ways) for operator, ways in table.functions.items()}
        return table

    return answer

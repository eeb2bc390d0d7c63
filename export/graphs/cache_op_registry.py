"""Cache torch's table of ONNX operators, so that a process reads it only once.

torch.onnx.export reads it at each call: the source of a thousand functions is parsed for their names, 0.45 s
each time, a fifth of a small graph's export (torch 2.13, onnxscript 0.7). For each node it also reads the
definition of ONNX's operator again, 2 % of that time.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_SIGNATURES: dict[Any, Any] = {}


@contextmanager
def cached_op_registry() -> Iterator[None]:
    """Make torch.onnx.export use a copy of the cached table; the first call fills the cache.

    The patched functions are not public. If torch or onnx_ir does not have them, nothing is changed.
    """
    with _cached_signatures(), _cached_torch_registry():
        yield


@contextmanager
def _cached_signatures() -> Iterator[None]:
    """Cache the definitions of ONNX operators, which are never modified."""
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
def _cached_torch_registry() -> Iterator[None]:
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
    registry.from_torchlib = classmethod(_memoized_copy(reads.__func__))
    try:
        yield
    finally:
        registry.from_torchlib = reads


@functools.cache
def _memoized_copy(read: Callable[..., Any]) -> Callable[..., Any]:
    """Return `read` with a cache: the same arguments get a copy of the first result."""
    kept = functools.cache(read)

    @functools.wraps(read)
    def answer(*args: Any, **kwargs: Any) -> Any:
        table = copy.copy(kept(*args, **kwargs))
        # custom operators are added to the caller's copy
        table.functions = {operator: list(ways) for operator, ways in table.functions.items()}
        return table

    return answer

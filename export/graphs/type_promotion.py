"""Speed up the type promotion of torch.onnx.export by reading types from the trace.

Where an operator of torch has inputs of two types, ONNX requires a Cast. To find these, torch.onnx.export
runs the program on fake tensors, operator by operator, although the trace has recorded each node's result.
That run was an eighth of the time of an export (torch 2.13). The casts are torch's own, in the same places.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def fast_type_promotion() -> Iterator[None]:
    """Make torch.onnx.export read each node's result from the trace, if it is recorded there.

    The class that runs the program is not public. If torch does not have it, nothing is changed.
    """
    try:
        from torch.onnx._internal.fx.passes import type_promotion
    except ImportError:
        yield
        return
    interpreter: Any = getattr(type_promotion, "_TypePromotionInterpreter", None)
    rule_of: Any = getattr(type_promotion, "get_type_promotion_rule", None)
    if rule_of is None or not {"run_node", "_maybe_promote_node"} <= set(vars(interpreter or object)):
        yield
        return
    computes = interpreter.run_node

    def run_node(self: Any, node: Any) -> Any:
        if node.op != "call_function" or "val" not in node.meta:
            return computes(self, node)
        if rule := rule_of(node, self.type_promotion_table):
            with self._set_current_node(node):
                self._maybe_promote_node(node, rule)
        return node.meta["val"]  # a node that got a cast has another result now

    interpreter.run_node = run_node
    try:
        yield
    finally:
        interpreter.run_node = computes

"""torch.onnx.export's casts between types, found without computing the whole program once more.

Where an operator of torch takes two types, ONNX wants a Cast. To find these places, torch.onnx.export runs
the program on fake tensors, operator by operator; but what each of them gives is written at its node since
the program was traced. That run was an eighth of the time of an export (torch 2.13). The casts are torch's
own, in the same places.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def known_types() -> Iterator[None]:
    """Let torch.onnx.export read from each node what it gives, where that is written there.

    The class that runs the program is none of torch's public ones. Where torch has no such class, nothing is
    changed.
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
        return node.meta["val"]  # of a node that got a cast it is another one now

    interpreter.run_node = run_node
    try:
        yield
    finally:
        interpreter.run_node = computes

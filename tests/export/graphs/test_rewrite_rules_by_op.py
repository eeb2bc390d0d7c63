"""A rule is tried only where it can fit; graphs are what they are without; nothing stays patched."""

import onnx_ir
import pytest
from onnxscript.rewriter import _DEFAULT_REWRITE_RULES as RULES
from onnxscript.rewriter import RewritePass, RewriteRuleClassBase, RewriteRuleSet, _rewrite_rule

from smelt.export.graphs.rewrite_rules_by_op import _operator_of, rewrite_rules_by_op

Rule = _rewrite_rule.RewriteRule
GRAPH = """
<ir_version: 9, opset_import: ["" : 20]>
g (float[2, 3] x) => (float[3, 2] y, float[2, 3] z) {
    a = Transpose <perm = [1, 0]> (x)
    b = Transpose <perm = [1, 0]> (a)
    y = Transpose <perm = [1, 0]> (b)
    c = Cast <to = 1> (x)
    d = Identity (c)
    z = Relu (d)
}
"""


class _ReluIsTanh(RewriteRuleClassBase):
    def pattern(self, op, x):
        return op.Relu(x)

    def rewrite(self, op, x):
        return op.Tanh(x)


def rewritten(rules=RULES):
    model = onnx_ir.from_onnx_text(GRAPH)
    RewritePass(rules)(model)
    return [(node.op_type, [value.name for value in node.inputs]) for node in model.graph]


def test_what_is_rewritten_is_the_same_and_most_rules_are_not_tried(monkeypatch):
    tried = []
    real = Rule.match
    monkeypatch.setattr(Rule, "match", lambda rule, *a, **k: tried.append(rule) or real(rule, *a, **k))
    expected, before = rewritten(), len(tried)
    assert len(expected) < 6
    tried.clear()
    with rewrite_rules_by_op():
        assert rewritten() == expected
    assert 0 < len(tried) < before / 4


def test_a_rule_that_someone_adds_is_tried_too():
    with rewrite_rules_by_op():
        assert [kind for kind, _ in rewritten(RewriteRuleSet([_ReluIsTanh.rule()]))][-1] == "Tanh"


def test_a_rule_for_any_operator_is_tried_everywhere():
    rules = [rule for rule in RULES if _operator_of(rule) is None]
    for rule in rules:  # those that onnxscript cannot name by one operator
        nodes = rule._target_pattern.output_nodes
        assert nodes[0].op_identifier() is None
    assert len(rules) < len(list(RULES)) / 4


def test_onnxscript_is_as_it_was_afterwards():
    tries = Rule.try_rewrite
    with pytest.raises(ZeroDivisionError), rewrite_rules_by_op():
        1 / (Rule.try_rewrite is tries)
    assert Rule.try_rewrite is tries


def test_an_onnxscript_without_such_rules_rewrites_as_it_does(monkeypatch):
    monkeypatch.delattr(Rule, "try_rewrite")
    with rewrite_rules_by_op():
        assert not hasattr(Rule, "try_rewrite")

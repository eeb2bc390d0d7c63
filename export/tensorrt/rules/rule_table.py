"""The table of rules, each with what TensorRT does with such a graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple

from smelt.export.tensorrt.rules import operator_rules, quantization_rules, type_rules, value_rules
from smelt.export.tensorrt.rules.checked_graph import (
    CheckedGraph,
    ProblemSeverity,
    RuleFinding,
    TensorrtProblem,
)

RuleOutcome = Literal["rejected", "built wrong", "built otherwise"]


class TensorrtRule(NamedTuple):
    """A name, what TensorRT does with such a graph, and the function that finds the locations."""

    name: str
    outcome: RuleOutcome
    check: Callable[[CheckedGraph], Iterator[RuleFinding]]

    @property
    def severity(self) -> ProblemSeverity:
        """An error if nothing can be built or the engine computes something else, otherwise a warning."""
        return "warning" if self.outcome == "built otherwise" else "error"


RULES: tuple[TensorrtRule, ...] = (
    TensorrtRule("opset", "built wrong", operator_rules.unsupported_opset),
    TensorrtRule("circle", "rejected", operator_rules.cycles),
    TensorrtRule("no-output", "built wrong", operator_rules.no_outputs),
    TensorrtRule("foreign-operator", "rejected", operator_rules.foreign_operators),
    TensorrtRule("foreign-namesake", "built wrong", operator_rules.foreign_namesakes),
    TensorrtRule("integer-operator", "rejected", operator_rules.integer_operators),
    TensorrtRule("missing-operator", "rejected", operator_rules.missing_operators),
    TensorrtRule("training-mode", "rejected", operator_rules.training_mode),
    TensorrtRule("attribute", "rejected", operator_rules.unsupported_attributes),
    TensorrtRule("missing-type", "rejected", type_rules.unsupported_types),
    TensorrtRule("mixed-types", "rejected", type_rules.mixed_types),
    TensorrtRule("refused-type", "rejected", type_rules.unsupported_op_types),
    TensorrtRule("uint8-inside", "rejected", type_rules.internal_uint8),
    TensorrtRule("cast-to-float8", "rejected", type_rules.casts_to_float8),
    TensorrtRule("codes", "rejected", quantization_rules.quantized_types),
    TensorrtRule("unsigned-codes", "built wrong", quantization_rules.unsigned_types),
    TensorrtRule("zero-point", "rejected", quantization_rules.zero_points),
    TensorrtRule("scale", "rejected", quantization_rules.non_positive_scales),
    TensorrtRule("blocks", "rejected", quantization_rules.unsupported_blocks),
    TensorrtRule("codes-without-scale", "rejected", quantization_rules.constants_without_scale),
    TensorrtRule("axes", "rejected", value_rules.too_many_axes),
    TensorrtRule("infinite", "built wrong", value_rules.non_finite_values),
    TensorrtRule("mask", "built otherwise", value_rules.mask_constants),
    TensorrtRule("overflowing-cast", "built otherwise", value_rules.overflowing_casts),
    TensorrtRule("norm-in-half", "built otherwise", value_rules.norms_in_fp16),
    TensorrtRule("double", "built otherwise", type_rules.double_types),
    TensorrtRule("default-input", "built otherwise", value_rules.default_inputs),
    TensorrtRule("other-blocks", "built otherwise", quantization_rules.undocumented_blocks),
    TensorrtRule("seed", "built otherwise", operator_rules.random_seeds),
    TensorrtRule("size-from-data", "built otherwise", operator_rules.data_dependent_shapes),
    TensorrtRule("unnamed-size", "built otherwise", value_rules.unnamed_sizes),
)
OUTCOMES: dict[str, RuleOutcome] = {rule.name: rule.outcome for rule in RULES}


def run_rules(graph: CheckedGraph) -> Iterator[TensorrtProblem]:
    """Yield the findings of all rules in a graph, in the order of the table."""
    for rule in RULES:
        for found in rule.check(graph):
            yield TensorrtProblem(
                rule.severity, found.reason, found.location, found.hint, rule.name, graph.path.name
            )

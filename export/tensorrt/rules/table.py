"""The rules, each with what TensorRT does where it finds something."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple

from smelt.export.tensorrt.rules import operators, quantization, types, values
from smelt.export.tensorrt.rules.graph import Found, Graph, Problem, Severity

Outcome = Literal["rejected", "built wrong", "built otherwise"]


class Rule(NamedTuple):
    """A name, what TensorRT does with such a graph, and the function that finds the places."""

    name: str
    outcome: Outcome
    look: Callable[[Graph], Iterator[Found]]

    @property
    def severity(self) -> Severity:
        """An error where nothing can be built, or what is built computes something else."""
        return "warning" if self.outcome == "built otherwise" else "error"


RULES: tuple[Rule, ...] = (
    Rule("opset", "built wrong", operators.opset),
    Rule("circle", "rejected", operators.circles),
    Rule("no-output", "built wrong", operators.nothing_to_give),
    Rule("foreign-operator", "rejected", operators.foreign_operators),
    Rule("foreign-namesake", "built wrong", operators.foreign_namesakes),
    Rule("integer-operator", "rejected", operators.integer_operators),
    Rule("missing-operator", "rejected", operators.missing_operators),
    Rule("training-mode", "rejected", operators.training_mode),
    Rule("attribute", "rejected", operators.attributes),
    Rule("missing-type", "rejected", types.missing_types),
    Rule("mixed-types", "rejected", types.mixed_types),
    Rule("refused-type", "rejected", types.refused_types),
    Rule("uint8-inside", "rejected", types.uint8_inside),
    Rule("cast-to-float8", "rejected", types.casts_to_float8),
    Rule("codes", "rejected", quantization.codes),
    Rule("unsigned-codes", "built wrong", quantization.unsigned_codes),
    Rule("zero-point", "rejected", quantization.zero_points),
    Rule("scale", "rejected", quantization.scales),
    Rule("blocks", "rejected", quantization.blocks),
    Rule("codes-without-scale", "rejected", quantization.codes_without_scale),
    Rule("axes", "rejected", values.axes),
    Rule("infinite", "built wrong", values.infinite),
    Rule("mask", "built otherwise", values.masks),
    Rule("overflowing-cast", "built otherwise", values.overflowing_casts),
    Rule("norm-in-half", "built otherwise", values.norms_in_half),
    Rule("double", "built otherwise", types.doubles),
    Rule("default-input", "built otherwise", values.default_inputs),
    Rule("other-blocks", "built otherwise", quantization.other_blocks),
    Rule("seed", "built otherwise", operators.random_seeds),
    Rule("size-from-data", "built otherwise", operators.sizes_from_data),
    Rule("unnamed-size", "built otherwise", values.unnamed_sizes),
)
OUTCOMES: dict[str, Outcome] = {rule.name: rule.outcome for rule in RULES}


def look(graph: Graph) -> Iterator[Problem]:
    """Yield what all rules find in a graph, in the order of the table."""
    for rule in RULES:
        for found in rule.look(graph):
            yield Problem(rule.severity, found.reason, found.place, found.mend, rule.name, graph.path.name)

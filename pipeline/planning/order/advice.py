"""Advice on orders that run and are known to be poor."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from smelt.core.messages import Message, warning
from smelt.planning.order.draft import Draft, done, scheme_of
from smelt.planning.order.lost import lost_by
from smelt.runtime.schemes.registry import SCHEMES

# steps of which a model that does not go on from them has nothing; `trim-vocabulary` gives it its words
_CHANGES_WEIGHTS = (
    "prune",
    "drop-layers",
    "factorize",
    "share-weights",
    "sparsify",
    "quantize",
    "finetune",
    "distill",
)


def poor_order(draft: Draft, above: Sequence[Draft]) -> Iterator[Message]:
    """Yield what is poor about a step behind those `above`, the nearest first."""
    words = [d.entry.word for d in above]
    at: Any = {"step": draft.name, "line": draft.entry.line}
    if draft.entry.word == "prune" and "factorize" in words:
        yield warning("poor-order", "After factorize only few layers can be pruned; prune first.", **at)
    if draft.entry.word == "factorize" and "sparsify" in words:
        yield warning("poor-order", "Factorized matrices are dense; the zeros of sparsify are lost.", **at)
    for d in above if draft.entry.word == "onnx" else ():
        if d.entry.word in ("distill", "finetune"):
            break
        scheme = SCHEMES.get(scheme_of(d)) if d.entry.word == "quantize" else None
        if scheme is not None and scheme.trained:
            yield warning(
                "untrained-scheme",
                f"The {scheme.name} weights of '{d.name}' are not trained, and their scores mean little. Add"
                f" a distill after '{d.name}': it trains the quantized weights.",
                **at,
            )
    codes = getattr(draft.settings, "qat", None)
    if codes is not None and codes.activations == "one-bit":
        yield warning(
            "one-bit-inputs",
            "qat: activations: one-bit lowers quality without a gain in speed: no runtime multiplies bits"
            " with bits.",
            **at,
        )
    student = draft.entry.word == "distill" and draft.entry.settings.get("student")
    if draft.settings is not None and draft.settings.begins_anew:
        yield from _unused(draft, above)
        student = None
    late = " and ".join(sorted(set(words) & {"prune", "factorize"}))
    if late and student:
        yield warning(
            "poor-order",
            f"Selecting a student's layers after {late} discards part of that work; distil to fewer layers"
            " first.",
            **at,
        )
    if late and draft.entry.word == "drop-layers":
        yield warning(
            "poor-order",
            f"Removing layers after {late} discards part of that work; put depth first.",
            **at,
        )


def _unused(draft: Draft, above: Sequence[Draft]) -> Iterator[Message]:
    """Yield that nothing of the steps before a student of its own stays in it, up to one that teaches it."""
    teachers = set(draft.references.values())
    before = list(itertools.takewhile(lambda d: d.name not in teachers, above))
    idle = [f"'{d.name}'" for d in reversed(before) if d.entry.word in _CHANGES_WEIGHTS]
    if idle:
        yield warning(
            "unused-steps",
            f"The student is another model, so the work of {' and '.join(idle)} is lost. Set `from: model`,"
            " or use one of them as teacher.",
            step=draft.name,
            line=draft.entry.line,
        )


def lost_work(drafts: Mapping[str, Draft], lines: Mapping[str, Sequence[Draft]]) -> Iterator[Message]:
    """Yield where a step loses the work of one above it; stages say what that is.

    Args:
        drafts: by name, in the recipe's order.
        lines: each with those above it, the nearest first.
    """
    for draft in drafts.values():
        if (step := done(draft)) is None:
            continue
        above = [found for d in lines[draft.name] if (found := done(d))]
        later = [drafts[name] for name, line in lines.items() if draft in line]
        below = [found for d in later if (found := done(d))]
        for code, text in lost_by(step, above, below):
            yield warning(code, text, step=draft.name, line=draft.entry.line)

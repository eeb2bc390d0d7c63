"""Warnings about orders of steps that work but give poor results."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from smelt.core.messages import Message, warning
from smelt.pipeline.plan.step_draft import StepDraft, lost_results, scheme_text, step_spec
from smelt.quantization.schemes.registry import SCHEMES

# stages whose work is lost if the student is another model; `trim-vocabulary` is not: it sets its tokens
_WEIGHT_CHANGING_STAGES = (
    "prune",
    "drop-layers",
    "factorize",
    "share-weights",
    "sparsify",
    "quantize",
    "finetune",
    "distill",
)


def poor_order_warnings(draft: StepDraft, above: Sequence[StepDraft]) -> Iterator[Message]:
    """Yield warnings about a step after the steps `above`, nearest first."""
    words = [d.entry.stage for d in above]
    at: Any = {"step": draft.name, "line": draft.entry.line}
    if draft.entry.stage == "prune" and "factorize" in words:
        yield warning(
            "poor-order", "After factorize only few layers can be pruned. Put prune before factorize.", **at
        )
    if draft.entry.stage == "factorize" and "sparsify" in words:
        yield warning(
            "poor-order",
            "Factorized matrices are dense, so the zeros of sparsify are lost. Remove sparsify or factorize.",
            **at,
        )
    for d in above if draft.entry.stage == "onnx" else ():
        if d.entry.stage in ("distill", "finetune"):
            break
        scheme = SCHEMES.get(scheme_text(d)) if d.entry.stage == "quantize" else None
        if scheme is not None and scheme.requires_training:
            yield warning(
                "untrained-scheme",
                f"The {scheme.name} weights of '{d.name}' are exported without training, so quality will be"
                f" low. Add distill after '{d.name}' to train the quantized weights.",
                **at,
            )
    student = draft.entry.stage == "distill" and draft.entry.settings.get("student")
    if draft.settings is not None and draft.settings.replaces_model:
        yield from _unused_work_warnings(draft, above)
        student = None
    late = " and ".join(sorted(set(words) & {"prune", "factorize"}))
    if late and student:
        yield warning(
            "poor-order",
            f"Selecting a student's layers after {late} discards part of that work. Distill to fewer layers"
            " first.",
            **at,
        )
    if late and draft.entry.stage == "drop-layers":
        yield warning(
            "poor-order",
            f"Removing layers after {late} discards part of that work. Put drop-layers first.",
            **at,
        )


def _unused_work_warnings(draft: StepDraft, above: Sequence[StepDraft]) -> Iterator[Message]:
    """Yield a warning if the work of earlier steps is lost because the student is another model.

    Steps up to the nearest teacher count.
    """
    teachers = set(draft.references.values())
    before = list(itertools.takewhile(lambda d: d.name not in teachers, above))
    idle = [f"'{d.name}'" for d in reversed(before) if d.entry.stage in _WEIGHT_CHANGING_STAGES]
    if idle:
        yield warning(
            "unused-steps",
            f"The student is another model, so the work of {' and '.join(idle)} is lost. Set `from: model`,"
            " or use one of these steps as the teacher.",
            step=draft.name,
            line=draft.entry.line,
        )


def lost_work_warnings(
    drafts: Mapping[str, StepDraft], lines: Mapping[str, Sequence[StepDraft]]
) -> Iterator[Message]:
    """Yield a warning where a step invalidates the result of an earlier one (see `lost_results`).

    Args:
        drafts: steps by name, in the recipe's order.
        lines: ancestors of each step by name, nearest first.
    """
    for draft in drafts.values():
        if (step := step_spec(draft)) is None:
            continue
        above = [found for d in lines[draft.name] if (found := step_spec(d))]
        later = [drafts[name] for name, line in lines.items() if draft in line]
        below = [found for d in later if (found := step_spec(d))]
        for code, text in lost_results(step, above, below):
            yield warning(code, text, step=draft.name, line=draft.entry.line)

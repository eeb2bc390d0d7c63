"""Compare the labels of teachers and student, from their configs alone: no torch is imported.

The checks before a run and the stage use the same functions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from smelt.core.messages import Message, error_message
from smelt.data.labels import (
    MULTI_LABEL,
    REGRESSION,
    SINGLE_LABEL,
    ProblemType,
    class_names,
    has_classifier,
    problem_type,
)
from smelt.data.tasks import tasks_with

# How the outputs of several classifiers become targets; see `combination_of`.
Combination: TypeAlias = Literal["mean", "per-label", "restricted", "concatenated"]


@dataclass(frozen=True)
class ModelLabels:
    """What the outputs of a classifier mean.

    names: of its outputs, in order. problem: its problem type. of_tokens: it classifies each token.
    """

    names: tuple[str, ...]
    problem: ProblemType
    of_tokens: bool = False

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> ModelLabels:
        """Return the labels of a model from its Hugging Face config, as a dict.

        Raises:
            InputError: the names or the problem type are invalid.
        """
        of_tokens = any(has_classifier(config, task) for task in tasks_with(output="tags"))
        return cls(tuple(class_names(config)), problem_type(config), of_tokens)


def planned_labels(config: Mapping[str, Any]) -> ModelLabels | None:
    """Return the labels of a model in a plan; None if they are not known before the run."""
    return ModelLabels.from_config(config) if has_classifier(config) else None


def merged_labels(teachers: Sequence[ModelLabels]) -> list[str]:
    """Return the labels of all teachers, each once, in order."""
    return list(dict.fromkeys(name for teacher in teachers for name in teacher.names))


def have_same_labels(teachers: Sequence[ModelLabels]) -> bool:
    """Return whether all teachers have one problem type and the same labels, in any order."""
    return len({(frozenset(teacher.names), teacher.problem) for teacher in teachers}) == 1


def new_student_labels(teachers: Sequence[ModelLabels], model: ModelLabels) -> ModelLabels:
    """Return the labels of a student that is made for several teachers.

    Args:
        teachers: of the step.
        model: the step's input. If it has the labels of all teachers, as one whose classifier was made for
            the data has, the student gets the same, in the same order, so that their scores can be compared.
    """
    union = merged_labels(teachers)
    if set(model.names) == set(union):
        return ModelLabels(model.names, model.problem)
    return ModelLabels(tuple(union), teachers[0].problem if have_same_labels(teachers) else MULTI_LABEL)


def combination_of(teachers: Sequence[ModelLabels], student: ModelLabels, uses_labels: bool) -> Combination:
    """Return how the outputs of these teachers become the targets of `student`.

    mean: the mean of their probabilities. per-label: an own probability for each label. restricted: the
    student's distribution over the labels of each teacher equals that teacher's. concatenated: one
    distribution over the logits of all teachers, if no label is common and nothing else defines the order of
    labels of different teachers.

    Args:
        teachers: of the step; no errors in `several_teacher_errors`.
        student: the student.
        uses_labels: whether the student also learns from labels of the samples.
    """
    if student.problem != SINGLE_LABEL:
        return "per-label"
    if have_same_labels(teachers):
        return "mean"
    return "restricted" if uses_labels or _num_linked(teachers) == 1 else "concatenated"


def several_teacher_errors(
    teachers: Sequence[ModelLabels], student: ModelLabels | None, *, uses_labels: bool
) -> list[Message]:
    """Return the errors where the outputs of several classifiers cannot be combined for `student`.

    Args:
        teachers: at least two.
        student: None if there is none yet, or its labels are made of the teachers'.
        uses_labels: whether the student also learns from labels of the samples.
    """
    problems = {teacher.problem for teacher in teachers} | ({student.problem} if student else set())
    if REGRESSION in problems and len(problems) > 1:
        text = (
            f"teachers and student are {' and '.join(sorted(problems))} models, and regression has no"
            " classes. Use models of one kind."
        )
        return [error_message("problem-type-mismatch", text, setting="teacher")]
    counts = {len(model.names) for model in (*teachers, *([student] if student else []))}
    if problems == {REGRESSION} and len(counts) > 1:
        text = (
            f"teachers and student have {' and '.join(map(str, sorted(counts)))} outputs, and numbers are"
            " averaged by output. Use models with equal outputs."
        )
        return [error_message("problem-type-mismatch", text, setting="teacher")]
    if student is None or problems == {REGRESSION}:
        return []
    union, names = merged_labels(teachers), student.names
    missing = [label for label in union if label not in names]
    without_teacher = [label for label in names if label not in union]
    if missing or without_teacher:
        reason = (
            f"the student lacks {first_labels(missing)}"
            if missing
            else f"no teacher has {first_labels(without_teacher)}"
        )
        text = (
            f"the teachers' labels are {first_labels(union)}, but the student's are"
            f" {first_labels(names)}: {reason}. With several teachers, the student must have all"
            " their labels and no others. Start from an encoder without classifier and"
            f" samples with all labels, or set student: {{config: FILE}}."
        )
        return [error_message("labels-mismatch" if missing else "untaught-labels", text, setting="teacher")]
    if have_same_labels(teachers) and student.problem == teachers[0].problem:
        return []
    return _single_label_errors(teachers, student, uses_labels)


def _single_label_errors(
    teachers: Sequence[ModelLabels], student: ModelLabels, uses_labels: bool
) -> list[Message]:
    """Return the errors of a student with one class per sample, whose teachers have different labels."""
    if student.problem != SINGLE_LABEL:
        return []
    if student.of_tokens or any(teacher.of_tokens for teacher in teachers):
        text = (
            "the teachers tag tokens with different labels: a token that one of them calls 'O' may have a"
            " label of another. Use teachers with the same labels."
        )
        return [error_message("single-label-student", text, setting="teacher")]
    if any(teacher.problem != SINGLE_LABEL for teacher in teachers):
        union = merged_labels(teachers)
        text = (
            "a teacher is multi-label, so a sample can have several labels, but the student predicts only one"
            f' ({student.problem}). Use samples with lists of labels: ["{union[0]}", "{union[-1]}"].'
        )
        return [error_message("single-label-student", text, setting="teacher")]
    num_linked = _num_linked(teachers)
    if uses_labels or num_linked in (1, len(teachers)):
        return []
    text = (
        f"the teachers' labels form {num_linked} groups without a common label, so nothing defines which"
        " group a sample belongs to. Train on labeled samples with a weight of losses.labels, or add a"
        " teacher with labels of several groups."
    )
    return [error_message("unlinked-labels", text, setting="teacher")]


def _num_linked(teachers: Sequence[ModelLabels]) -> int:
    """Return the number of groups of teachers that common labels link; teachers of no common label: all."""
    groups: list[set[str]] = []
    for teacher in teachers:
        linked = [group for group in groups if not group.isdisjoint(teacher.names)]
        groups = [group for group in groups if group.isdisjoint(teacher.names)]
        groups.append(set(teacher.names).union(*linked))
    return len(groups)


def label_errors(student: Mapping[str, Any], teacher: Mapping[str, Any]) -> list[Message]:
    """Return the errors where a classifier's outputs cannot be compared with those of its only teacher.

    Args:
        student: its Hugging Face config, as a dict.
        teacher: the teacher's.
    """
    labels, teacher_labels = class_names(student), class_names(teacher)
    count = range(len(labels))
    unnamed = [[f"LABEL_{i}" for i in count], [str(i) for i in count]]  # indices are no names
    if labels != teacher_labels and not (labels in unnamed and teacher_labels in unnamed):
        text = (
            f"the teacher's labels are {first_labels(teacher_labels)}, but the student's are"
            f" {first_labels(labels)}. Use a teacher with the same labels."
        )
        return [error_message("labels-mismatch", text, setting="teacher")]
    problem, teacher_problem = problem_type(student), problem_type(teacher)
    if problem != teacher_problem:
        text = (
            f"the teacher's problem type is {teacher_problem}, but the student's is {problem}. Use a teacher"
            " with the same problem type."
        )
        return [error_message("problem-type-mismatch", text, setting="teacher")]
    return []


def first_labels(labels: Sequence[str]) -> str:
    """Return the first labels as text, and the number of the others."""
    return ", ".join(f"'{label}'" for label in labels[:6]) + (
        f" and {len(labels) - 6} more" if len(labels) > 6 else ""
    )

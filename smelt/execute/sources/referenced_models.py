"""Check models that steps name by folder (teacher, student) before the first step."""

from __future__ import annotations

from pathlib import Path

from smelt.core.data import CLASSIFICATION_TASKS, SENTENCE_SIMILARITY
from smelt.core.errors import InputError
from smelt.inspect.model_folder import read_config
from smelt.planning.plan import Plan
from smelt.recipe.problem_type import has_classifier


def require_finite_models(plan: Plan) -> None:
    """Require that no model that a step of `plan` names by folder has NaN or infinite weights.

    Raises:
        InputError: one has; the message gives line, step, file and tensor.
    """
    from smelt.runtime.models.weights.finite_weights import require_finite_weights

    task = plan.recipe.task
    for step in plan.steps:
        paths = step.settings.paths()
        for folder in (Path(paths[place]) for place in step.settings.paths_to_models()):
            if not folder.is_dir():
                continue
            new_head = task in CLASSIFICATION_TASKS and not has_classifier(read_config(folder)[0])
            try:
                require_finite_weights(folder, new_head, task == SENTENCE_SIMILARITY)
            except InputError as error:
                raise InputError(
                    f"{plan.path}:{step.line}: step '{step.name}': {error}",
                    code=error.code,
                    file=str(plan.path),
                    line=step.line,
                ) from error

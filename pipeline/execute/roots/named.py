"""Models that steps name by their folders (a teacher, a student), looked at before the first step works."""

from __future__ import annotations

from pathlib import Path

from smelt.core.data import CLASSIFICATION, SIMILARITY
from smelt.core.errors import InputError
from smelt.look.model_folder import read_config
from smelt.planning.plan import Plan
from smelt.recipe.problem import has_classifier


def require_finite_models(plan: Plan) -> None:
    """Require that no model that a step of `plan` names by its folder has a weight that is NaN or infinite.

    Raises:
        InputError: one has; line, step, file and tensor are named.
    """
    from smelt.runtime.models.places.finite_weights import require_finite_weights

    task = plan.recipe.task
    for step in plan.steps:
        paths = step.settings.paths()
        for folder in (Path(paths[place]) for place in step.settings.models()):
            if not folder.is_dir():
                continue
            new_head = task in CLASSIFICATION and not has_classifier(read_config(folder)[0])
            try:
                require_finite_weights(folder, new_head, task == SIMILARITY)
            except InputError as error:
                raise InputError(
                    f"{plan.path}:{step.line}: step '{step.name}': {error}",
                    code=error.code,
                    file=str(plan.path),
                    line=step.line,
                ) from error

"""Create the first artifact of a run from a model, a config, or an ONNX model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from smelt.core.artifact import Artifact
from smelt.core.data import Split
from smelt.core.messages import Message
from smelt.execute.sources.referenced_models import require_finite_models
from smelt.execute.sources.third_party_onnx import import_onnx_model
from smelt.execute.sources.untrained_model import make_untrained_model
from smelt.execute.sources.user_model import import_user_model
from smelt.execute.task_setup import resolve_task
from smelt.execute.text_lengths import require_texts_fit
from smelt.planning.warnings import decoding_warnings

if TYPE_CHECKING:
    from smelt.execute.scoring import Scorer
    from smelt.execute.step_runner import StepRunner
    from smelt.planning.plan import Plan


@dataclass(frozen=True)
class FirstArtifact:
    """The first artifact with step runner and scorer. cached: whether it was in the store already."""

    artifact: Artifact
    cached: bool
    step_runner: StepRunner
    scorer: Scorer


def make_first_artifact(
    plan: Plan,
    all_data: Mapping[str, Split],
    data: Mapping[str, Split],
    step_runner: StepRunner,
    scorer: Scorer,
    add_warnings: Callable[[Sequence[Message]], None],
    rebuild: bool,
) -> FirstArtifact:
    """Store the model that the recipe of `plan` starts from, and return the first artifact.

    Args:
        plan: plan of the run.
        all_data: all splits without `--limit`; they define the labels of a new classifier.
        data: the splits that the run uses.
        step_runner: step runner of the run.
        scorer: scorer of the run; gets the task's default metrics if the recipe names none.
        add_warnings: called with warnings.
        rebuild: create the artifact again, even if the store has it.

    Raises:
        InputError: model, labels, scores and metrics do not fit each other; a text is too long (`truncation:
            error`); weights of a model are NaN or infinite.
    """
    recipe, model, graph = plan.recipe, plan.recipe.model, plan.third_party_model
    if graph is not None and graph.tokenizer_folder is None:
        return FirstArtifact(*import_onnx_model(step_runner, graph, data, rebuild), step_runner, scorer)
    require_finite_models(plan)
    settled = resolve_task(plan, all_data, scorer.metrics)
    scorer = replace(scorer, metrics=settled.metrics)
    step_runner = replace(step_runner, validation_scorer=scorer)
    add_warnings(settled.warnings)
    add_warnings(decoding_warnings(recipe, settled.folder))
    if graph is not None:
        artifact, cached = import_onnx_model(step_runner, graph, data, rebuild, settled.task_setup)
    elif isinstance(model, str):
        artifact, cached = import_user_model(step_runner, settled.folder, settled.task_setup, rebuild)
    else:
        artifact, cached = make_untrained_model(step_runner, recipe, settled.task_setup, rebuild)
    if recipe.truncation == "error":
        require_texts_fit(artifact.path, recipe.task, data)
    return FirstArtifact(artifact, cached, step_runner, scorer)

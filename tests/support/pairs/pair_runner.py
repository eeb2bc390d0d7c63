"""Two stages one behind the other on a tiny model: planned as a recipe is, done as a run does them.

    bench = Bench("t5", folder)
    refusal = bench.plan("prune", "int4")    # None, or what the plan says
    bench.do("prune", "int4")                # raises where something does not hold

The steps are those of the plan, done by the workshop of a run into a store: settings, keys, ancestors and
manifests are what a run has. Nothing is scored. What goes first is made once for all that follow it.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from smelt.core.artifact import Artifact
from smelt.core.errors import InputError
from smelt.core.messages import Message, message_codes
from smelt.pipeline.plan.plan import Plan, PlanStep
from tests.support import harness
from tests.support.pairs import technique_checks
from tests.support.pairs.paired_techniques import MODELS, TECHNIQUES, with_prerequisite, write_recipe


class PairRunner:
    """A tiny model with its data and a store, in a folder."""

    def __init__(self, model: str, folder: Path) -> None:
        self.model, self.folder = model, folder
        folder.mkdir(parents=True, exist_ok=True)
        MODELS[model].make(folder / "model")
        self._counts: dict[str, technique_checks.ModelCounts] = {}
        self._step_runner: Any = None
        self._model_artifact: Artifact | None = None

    def plan(self, *stages: str, target: str | None = None) -> Plan:
        """Return the plan of these techniques, one behind the other, and of what the first one goes on from.

        Raises:
            InputError: the plan refuses them.
        """
        from smelt.pipeline.plan.load_plan import load_plan

        return load_plan(write_recipe(self.folder, MODELS[self.model], with_prerequisite(*stages), target))

    def run(self, *stages: str, export: bool = False) -> list[Artifact]:
        """Do these techniques one behind the other and check each; return what they made, without a stem.

        export: to ONNX besides, which compares each graph with the model.
        """
        plan = self.plan(*stages, target="ort-cpu" if export else None)
        artifacts = {"model": self._import_model(plan)}
        results, techniques = [], with_prerequisite(*stages)
        for step, stage in zip(plan.steps, [*techniques, *["onnx"] * export], strict=True):
            above = {name: artifacts[name] for name in plan.ancestor_names(step)}
            artifacts[step.name] = new = self._run_step(step, above)
            results.append(new)
            if stage in TECHNIQUES:
                lost_codes = message_codes(results for results in plan.warnings if results.line == step.line)
                technique_checks.check_result(
                    TECHNIQUES[stage], artifacts[step.parent], new, self._counts, lost_codes
                )
        return results[len(techniques) - len(stages) :]

    def plan_warnings(self, *stages: str) -> list[str]:
        """Return what the plan says of the last of these techniques: a poor order, work that is lost."""
        plan = self.plan(*stages)
        return [str(warning) for warning in plan.warnings if warning.line == plan.steps[-1].line]

    def remove(self, *artifacts: Artifact) -> None:
        """Remove what was made."""
        for artifact in artifacts:
            self._counts.pop(artifact.key, None)
            shutil.rmtree(artifact.path, ignore_errors=True)

    def _import_model(self, plan: Plan) -> Artifact:
        if self._model_artifact is None:
            from smelt.core.store import Store
            from smelt.pipeline.execute.display import Display
            from smelt.pipeline.execute.scoring import Scorer
            from smelt.pipeline.execute.sources import import_user_model
            from smelt.pipeline.execute.step_runner import StepRunner, resolve_task

            recipe, data = plan.recipe, plan.read_data()
            store, score = Store(self.folder / ".store"), recipe.score
            scorer = Scorer(
                store, recipe.task, score.quality, score.generation, score.batch_size, 1, "warn", "cpu"
            )
            windows = recipe.data.windows if recipe.task == "language-modeling" else None
            display = Display(self.folder / "log.txt", quiet=True)
            self._step_runner = StepRunner(
                store, recipe.task, data, 0, 1, scorer, display, device="cpu", windows=windows
            )
            settled = resolve_task(plan, data, scorer.metrics)
            self._model_artifact, _ = import_user_model(
                self._step_runner, settled.folder, settled.task_setup, False
            )
        return self._model_artifact

    def _run_step(self, step: PlanStep, above: Mapping[str, Artifact]) -> Artifact:
        assert step.unavailable is None, step.unavailable
        with harness.saved_models(lambda model: technique_checks.outputs_of(model.eval())) as saved:
            new_artifact, cached = self._step_runner.run_step(step, above, False)
        artifact: Artifact = new_artifact
        if step.stage_class.produces == "torch" and not cached:
            assert len(saved) == 1, "one model is saved, by save_model"
            self._counts[artifact.key] = counts = technique_checks.count_model(artifact.path)
            off = (counts.outputs - saved[0]).abs().max() / saved[0].abs().max()
            assert off <= technique_checks.OUTPUT_TOLERANCE, (
                f"the model in its folder is another one than that in memory: {off}"
            )
        return artifact


def plan_errors(bench: PairRunner, *stages: str) -> list[Message]:
    """Return what the plan says against these techniques; nothing where it takes them."""
    try:
        bench.plan(*stages)
    except InputError as error:
        return list(error.messages)
    return []

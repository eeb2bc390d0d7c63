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

import harness
import promises
from paired_techniques import MODELS, TECHNIQUES, chain, write_recipe

from smelt.core.artifact import Artifact
from smelt.core.errors import InputError
from smelt.core.messages import Message, codes
from smelt.planning.plan import Plan, Step


class Bench:
    """A tiny model with its data and a store, in a folder."""

    def __init__(self, model: str, folder: Path) -> None:
        self.model, self.folder = model, folder
        folder.mkdir(parents=True, exist_ok=True)
        MODELS[model].make(folder / "model")
        self._seen: dict[str, promises.Seen] = {}
        self._shop: Any = None
        self._root: Artifact | None = None

    def plan(self, *stages: str, target: str | None = None) -> Plan:
        """Return the plan of these techniques, one behind the other, and of what the first one goes on from.

        Raises:
            InputError: the plan refuses them.
        """
        from smelt.planning.load import load_plan

        return load_plan(write_recipe(self.folder, self.model, list(chain(*stages)), target))

    def do(self, *stages: str, export: bool = False) -> list[Artifact]:
        """Do these techniques one behind the other and check each; return what they made, without a stem.

        export: to ONNX besides, which compares each graph with the model.
        """
        plan = self.plan(*stages, target="ort-cpu" if export else None)
        made = {"model": self._begin(plan)}
        found, whole = [], chain(*stages)
        for step, stage in zip(plan.steps, [*whole, *["onnx"] * export], strict=True):
            above = {name: made[name] for name in plan.above(step)}
            made[step.name] = new = self._step(step, above)
            found.append(new)
            if stage in TECHNIQUES:
                lost = codes(found for found in plan.warnings if found.line == step.line)
                promises.promises(TECHNIQUES[stage], made[step.parent], new, self._seen, lost)
        return found[len(whole) - len(stages) :]

    def foretold(self, *stages: str) -> list[str]:
        """Return what the plan says of the last of these techniques: a poor order, work that is lost."""
        plan = self.plan(*stages)
        return [str(found) for found in plan.warnings if found.line == plan.steps[-1].line]

    def forget(self, *artifacts: Artifact) -> None:
        """Remove what was made."""
        for artifact in artifacts:
            self._seen.pop(artifact.key, None)
            shutil.rmtree(artifact.path, ignore_errors=True)

    def _begin(self, plan: Plan) -> Artifact:
        if self._root is None:
            from smelt.core.store.store import Store
            from smelt.execute.display import Display
            from smelt.execute.head import settle_head
            from smelt.execute.roots.imported import import_root
            from smelt.execute.scoring import Scorer
            from smelt.execute.steps import Workshop

            recipe, data = plan.recipe, plan.read_data()
            store, score = Store(self.folder / ".store"), recipe.score
            scorer = Scorer(
                store, recipe.task, score.quality, score.generation, score.batch_size, 1, "warn", "cpu"
            )
            windows = recipe.data.windows if recipe.task == "language-modeling" else None
            display = Display(self.folder / "log.txt", quiet=True)
            self._shop = Workshop(
                store, recipe.task, data, 0, 1, scorer, display, device="cpu", windows=windows
            )
            settled = settle_head(plan, data, scorer.metrics)
            self._root, _ = import_root(self._shop, settled.folder, settled.head, False)
        return self._root

    def _step(self, step: Step, above: Mapping[str, Artifact]) -> Artifact:
        assert step.unavailable is None, step.unavailable
        with harness.saved_models(lambda model: promises.outputs_of(model.eval())) as saved:
            made, cached = self._shop.run_step(step, above, False)
        artifact: Artifact = made
        if step.cls.produces == "torch" and not cached:
            assert len(saved) == 1, "one model is saved, by save_model"
            self._seen[artifact.key] = seen = promises.look(artifact.path)
            off = (seen.outputs - saved[0]).abs().max() / saved[0].abs().max()
            assert off <= promises.NEAR, f"the model in its folder is another one than that in memory: {off}"
        return artifact


def refused(bench: Bench, *stages: str) -> list[Message]:
    """Return what the plan says against these techniques; nothing where it takes them."""
    try:
        bench.plan(*stages)
    except InputError as error:
        return list(error.found)
    return []

"""The first artifact of a run, by what its recipe begins with: a model, a config, or a finished graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from smelt.core.artifact import Artifact
from smelt.core.data import Split
from smelt.core.messages import Message
from smelt.execute.head import settle_head
from smelt.execute.lengths import require_lengths
from smelt.execute.roots.foreign import begin_with_graph
from smelt.execute.roots.imported import import_root
from smelt.execute.roots.named import require_finite_models
from smelt.execute.roots.untrained import start
from smelt.planning.warnings import decoding_warnings

if TYPE_CHECKING:
    from smelt.execute.scoring import Scorer
    from smelt.execute.steps import Workshop
    from smelt.planning.plan import Plan


@dataclass(frozen=True)
class Begun:
    """The first artifact, and those who work on from it. cached: it was in the store already."""

    artifact: Artifact
    cached: bool
    shop: Workshop
    scorer: Scorer


def begin(
    plan: Plan,
    whole: Mapping[str, Split],
    data: Mapping[str, Split],
    shop: Workshop,
    scorer: Scorer,
    warn: Callable[[Sequence[Message]], None],
    fresh: bool,
) -> Begun:
    """Bring what the recipe of `plan` begins with into the store.

    Args:
        plan: the run's.
        whole: the rows of every split; the labels of a new classifier are theirs, whatever the limit.
        data: the rows that the run uses.
        shop: who makes artifacts.
        scorer: who scores them; the task fills in metrics where the recipe names none.
        warn: told what a person should know.
        fresh: make it anew, also where the store has it.

    Raises:
        InputError: model, labels, scores and metrics do not fit each other; a text is too long (`truncation:
        error`);
            weights of a model are no numbers.
    """
    recipe, model, graph = plan.recipe, plan.recipe.model, plan.foreign
    if graph is not None and graph.texts is None:
        return Begun(*begin_with_graph(shop, graph, data, fresh), shop, scorer)
    require_finite_models(plan)
    settled = settle_head(plan, whole, scorer.metrics)
    scorer = replace(scorer, metrics=settled.metrics)
    shop = replace(shop, validation=scorer)
    warn(settled.doubts)
    warn(decoding_warnings(recipe, settled.folder))
    if graph is not None:
        artifact, cached = begin_with_graph(shop, graph, data, fresh, settled.head)
    elif isinstance(model, str):
        artifact, cached = import_root(shop, settled.folder, settled.head, fresh)
    else:
        artifact, cached = start(shop, recipe, settled.head, fresh)
    if recipe.truncation == "error":
        require_lengths(artifact.path, recipe.task, data)
    return Begun(artifact, cached, shop, scorer)

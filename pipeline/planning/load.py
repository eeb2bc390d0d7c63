"""From a recipe to a plan: everything that can be checked without doing it, all mistakes at once."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from smelt.look.coded_model import coded_model
from smelt.look.foreign import is_onnx
from smelt.look.model_folder import read_config
from smelt.planning.engines import fit_engines
from smelt.planning.fit import check_fit, check_metrics, check_rows, check_windows
from smelt.planning.foreign.generators import check_engines
from smelt.planning.foreign.graph import check_floats, check_foreign, fit_axes, fit_batches
from smelt.planning.gates import baseline, cut, gates, judged_on, timed
from smelt.planning.inputs import check_data, check_device, check_model, check_tokenizer
from smelt.planning.labels import check_classifier
from smelt.planning.order.checks import Checker
from smelt.planning.order.coded import codes_lost
from smelt.planning.order.methods import unfit_methods
from smelt.planning.order.rates import unsaid_rates
from smelt.planning.order.tuned import idle_tune
from smelt.planning.plan import Plan
from smelt.planning.sentences import check_sentences
from smelt.planning.untrained import check_new_head, check_untrained, config_file, read_outline
from smelt.planning.warnings import data_warnings, decoding_warnings, kept_last
from smelt.recipe.errors import touches
from smelt.recipe.inputs import Untrained
from smelt.recipe.recipe import examine, find_recipe
from smelt.recipe.yaml_file import Document, read_yaml


def load_plan(recipe: str | Path, overrides: Sequence[str] = (), until: str | None = None) -> Plan:
    """Read the recipe (a file, or the name of one that ships) and check all that can be checked now.

    Raises:
        InputError: every mistake in the recipe, the model's folder and the data, one per line, each
            with file and line.
    """
    path = recipe if isinstance(recipe, Path) else find_recipe(recipe)
    return make_plan(read_yaml(path), path, overrides, until)


def make_plan(
    document: Document, path: Path, overrides: Sequence[str] = (), until: str | None = None
) -> Plan:
    """Check the recipe that `document` is, as if it stood at `path`.

    Raises:
        InputError: as `load_plan`.
    """
    read, mistakes, bad = examine(document, path, overrides)
    from_graph = is_onnx(read.model, read.base)
    checker = Checker(read, mistakes, bad, "onnx" if from_graph else "torch")
    every = fit_engines(checker.steps(), read, checker.places, mistakes)
    kept = cut(checker, until)
    judged = gates(checker, kept)
    timed(checker)
    baseline(checker, kept)
    foreign = check_foreign(read, mistakes, bad, checker.warnings)
    read = fit_axes(fit_batches(read, foreign, mistakes), foreign)
    if from_graph:
        folder = foreign.texts if foreign else None
    else:
        folder = check_model(read, mistakes, bad, checker.warnings, checker.notes)
    check_untrained(read, every, mistakes, bad)
    check_new_head(read, every, folder, mistakes)
    check_fit(every, checker.places, read, folder, mistakes)
    check_engines(foreign, every, checker.places, mistakes)
    check_floats(foreign, every, checker.places, mistakes)
    check_windows(read, folder, mistakes)
    splits = check_data(read, mistakes, bad)
    check_tokenizer(read, splits, mistakes)
    check_device(read, mistakes, bad)
    read, problem = check_classifier(read, folder, splits, mistakes, bad)
    read = check_sentences(read, folder, splits, mistakes, bad, checker.warnings)
    check_rows(every, checker.places, read.task, splits, mistakes, bad)
    if not touches(bad, "task", "score.quality"):
        check_metrics(every, checker.places, read.score.quality, mistakes)
    mistakes.raise_all()
    steps = tuple(step for step in every if step.name in kept)
    doubts = [*kept_last(read, steps), *data_warnings(read, any(step.trains for step in steps), splits)]
    doubts += decoding_warnings(read, folder) if folder else []
    config = read_config(folder)[0] if folder and not from_graph else {}
    doubts += codes_lost(steps, config)
    coded = coded_model(folder, config) if folder and not from_graph else None
    floats = isinstance(read.model, Untrained) or (folder is not None and not coded)
    doubts += [] if from_graph else idle_tune(steps, floats)
    if isinstance(read.model, Untrained):
        config = read_outline(config_file(read.model, read.base))[0]
    checker.notes += [*unsaid_rates(steps, config, coded), *unfit_methods(steps)]
    text = document.text + "".join(f"\n# --set {override}" for override in overrides)
    return Plan(
        recipe=read,
        steps=steps,
        gates=judged,
        local_model=folder,
        text=text,
        splits=splits,
        warnings=(*checker.warnings, *doubts),
        notes=tuple(checker.notes),
        until=until,
        rest=tuple(step for step in every if step.name not in kept),
        order=tuple(step.name for step in every),
        judged_on=judged_on(checker, splits),
        problem=problem,
        foreign=foreign,
    )

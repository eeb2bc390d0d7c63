"""Turn a recipe into a plan, with all checks that need no work; all mistakes are reported together."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from smelt.inspect.model_folder import read_config
from smelt.inspect.onnx_files import is_onnx
from smelt.inspect.quantized_model import inspect_quantization
from smelt.planning.embedder_checks import check_embedder
from smelt.planning.engine_lengths import set_engine_lengths
from smelt.planning.gates import (
    check_baseline,
    check_latency_steps,
    choose_judging_split,
    plan_gates,
    steps_until,
)
from smelt.planning.input_checks import check_bleu_tokenizer, check_data, check_device, check_model
from smelt.planning.label_checks import check_classifier
from smelt.planning.order.autotune import idle_autotune_warnings
from smelt.planning.order.default_learning_rates import default_rate_notes
from smelt.planning.order.method_notes import unsuitable_method_notes
from smelt.planning.order.plan_checker import PlanChecker
from smelt.planning.order.quantized_steps import quantization_lost_warnings
from smelt.planning.plan import Plan
from smelt.planning.stage_checks import (
    check_model_configs,
    check_stage_data,
    check_stage_metrics,
    check_window_length,
)
from smelt.planning.third_party.generation_graphs import check_generation_engines
from smelt.planning.third_party.onnx_model import (
    apply_graph_axes,
    apply_graph_batch_size,
    check_float_weights,
    check_third_party_model,
)
from smelt.planning.untrained_checks import (
    check_new_classifier,
    check_untrained,
    config_file,
    read_untrained_config,
)
from smelt.planning.warnings import data_warnings, decoding_warnings, last_checkpoint_warnings
from smelt.recipe.mistakes import has_mistake
from smelt.recipe.model_and_data import UntrainedModel
from smelt.recipe.recipe import check_recipe, find_recipe
from smelt.recipe.yaml_file import YamlDocument, read_yaml


def load_plan(recipe: str | Path, overrides: Sequence[str] = (), until: str | None = None) -> Plan:
    """Read and check a recipe (a file, or the name of one included in smelt) and return its plan.

    Raises:
        InputError: there are mistakes in the recipe, the model's folder or the data; one per line, each with
            file and line.
    """
    path = recipe if isinstance(recipe, Path) else find_recipe(recipe)
    return make_plan(read_yaml(path), path, overrides, until)


def make_plan(
    document: YamlDocument, path: Path, overrides: Sequence[str] = (), until: str | None = None
) -> Plan:
    """Check the recipe in `document`, as if it were the file `path`, and return its plan.

    Raises:
        InputError: as `load_plan`.
    """
    read, mistakes, bad = check_recipe(document, path, overrides)
    from_graph = is_onnx(read.model, read.base)
    checker = PlanChecker(read, mistakes, bad, "onnx" if from_graph else "torch")
    every = set_engine_lengths(checker.build_steps(), read, checker.setting_paths, mistakes)
    kept = steps_until(checker, until)
    judged = plan_gates(checker, kept)
    check_latency_steps(checker)
    check_baseline(checker, kept)
    foreign = check_third_party_model(read, mistakes, bad, checker.warnings)
    read = apply_graph_axes(apply_graph_batch_size(read, foreign, mistakes), foreign)
    if from_graph:
        folder = foreign.tokenizer_folder if foreign else None
    else:
        folder = check_model(read, mistakes, bad, checker.warnings, checker.notes)
    check_untrained(read, every, mistakes, bad)
    check_new_classifier(read, every, folder, mistakes)
    check_model_configs(every, checker.setting_paths, read, folder, mistakes)
    check_generation_engines(foreign, every, checker.setting_paths, mistakes)
    check_float_weights(foreign, every, checker.setting_paths, mistakes)
    check_window_length(read, folder, mistakes)
    splits = check_data(read, mistakes, bad)
    check_bleu_tokenizer(read, splits, mistakes)
    check_device(read, mistakes, bad)
    read, problem = check_classifier(read, folder, splits, mistakes, bad)
    read = check_embedder(read, folder, splits, mistakes, bad, checker.warnings)
    check_stage_data(every, checker.setting_paths, read.task, splits, mistakes, bad)
    if not has_mistake(bad, "task", "score.quality"):
        check_stage_metrics(every, checker.setting_paths, read.score.quality, mistakes)
    mistakes.raise_if_any()
    steps = tuple(step for step in every if step.name in kept)
    doubts = [
        *last_checkpoint_warnings(read, steps),
        *data_warnings(read, any(step.trains for step in steps), splits),
    ]
    doubts += decoding_warnings(read, folder) if folder else []
    config = read_config(folder)[0] if folder and not from_graph else {}
    doubts += quantization_lost_warnings(steps, config)
    coded = inspect_quantization(folder, config) if folder and not from_graph else None
    floats = isinstance(read.model, UntrainedModel) or (folder is not None and not coded)
    doubts += [] if from_graph else idle_autotune_warnings(steps, floats)
    if isinstance(read.model, UntrainedModel):
        config = read_untrained_config(config_file(read.model, read.base))[0]
    checker.notes += [*default_rate_notes(steps, config, coded), *unsuitable_method_notes(steps)]
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
        excluded_steps=tuple(step for step in every if step.name not in kept),
        step_order=tuple(step.name for step in every),
        judged_on=choose_judging_split(checker, splits),
        problem_type=problem,
        third_party_model=foreign,
    )

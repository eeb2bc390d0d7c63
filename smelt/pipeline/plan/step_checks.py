"""Read the steps of a recipe, and check each one against the steps before it.

`read_steps` calls the functions in `STEP_CHECKS` for every step, and those in `INPUT_CHECKS` for steps that
accept the format of their input.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from smelt.compress.model_input import AFTER_QUANTIZE, TRAINING_BEFORE_QUANTIZE
from smelt.compress.trim_vocabulary.select_tokens import read_kept_tokens
from smelt.core.artifact import Format
from smelt.core.errors import InputError, did_you_mean
from smelt.core.files import path_exists, resolve_path
from smelt.core.messages import Message, error_message, warning
from smelt.data.labels import has_classifier
from smelt.data.tasks import tasks_with
from smelt.evaluate.metrics.registry import AGREEMENT_METRIC, METRICS_BY_TASK
from smelt.export.settings import OnnxSettings, ProviderSettings
from smelt.pipeline.inspect.find_model import merged_model_folder
from smelt.pipeline.inspect.machine import unavailable_reason, unscored_reason
from smelt.pipeline.inspect.model_folder import check_model_folder, different_token, read_config
from smelt.pipeline.plan.check_context import CheckContext
from smelt.pipeline.plan.plan import PlanStep
from smelt.pipeline.plan.step_draft import (
    StepDraft,
    scheme_text,
    shortlist_scheme_errors,
    target_errors,
    to_plan_step,
)
from smelt.pipeline.plan.warnings import poor_order_warnings
from smelt.pipeline.recipe import stages
from smelt.pipeline.recipe.model_and_data import UntrainedModel
from smelt.pipeline.recipe.stages import MODEL_STEP, StageEntry
from smelt.pipeline.recipe.validation_errors import Finding, error_findings, validate_settings
from smelt.pipeline.recipe.yaml_file import KeyPath
from smelt.stage import Settings

StepCheck = Callable[[CheckContext, StepDraft], Iterator[Finding]]


def read_steps(context: CheckContext) -> Iterator[Finding]:
    """Build the tree of steps, and check each step after its parents."""
    entries = list(context.recipe.stages)
    previous: str | None = MODEL_STEP
    for position, (entry, name) in enumerate(zip(entries, context.declared_names, strict=True)):
        if name in context.drafts:
            text = f"duplicate step name '{name}', first used in line {context.drafts[name].entry.line}."
            text = f"{text} Choose another name."
            yield ("stages", entry.index, "name"), error_message("duplicate-step", text)
            context.invalid_paths.add("stages")
            previous = None
            continue
        # after an invalid step the default parent is unknown
        previous_index = entries[position - 1].index if position else -1
        previous = previous if entry.index == previous_index + 1 else None
        yield from _check_parent(context, entry)
        parent = previous if entry.parent is None else entry.parent
        draft = StepDraft(entry, name, parent if parent in context.step_names else None)
        context.drafts[name] = draft
        yield from _read_settings(context, draft)
        for check in STEP_CHECKS:
            yield from check(context, draft)
        _set_unavailable(context, draft)
        yield from _check_input(context, draft)
        previous = name
    context.steps = tuple(step for draft in context.drafts.values() if (step := to_plan_step(draft)))


def _check_parent(context: CheckContext, entry: StageEntry) -> Iterator[Finding]:
    """Check that `from` names an earlier step."""
    if entry.parent is None or entry.parent in context.step_names:
        return
    name = entry.parent[:60]
    steps_text = f"Earlier steps: {', '.join(context.step_names)}."
    if entry.parent in context.declared_names:
        text = f"'{name}' comes after this step. {steps_text}"
        yield ("stages", entry.index, "from"), error_message("later-step", text)
    elif not context.may_exist(entry.parent):
        text = f"no step '{name}'. {steps_text}{did_you_mean(name, context.step_names)}"
        yield ("stages", entry.index, "from"), error_message("unknown-step", text)


def _read_settings(context: CheckContext, draft: StepDraft) -> Iterator[Finding]:
    """Read the settings of a step, and check the files and folders that they name."""
    from_graph = context.start_format == "onnx"
    name = draft.entry.stage
    draft.stage_class = stages.load_stage(stages.ONNX_EQUIVALENTS.get(name, name) if from_graph else name)
    settings_type: type[Settings] = draft.stage_class.settings_type
    if not draft.entry.has_settings:
        return
    draft.settings, invalid = validate_settings(
        settings_type, draft.entry.settings, draft.entry.path, context.errors
    )
    draft.invalid_settings = frozenset(str(setting[0]) for setting in invalid if setting)
    if draft.settings is None:
        return
    try:
        draft.settings = draft.settings.resolve_paths(context.recipe.base, merged_model_folder)
    except InputError as error:  # of an adapter
        draft.settings = None
        yield from error_findings(draft.entry.path, error)
        return
    if "task" not in context.invalid_paths:
        draft.settings = draft.settings.resolve_for_task(context.recipe.task)
    for setting, path in draft.settings.paths().items():
        used_unchanged = draft.settings.paths_to_models().get(setting)
        for problem in _path_errors(context, Path(path), used_unchanged):
            yield _setting_path(draft, setting), problem
            draft.invalid_settings |= {str(setting[0])}


def _setting_path(draft: StepDraft, setting: tuple[str | int, ...]) -> KeyPath:
    """Return where a setting of `Settings.paths` is in the recipe."""
    in_list = isinstance(draft.entry.settings.get(str(setting[0])), list)
    return (*draft.entry.path, *(key for key in setting if in_list or not isinstance(key, int)))


def _path_errors(context: CheckContext, path: Path, used_unchanged: bool | None) -> list[Message]:
    """Return errors at a path in settings. used_unchanged: see `Settings.paths_to_models`; None for files."""
    if not path_exists(path):
        return [error_message("missing-file", f"{path}: no such file or folder.")]
    if used_unchanged is None:
        return []
    if not path.is_dir():
        text = f"{path}: not a folder. Expected a model's folder with config.json."
        return [error_message("not-a-folder", text)]
    task = None if "task" in context.invalid_paths else context.recipe.task
    problems, _ = check_model_folder(
        path, task, is_baseline=False, needs_tokenizer=task not in tasks_with(modality="image")
    )
    if not problems and used_unchanged and task in tasks_with(classifies=True):
        if has_classifier(read_config(path)[0], task):
            return []
        return [
            error_message(
                "no-classifier",
                f"{path}: the model has no classifier, so it cannot be a teacher. Train it first.",
            )
        ]
    return problems


def check_teacher_tokenizers(context: CheckContext) -> Iterator[Finding]:
    """Compare the tokenizers of teachers in folders with the model's, else with the first teacher's.

    After trim-vocabulary a teacher may have other tokens; the run compares the kept ones.
    """
    if "task" in context.invalid_paths or not context.recipe.traits.has_tokenizer:
        return
    for draft in context.drafts.values():
        if draft.settings is None or any(
            ancestor.entry.stage == "trim-vocabulary" for ancestor in context.ancestors(draft)
        ):
            continue
        paths, unchanged = draft.settings.paths(), draft.settings.paths_to_models()
        teachers = {
            setting: Path(paths[setting])
            for setting, used_unchanged in unchanged.items()
            if used_unchanged and str(setting[0]) not in draft.invalid_settings
        }
        reference = _tokenizer_folder(context) or next(iter(teachers.values()), None)
        if reference is None or (reference.is_dir() and read_kept_tokens(reference) is not None):
            continue
        for setting, folder in teachers.items():
            if difference := different_token(folder, reference):
                token, token_id, other_id = difference
                text = (
                    f"the id of '{token[:40]}' is {token_id} in {folder}, but {other_id} in {reference}."
                    " Use models with the same tokenizer."
                )
                yield _setting_path(draft, setting), error_message("tokenizer-mismatch", text)


def _tokenizer_folder(context: CheckContext) -> Path | None:
    """Return the folder of the model's tokenizer; None if it is not known before the run."""
    model = context.recipe.model
    if isinstance(model, UntrainedModel):
        return context.recipe.base / model.tokenizer if isinstance(model.tokenizer, str) else None
    return context.model_folder


def _check_task(context: CheckContext, draft: StepDraft) -> Iterator[Finding]:
    """Check that the stage supports the task of the recipe."""
    assert draft.stage_class is not None
    from_graph = context.start_format == "onnx" and "onnx" not in draft.stage_class.accepts
    if "task" in context.invalid_paths or from_graph:  # `_check_format` reports it
        return
    if context.recipe.task not in draft.stage_class.tasks:
        tasks = ", ".join(sorted(draft.stage_class.tasks))
        text = f"{draft.entry.stage} does not support {context.recipe.task}. Supported tasks: {tasks}."
        yield draft.entry.path, error_message("unsupported-task", text)


def _check_needs(context: CheckContext, draft: StepDraft) -> Iterator[Finding]:
    """Check that the recipe has the data that the step needs."""
    assert draft.stage_class is not None
    stage, settings, available = draft.stage_class, draft.settings, context.recipe.data.split_sources()
    draft.needs = stage.needs_with(settings, available) if settings else stage.needs
    for split_name in ("train", "unlabeled", "validation", "calibration"):
        if (
            split_name not in draft.needs
            or split_name in available
            or context.is_invalid(f"data.{split_name}", "data.split")
        ):
            continue
        with_calibration = settings and stage.needs_with(settings, [*available, "calibration"])
        accepts_calibration = (
            split_name == "train" and with_calibration and split_name not in with_calibration
        )
        needed_data, name = (
            ("calibration or train", "calibration") if accepts_calibration else (split_name, split_name)
        )
        text = f"{draft.entry.stage} needs {needed_data} data. Set data: {{{name}: FILE}}"
        has_unlabeled = split_name == "train" and "unlabeled" in available
        can_use_it = has_unlabeled and "train_on" in stage.settings_type.model_fields
        text += ", or train_on: unlabeled." if can_use_it else "."
        yield draft.entry.path, error_message("missing-data", text)


def _check_references(context: CheckContext, draft: StepDraft) -> Iterator[Finding]:
    """Check that settings that name a step name an earlier one with a torch model."""
    earlier_names = [name for name in context.step_names if name != draft.name]
    torch = [name for name in earlier_names if context.step_format(name) in ("torch", None)]
    any_format = draft.settings.any_format_references() if draft.settings else ()
    folders = draft.settings.folder_references() if draft.settings else ()
    for setting, name in draft.references.items():
        possible = earlier_names if setting in any_format else torch
        is_declared = name in context.declared_names
        if name in possible or (name not in earlier_names and not is_declared and context.may_exist(name)):
            continue
        if name in earlier_names:
            code = "wrong-model-format"
            problem = f"'{name}' is a model in the format {context.step_format(name)}, expected torch."
        else:
            code = "later-step" if is_declared else "unknown-step"
            problem = f"no earlier step '{name[:60]}'."
        hint = did_you_mean(name, possible)
        folder = resolve_path(context.recipe.base, name)
        is_model = name.strip() and path_exists(folder / "config.json") and any(folder.glob("*.safetensors"))
        if setting in folders and is_model:
            hint = f" For a model in a folder write `{{model: {name}}}`."
        text = f"{problem} Possible steps: {', '.join(possible)}.{hint}"
        yield context.setting_path(draft.name, setting), error_message(code, text)


def _check_selection(context: CheckContext, draft: StepDraft) -> Iterator[Finding]:
    """Check that checkpoints are chosen by the loss, or by a metric that the recipe scores."""
    metric = getattr(draft.settings, "metric_for_best_model", "loss")
    if metric == "loss" or context.is_invalid("task", "score"):
        return
    path = context.setting_path(draft.name, "metric_for_best_model")
    if context.recipe.traits.samples == "running-text":
        text = "the metrics of a language model are functions of its loss. Set metric_for_best_model: loss."
        yield path, error_message("metric-follows-loss", text)
        return
    # the default metrics of a classifier are known only after reading its labels
    metrics = ("loss", *(context.recipe.score.quality or METRICS_BY_TASK[context.recipe.task]))
    metrics = tuple(name for name in metrics if name != AGREEMENT_METRIC)  # it needs the baseline's outputs
    if metric not in metrics:
        text = (
            f"'{metric[:60]}' is not scored. Available: {', '.join(metrics)}.{did_you_mean(metric, metrics)}"
            " Add other metrics to score: {quality: [...]}."
        )
        yield path, error_message("metric-not-scored", text)


def _set_unavailable(context: CheckContext, draft: StepDraft) -> None:
    """Set why the step cannot run or be scored on this machine; the plan shows it."""
    assert draft.stage_class is not None
    draft.unavailable = unavailable_reason(draft.stage_class, draft.target, draft.settings)
    dtype = getattr(draft.settings, "dtype", None)
    draft.unscored = unscored_reason(draft.stage_class.produces, draft.target, dtype)
    parent = context.drafts.get(draft.parent or "")
    if parent and parent.unavailable and not draft.unavailable:
        draft.unavailable = f"its parent step '{parent.name}' cannot run on this machine."


STEP_CHECKS: tuple[StepCheck, ...] = (
    _check_task,
    _check_needs,
    _check_references,
    _check_selection,
)


def _check_input(context: CheckContext, draft: StepDraft) -> Iterator[Finding]:
    """Check a step with a known parent against the steps before it."""
    if draft.parent is None:
        return
    format_errors = list(_check_format(context, draft))
    yield from format_errors
    for check in INPUT_CHECKS if not format_errors else ():
        yield from check(context, draft)


def _check_format(context: CheckContext, draft: StepDraft) -> Iterator[Finding]:
    """Check that the stage accepts the format of its parent, and of the model that the recipe starts from."""
    assert draft.stage_class is not None
    assert draft.parent is not None
    stage = draft.entry.stage
    actual = context.step_format(draft.parent)
    if actual is not None and actual not in draft.stage_class.accepts:
        formats = " or ".join(sorted(draft.stage_class.accepts))
        advice = _order_advice(context, draft, actual)
        text = f"{stage} needs a model in {formats}, but its parent step '{draft.parent}' outputs {actual}."
        text = f"{text} {advice[:1].upper()}{advice[1:]}."
        yield draft.entry.path, error_message("wrong-model-format", text)
    elif draft.stage_class.imported_only and context.start_format != "onnx":
        text = (
            f"{stage} is only for recipes that start from an ONNX model. The stage `onnx` simplifies its"
            " graphs; to quantize, put `quantize` before it; for float16, set `onnx: {dtype: fp16}`."
        )
        yield draft.entry.path, error_message("needs-onnx-model", text)


def _order_advice(context: CheckContext, draft: StepDraft, model_format: Format) -> str:
    """Return how to give `draft` a parent whose format it accepts."""
    assert draft.stage_class is not None
    accepted_formats = draft.stage_class.accepts
    if context.start_format == "onnx" and model_format == "onnx":
        for_onnx = [name for name in stages.STAGE_CLASSES if "onnx" in stages.load_stage(name).accepts]
        return (
            f"stages for ONNX models: {', '.join(for_onnx)}. For {draft.entry.stage} start from the"
            " folder with weights that the ONNX model was exported from"
        )
    alternatives = []
    converted = [d for d in context.ancestors(draft) if d.format == model_format]
    if converted and converted[-1].parent and context.step_format(converted[-1].parent) in accepted_formats:
        alternatives.append(f"move it before '{converted[-1].name}'")
    other_names = [name for name in context.step_names if name != draft.name]
    if possible := [name for name in other_names if context.step_format(name) in accepted_formats]:
        alternatives.append(f"set `from:` to one of: {', '.join(possible)}")
    makers = [name for name in stages.STAGE_CLASSES if stages.load_stage(name).produces in accepted_formats]
    return ", or ".join(alternatives) or f"put one of these before it: {', '.join(makers)}"


def _check_float_input(context: CheckContext, draft: StepDraft) -> Iterator[Finding]:
    """Check that what needs float weights does not follow `quantize`."""
    assert draft.stage_class is not None
    quantized = _quantizing_ancestor(context, draft)
    if quantized is None:
        return
    stage, quantized_by = draft.entry.stage, f"({scheme_text(quantized)})"
    for name, reason in TRAINING_BEFORE_QUANTIZE.items():
        if getattr(draft.settings, name, None) is not None:
            text = f"the weights are already quantized {quantized_by} by '{quantized.name}';"
            text = f"{text} {reason.replace('WORD', stage)}"
            yield context.setting_path(draft.name, name), error_message(AFTER_QUANTIZE, text)
    if draft.stage_class.needs_float:
        text = (
            f"{stage} needs float weights, but '{quantized.name}' quantized them {quantized_by}."
            f" Move it before '{quantized.name}', or set `from: {quantized.parent or MODEL_STEP}`."
        )
        yield draft.entry.path, error_message("already-quantized", text)


def _quantizing_ancestor(context: CheckContext, draft: StepDraft) -> StepDraft | None:
    """Return the nearest earlier step that quantizes; None without one."""
    quantizing = (d for d in context.ancestors(draft) if d.entry.stage in ("quantize", "quantize-onnx"))
    return next(quantizing, None)


def _check_units(context: CheckContext, draft: StepDraft) -> Iterator[Finding]:
    """Check that no earlier step makes it impossible to prune heads and neurons."""
    assert draft.stage_class is not None
    has_learned_masks = getattr(draft.settings, "learned_masks", None) is not None
    if not draft.stage_class.prunes_units and not has_learned_masks:
        return
    for d in context.ancestors(draft):
        if d.stage_class and d.settings and (reason := d.stage_class.unit_pruning_error(d.settings)):
            text = (
                f"{draft.entry.stage} is not possible after '{d.name}': {reason}. Move it before '{d.name}',"
                f" or set `from: {d.parent or MODEL_STEP}`."
            )
            yield draft.entry.path, error_message("impossible-order", text)


def _check_sparse_adapters(context: CheckContext, draft: StepDraft) -> Iterator[Finding]:
    """Check that layers with DoRA, or with an adapter that is saved, are not sparse."""
    lora: Any = getattr(draft.settings, "lora", None)
    options = [name for name in ("use_dora", "save_adapter") if lora is not None and getattr(lora, name)]
    for d in context.ancestors(draft) if options else ():
        if d.stage_class is None or d.settings is None or "zeros" in d.stage_class.invalidates(d.settings):
            return
        sparsity: Any = getattr(d.settings, "sparsify", None) or d.settings
        if "zeros" in d.stage_class.provides(d.settings) and {*sparsity.targets} & {*lora.targets}:
            text = (
                f"{options[0]} is not supported for sparse layers, and '{d.name}' makes them sparse. Remove"
                f" {options[0]}, or move '{draft.name}' before '{d.name}'."
            )
            yield (
                context.setting_path(draft.name, f"lora.{options[0]}"),
                error_message("unsupported-layer", text),
            )
            return


def _check_target(context: CheckContext, draft: StepDraft) -> Iterator[Finding]:
    """Check that the target runtime supports the output of the steps before."""
    ancestors = context.ancestors(draft)
    quantized = _quantizing_ancestor(context, draft)
    yield from target_errors(draft, ancestors[0] if ancestors else None, quantized, context.start_format)
    if draft.entry.stage == "onnx" and any(d.entry.stage == "shortlist" for d in ancestors):
        yield from shortlist_scheme_errors(draft, quantized)


def _check_poor_order(context: CheckContext, draft: StepDraft) -> Iterator[Finding]:
    """Warn about orders of steps that work but give poor results."""
    for message in poor_order_warnings(draft, context.ancestors(draft)):
        yield (), message


INPUT_CHECKS: tuple[StepCheck, ...] = (
    _check_float_input,
    _check_units,
    _check_sparse_adapters,
    _check_target,
    _check_poor_order,
)


def set_engine_sizes(context: CheckContext) -> Iterator[Finding]:
    """Set `max_new_tokens` and `num_beams` of engines to those of `score: {generation: ...}`.

    Steps that set them keep their own. Applies to `tensorrt`, and to `engine` of an `onnx` for TensorRT's
    providers. Without a number of tokens the stage uses the model's own. Fewer tokens than scoring needs are
    an error, since scoring would fail on longer outputs; fewer beams a warning, since more rows than an
    engine takes are run in parts.
    """
    generation = context.recipe.score.generation
    if context.recipe.traits.output != "text":
        return
    needed = generation.max_new_tokens
    for step in context.steps:
        prefix = "" if step.stage == "tensorrt" else "engine."
        beams = _engine_setting(step, "num_beams")
        if beams is not None and beams < generation.num_beams:
            text = (
                f"The engine is built for {beams} beams, but scores use {generation.num_beams}: a full batch"
                f" is decoded in {-(-generation.num_beams // beams)} parts, one after the other. Set"
                f" num_beams: {generation.num_beams}, or remove it."
            )
            path = context.setting_path(step.name, f"{prefix}num_beams")
            yield path, warning("engine-has-fewer-beams", text)
        limit = _engine_setting(step, "max_new_tokens")
        if limit is not None and needed is not None and limit < needed:
            setting = f"{prefix}max_new_tokens"
            text = (
                f"{limit} is less than score: {{generation: {{max_new_tokens: {needed}}}}}. An engine cannot"
                f" generate more tokens than it was built for. Set at least {needed} here."
            )
            yield context.setting_path(step.name, setting), error_message("engine-too-short", text)
    wanted = {"max_new_tokens": needed, "num_beams": generation.num_beams}
    context.steps = tuple(_with_engine_sizes(step, wanted) for step in context.steps)


def _engine_setting(step: PlanStep, name: str) -> int | None:
    """Return a setting of a step's engines; None if not set."""
    engine = step.settings if step.stage == "tensorrt" else getattr(step.settings, "engine", None)
    value: int | None = getattr(engine, name, None)
    return value


def _with_engine_sizes(step: PlanStep, wanted: Mapping[str, int | None]) -> PlanStep:
    missing = {name: value for name, value in wanted.items() if _engine_setting(step, name) is None}
    if step.stage == "tensorrt":
        update: dict[str, object] = dict(missing)
    elif getattr(step.settings, "target", None) == "ort-tensorrt":
        engine = getattr(step.settings, "engine", None) or ProviderSettings()
        update = {"engine": engine.model_copy(update=missing)}
    else:
        return step
    return replace(step, settings=step.settings.model_copy(update=update))


def set_autotune_sizes(context: CheckContext) -> Iterator[Finding]:
    """Set the batch sizes and beams of `autotune` to those that the recipe times, where a step sets none.

    Operators chosen for other batch sizes can be slower at these.
    """
    score = context.recipe.score
    sizes = tuple(score.latency.batch_sizes) if score.latency else (1,)
    context.steps = tuple(
        replace(step, settings=step.settings.autotune_for(sizes, score.generation.num_beams))
        if isinstance(step.settings, OnnxSettings)
        else step
        for step in context.steps
    )
    yield from ()

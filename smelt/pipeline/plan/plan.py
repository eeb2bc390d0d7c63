"""The plan of a recipe: the tree of steps, gates and data, and its text form.

The splits of a recipe are read from their files, or taken from the training samples.
"""

from __future__ import annotations

import copy
import json
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from smelt.core.artifact import Format
from smelt.core.errors import InputError, MissingDependencyError, combined_error
from smelt.core.files import path_exists, resolve_path
from smelt.core.messages import Message, error_message
from smelt.data.labels import ProblemType, require_all_or_none
from smelt.data.split_division import divide_split, limit_split
from smelt.data.splits import Split
from smelt.evaluate.metrics.registry import (
    find_metric,
    is_custom_metric,
    is_lower_better,
    scores_agreement_alone,
)
from smelt.models.text_rules import read_text_rules
from smelt.pipeline.inspect.find_model import fetch_model, merged_model_folder
from smelt.pipeline.inspect.model_info import OnnxModel
from smelt.pipeline.plan.task_checks import pooling_text, resolve_pooling, resolve_text_rules
from smelt.pipeline.recipe.recipe import JudgedOn, ParsedRecipe
from smelt.pipeline.recipe.stages import MODEL_STEP
from smelt.pipeline.recipe.yaml_file import dump_yaml
from smelt.stage import Need, Settings, Stage, absolute_path
from smelt.tasks.read_split import UNLABELED, is_plain_text, read_split, read_unlabeled
from smelt.tasks.registry import task_spec


def read_split_source(recipe: ParsedRecipe, name: str) -> dict[str, Split]:
    """Read the split `name` of `recipe`; for `train` also the splits that are taken from it.

    Raises:
        InputError: the samples cannot be read, or are too few to be divided.
    """
    data = recipe.data
    origin, calibrates = data.split_files()[name], name == "calibration"
    draw = data.row_draw(name, recipe.seed)
    if name == UNLABELED or (calibrates and is_plain_text(origin, recipe.task)):
        return {name: read_unlabeled(origin, recipe.task, data.columns, recipe.base, draw, data.streaming)}
    unlabeled = calibrates and recipe.traits.classifies
    split = read_split(
        origin,
        recipe.task,
        data.columns,
        recipe.base,
        name,
        data.axes,
        targets_optional=unlabeled or (name == "test" and scores_agreement_alone(recipe.score.quality)),
        label_arrays=recipe.label_arrays,
        draw=draw,
        streaming=data.streaming,
    )
    if unlabeled:  # most stages calibrate without labels
        row_numbers = [example.line or example.row or 0 for example in split.examples]
        has_label = (example.label is not None for example in split.examples)
        column = getattr(data.columns, task_spec(recipe.task).target_roles[0])
        require_all_or_none(has_label, row_numbers, column, "label")
    shares = data.split.named_fractions() if name == "train" else {}
    divided = divide_split(split, shares, recipe.seed) if shares else {name: split}
    window_settings = data.windows.model_dump(exclude_none=True)
    return {
        split_name: replace(row_numbers, windows=row_numbers.windows.model_copy(update=window_settings))
        if row_numbers.windows
        else row_numbers
        for split_name, row_numbers in divided.items()
    }


_WIDTH = 80


@dataclass(frozen=True)
class PlanStep:
    """One stage with its settings and its parent step (`model` is the original model).

    needs: required data and hardware, given the settings. invalid_settings: settings with errors, replaced
    by their defaults while the recipe is checked. unavailable: why the step cannot run on this machine, or
    None.
    unscored: why its artifact cannot be scored on this machine, or None.
    """

    name: str
    stage: str
    stage_class: type[Stage[Any]]
    settings: Settings
    parent: str
    optional: bool
    line: int
    unavailable: str | None = None
    unscored: str | None = None
    invalid_settings: frozenset[str] = frozenset()
    needs: frozenset[Need] = frozenset()

    @property
    def format(self) -> Format:
        """Output format of the step: torch, onnx or tensorrt."""
        return self.stage_class.produces

    @property
    def trains(self) -> bool:
        """Whether the step trains on samples."""
        return bool(self.needs & {"train", "unlabeled"})

    @property
    def dependencies(self) -> tuple[str, ...]:
        """The steps that this one needs: its parent and those that its settings name."""
        return (self.parent, *self.settings.step_references().values())


@dataclass(frozen=True)
class PlannedGate:
    """A limit on one metric, as in report.json. kind: max_degradation, min or max. at: names of steps.

    confidence: of the interval whose worse end is compared with the limit; None compares the value.
    """

    metric: str
    kind: str
    limit: float
    at: tuple[str, ...]
    confidence: float | None = None


@dataclass(frozen=True)
class Plan:
    """A checked recipe.

    steps: in the recipe's order, parents first, without the original model; with `until` only that step and
        those that it needs.
    splits: the splits that were read already, because their files are small.
    excluded_steps: the steps that `until` excludes.
    step_order: names of all steps in the recipe's order.
    warnings: warnings for plan and report.
    notes: notes for the plan only.
    judged_on: the split for scores, gates and the recommendation.
    problem_type: problem type of a classifier, if model and data are available.
    onnx_model: the ONNX model that the recipe starts from; None if it starts from weights.
    """

    recipe: ParsedRecipe
    steps: tuple[PlanStep, ...]
    gates: tuple[PlannedGate, ...]
    local_model: Path | None
    splits: Mapping[str, Split] = field(default_factory=dict)
    warnings: tuple[Message, ...] = ()
    notes: tuple[Message, ...] = ()
    until: str | None = None
    excluded_steps: tuple[PlanStep, ...] = ()
    step_order: tuple[str, ...] = ()
    judged_on: JudgedOn = "test"
    problem_type: ProblemType | None = None
    onnx_model: OnnxModel | None = None

    def __str__(self) -> str:
        return _format_plan(self)

    @property
    def user_functions(self) -> list[str]:
        """The functions of the user's own code that the recipe names: custom metrics, and a module's."""
        module = self.recipe.module
        metrics = [name for name in self.recipe.score.quality if is_custom_metric(name)]
        return metrics if module is None else [*metrics, module.module]

    @property
    def excluded_names(self) -> tuple[str, ...]:
        """The names of the steps that `until` excludes."""
        return tuple(step.name for step in self.excluded_steps)

    @property
    def path(self) -> Path:
        """The recipe's file."""
        return self.recipe.path

    @property
    def model_folder(self) -> Path:
        """The folder of the original model; a hub id is downloaded now.

        Raises:
            InputError: the download failed, or the model is not supported.
        """
        return self.local_model or fetch_model(str(self.recipe.model), self.recipe.base, self.recipe.task)

    def recipe_dict(self) -> dict[str, Any]:
        """Return the recipe as plain values with `--set` applied."""
        return dict(self.recipe.document)

    def portable_recipe(self) -> str:
        """Return the recipe as YAML with `--set` applied that runs from any folder: its paths are absolute.

        What does not exist as a file or folder, such as a hub id, is kept.
        """
        value = copy.deepcopy(self.recipe_dict())
        base = self.recipe.base
        for holder, key in _paths_of_recipe(value, self.recipe):
            _make_absolute(holder, key, base)
        steps = {step.name: step for step in (*self.steps, *self.excluded_steps)}
        for item, name in zip(value["stages"], self.step_order, strict=True):
            step = steps[name]
            for setting_path, path in step.settings.paths().items():
                # a setting may have a shorter form, such as `student: FOLDER` for `student: {model: FOLDER}`
                for holder, key in _find_strings(item[step.stage], setting_path[0]):
                    if merged_model_folder(absolute_path(resolve_path(base, holder[key]))) == Path(path):
                        _make_absolute(holder, key, base)
        return dump_yaml(value)

    def gates_of(self, name: str) -> list[PlannedGate]:
        """Return the gates on the step `name`."""
        return [gate for gate in self.gates if name in gate.at]

    def step(self, name: str) -> PlanStep:
        """Return the step `name`."""
        return next(step for step in self.steps if step.name == name)

    def children(self, name: str) -> list[PlanStep]:
        """Return the steps whose parent is the step `name` (`model` for the original model)."""
        return [step for step in self.steps if step.parent == name]

    @property
    def blocked_steps(self) -> list[PlanStep]:
        """The steps that cannot run on this machine and are not optional."""
        return [step for step in self.steps if step.unavailable and not step.optional]

    def ancestor_names(self, step: PlanStep) -> list[str]:
        """Return the steps that `step` may read: the model, the steps that it names, its ancestors."""
        parents = {s.name: s.parent for s in self.steps}
        ancestors, name = list[str](), step.parent
        while name != MODEL_STEP:
            ancestors.append(name)
            name = parents[name]
        referenced = [name for name in step.dependencies if name != MODEL_STEP and name not in ancestors]
        return [MODEL_STEP, *referenced, *reversed(ancestors)]

    def require_runnable(self) -> None:
        """Require that all steps that are not optional can run on this machine.

        Raises:
            MissingDependencyError: some cannot; the message lists every such step.
        """
        if self.blocked_steps:
            raise combined_error(
                (
                    error_message(
                        "step-unavailable",
                        f"step '{step.name}' cannot run on this machine: {step.unavailable}"
                        " Set `optional: true` next to the stage to skip it.",
                        file=str(self.recipe.path),
                        line=step.line,
                    )
                    for step in self.blocked_steps
                ),
                MissingDependencyError,
            )

    def read_data(self, limit: int | None = None) -> dict[str, Split]:
        """Read every split of the recipe, at most `limit` samples of each.

        Raises:
            InputError: there are errors in the data; the message lists those of all splits.
        """
        splits, problems = dict(self.splits), list[Message]()
        for name in self.recipe.data.split_files():
            if name not in splits:
                try:
                    splits |= read_split_source(self.recipe, name)
                except InputError as error:
                    problems += error.messages or [error.as_message()]
        if problems:
            raise combined_error(problems)
        return {name: limit_split(splits[name], limit) for name in self.recipe.data.split_sources()}


def _format_plan(plan: Plan) -> str:
    """Return the plan as text of at most 80 columns: model, data, tree of steps, score, gates, warnings."""
    recipe = plan.recipe
    lines = [*_wrap_lines(f"{recipe.path}: {recipe.task}, {_pluralize(len(plan.steps), 'step')}", 2), ""]
    lines += _wrap_lines(f"model       {_model_text(recipe)}", 12)
    for entry in _graph_lines(plan.onnx_model) if plan.onnx_model else ():
        lines += _wrap_lines(entry, 12)
    for name, origin in recipe.data.split_sources().items():
        count_text = f" ({_count_text(plan.splits[name])})" if name in plan.splits else ""
        share = recipe.data.split.named_fractions().get(name)
        entry = origin if share is None else f"{100 * share:.4g} % of train, seed {recipe.seed}"
        lines += _wrap_lines(f"{name:<12}{entry}{count_text}", 12)
    for entry in resolve_text_rules(recipe, plan.local_model)[1] if plan.local_model else ():
        lines += _wrap_lines(f"texts       {entry}", 12)
    if recipe.traits.output == "embedding" and plan.local_model:
        lines += _wrap_lines(f"vectors     {pooling_text(resolve_pooling(recipe, plan.local_model)[0])}", 12)
    if (launch := recipe.launch).num_processes > 1:
        lines += _wrap_lines(f"training    {launch.num_processes} processes, {launch.description}", 12)
    lines += ["", MODEL_STEP, *_tree_lines(plan, MODEL_STEP, ""), ""]
    lines += _score_lines(plan)
    if plan.judged_on != "test":
        text = (
            "judged on   validation: gates and recommendation; the recommended and Pareto-optimal steps are"
            " scored on test"
        )
        lines += _wrap_lines(text, 12)
    elif recipe.judged_on == "test":
        text = "judged on   test: choosing the best of several branches on test overestimates its score"
        lines += _wrap_lines(text, 12)
    for gate in plan.gates:
        direction = "rise" if is_lower_better(gate.metric, recipe.metric_settings) else "drop"
        sign = {"max_degradation": f"{direction} at most", "min": "at least", "max": "at most"}[gate.kind]
        sure = f", with confidence {gate.confidence:g}" if gate.confidence is not None else ""
        limit = f"{sign} {gate.limit:,.10g}{sure}"
        lines += _wrap_lines(f"gate        {gate.metric}: {limit} at {', '.join(gate.at)}", 12)
    if plan.until:
        lines += _wrap_lines(
            f"until       {plan.until}; excluded: {', '.join(plan.excluded_names) or 'none'}", 12
        )
    for message in plan.notes:
        lines += _wrap_lines(f"note        {message}", 12)
    for warning in plan.warnings:
        lines += _wrap_lines(f"warning     {warning}", 12)
    if plan.blocked_steps:
        names = ", ".join(step.name for step in plan.blocked_steps)
        lines += _wrap_lines(
            f"cannot run on this machine: {names}. Install what is missing, or set"
            " `optional: true` next to the stage to skip it.",
            0,
        )
    return "\n".join(line.rstrip() for line in lines)


def _tree_lines(plan: Plan, name: str, indent: str) -> Iterator[str]:
    """Yield the steps below `name`; a chain has one column, branches are indented."""
    children = [step for step in plan.steps if step.parent == name]
    for number, step in enumerate(children):
        last = number == len(children) - 1
        branch_prefix, bar = ("", "") if len(children) == 1 else ("└─ ", "   ") if last else ("├─ ", "│  ")
        yield from _step_lines(step, indent + branch_prefix, indent + bar)
        yield from _tree_lines(plan, step.name, indent + bar)


def _step_lines(step: PlanStep, first: str, rest: str) -> Iterator[str]:
    settings = ", ".join(f"{name}: {_value_text(value)}" for name, value in step.settings.to_plan().items())
    read_splits = sorted(
        split_name
        for split_name in step.needs
        if split_name in ("train", "unlabeled", "validation", "calibration")
    )
    title = step.name if step.name == step.stage else f"{step.name} ({step.stage})"
    columns = [f"{title} -> {step.format}"]
    columns += [f"{{{settings}}}"] if settings else []
    columns += [f"reads {', '.join(read_splits)}"] if read_splits else []
    if step.unavailable:
        availability = "will be skipped" if step.optional else "CANNOT RUN"
        columns.append(f"{availability}: {step.unavailable}")
    elif step.optional:
        columns.append("optional")
    if step.unscored and not step.unavailable:
        status = "built, not scored (needs a CUDA GPU)"
        columns.append(status if step.format == "tensorrt" else f"not scored: {step.unscored}")
    yield from textwrap.wrap(
        "  ".join(columns),
        _WIDTH,
        initial_indent=first,
        subsequent_indent=f"{rest}    ",
        break_on_hyphens=False,
    )


def _metric_descriptions(plan: Plan) -> list[str]:
    """Return the metrics, with how they are computed on the test references, if these were read."""
    recipe, references = plan.recipe, None
    language = recipe.data.target_language
    if recipe.traits.output == "text" and "test" in plan.splits:
        references = [text for example in plan.splits["test"].examples for text in example.references]
        if language is None and plan.local_model:
            language = read_text_rules(plan.local_model).target_language
    return [
        find_metric(name).describe(recipe.metric_settings.get(name, {}), references, language)
        for name in recipe.score.quality
    ]


def _score_lines(plan: Plan) -> list[str]:
    score = plan.recipe.score
    names = _metric_descriptions(plan)
    text = f"score       {', '.join(names) or 'metrics by the labels'}"
    if plan.recipe.traits.output == "text":
        text += f"; {score.generation.summary()}"
    if score.latency:
        sizes = ", ".join(map(str, score.latency.batch_sizes))
        text += f"; latency at batch size {sizes} compared with {plan.recipe.baseline}"
    return _wrap_lines(text, 12)


def _value_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False).replace('"', "")


def _model_text(recipe: ParsedRecipe) -> str:
    model = recipe.model
    if recipe.module is not None:
        return f"{recipe.module.module}, your own code, which is run; weights: {recipe.module.weights}"
    if isinstance(model, str):
        return model
    tokenizer = model.tokenizer
    if tokenizer is None:
        return f"{model.config}, untrained"
    tokenizer_text = (
        tokenizer
        if isinstance(tokenizer, str)
        else f"{tokenizer.train}, at most {tokenizer.vocab_size:,} tokens, from train"
    )
    return f"{model.config}, untrained; tokenizer: {tokenizer_text}"


def _count_text(split: Split) -> str:
    """Return the number of samples as text; of running text that of the texts that windows are cut from."""
    if split.windows is None:
        return _pluralize(len(split), "sample")
    return f"{_pluralize(len(split), 'text')}, in windows"


def _pluralize(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _wrap_lines(text: str, indent: int) -> list[str]:
    return textwrap.wrap(text, _WIDTH, subsequent_indent=" " * indent, break_on_hyphens=False)


def _graph_lines(model: OnnxModel) -> Iterator[str]:
    """Yield the lines about an ONNX model in `smelt plan`."""
    details = model.details
    producer = f", produced by {details['producer']}" if details.get("producer") else ""
    nodes = f"{details['nodes']:,} node{'' if details['nodes'] == 1 else 's'}"
    if model.graphs:
        names = ", ".join(f"{name}.onnx" for name in model.graphs)
        yield f"graphs      {names}: {nodes} of opset {details['opset']}{producer}"
        return
    yield f"graph       {nodes} of opset {details['opset']}{producer}"
    yield f"inputs      {'; '.join(value.describe() for value in model.signature.inputs)}"
    yield f"outputs     {'; '.join(value.describe() for value in model.signature.outputs)}"


_MODEL_PATHS = ("config", "tokenizer", "weights", "processor")


def _paths_of_recipe(value: dict[str, Any], recipe: ParsedRecipe) -> Iterator[tuple[Any, Any]]:
    """Yield (container, key) of every path in a recipe that is not a setting of a stage."""
    for holder, names in ((value, ("model", "tokenizer")), (value["model"], _MODEL_PATHS)):
        for name in names if isinstance(holder, dict) else ():
            if isinstance(holder.get(name), str):
                yield holder, name
    yield from ((value["data"], name) for name in recipe.data.split_files() if name in value["data"])
    if isinstance(value.get("launch"), dict):
        yield from _find_strings(value["launch"], "config_file")
    score = value.get("score")
    for metric in (score.get("quality") or ()) if isinstance(score, dict) else ():
        if isinstance(metric, dict):  # bertscore: {model: FOLDER}
            yield from (
                reference for settings in metric.values() for reference in _find_strings(settings, "model")
            )


def _find_strings(holder: Any, key: Any) -> Iterator[tuple[Any, Any]]:
    """Yield (container, key) of each string in `holder[key]`: itself, or those nested in it."""
    value = holder.get(key) if isinstance(holder, dict) else holder[key] if isinstance(holder, list) else None
    if isinstance(value, str):
        yield holder, key
    elif isinstance(value, dict | list):
        for child_key in value if isinstance(value, dict) else range(len(value)):
            yield from _find_strings(value, child_key)


def _make_absolute(holder: Any, key: Any, base: Path) -> None:
    """Make the path `holder[key]`, relative to `base`, absolute if it exists."""
    path = resolve_path(base, holder[key])
    if path_exists(path):
        holder[key] = str(absolute_path(path))

"""Check the steps of a plan before a run: order, required data, references, metrics, gates and their split.

TensorRT engines get the maximum output length of the recipe's scoring settings.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from smelt.compress.model_input import AFTER_QUANTIZE, TRAINING_BEFORE_QUANTIZE
from smelt.core.artifact import Format
from smelt.core.errors import did_you_mean
from smelt.core.files import path_exists, resolve_path
from smelt.core.messages import Message, error_message, warning
from smelt.core.stage import Settings, stage_needs
from smelt.data.splits import (
    CLASSIFICATION_TASKS,
    CUSTOM_TASK,
    IMAGE_CLASSIFICATION,
    SENTENCE_SIMILARITY,
    TEXT_TO_TEXT_TASKS,
    Split,
)
from smelt.evaluate.metrics.registry import AGREEMENT_METRIC, METRICS_BY_TASK
from smelt.export.settings import ProviderSettings
from smelt.pipeline.inspect.machine import unavailable_reason, unscored_reason
from smelt.pipeline.inspect.model_folder import check_model_folder, read_config
from smelt.pipeline.plan.plan import PlannedGate, PlanStep
from smelt.pipeline.plan.step_draft import (
    StepDraft,
    check_shortlist_scheme,
    check_target,
    scheme_text,
    to_plan_step,
)
from smelt.pipeline.plan.warnings import MIN_JUDGING_ROWS, lost_work_warnings, poor_order_warnings
from smelt.pipeline.recipe import stages
from smelt.pipeline.recipe.model_and_data import has_classifier
from smelt.pipeline.recipe.recipe import SPEED_METRICS, JudgedOn, ParsedRecipe
from smelt.pipeline.recipe.stages import MODEL_STEP, StageEntry, step_names
from smelt.pipeline.recipe.validation_errors import RecipeErrors, has_error, validate_settings
from smelt.pipeline.recipe.yaml_file import KeyPath


class PlanChecker:
    """Checks one recipe; adds errors to `errors`, advice to `warnings` and `notes`.

    bad: dotted paths of parts that are known to be invalid. begins_as: the format of the original model.
    """

    def __init__(
        self, recipe: ParsedRecipe, errors: RecipeErrors, bad: set[str], begins_as: Format = "torch"
    ) -> None:
        self.recipe, self.errors, self.invalid_paths = recipe, errors, bad
        self._start_format: Format = begins_as
        self.warnings: list[Message] = []
        self.notes: list[Message] = []
        self.drafts: dict[str, StepDraft] = {}
        self._declared_names = step_names(list(recipe.stages))
        self._unparsed_names = _unparsed_step_names(recipe) if "stages" in bad else set()

    @property
    def step_names(self) -> list[str]:
        """The names of all steps, `model` first."""
        return [MODEL_STEP, *self.drafts]

    def may_exist(self, name: str) -> bool:
        """Return whether there is a step `name`, or possibly one among the invalid steps."""
        return name in self.step_names or not self._unparsed_names.isdisjoint(
            {"*", name, name.rpartition("-")[0]}
        )

    def unknown_step_text(self, name: str) -> str:
        """Return the message that there is no step `name`."""
        hint = did_you_mean(name, self.step_names)
        return f"no step '{name[:60]}'. Known steps: {', '.join(self.step_names)}.{hint}"

    @property
    def setting_paths(self) -> dict[str, KeyPath]:
        """Path of each step's settings in the recipe."""
        return {name: draft.entry.path for name, draft in self.drafts.items()}

    def build_steps(self) -> tuple[PlanStep, ...]:
        """Build the tree, check every step, and return the complete steps."""
        entries, names = list(self.recipe.stages), self._declared_names
        previous: str | None = MODEL_STEP
        for position, (entry, name) in enumerate(zip(entries, names, strict=True)):
            if name in self.drafts:
                first = self.drafts[name].entry.line
                where = ("stages", entry.index, "name")
                self.errors.add(
                    where,
                    f"duplicate step name '{name}', first used in line {first}. Choose another name.",
                    code="duplicate-step",
                )
                self.invalid_paths.add("stages")
                previous = None
                continue
            # after an invalid step the default parent is unknown
            before = entries[position - 1].index if position else -1
            previous = previous if entry.index == before + 1 else None
            draft = StepDraft(entry, name, self._resolve_parent(entry, previous))
            self.drafts[name] = draft
            self._load_settings(draft)
            self._check_step(draft)
            previous = name
        lines = {name: self._ancestors(draft) for name, draft in self.drafts.items()}
        self.warnings += lost_work_warnings(self.drafts, lines)
        return tuple(step for draft in self.drafts.values() if (step := to_plan_step(draft)))

    def _resolve_parent(self, entry: StageEntry, previous: str | None) -> str | None:
        if entry.parent is None:
            return previous
        if entry.parent in self.step_names:
            return entry.parent
        later = entry.parent in self._declared_names
        if later or not self.may_exist(entry.parent):
            word = entry.parent[:60]
            what = f"'{word}' comes after this step" if later else f"no step '{word}'"
            hint = "" if later else did_you_mean(word, self.step_names)
            known = f"Earlier steps: {', '.join(self.step_names)}."
            code = "later-step" if later else "unknown-step"
            self.errors.add(("stages", entry.index, "from"), f"{what}. {known}{hint}", code=code)
        return None

    def _load_settings(self, draft: StepDraft) -> None:
        word = draft.entry.stage
        from_graph = self._start_format == "onnx"
        draft.stage_class = stages.load_stage(stages.ONNX_EQUIVALENTS.get(word, word) if from_graph else word)
        settings_type: type[Settings] = draft.stage_class.settings_type
        if not draft.entry.has_settings:
            return
        draft.settings, wrong = validate_settings(
            settings_type, draft.entry.settings, draft.entry.path, self.errors
        )
        draft.invalid_settings = frozenset(str(place[0]) for place in wrong if place)
        if draft.settings is not None:
            draft.settings = draft.settings.resolve_paths(self.recipe.base)
            if "task" not in self.invalid_paths:
                draft.settings = draft.settings.resolve_for_task(self.recipe.task)
            for place, path in draft.settings.paths().items():
                in_list = isinstance(draft.entry.settings.get(str(place[0])), list)
                where = place if in_list else tuple(word for word in place if not isinstance(word, int))
                for problem in self._named_path_problems(
                    Path(path), draft.settings.paths_to_models().get(place)
                ):
                    self.errors.add_message((*draft.entry.path, *where), problem)
                    draft.invalid_settings |= {str(place[0])}

    def _named_path_problems(self, path: Path, as_it_is: bool | None) -> list[Message]:
        """Return errors at a path in settings. as_it_is: see `Settings.paths_to_models`; None for files."""
        if not path_exists(path):
            return [error_message("missing-file", f"{path}: no such file or folder.")]
        if as_it_is is None:
            return []
        if not path.is_dir():
            text = f"{path}: not a folder. Expected a model's folder with config.json."
            return [error_message("not-a-folder", text)]
        task = None if "task" in self.invalid_paths else self.recipe.task
        problems, _ = check_model_folder(
            path, task, is_baseline=False, needs_tokenizer=task != IMAGE_CLASSIFICATION
        )
        if not problems and as_it_is and task in CLASSIFICATION_TASKS:
            if has_classifier(read_config(path)[0]):
                return []
            return [
                error_message(
                    "no-classifier",
                    f"{path}: the model has no classifier, so it cannot be a teacher. Train it first.",
                )
            ]
        return problems

    def _check_step(self, draft: StepDraft) -> None:
        """Check order, task, data and machine of one step after its parents."""
        assert draft.stage_class is not None
        word, path = draft.entry.stage, draft.entry.path
        elsewhere = (
            self._start_format not in draft.stage_class.accepts and self._start_format == "onnx"
        )  # reported by `_check_order`
        if (
            "task" not in self.invalid_paths
            and self.recipe.task not in draft.stage_class.tasks
            and not elsewhere
        ):
            tasks = ", ".join(sorted(draft.stage_class.tasks))
            self.errors.add(
                path,
                f"{word} does not support {self.recipe.task}. Supported tasks: {tasks}.",
                code="unsupported-task",
            )
        given = self.recipe.data.split_sources()
        draft.needs = (
            stage_needs(draft.stage_class, draft.settings, given)
            if draft.settings
            else draft.stage_class.needs
        )
        unsettled = draft.settings is None and hasattr(
            draft.stage_class, "needs_with"
        )  # its needs are unknown
        for need in ("train", "unlabeled", "validation", "calibration") if not unsettled else ():
            unknown = has_error(self.invalid_paths, f"data.{need}", "data.split")
            if need in draft.needs and need not in given and not unknown:
                instead = draft.settings and stage_needs(
                    draft.stage_class, draft.settings, [*given, "calibration"]
                )
                either = need == "train" and instead and need not in instead  # one of them will do
                what, name = ("calibration or train", "calibration") if either else (need, need)
                self.errors.add(
                    path,
                    f"{word} needs {what} data. Set data: {{{name}: FILE}}.",
                    code="missing-data",
                )
        self._check_references(draft)
        self._check_selection(draft)
        draft.unavailable = unavailable_reason(draft.stage_class, draft.target, draft.settings)
        draft.unscored = unscored_reason(
            draft.stage_class.produces, draft.target, getattr(draft.settings, "dtype", None)
        )
        if draft.parent is None:
            return
        parent = self.drafts.get(draft.parent)
        if parent and parent.unavailable and not draft.unavailable:
            draft.unavailable = f"its parent step '{parent.name}' cannot run on this machine."
        self._check_order(draft)

    def _check_references(self, draft: StepDraft) -> None:
        """Check that settings that name a step name an earlier one with a torch model."""
        earlier = [name for name in self.step_names if name != draft.name]
        torch = [name for name in earlier if self._step_format(name) in ("torch", None)]
        free = draft.settings.any_format_references() if draft.settings else ()
        folders = draft.settings.folder_references() if draft.settings else ()
        for setting, name in draft.references.items():
            fit = earlier if setting in free else torch
            path = (*draft.entry.path, *(int(w) if w.isdigit() else w for w in setting.split(".")))
            if name in fit or (
                name not in earlier and name not in self._declared_names and self.may_exist(name)
            ):
                continue
            if name in earlier:
                code = "wrong-model-format"
                what = f"'{name}' is a model in the format {self._step_format(name)}, expected torch."
            else:
                code = "later-step" if name in self._declared_names else "unknown-step"
                what = f"no earlier step '{name[:60]}'."
            hint = did_you_mean(name, fit)
            folder = resolve_path(self.recipe.base, name)
            is_model = (
                name.strip() and path_exists(folder / "config.json") and any(folder.glob("*.safetensors"))
            )
            if setting in folders and is_model:
                hint = f" For a model in a folder write `{{model: {name}}}`."
            self.errors.add(path, f"{what} Possible steps: {', '.join(fit)}.{hint}", code=code)

    def _check_selection(self, draft: StepDraft) -> None:
        """Check that checkpoints are chosen by the loss, or by a metric that the recipe scores."""
        metric = getattr(draft.settings, "metric_for_best_model", "loss")
        if metric == "loss" or has_error(self.invalid_paths, "task", "score"):
            return
        path = (*draft.entry.path, "metric_for_best_model")
        if self.recipe.task == "language-modeling":
            self.errors.add(
                path,
                "the metrics of a language model are functions of its loss. Set metric_for_best_model: loss.",
                code="metric-follows-loss",
            )
            return
        # the default metrics of a classifier are known only after reading its labels
        known = ("loss", *(self.recipe.score.quality or METRICS_BY_TASK[self.recipe.task]))
        known = tuple(name for name in known if name != AGREEMENT_METRIC)  # it needs the baseline's outputs
        if metric not in known:
            self.errors.add(
                path,
                f"'{metric[:60]}' is not scored. Available: {', '.join(known)}.{did_you_mean(metric, known)}"
                " Add other metrics to score: {quality: [...]}.",
                code="metric-not-scored",
            )

    def _check_order(self, draft: StepDraft) -> None:
        assert draft.stage_class is not None
        word, path = draft.entry.stage, draft.entry.path
        above = self._ancestors(draft)
        parent = above[0] if above else None
        given: Format | None = parent.format if parent else self._start_format
        if given is not None and given not in draft.stage_class.accepts:
            accepts = " or ".join(sorted(draft.stage_class.accepts))
            advice = self._order_advice(draft, given, above)
            reality = f"its parent step '{draft.parent}' outputs {given}"
            advice = f"{advice[:1].upper()}{advice[1:]}"
            self.errors.add(
                path,
                f"{word} needs a model in {accepts}, but {reality}. {advice}.",
                code="wrong-model-format",
            )
            return
        if getattr(draft.stage_class, "imported_only", False) and self._start_format != "onnx":
            self.errors.add(
                path,
                f"{word} is only for recipes that start from an ONNX model. The stage `onnx` simplifies its"
                " graphs; to quantize, put `quantize` before it; for float16, set `onnx: {dtype: fp16}`.",
                code="needs-onnx-model",
            )
            return
        quantized = next((d for d in above if d.entry.stage in ("quantize", "quantize-onnx")), None)
        for name, why in TRAINING_BEFORE_QUANTIZE.items():
            if quantized and getattr(draft.settings, name, None) is not None:
                self.errors.add(
                    (*path, name),
                    f"the weights are already quantized ({scheme_text(quantized)}) by '{quantized.name}';"
                    f" {why.replace('WORD', word)}",
                    code=AFTER_QUANTIZE,
                )
        if quantized and getattr(draft.stage_class, "needs_float", False):
            self.errors.add(
                path,
                f"{word} needs float weights, but '{quantized.name}' quantized them"
                f" ({scheme_text(quantized)})."
                f" Move it before '{quantized.name}', or set `from: {quantized.parent or MODEL_STEP}`.",
                code="already-quantized",
            )
        self._check_units(draft, above)
        check_target(draft, parent, quantized, self._start_format, self.errors)
        if draft.entry.stage == "onnx" and any(d.entry.stage == "shortlist" for d in above):
            check_shortlist_scheme(draft, quantized, self.errors)
        self.warnings += poor_order_warnings(draft, above)

    def _check_units(self, draft: StepDraft, above: list[StepDraft]) -> None:
        """Check that no earlier step makes it impossible to prune heads and neurons."""
        cuts = (
            getattr(draft.stage_class, "prunes_units", False)
            or getattr(draft.settings, "learned_masks", None) is not None
        )
        for d in above if cuts else ():
            holds = getattr(d.stage_class, "unit_pruning_error", None)
            if holds and d.settings and (why := holds(d.settings)):
                self.errors.add(
                    draft.entry.path,
                    f"{draft.entry.stage} is not possible after '{d.name}': {why}. Move it before '{d.name}',"
                    f" or set `from: {d.parent or MODEL_STEP}`.",
                    code="impossible-order",
                )

    def _ancestors(self, draft: StepDraft) -> list[StepDraft]:
        """Return the ancestors of `draft`, nearest first."""
        found: list[StepDraft] = []
        name = draft.parent
        while name is not None and name in self.drafts:
            found.append(self.drafts[name])
            name = self.drafts[name].parent
        return found

    def _step_format(self, name: str) -> Format | None:
        return self._start_format if name == MODEL_STEP else self.drafts[name].format

    def _order_advice(self, draft: StepDraft, given: Format, above: list[StepDraft]) -> str:
        """Return how to give `draft` a parent whose format it accepts."""
        assert draft.stage_class is not None
        accepts = draft.stage_class.accepts
        if self._start_format == "onnx" and given == "onnx":
            fitting = [w for w in stages.STAGE_CLASSES if "onnx" in stages.load_stage(w).accepts]
            return (
                f"stages for ONNX models: {', '.join(fitting)}. For {draft.entry.stage} start from the"
                " folder with weights that the ONNX model was exported from"
            )
        ways = []
        turned = [d for d in above if d.format == given]
        if turned and turned[-1].parent is not None and self._step_format(turned[-1].parent) in accepts:
            ways.append(f"move it before '{turned[-1].name}'")
        possible = [
            name for name in self.step_names if name != draft.name and self._step_format(name) in accepts
        ]
        if possible:
            ways.append(f"set `from:` to one of: {', '.join(possible)}")
        makers = [word for word in stages.STAGE_CLASSES if stages.load_stage(word).produces in accepts]
        return ", or ".join(ways) or f"put one of these before it: {', '.join(makers)}"


def _unparsed_step_names(recipe: ParsedRecipe) -> set[str]:
    """Return the possible names of invalid steps; `*` for any name."""
    items = recipe.document.get("stages")
    read = {entry.index for entry in recipe.stages}
    found: set[str] = set()
    for number, item in enumerate(items if isinstance(items, list) else ["*"]):
        name = item.get("name") if isinstance(item, dict) else None
        if number not in read:
            # without `name`, a step has the name of its stage, which is unknown if mistyped
            found |= {name} if isinstance(name, str) else set(stages.STAGE_CLASSES)
    return found if isinstance(items, list) else {"*"}


def steps_until(checker: PlanChecker, until: str | None) -> list[str]:
    """Return the names of the step `until` and all steps that it needs, in order; all steps for None."""
    if until is None or until == MODEL_STEP:
        return [] if until else list(checker.drafts)
    if until not in checker.drafts:
        if not checker.may_exist(until):
            checker.errors.add_for_option(
                checker.unknown_step_text(until), code="unknown-step", option="--until"
            )
        return list(checker.drafts)
    wanted = {until}
    for name, draft in reversed(checker.drafts.items()):  # dependencies come before a step
        if name in wanted:
            wanted |= {draft.parent or MODEL_STEP, *draft.references.values()}
    return [name for name in checker.drafts if name in wanted]


def plan_gates(checker: PlanChecker, included: list[str]) -> tuple[PlannedGate, ...]:
    """Return the gates with the steps to check: those of `at`, or the last scored step of each branch.

    With `--until`, a gate whose steps are all excluded is not evaluated: its limit was written for another
    step than the last one of the shortened run.
    """
    out: list[PlannedGate] = []
    last = _leaf_steps(checker)
    for metric, gate in checker.recipe.gates.items():
        at = (gate.at,) if isinstance(gate.at, str) else gate.at
        if has_error(checker.invalid_paths, f"gates.{metric}.at"):
            at = None
        for name in at or ():
            if not checker.may_exist(name):
                checker.errors.add(
                    ("gates", metric, "at"), checker.unknown_step_text(name), code="unknown-step"
                )
        if metric in SPEED_METRICS and checker.recipe.score.latency is None:
            checker.warnings.append(
                warning(
                    "gate-not-judged",
                    f"The gate on {metric} is not evaluated: latency is not measured (score.latency: false).",
                )
            )
            continue
        steps = tuple(name for name in at or last if name in (MODEL_STEP, *included))
        left = [
            name for name in at or last if name in checker.step_names and name not in (MODEL_STEP, *included)
        ]
        if left and (at or not steps):
            checker.warnings.append(
                warning(
                    "gate-not-judged",
                    f"The gate on {metric} is not evaluated at {', '.join(left)}: excluded by --until.",
                )
            )
        limits = {"max_drop": gate.max_drop, "min": gate.min, "max": gate.max}
        if checker.recipe.baseline not in (MODEL_STEP, *included):
            limits.pop("max_drop")  # no baseline to compare with; check_baseline warns about it
            if metric == AGREEMENT_METRIC and checker.recipe.task != CUSTOM_TASK:
                limits = {}
        given = [(kind, limit) for kind, limit in limits.items() if limit is not None and steps]
        out += [PlannedGate(metric, kind, limit, steps, gate.confidence) for kind, limit in given]
    return tuple(out)


def check_latency_steps(checker: PlanChecker) -> None:
    """Check that the names in `score.latency.steps` are steps."""
    latency = checker.recipe.score.latency
    if not latency or has_error(checker.invalid_paths, "score.latency.steps"):
        return
    for name in latency.named_steps():
        if not checker.may_exist(name):
            checker.errors.add(
                ("score", "latency", "steps"), checker.unknown_step_text(name), code="unknown-step"
            )


def choose_judging_split(checker: PlanChecker, splits: Mapping[str, Split]) -> JudgedOn:
    """Return the split on which gates and the recommendation are evaluated.

    Choosing the best of several branches on test overestimates its score. So the choice is made on validation
    and the chosen step is scored on test. The default is test if validation has too few samples, or for
    sentence similarity, whose validation samples need no scores.

    Args:
        checker: the checker of the recipe.
        splits: the splits that were read; files that were not are large.
    """
    recipe, files = checker.recipe, checker.recipe.data.split_files()
    if recipe.judged_on is not None:
        return recipe.judged_on
    if "validation" not in recipe.data.split_sources() or recipe.task == SENTENCE_SIMILARITY:
        return "test"
    few = (
        recipe.task != "language-modeling"
        and len(splits.get("validation", range(MIN_JUDGING_ROWS))) < MIN_JUDGING_ROWS
    )
    same = files.get("validation") is not None and files.get("validation") == files.get("test")
    return "test" if few or same or len(_leaf_steps(checker)) < 2 else "validation"


def _leaf_steps(checker: PlanChecker) -> tuple[str, ...]:
    running = [d for d in checker.drafts.values() if not d.unavailable and not d.unscored]
    parents = {d.parent for d in running}
    return tuple(d.name for d in running if d.name not in parents) or (MODEL_STEP,)


def check_baseline(checker: PlanChecker, included: list[str]) -> None:
    """Check that the baseline is a step of the run and can be scored."""
    name = checker.recipe.baseline
    if has_error(checker.invalid_paths, "baseline") or name == MODEL_STEP:
        return
    if name in included:
        if reason := checker.drafts[name].unscored:
            checker.warnings.append(
                warning("no-comparison", f"No step is compared with the baseline '{name}': {reason}")
            )
        return
    if name in checker.step_names:
        checker.warnings.append(
            warning(
                "no-comparison",
                f"The baseline '{name}' is excluded by --until, so no step is compared with it.",
            )
        )
    elif not checker.may_exist(name):
        checker.errors.add(("baseline",), checker.unknown_step_text(name), code="unknown-step")


def set_engine_lengths(
    steps: Sequence[PlanStep], recipe: ParsedRecipe, setting_paths: dict[str, KeyPath], errors: RecipeErrors
) -> tuple[PlanStep, ...]:
    """Return `steps` with `max_new_tokens` of engines set to that of `score: {generation: ...}`.

    Applies to `tensorrt`, and to `engine` of an `onnx` for TensorRT's providers, if they do not set it. If
    neither is set, the stage uses the model's own value. A value below that of the scoring is an error:
    scoring would fail on longer outputs.
    """
    wanted = recipe.score.generation.max_new_tokens
    if recipe.task not in TEXT_TO_TEXT_TASKS or wanted is None:
        return tuple(steps)
    for step in steps:
        given = _engine_max_new_tokens(step)
        if given is not None and given < wanted:
            inner = ("max_new_tokens",) if step.stage == "tensorrt" else ("engine", "max_new_tokens")
            errors.add(
                (*setting_paths[step.name], *inner),
                f"{given} is less than score: {{generation: {{max_new_tokens: {wanted}}}}}. An engine cannot"
                f" generate more tokens than it was built for. Set at least {wanted} here.",
                code="engine-too-short",
            )
    return tuple(_with_max_new_tokens(step, wanted) for step in steps)


def _engine_max_new_tokens(step: PlanStep) -> int | None:
    """Return `max_new_tokens` of a step's engines; None if not set."""
    engine = step.settings if step.stage == "tensorrt" else getattr(step.settings, "engine", None)
    found: int | None = getattr(engine, "max_new_tokens", None)
    return found


def _with_max_new_tokens(step: PlanStep, wanted: int) -> PlanStep:
    if _engine_max_new_tokens(step) is not None:
        return step
    if step.stage == "tensorrt":
        update: dict[str, object] = {"max_new_tokens": wanted}
    elif getattr(step.settings, "target", None) == "ort-tensorrt":
        engine = getattr(step.settings, "engine", None) or ProviderSettings()
        update = {"engine": engine.model_copy(update={"max_new_tokens": wanted})}
    else:
        return step
    return replace(step, settings=step.settings.model_copy(update=update))

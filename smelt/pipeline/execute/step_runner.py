"""Run one step of a plan: take its artifact from the store, or run the stage and store the artifact.

What the task adds to the original model (class labels, pooling, text rules) is resolved here too.
"""

from __future__ import annotations

import contextlib
import io
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from smelt.core.artifact import MASTER_WEIGHTS_FILE, Artifact, Manifest, StepRecord
from smelt.core.errors import SmeltError, combined_error, rust_panics_as_errors
from smelt.core.files import json_hash, sha256_of
from smelt.core.messages import Message
from smelt.core.stage_cache import StageCache
from smelt.core.store import StepCheckpoints, Store
from smelt.core.system import package_versions, peak_memory_bytes, reset_peak_memory
from smelt.data.labels import ProblemType
from smelt.data.splits import Split, Windows
from smelt.evaluate.environment import default_threads, machine_id
from smelt.models.text_rules import SentenceRules, TextRules
from smelt.pipeline.execute.display import explain_step_error
from smelt.pipeline.execute.scoring import Scorer
from smelt.pipeline.inspect.machine import gpu_names, has_bf16_instructions, training_device
from smelt.pipeline.plan.task_checks import (
    embedder_metrics,
    prompt_errors,
    resolve_pooling,
    resolve_text_rules,
)
from smelt.pipeline.plan.untrained_checks import config_file, resolve_labels
from smelt.pipeline.recipe.validation_errors import dotted_path
from smelt.runtimes.onnx_import.trial_run import record_verified_graphs
from smelt.stage import Context

if TYPE_CHECKING:
    from smelt.pipeline.execute.display import Display
    from smelt.pipeline.plan.costs import StepEstimate
    from smelt.pipeline.plan.plan import Plan, PlanStep
    from smelt.pipeline.recipe.recipe import ParsedRecipe


KEY_LIBRARIES = (
    "torch",
    "transformers",
    "tokenizers",
    "sentencepiece",
    "accelerate",
    "onnx",
    "onnx-ir",
    "onnxscript",
    "onnxsim",
    "onnxruntime-gpu",
    "onnxruntime",
    "tensorrt",
    "tensorrt-rtx",
    "tensorrt-cu13",
    "tensorrt-cu12",
    "openvino",
)


# Failures of machines and processes: the training itself can resume.
_RESUMABLE = {
    "training-process-died",
    "task-lost",
    "unexpected",
    "ranks-differ",
    "too-few-gpus",
    "no-connection",
    "out-of-memory",
    "disk-full",
    "file-too-large",
}


class StageLauncher(Protocol):
    """Runs training stages in several processes (smelt.pipeline.execute.training_processes)."""

    def applies_to(self, step: PlanStep) -> bool:
        """Return whether `step` is trained in several processes."""

    def train(
        self,
        step: PlanStep,
        key: str,
        ancestors: Mapping[str, Artifact],
        store: Store,
        ctx: Context,
        log_line: Callable[[str], None],
    ) -> None:
        """Run the stage of `step` as it would run with `ctx`."""


@dataclass(frozen=True)
class StepRunner:
    """Runs the steps of one run.

    validation_scorer: scores on validation data. windows: the recipe's window settings for language models,
    stored in the artifacts so that `smelt eval` uses the same. log_metrics: receives a step's training
    curve: step, metrics, update. launch: of training stages in several processes. estimates: of the steps'
    sizes by name, which are recorded with the measured ones.
    """

    store: Store
    task: Any
    data: Mapping[str, Split]
    seed: int
    threads: int | None
    validation_scorer: Scorer
    display: Display
    versions: Mapping[str, str] = field(default_factory=lambda: package_versions(KEY_LIBRARIES))
    device: str = "auto"
    windows: Windows | None = None
    log_metrics: Callable[[str, Mapping[str, float], int], None] = lambda step, metrics, update: None
    launch: StageLauncher | None = None
    estimates: Mapping[str, StepEstimate] = field(default_factory=dict)

    @property
    def windows_details(self) -> dict[str, Any]:
        """The window settings for the manifests of artifacts; empty for other tasks."""
        return {} if self.windows is None else {"windows": self.windows.model_dump(exclude_none=True)}

    def run_step(
        self, step: PlanStep, ancestors: Mapping[str, Artifact], fresh: bool
    ) -> tuple[Artifact, bool]:
        """Return the artifact of `step`, and whether it was in the store already.

        Raises:
            SmeltError: the stage failed; nothing was stored.
        """
        key = self.step_key(step, ancestors)
        unfinished = StepCheckpoints(self.store, key)

        def make(space: Path) -> Artifact:
            if fresh:
                unfinished.remove()
            manifest = self._run_stage(step, ancestors, key, space, unfinished)
            artifact = self.store.commit(space / "out", manifest, replace=fresh)
            unfinished.remove()
            return artifact

        return self.get_or_make(step.name, key, fresh, make)

    def get_or_make(
        self, name: str, key: str, fresh: bool, make: Callable[[Path], Artifact]
    ) -> tuple[Artifact, bool]:
        """Return the artifact `key` from the store, or `make` it, one process at a time."""
        hint = f"Run the recipe again with --rebuild {name} to build it again."
        stored_artifact = None if fresh else self.store.find(key, hint)
        if stored_artifact:
            return stored_artifact, True

        def waiting(holder: str) -> None:
            self.display.print_line(f"{name}: waits for {holder}, which is making the same step", brief=True)

        with self.store.lock(key, waiting):
            # the previous lock holder may have made it
            stored_artifact = None if fresh else self.store.find(key, hint)
            if stored_artifact:
                return stored_artifact, True
            with self.store.workspace() as space:
                try:
                    with rust_panics_as_errors():
                        artifact = make(space)
                        if artifact.format == "onnx":
                            record_verified_graphs(artifact.manifest.files)
                        return artifact, False
                except Exception as error:
                    # explained here, while the workspace still exists
                    failure = explain_step_error(error, name, space, self.display.log_path)
                    if failure is error:
                        raise
                    raise failure from error

    def step_key(self, step: PlanStep, ancestors: Mapping[str, Artifact]) -> str:
        """Return the content address of the output of `step`; referenced steps enter by their keys."""
        parent = ancestors[step.parent]
        references = {
            setting: ancestors[name].key for setting, name in step.settings.step_references().items()
        }
        return json_hash(
            {
                "parent": parent.key,
                "stage": step.stage,
                "version": step.stage_class.version,
                "settings": _settings_key(step) | references,
                "seed": self.seed,
                "data": {n: s.fingerprint for n, s in self.data.items() if n != "test"},
                "libraries": dict(self.versions),
                **self._machine_key(step),
                **self._scoring_key(step),
                **_master_weights_key(step, parent),
            }
        )

    def _machine_key(self, step: PlanStep) -> dict[str, Any]:
        """Return the properties of this machine that affect the output of `step`."""
        properties: dict[str, Any] = {}
        if "tensorrt" in step.needs:
            properties["gpus"] = gpu_names()  # an engine is specific to the GPU that it was built on
        if step.needs & {"train", "unlabeled", "calibration"}:  # all may compute gradients
            properties["device"] = training_device(self.device)
            if getattr(step.settings, "precision", None) == "auto":
                properties["bf16"] = has_bf16_instructions()
        if getattr(step.settings, "lora", None) is not None:
            properties["adapters"] = package_versions(("peft",))
        elif packages := step.settings.required_packages():
            properties["packages"] = package_versions(tuple(packages))
        if step.settings.is_machine_dependent:
            from smelt.export.autotune import available_cores

            properties["machine"] = machine_id()
            properties["cores"] = available_cores()  # a process may be limited to fewer than the machine has
        return properties

    def _scoring_key(self, step: PlanStep) -> dict[str, Any]:
        """Return the scoring conditions, if a metric selects the checkpoint; else an empty dict."""
        from smelt.training.settings import LOSS_METRIC

        metric = getattr(step.settings, "metric_for_best_model", LOSS_METRIC)
        return {} if metric == LOSS_METRIC else {"score": self.validation_scorer.key_conditions()}

    def _run_stage(
        self,
        step: PlanStep,
        ancestors: Mapping[str, Artifact],
        key: str,
        space: Path,
        unfinished: StepCheckpoints,
    ) -> Manifest:
        """Run the stage with output folder `space / "out"`; return the manifest of its artifact."""
        parent = ancestors[step.parent]
        out = space / "out"
        out.mkdir()
        ctx = self.context(step, ancestors, out, unfinished)
        is_launched = self.launch is not None and self.launch.applies_to(step)
        start_time, is_reset = time.monotonic(), reset_peak_memory()
        with _capture_stdout() as chatter:
            try:
                if self.launch is not None and is_launched:
                    self.launch.train(step, key, ancestors, self.store, ctx, self.display.log_line)
                else:
                    step.stage_class()(parent, step.settings, ctx)
            except SmeltError as error:
                if error.code not in _RESUMABLE:
                    unfinished.remove()  # resuming would fail again
                raise
            finally:
                for line in chatter.getvalue().splitlines():
                    self.display.log_line(line)
        peak = peak_memory_bytes() if is_reset and not is_launched else None
        seconds = round(time.monotonic() - start_time, 3)
        ctx.details.update(self.windows_details)
        ctx.details.setdefault("parameters", parent.manifest.details.get("parameters"))
        if step.stage_class.produces == "torch":
            from smelt.models.model_size import count_parameters

            ctx.details["parameters"] = count_parameters(out)
        return Manifest(
            key=key,
            format=step.stage_class.produces,
            task=self.task,
            stage=step.stage,
            settings=step.settings.model_dump(mode="json"),
            seed=self.seed,
            parent=parent.key,
            versions=dict(self.versions),
            details=ctx.details,
            warnings=ctx.warnings,
            seconds=seconds,
            record=None if unfinished.is_resumed else self._record(step.name, seconds, peak),
        )

    def _record(self, name: str, seconds: float, peak: int | None) -> StepRecord | None:
        """Return the measured time and memory of a step; None if its work is not known."""
        estimate = self.estimates.get(name)
        if estimate is None or estimate.size is None or not estimate.size.work:
            return None
        return StepRecord(
            kind=estimate.kind,
            machine=machine_id(),
            threads=self.threads or default_threads(),
            seconds=seconds,
            memory_bytes=peak,
            estimated_memory_bytes=estimate.size.memory_bytes,
            work=estimate.size.work,
        )

    def context(
        self, step: PlanStep, ancestors: Mapping[str, Artifact], out: Path, unfinished: StepCheckpoints
    ) -> Context:
        """Return the context of the stage of `step`, which writes into the empty folder `out`."""
        stage_cache = StageCache(self.store, self.versions, self.display.print_line)
        return Context(
            out=out,
            task=self.task,
            data={n: s for n, s in self.data.items() if n != "test"},
            seed=self.seed,
            ancestors=ancestors,
            score=self._validation_scores,
            negated_metrics=self.validation_scorer.negated_metrics,
            progress=self.display.progress,
            threads=self.threads,
            device=self.device,
            cached_value=stage_cache.cached_value,
            cached_files=stage_cache.cached_files,
            next_checkpoint_folder=unfinished.next_folder,
            checkpoint_saved=unfinished.saved,
            log_metrics=partial(self.log_metrics, step.name),
            log=self.display.print_line,
        )

    def _validation_scores(self, artifact: Artifact, split: Split | None = None) -> Mapping[str, float]:
        scores = self.validation_scorer.score(artifact, split or self.data["validation"])["quality"]
        # stages select the highest value, so metrics where lower is better are negated
        return {n: s["value"] if s["higher_is_better"] else -s["value"] for n, s in scores.items()}


def recipe_scorer(recipe: ParsedRecipe, store: Store) -> Scorer:
    """Return the scorer with the settings of a recipe."""
    score = recipe.score
    return Scorer(
        store,
        recipe.task,
        score.quality,
        score.generation,
        score.batch_size,
        recipe.threads,
        recipe.truncation,
        recipe.device,
        recipe.metric_settings,
        recipe.base,
    )


def recipe_step_runner(
    recipe: ParsedRecipe,
    store: Store,
    data: Mapping[str, Split],
    scorer: Scorer,
    display: Display,
    launch: StageLauncher | None = None,
    estimates: Mapping[str, StepEstimate] | None = None,
) -> StepRunner:
    """Return the runner of a recipe's steps."""
    return StepRunner(
        store,
        recipe.task,
        data,
        recipe.seed,
        recipe.threads,
        scorer,
        display,
        device=recipe.device,
        windows=recipe.data.windows if recipe.traits.samples == "running-text" else None,
        launch=launch,
        estimates=estimates or {},
    )


def _master_weights_key(step: PlanStep, parent: Artifact) -> dict[str, Any]:
    """Return the hash of the float master weights, if a step that changes quantized weights has them."""
    weights_file = parent.manifest.files.get(MASTER_WEIGHTS_FILE)
    continues_training = step.settings.changes_quantized_weights or step.stage_class.changes_quantized_weights
    return {"latents": weights_file.sha256} if continues_training and weights_file is not None else {}


def _settings_key(step: PlanStep) -> dict[str, Any]:
    """Return a step's settings for its key; files and folders enter by the hash of their content."""
    values: dict[str, Any] = step.settings.model_dump(mode="json")
    for (*parents, last), name in step.settings.paths().items():
        path, mapping = Path(name), cast("Any", values)
        for key in parents:
            mapping = mapping[key]
        files = [path] if path.is_file() else sorted(p for p in path.iterdir() if p.is_file())
        mapping[last] = json_hash([[p.name, sha256_of(p)] for p in files])
    return values


@contextlib.contextmanager
def _capture_stdout() -> Iterator[io.StringIO]:
    """Capture the output of libraries, which is written to the log instead of the terminal."""
    chatter = io.StringIO()
    with contextlib.redirect_stdout(chatter), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield chatter


ClassLabels = tuple[ProblemType, list[str]]


@dataclass(frozen=True)
class TaskSetup:
    """Task-specific settings of the original model.

    labels: problem type of a classifier, and the class names if it gets a new classifier. sentences: pooling
    of a sentence embedder. text_rules: prefix and languages of texts.
    """

    text_rules: TextRules
    labels: ClassLabels | None = None
    sentences: SentenceRules | None = None

    @property
    def key_parts(self) -> dict[str, Any]:
        """The parts that enter the artifact's key."""
        sentence_part = {} if self.sentences is None else {"sentences": self.sentences.model_dump()}
        return {"text": self.text_rules.cache_key(), **sentence_part}


@dataclass(frozen=True)
class ResolvedTask:
    """The model folder, task setup, metrics and warnings of a run, once model and data are available."""

    folder: Path
    task_setup: TaskSetup
    metrics: Sequence[str]
    warnings: Sequence[Message] = ()


def resolve_task(plan: Plan, data: Mapping[str, Split], metrics: Sequence[str]) -> ResolvedTask:
    """Return the task setup for the model of `plan`; a hub id is downloaded now.

    Args:
        plan: plan of the run.
        data: all splits.
        metrics: metrics of the recipe; replaced by the task's defaults if empty.

    Raises:
        InputError: model, labels, scores and metrics do not fit each other.
    """
    recipe, model = plan.recipe, plan.recipe.model
    has_weights = isinstance(model, str)
    folder = plan.model_folder if isinstance(model, str) else recipe.base / model.config
    file = folder / "config.json" if isinstance(model, str) else config_file(model, recipe.base)
    labels, sentences, warnings = None, None, list[Message]()
    if recipe.traits.classifies:
        labels, metrics = resolve_labels(recipe, file, data, plan.problem_type)
    elif recipe.traits.output == "embedding":
        metrics = embedder_metrics(recipe, data)
        sentences, warnings = resolve_pooling(recipe, folder if has_weights else None)
    rules, _ = resolve_text_rules(recipe, folder)
    if errors := prompt_errors(recipe, folder, data):
        raise combined_error([message.with_prefix(f"{dotted_path(path)}: ") for path, message in errors])
    return ResolvedTask(folder, TaskSetup(rules, labels, sentences), metrics, warnings)

"""`smelt shrink`: make a model smaller or faster within a loss of quality and a time, without a recipe.

The model and one training update are measured; from task, family, samples and time follows a recipe with a
search space, which is written and searched. The recipe can be edited and searched again by `smelt search`.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from smelt.core.errors import InputError, SmeltError, did_you_mean
from smelt.core.files import write_atomically
from smelt.core.locks import file_lock
from smelt.core.workspaces import temporary_workspace
from smelt.data.tasks import Task, task_traits
from smelt.evaluate.metrics.registry import METRICS, METRICS_BY_TASK, is_lower_better
from smelt.models.families.limits import no_blocks_reason
from smelt.models.families.registry import find_family
from smelt.pipeline.execute.run import RunOptions, run_plan
from smelt.pipeline.execute.run_folder import StorePlace, check_store
from smelt.pipeline.execute.step_runner import resolve_task
from smelt.pipeline.inspect.init_recipe import InitOptions, init_recipe
from smelt.pipeline.inspect.init_stages import MIN_SHORTLIST_ROWS, layer_counts
from smelt.pipeline.inspect.model_info import ModelInfo, inspect_model, is_onnx
from smelt.pipeline.plan.load_plan import make_plan
from smelt.pipeline.recipe.stages import MODEL_STEP, load_stage
from smelt.pipeline.recipe.yaml_file import dump_yaml, parse_yaml
from smelt.pipeline.search.report import finish_search
from smelt.pipeline.search.space import SearchSpace, read_space
from smelt.pipeline.search.study import Search, SearchOptions
from smelt.quantization.schemes.registry import DEFAULT_SCHEME, SCHEMES_BY_BITS, STATIC_SCHEME
from smelt.training.processes import require_single_process

RECIPE_FILE = "shrink.yaml"
_FORMS = '"2x faster", "4x smaller", or "at most 20 MB"'
_BYTES = {"KB": 1e3, "MB": 1e6, "GB": 1e9}
DEFAULT_MAX_DROP = 1.0  # points of a metric from 0 to 100
DEFAULT_MINUTES = 30.0
# Of the time, for training; the rest is for exports, scores and latency. Trainings that fit into it.
_TRAINING_SHARE, _TRAININGS = 0.7, 6
_MIN_UPDATES, _MAX_UPDATES = 100, 20_000  # a student of fewer updates is not worth its time
_TIMED_UPDATES = (1, 4, 16)  # the first training warms up; the other two differ by the time of 12 updates
_LEAST_SHARE = 0.3  # of the time of the longest training, which is for updates: a busy machine hides them
_AUTOTUNE_MINUTES = 20.0  # choosing operators by measuring takes about a minute a trial
_LATENCY: dict[str, Any] | bool = {"batch_sizes": [1]}
_KEPT_RATIOS = (0.5, 0.75)  # of FFN neurons


@dataclass(frozen=True)
class Target:
    """A speed-up of at least `value`, 1 / `value` of the model's size, or at most `value` bytes."""

    kind: Literal["speedup", "ratio", "bytes"]
    value: float
    text: str


@dataclass(frozen=True)
class ShrinkOptions:
    """Options of `smelt shrink`.

    targets: as texts, see `parse_target`; empty: as fast as possible. max_degradations: as texts, see
    `parse_max_degradation`; empty: 1 point of the main metric. time_limit_minutes: time for measuring and
    trials of a call, checked before each step of a trial, except the first trial, which is finished; the
    scores on test come after it. task, columns, languages: as for `smelt init`. out: the folder (default:
    runs/NAME-shrink). store: as for a run.
    """

    targets: tuple[str, ...] = ()
    max_degradations: tuple[str, ...] = ()
    time_limit_minutes: float = DEFAULT_MINUTES
    task: Task | None = None
    columns: Mapping[str, str] = field(default_factory=dict)
    languages: tuple[str | None, str | None] = (None, None)
    out: Path | None = None
    store: StorePlace | None = None


@dataclass(frozen=True)
class Measured:
    """What is measured before a search.

    size_bytes: of the original model. metric: the main one. rows: number of training samples.
    update_seconds: of one training update; None without training samples.
    """

    size_bytes: int
    metric: str
    rows: int
    update_seconds: float | None


def parse_target(text: str) -> Target:
    """Return a target: "2x faster", "4x smaller", "at most 20 MB" (or "under"; powers of 1000).

    Raises:
        InputError: it has another form, or does not ask for anything.
    """
    normalized = " ".join(text.split()).replace("X ", "x ")
    number = r"(\d+(?:\.\d+)?)"
    if match := re.fullmatch(rf"{number} ?[x×] (faster|smaller)", normalized):
        if float(match[1]) > 1:
            return Target("speedup" if match[2] == "faster" else "ratio", float(match[1]), normalized)
    elif (match := re.fullmatch(rf"(?:at most|under) {number} ?(KB|MB|GB)", normalized)) and float(
        match[1]
    ) > 0:
        return Target("bytes", float(match[1]) * _BYTES[match[2]], normalized)
    raise InputError(f"target: expected {_FORMS}, got {text!r}.", code="wrong-value", setting="target")


def parse_max_degradation(text: str) -> tuple[str, float]:
    """Return metric and limit of a text such as "bleu 0.5".

    Raises:
        InputError: it has another form, or names no metric.
    """
    match = re.fullmatch(r"\s*([^\s:]+)[ :]+(\d+(?:\.\d+)?)\s*", text)
    if match is None or match[1] not in METRICS:
        raise InputError(
            f'max_degradation: expected a metric and its largest loss, such as "bleu 0.5", got {text!r}.',
            code="wrong-value",
            setting="max_degradation",
        )
    return match[1], float(match[2])


class _Shrink:
    """One call of `smelt shrink`."""

    def __init__(self, model: str, data: Sequence[Path], options: ShrinkOptions) -> None:
        self.model, self.data, self.options = model, [path.resolve() for path in data], options
        self.targets = [parse_target(text) for text in options.targets]
        self.drops = dict(parse_max_degradation(text) for text in options.max_degradations)
        if not options.time_limit_minutes > 0:
            raise InputError(
                "time_limit_minutes: expected a positive time.",
                code="wrong-value",
                setting="time_limit_minutes",
            )
        if is_onnx(model, Path.cwd()):
            raise InputError(
                f"{model}: shrink trains and prunes, which an ONNX file does not allow. Use the model that it"
                f" was exported from, or write a recipe: smelt init {model}.",
                code="does-not-fit-model",
            )
        name = Path(model).resolve().name if Path(model).exists() else model.rstrip("/").split("/")[-1]
        self.folder = (options.out or Path("runs") / f"{name}-shrink").resolve()

    @property
    def command(self) -> str:
        """What the recipe follows from, as JSON: another call in the same folder is another search."""
        o = self.options
        arguments = [
            self.model,
            [str(path) for path in self.data],
            o.targets,
            o.max_degradations,
            o.time_limit_minutes,
        ]
        return json.dumps([*arguments, o.task, dict(o.columns), o.languages])

    def written_recipe(self) -> Path | None:
        """Return the recipe of an earlier call with the same arguments; None if there is none.

        Raises:
            InputError: the folder has the recipe of another call.
        """
        path = self.folder / RECIPE_FILE
        if not path.exists():
            return None
        first_line = path.read_text(encoding="utf-8").split("\n", 1)[0]
        if first_line != f"# {self.command}":
            raise InputError(
                f"{self.folder}: has the search of other arguments. Choose another folder with --out; or go"
                f" on with it: smelt search {path} --out {self.folder}.",
                code="other-study",
            )
        return path

    def write_recipe(self, path: Path, explain: Callable[[str], None] | None) -> None:
        """Measure the model, and write the recipe with its search space and the reasons for it.

        Raises:
            InputError: the model cannot be shrunk, or the recipe would not be valid; nothing is written.
        """
        with temporary_workspace() as space:
            text, _ = init_recipe(
                self.model,
                self.data,
                str(Path(space) / "recipe.yaml"),
                self.options.task,
                options=InitOptions(self.options.task, self.options.columns, self.options.languages),
            )
            value = self._absolute(dict(parse_yaml(text, "recipe.yaml").value), Path(space))
            info = inspect_model(self.model, value["task"])
            if info.quantization is not None:
                raise InputError(
                    f"{self.model}: the weights are already quantized ({info.quantization.description});"
                    f" shrink needs float weights. Start from {info.quantization.float_source}.",
                    code="does-not-fit-model",
                )
            for metric in self.drops:
                if metric not in (metrics := METRICS_BY_TASK[info.task]):
                    raise InputError(
                        f"max_degradation: '{metric}' is not a metric for {info.task}. Known:"
                        f" {', '.join(metrics)}.{did_you_mean(metric, metrics)}",
                        code="does-not-fit-task",
                        setting="max_degradation",
                    )
            if explain is not None:
                training_text = " and a few training updates" if "train" in value["data"] else ""
                explain(f"Measuring the model{training_text} ...")
            measurement = self._measure(value, info, Path(space))
            value, reasons = self._with_space(value, info, measurement)
            if explain is not None:
                for reason in reasons:
                    explain(reason)
            comments = "".join(f"# {line}\n" for line in [self.command, *reasons])
            text = comments + dump_yaml(value)
            checked = Path(space) / RECIPE_FILE
            checked.write_text(text, encoding="utf-8")
            read_space(str(checked))
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, text)

    def _absolute(self, value: dict[str, Any], base: Path) -> dict[str, Any]:
        """Return the recipe with absolute paths, for another folder."""

        def absolute(name: str) -> str:
            return str((base / Path(name).expanduser()).resolve()) if (base / name).exists() else name

        data = {k: absolute(v) if isinstance(v, str) else v for k, v in value["data"].items()}
        return value | {"model": absolute(value["model"]), "data": data}

    def _measure(self, value: dict[str, Any], info: ModelInfo, space: Path) -> Measured:
        """Return the size of the model, and the time of an update, from short trainings."""
        steps: list[dict[str, Any]] = []
        # without a classifier the model cannot teach
        stage, losses = ("finetune", {}) if info.needs_classifier else ("distill", _losses(info.task))
        if "train" in value["data"]:
            steps = [
                {stage: losses | {"max_steps": count, "num_evals": 0}, "name": f"timed{count}"}
                for count in _TIMED_UPDATES
            ]
            for step in steps[1:]:
                step["from"] = MODEL_STEP
        recipe = {key: key_value for key, key_value in value.items() if key != "baseline"}
        document = parse_yaml(dump_yaml(recipe | {"stages": steps or [{"onnx": {}}]}), "measured.yaml")
        plan = make_plan(document, space / "measured.yaml", until=None if steps else MODEL_STEP)
        data = plan.read_data()
        metric = resolve_task(plan, data, plan.recipe.score.quality).metrics[0]
        options = RunOptions(space / "run", space / "store", quiet=True, scored=False, pages=False)
        report = run_plan(plan, options).report
        if report["status"] == "interrupted":
            raise KeyboardInterrupt
        steps_by_name = {step["name"]: step for step in report["steps"]}
        if failed := [step["error"] for step in report["steps"] if step["error"]]:
            raise InputError(f"measuring the model: {failed[0]['message']}", code=failed[0]["code"])
        size = int(steps_by_name[MODEL_STEP]["size_bytes"])
        if not steps:
            return Measured(size, metric, 0, None)
        _, min_updates, max_updates = _TIMED_UPDATES
        short_seconds, long_seconds = (
            steps_by_name[f"timed{count}"]["seconds"] for count in (min_updates, max_updates)
        )
        seconds = max(
            (long_seconds - short_seconds) / (max_updates - min_updates),
            _LEAST_SHARE * long_seconds / max_updates,
        )
        return Measured(size, metric, len(data["train"]), seconds)

    def _with_space(
        self, value: dict[str, Any], info: ModelInfo, measured: Measured
    ) -> tuple[dict[str, Any], list[str]]:
        """Return the recipe with stages and goal of the search, and the reasons for them."""
        update, minutes = measured.update_seconds, self.options.time_limit_minutes
        reasons = [f"The model has {measured.size_bytes / 1e6:.1f} MB."]
        num_updates = 0
        if update is not None:
            max_fitting = _TRAINING_SHARE * 60 * minutes / (_TRAININGS * update)
            num_updates = min(_MAX_UPDATES, int(max_fitting))
            share = f"{100 * _TRAINING_SHARE:.0f} % of {minutes:.3g} minutes"
            text = (
                f"An update takes {update:.2f} s: {_TRAININGS} trainings of {num_updates:,} updates fit into"
                f" {share}."
            )
            if num_updates < _MIN_UPDATES:
                num_updates = 0
                text = (
                    f"An update takes {update:.2f} s: {_TRAININGS} trainings of {_MIN_UPDATES} updates do not"
                    f" fit into {share}, so only stages without training are tried."
                )
            reasons.append(text)
        stages, stage_reasons = _space_stages(info, measured, num_updates, minutes)
        metric = measured.metric
        drops = self.drops or {metric: DEFAULT_MAX_DROP}
        if not self.drops and math.isinf(METRICS[metric].limits[1]):
            raise InputError(
                f'max_degradation: set how much may be lost, such as --max-degradation "{metric} 1", since'
                f" {metric} has no fixed range.",
                code="missing-max-degradation",
                setting="max_degradation",
            )
        limits: dict[str, Any] = {name: {"max_degradation": drop} for name, drop in drops.items()}
        for target in self.targets:
            if target.kind == "speedup":
                limits["speedup"] = {"min": target.value}
            else:
                max_bytes = int(
                    target.value if target.kind == "bytes" else measured.size_bytes / target.value
                )
                limits["size_bytes"] = {
                    "max": min(max_bytes, limits.get("size_bytes", {"max": max_bytes})["max"])
                }
        goal = "size" if self.targets and self.targets[0].kind != "speedup" else "latency"
        reasons += stage_reasons
        drops_text = ", ".join(
            f"{name} may {'rise' if is_lower_better(name, {}) else 'fall'} by {drop:g}"
            for name, drop in drops.items()
        )
        goal_text = ", ".join(target.text for target in self.targets) or f"the lowest {goal}"
        reasons.append(f"Goal: {goal_text}; {drops_text}.")
        if info.needs_classifier:
            num_updates = num_updates or 3 * _MIN_UPDATES
            training_stage = {
                "finetune": {"max_steps": num_updates, "learning_rate": 5.0e-5},
                "name": "tuned",
            }
            stages = [training_stage, *stages]
            value["baseline"] = "tuned"
        score = dict(value.get("score") or {}) | {"latency": _LATENCY}
        quality = list(score.get("quality") or [])
        score["quality"] = [*drops, *(name for name in quality if name not in drops)]
        search = {"minimize": goal, "time_limit_minutes": minutes}
        return value | {"stages": stages, "score": score, "gates": limits, "search": search}, reasons


def _losses(task: Task) -> dict[str, Any]:
    """Return the losses of `distill` for a student that learns from the teacher alone."""
    if task_traits(task).embeds:
        return {"losses": {"sentence_embedding": 1.0, "pairwise_similarity": 1.0}}
    temperature = 1.0 if task_traits(task).output == "text" else 2.0
    return {"losses": {"logits": 1.0, "labels": 0.0}, "temperature": temperature}


def _choices(*values: Any) -> dict[str, Any]:
    return {"search": {"choices": list(dict.fromkeys(values))}}


def _space_stages(
    info: ModelInfo, measured: Measured, updates: int, minutes: float
) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the stages of the space, and what is tried and what is not, with the reasons.

    updates: of each training; 0: none.
    """
    has_no_blocks, trains = no_blocks_reason(info.config) is not None, measured.update_seconds is not None
    stages: list[dict[str, Any]] = []
    reasons: list[str] = []

    def add(stage: str, settings: dict[str, Any], why: str, optional: bool = True) -> None:
        if info.task in load_stage(stage).tasks:
            stages.append({stage: settings} | ({"optional": "search"} if optional else {}))
            reasons.append(f"{stage}: {why}.")

    family = find_family(info.config)
    is_depthwise = family is not None and not family.has_dense_kernels
    if is_depthwise:
        reasons.append("Not factorize: its convolutions are depthwise.")
    elif has_no_blocks:
        add("factorize", {"method": "tucker", "keep_ratio": _choices(0.3, 0.5, 0.7)}, "low-rank convolutions")
    elif trains:
        importance = {"importance": "magnitude"} if info.traits.output == "embedding" else {}
        prune_settings = {"targets": ["ffn"], "keep_ratio": _choices(*_KEPT_RATIOS)}
        add(
            "prune",
            prune_settings | importance,
            "half or a quarter of the neurons of feed-forward layers are removed",
        )
    else:
        add("factorize", {"method": "svd", "energy": {"search": [0.9, 0.99]}}, "needs no training samples")
    if updates:
        settings: dict[str, Any] = {"teacher": "tuned"} if info.needs_classifier else {}
        counts = layer_counts(info)
        stack = (
            "decoder_layers" if info.traits.architecture == "encoder-decoder" else next(iter(counts), None)
        )
        if stack is not None and not has_no_blocks and (count := counts.get(stack, 1)) > 1:
            layer_choices = _choices(max(1, round(count / 3)), max(1, round(count / 2)), count)
            settings["student"] = {stack: layer_choices}
        settings |= _losses(info.task) | {"max_steps": updates, "lr_scheduler_type": "cosine"}
        add("distill", settings, f"{updates:,} updates on the outputs of the whole model, with fewer layers")
    if info.traits.architecture == "encoder-decoder" and info.traits.modality == "text":
        if measured.rows >= MIN_SHORTLIST_ROWS:
            add("shortlist", {}, "the output layer computes only likely tokens")
        else:
            reasons.append(
                f"Not shortlist: it needs {MIN_SHORTLIST_ROWS:,} training samples, not {measured.rows:,}."
            )
    if is_depthwise and trains:
        add("quantize", {"scheme": STATIC_SCHEME}, "convolutions of 8 bits")
    elif not has_no_blocks:
        schemes = _choices(DEFAULT_SCHEME, SCHEMES_BY_BITS[4].name)
        add("quantize", {"scheme": schemes}, "weights of 8 or 4 bits")
    autotune_setting = (
        {"autotune": _choices(False, True)} if minutes >= _AUTOTUNE_MINUTES and not has_no_blocks else {}
    )
    add("onnx", {"target": "ort-cpu"} | autotune_setting, "for ONNX Runtime on this CPU", optional=False)
    return stages, reasons


def plan_shrink(
    model: str, data: Sequence[Path], options: ShrinkOptions, explain: Callable[[str], None] | None
) -> SearchSpace:
    """Return the search space for a model, without writing anything.

    Args:
        model: a folder or a hub id.
        data: files or folders with the splits, as for `smelt init`.
        options: target, largest loss and time.
        explain: called with a line about each decision, or None.

    Raises:
        InputError: target, model or data are not suitable.
    """
    job = _Shrink(model, data, options)
    with temporary_workspace() as space:
        path = Path(space) / RECIPE_FILE
        job.write_recipe(path, explain)
        return read_space(str(path))


def shrink(
    model: str, data: Sequence[Path], options: ShrinkOptions, explain: Callable[[str], None] | None
) -> tuple[dict[str, Any], Path]:
    """Search for the smallest or fastest form of a model; return the report and its folder.

    The report is that of a search (search.json): `front` is empty where the target cannot be met, then
    `nearest` is the trial that comes closest. A second call with the same arguments goes on.

    Args:
        model: a folder or a hub id.
        data: files or folders with the splits, as for `smelt init`.
        options: target, largest loss, time and folder.
        explain: called with a line about each decision and each trial; None: nothing is printed.

    Raises:
        InputError: target, model or data are not suitable, or the folder has another search.
        RunError: all of the first trials failed.
    """
    require_single_process("smelt shrink")
    job, start_time = _Shrink(model, data, options), time.monotonic()
    check_store(options.store)
    try:
        job.folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"{job.folder}: cannot use this folder: {error.strerror}. Choose another with --out.",
            code="unusable-folder",
        ) from error
    path = job.folder / RECIPE_FILE
    try:
        with file_lock(job.folder / "shrink.lock"):  # two workers would measure two different spaces
            if job.written_recipe() is None:
                job.write_recipe(path, explain)
    except SmeltError:
        with suppress(OSError):
            job.folder.rmdir()  # if it is empty
        raise
    with file_lock(job.folder / "shrink.lock"):
        remaining_minutes = max(0.01, options.time_limit_minutes - (time.monotonic() - start_time) / 60)
        search = Search(
            read_space(str(path)),
            SearchOptions(job.folder, options.store, time_limit_minutes=remaining_minutes),
        )
        search.try_first(_first_point(search.space))
    return finish_search(search, search.run(explain)), job.folder


def _first_point(space: SearchSpace) -> dict[str, Any]:
    """Return the point that is tried first: without training, int8."""
    defaults = space.defaults()
    return defaults | {
        parameter.name: parameter.name == "quantize"
        for parameter in space.parameters
        if parameter.kind == "used"
    }


def target_text(report: Mapping[str, Any], targets: Sequence[str]) -> str:
    """Return a sentence that says whether the targets were met, and by which trial."""
    goal_text = ", ".join(targets) or "the goal"
    if report["front"]:
        best = report["front"][0]
        latency = best["latency"] or {}
        uses_cpu_time = latency.get("stable") is False  # as the constraint was judged
        speed = latency.get("cpu_speedup" if uses_cpu_time else "speedup")
        timing_text = " by processor time" if uses_cpu_time else ""
        results = [f"{best['size_bytes'] / 1e6:.1f} MB"]
        results += [f"{speed:.2f} times as fast{timing_text}"] if speed else []
        return f"Met: {goal_text}. {best['name']} has {', '.join(results)}."
    nearest = report["nearest"]
    if nearest is None:
        return f"Not met: {goal_text}. No trial was measured."
    violations_text = ", ".join(
        f"{name} by {amount:.4g}" for name, amount in nearest["violations"].items() if amount > 0
    )
    return f"Not met: {goal_text}. The nearest is {nearest['name']}, beyond the limits of {violations_text}."

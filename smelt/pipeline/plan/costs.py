"""The sizes of every step of a plan, its time by earlier steps, and the refusal of what cannot fit.

Sizes follow the model's config through the tree of steps, with the sizes of each stage
(`Stage.estimate_size`). Times and the memory of activations are those that a record of an earlier step on
this machine measured; without one they are unknown.

A refusal is certain: it compares the weights that a step must hold with all memory of the machine or its
container, and the artifacts with the free disk. What else a step holds gives warnings only.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from smelt.core.artifact import StepRecord
from smelt.core.errors import combined_error
from smelt.core.messages import Message, error_message, info, warning
from smelt.data.splits import Split
from smelt.models.model_size import (
    FLOAT_BYTES,
    INTERPRETER_BYTES,
    ModelSize,
    SizeInputs,
    StepSize,
    one_shot_size,
    read_model_size,
    size_from_config,
    sum_of_weights,
)
from smelt.models.text_rules import DEFAULT_WINDOW_LENGTH
from smelt.pipeline.inspect.machine import training_device
from smelt.pipeline.inspect.model_folder import read_config
from smelt.pipeline.plan.untrained_checks import config_file, read_untrained_config
from smelt.pipeline.recipe.model_and_data import UntrainedModel
from smelt.pipeline.recipe.recipe import DEFAULT_COMPARED_SAMPLES, MAX_COMPARED_PARAMETERS
from smelt.pipeline.recipe.stages import MODEL_STEP
from smelt.stage import Settings
from smelt.training.processes import (
    LaunchSettings,
    external_machines,
    external_processes,
    strategy_conflicts,
)
from smelt.training.settings import TrainingSettings

if TYPE_CHECKING:
    from smelt.pipeline.plan.plan import Plan, PlanStep


# The name of the estimate of the comparisons of layers and next tokens; no step can have it.
COMPARISONS = "baseline comparisons"
# Of the estimated size of the artifacts, what is certainly needed: some layers may become smaller.
_CERTAIN_DISK = 0.7


_CHARACTERS_PER_TOKEN = 4  # of running text, about: times are in proportion to the windows of earlier runs


@dataclass(frozen=True)
class MachineLimits:
    """Bytes: all memory that a process may ever have, the free part of it, the free disk, memory of a GPU."""

    memory_bytes: int
    free_bytes: int
    disk_bytes: int
    device_bytes: int | None = None


@dataclass(frozen=True)
class StepEstimate:
    """The estimates of one step.

    kind: what records of earlier steps are compared by. size: None: unknown. scoring_bytes: of the weights
    while its artifact is scored. record: the earlier step of the kind with the most similar work.
    """

    name: str
    kind: str
    size: StepSize | None
    scoring_bytes: int | None = None
    is_gpu: bool = False
    record: StepRecord | None = None

    @property
    def seconds(self) -> float | None:
        """The time of the record, in proportion to the work; None: unknown."""
        if self.size is None or self.size.work is None or self.record is None:
            return None
        return self.record.seconds * self.size.work / self.record.work

    @property
    def memory_factor(self) -> float:
        """What the record's step took, as a multiple of what was estimated for it; 1 without one."""
        if self.record is None or self.record.memory_bytes is None:
            return 1.0
        return self.record.memory_bytes / (self.record.estimated_memory_bytes + INTERPRETER_BYTES)

    @property
    def memory_bytes(self) -> int | None:
        """Memory of the step with its interpreter: as the record's step took, or at least; None: unknown."""
        if self.size is None:
            return None
        return round(max(1.0, self.memory_factor) * (self.size.memory_bytes + INTERPRETER_BYTES))


_MAX_WORK_RATIO = 4.0  # of a step to that of a record: start and imports do not grow with the work


def estimate_steps(
    plan: Plan, splits: Mapping[str, Split], records: Sequence[StepRecord] = ()
) -> dict[str, StepEstimate]:
    """Return the estimates of the original model and of all steps that this machine can run, by name.

    Args:
        plan: a checked recipe.
        splits: the samples that were read; work on others is unknown.
        records: of earlier steps on this machine with as many threads, newest first.

    Raises:
        InputError: a weight file of the model is missing or damaged.
    """
    config = _start_config(plan)
    size = _start_size(plan, config)
    samples = _count_samples(splits)
    start = None if size is None else StepSize(size.stored_bytes, 0, size, size.stored_bytes)
    estimates = {MODEL_STEP: StepEstimate(MODEL_STEP, MODEL_STEP, start, _scoring_bytes(size))}
    configs, sizes = {MODEL_STEP: config}, {MODEL_STEP: size}
    for step in plan.steps:
        if step.unavailable:
            continue
        parent_config = configs.get(step.parent)
        step_config = (
            None if parent_config is None else step.stage_class.check_model(step.settings, parent_config)[1]
        )
        inputs = _size_inputs(plan, step, sizes, parent_config, step_config, samples)
        can_estimate = inputs is not None and (bool(inputs.source.stacks) or not step.trains)
        estimate = _estimate(step, step.settings, inputs) if inputs is not None and can_estimate else None
        result = None if estimate is None else estimate.result
        configs[step.name], sizes[step.name] = step_config, result
        is_gpu = inputs is not None and inputs.is_gpu
        kind = step_kind(plan, step) + (" on a GPU" if is_gpu else "")
        scoring = None if step.unscored else _scoring_bytes(result, step.format == "onnx")
        record = None if estimate is None else _nearest_record(kind, estimate, records)
        estimates[step.name] = StepEstimate(step.name, kind, estimate, scoring, is_gpu, record)
    comparisons = _estimate_comparisons(plan, estimates, samples, records)
    return estimates if comparisons is None else estimates | {COMPARISONS: comparisons}


def _count_samples(splits: Mapping[str, Split]) -> dict[str, int]:
    """Return the numbers of samples by split; of running text about its windows, which are not cut yet."""
    counts = {}
    for name, split in splits.items():
        if split.windows is not None:
            characters = sum(len(example.text) + 1 for example in split.examples)
            length = split.windows.length or DEFAULT_WINDOW_LENGTH
            counts[name] = math.ceil(characters / (_CHARACTERS_PER_TOKEN * length))
        elif len(split):
            counts[name] = len(split)
    return counts


def compared_steps(plan: Plan) -> tuple[list[str], list[str]]:
    """Return the names of the steps whose layers, and of those whose next tokens, may be compared."""
    formats = {MODEL_STEP: "torch" if plan.onnx_model is None else "onnx"}
    formats |= {step.name: step.format for step in plan.steps if not (step.unscored or step.unavailable)}
    baseline = plan.recipe.baseline
    others = [name for name in formats if name != baseline]
    is_torch = formats.get(baseline) == "torch"
    layers = [name for name in others if is_torch and formats[name] == "torch"]
    return layers, others if plan.recipe.traits.output == "text" and baseline in formats else []


def skipped_comparisons(plan: Plan, estimates: Mapping[str, StepEstimate]) -> list[Message]:
    """Return that comparisons are not made by default, because the baseline has too many parameters."""
    baseline, score = estimates.get(plan.recipe.baseline), plan.recipe.score
    if baseline is None or baseline.size is None:
        return []
    parameters = baseline.size.result.parameters
    settings = [
        name
        for name, steps, count in zip(
            ("sqnr_samples", "kl_samples"),
            compared_steps(plan),
            score.compared_samples(parameters),
            strict=True,
        )
        if steps and not count and getattr(score, name) is None
    ]
    return [skipped_comparisons_message(plan.recipe.baseline, parameters, settings)] if settings else []


def skipped_comparisons_message(baseline: str, parameters: int, settings: Sequence[str]) -> Message:
    """Return that the comparisons with these settings of `score` are not made by default."""
    what = " and ".join({"sqnr_samples": "layers", "kl_samples": "next tokens"}[name] for name in settings)
    requested = ", ".join(f"{name}: {DEFAULT_COMPARED_SAMPLES}" for name in settings)
    return info(
        "comparisons-skipped",
        f"The {what} of the steps are not compared with the baseline's: '{baseline}' has {parameters:,}"
        f" parameters, more than {MAX_COMPARED_PARAMETERS:,}. To compare them, set score: {{{requested}}}.",
    )


def _estimate_comparisons(
    plan: Plan,
    estimates: Mapping[str, StepEstimate],
    samples: Mapping[str, int],
    records: Sequence[StepRecord],
) -> StepEstimate | None:
    """Return the estimate of the comparisons with the baseline, after the last step; None if there are none.

    Of two models that are compared layer by layer, memory has one block and what is outside of blocks; of
    models whose next tokens are compared, one at a time.
    """
    baseline = estimates.get(plan.recipe.baseline)
    size = None if baseline is None or baseline.size is None else baseline.size.result
    counts = plan.recipe.score.compared_samples(None if size is None else size.parameters)
    layer_steps, token_steps = (
        names if count else [] for names, count in zip(compared_steps(plan), counts, strict=True)
    )
    if not layer_steps and not token_steps:
        return None
    names = [*["layers"][: len(layer_steps)], *["tokens"][: len(token_steps)]]
    kind = " ".join([COMPARISONS, *names, training_device(plan.recipe.device)])
    step_size = None
    if size is not None:
        held = [0]
        if layer_steps:
            one_model = FLOAT_BYTES * (size.parameters - size.block_weights + size.largest_block)
            held.append(2 * min(one_model, size.float_bytes))
        if token_steps:
            held += [estimates[name].scoring_bytes or 0 for name in token_steps if name in estimates]
        layer_samples, token_samples = counts
        if plan.recipe.traits.samples != "running-text":  # its windows are not counted
            token_samples = min(token_samples, samples.get(plan.judged_on, token_samples))
            layer_samples = min(
                layer_samples, samples.get("validation", samples.get(plan.judged_on, layer_samples))
            )
        work = size.parameters * (layer_samples * len(layer_steps) + token_samples * len(token_steps))
        step_size = StepSize(max(held), 0, size, disk_bytes=0, work=float(work))
    record = None if step_size is None else _nearest_record(kind, step_size, records)
    return StepEstimate(COMPARISONS, kind, step_size, record=record)


def _nearest_record(kind: str, size: StepSize, records: Sequence[StepRecord]) -> StepRecord | None:
    """Return the record of the kind whose work is the most similar, the newest of equal ones."""
    if not size.work:
        return None
    ratios = [(abs(math.log(size.work / each.work)), each) for each in records if each.kind == kind]
    ratio, record = min(ratios, key=lambda pair: pair[0], default=(math.inf, None))
    return record if ratio <= math.log(_MAX_WORK_RATIO) else None


def _scoring_bytes(size: ModelSize | None, is_graph: bool = False) -> int | None:
    """Return the bytes of the weights while a model is scored; None if its size is not known.

    A quantized matrix is kept as it is and dequantized; a session of ONNX Runtime packs its weights again.
    """
    if size is None:
        return None
    if is_graph:
        return 2 * size.stored_bytes
    return size.float_bytes + (size.stored_bytes if size.bytes_per_weight < 2 else 0)


def _processes_of(plan: Plan, step: PlanStep) -> tuple[int, int]:
    """Return the processes that train a step together, and their machines; 1 and 1 if only one does."""
    count = external_processes() or plan.recipe.launch.num_processes
    divided = count > 1 and isinstance(step.settings, TrainingSettings)
    return (count, external_machines()) if divided else (1, 1)


# settings whose values, and settings whose presence, decide how the time of a step grows with its work
_COMPARED_VALUES = ("method", "target", "scheme", "importance", "dtype")
_COMPARED_FLAGS = (
    *("lora", "qat", "sparsify", "learned_masks", "sequence_level", "max_steps", "max_tokens_per_batch"),
    *("mixed_precision", "low_rank_correction", "autotune", "gradient_checkpointing", "calibration_samples"),
)


def step_kind(plan: Plan, step: PlanStep) -> str:
    """Return what measurements of steps are compared by.

    That is the stage, the settings that decide how its time grows, and the processes with their strategy.
    """
    settings: Any = step.settings
    values = (getattr(settings, name, None) for name in _COMPARED_VALUES)
    terms = [step.stage, *(str(value) for value in values if value is not None)]
    terms += [name for name in _COMPARED_FLAGS if getattr(settings, name, None)]
    processes, machines = _processes_of(plan, step)
    if processes > 1:
        terms.append(f"{processes} processes on {machines}, {plan.recipe.launch.description}")
    return " ".join(terms)


def _start_config(plan: Plan) -> Mapping[str, Any] | None:
    model = plan.recipe.model
    if isinstance(model, UntrainedModel):
        return read_untrained_config(config_file(model, plan.recipe.base))[0]
    if plan.local_model is None or plan.onnx_model is not None:
        return None
    return read_config(plan.local_model)[0]


def _start_size(plan: Plan, config: Mapping[str, Any] | None) -> ModelSize | None:
    if plan.onnx_model is not None:
        graph = plan.onnx_model
        files = [*(graph.graphs.values() or [graph.file])]
        files += [graph.file.parent / name for name in graph.weight_files]
        return sum_of_weights(sum(file.stat().st_size for file in files) // FLOAT_BYTES)
    if plan.local_model is None or isinstance(plan.recipe.model, UntrainedModel):
        return None if config is None else size_from_config(config)
    return None if config is None else read_model_size(plan.local_model, config)


def _size_inputs(
    plan: Plan,
    step: PlanStep,
    sizes: Mapping[str, ModelSize | None],
    before: Mapping[str, Any] | None,
    after: Mapping[str, Any] | None,
    samples: Mapping[str, int],
) -> SizeInputs | None:
    """Return the inputs of a step's estimate; None if the size of its input is unknown."""
    source = sizes.get(step.parent)
    if source is None:
        return None
    result = source
    if after is not None and after is not before and after != before:
        fresh = size_from_config(after)
        if fresh is not None:
            result = replace(
                fresh,
                other_weights=source.other_weights,
                bytes_per_weight=source.bytes_per_weight,
                table_bytes_per_weight=source.table_bytes_per_weight,
                kept_ratio=1.0 if step.settings.replaces_model else _kept_ratio(source, before),
            )
    launch = plan.recipe.launch
    processes, machines = _processes_of(plan, step)
    is_gpu = bool(step.needs & {"train", "unlabeled"}) and training_device(plan.recipe.device) == "cuda"
    named = {
        setting: size
        for setting, name in step.settings.step_references().items()
        if (size := sizes.get(name)) is not None
    }
    return SizeInputs(
        source=source,
        result=result,
        task=plan.recipe.task,
        samples=samples,
        named=named,
        is_gpu=is_gpu,
        processes=processes,
        zero_stage=launch.divides if processes > 1 else 0,
        offloaded=processes > 1 and launch.cpu_offload,
        by_deepspeed=processes > 1 and launch.strategy == "deepspeed",
        machines=machines,
    )


def _kept_ratio(size: ModelSize, config: Mapping[str, Any] | None) -> float:
    """Return the part of the blocks' weights in `config` that the model of it still has."""
    full_size = None if config is None else size_from_config(config)
    return (
        size.block_weights / full_size.block_weights
        if full_size is not None and full_size.block_weights
        else 1.0
    )


def _estimate(step: PlanStep, settings: Settings, inputs: SizeInputs) -> StepSize:
    """Return the sizes of a step with these settings."""
    size: StepSize = step.stage_class.estimate_size(settings, inputs) or replace(
        one_shot_size(inputs), least_bytes=0
    )
    return size if inputs.source.stacks else replace(size, least_bytes=0)  # a graph may be mapped


def check_costs(
    plan: Plan,
    estimates: Mapping[str, StepEstimate],
    limits: MachineLimits,
    stored: Collection[str] = (),
    file: str | None = None,
) -> list[Message]:
    """Return errors about steps that cannot fit, and warnings about those that probably do not.

    Args:
        plan: the plan.
        estimates: of its steps.
        limits: of this machine.
        stored: names of steps whose artifacts are in the store.
        file: of the recipe, for errors.
    """
    messages: list[Message] = []
    for step in plan.steps:
        estimate = estimates.get(step.name)
        if estimate is None or (size := estimate.size) is None or step.name in stored:
            continue
        location: Any = {"file": file, "line": step.line}
        total = estimate.memory_bytes or 0
        for kind, minimum, expected_bytes, capacity, free in (
            ("memory", size.least_bytes, total, limits.memory_bytes, limits.free_bytes),
            (
                "GPU memory",
                size.least_device_bytes,
                size.device_bytes,
                limits.device_bytes,
                limits.device_bytes,
            ),
        ):
            if capacity is None or free is None:
                continue
            if minimum > capacity and not step.optional:
                alternatives = fitting_settings(plan, step, estimates, capacity) if kind == "memory" else {}
                text = (
                    f"'{step.name}' needs at least {format_bytes(minimum)} of {kind}, without activations,"
                    f" and this machine has {format_bytes(capacity)}. {_advice(alternatives)}"
                )
                messages.append(error_message("needs-more-memory", text, **location))
            elif expected_bytes > free:
                alternatives = fitting_settings(plan, step, estimates, free) if kind == "memory" else {}
                text = (
                    f"'{step.name}' needs about {format_bytes(expected_bytes)} of {kind}, and"
                    f" {format_bytes(free)} are free. {_advice(alternatives)}"
                )
                messages.append(warning("may-need-more-memory", text, step=step.name, **location))
    comparisons = estimates.get(COMPARISONS)
    is_new = comparisons is not None and COMPARISONS not in stored
    if comparisons is not None and is_new and (comparisons.memory_bytes or 0) > limits.free_bytes:
        text = (
            f"Comparing layers and next tokens with the baseline needs about"
            f" {format_bytes(comparisons.memory_bytes or 0)} of memory, and {format_bytes(limits.free_bytes)}"
            " are free. Set score: {sqnr_samples: 0, kl_samples: 0} to leave it out."
        )
        messages.append(warning("may-need-more-memory", text, setting="score.sqnr_samples", file=file))
    return sorted(
        [*messages, *_disk_messages(plan, estimates, limits, stored, file)],
        key=lambda m: m.severity != "error",
    )


def _disk_messages(
    plan: Plan,
    estimates: Mapping[str, StepEstimate],
    limits: MachineLimits,
    stored: Collection[str],
    file: str | None,
) -> Iterator[Message]:
    new_costs = {n: e.size for n, e in estimates.items() if e.size is not None and n not in stored}
    optional = {step.name for step in plan.steps if step.optional}
    artifacts = sum(size.disk_bytes for size in new_costs.values())
    minimum = _CERTAIN_DISK * sum(size.disk_bytes for name, size in new_costs.items() if name not in optional)
    total = artifacts + max((size.temporary_bytes for size in new_costs.values()), default=0)
    advice = "Remove unused artifacts with `smelt store clean`, or use a store on another disk (--store)."
    if minimum > limits.disk_bytes:
        text = (
            f"The artifacts of this run need at least {format_bytes(minimum)} of disk, and"
            f" {format_bytes(limits.disk_bytes)} are free in the store's folder. {advice}"
        )
        yield error_message("needs-more-disk", text, file=file)
    elif total > limits.disk_bytes:
        text = (
            f"This run needs about {format_bytes(total)} of disk, with checkpoints and temporary files, and"
            f" {format_bytes(limits.disk_bytes)} are free in the store's folder. {advice}"
        )
        yield warning("may-need-more-disk", text)


def fitting_settings(
    plan: Plan, step: PlanStep, estimates: Mapping[str, StepEstimate], most: int
) -> dict[str, int]:
    """Return changes of a step's settings with which it fits into `most` bytes, and the bytes it then needs.

    By the same estimate; of changes of one setting the first that fits.
    """
    step_cost, factor = estimates[step.name].size, max(1.0, estimates[step.name].memory_factor)
    sizes = {name: None if e.size is None else e.size.result for name, e in estimates.items()}
    if step_cost is None or sizes.get(step.parent) is None:
        return {}

    def needed(launch: LaunchSettings, settings: Settings) -> int:
        changed_plan = replace(plan, recipe=plan.recipe.model_copy(update={"launch": launch}))
        samples = _count_samples(plan.splits)
        inputs = _size_inputs(changed_plan, step, sizes, None, None, samples)
        assert inputs is not None
        size = _estimate(step, settings, replace(inputs, result=step_cost.result))
        return round(factor * (size.memory_bytes + INTERPRETER_BYTES))

    launch, alternatives = plan.recipe.launch, dict[str, int]()
    for change, settings in step.stage_class.lighter_settings(step.settings):
        if isinstance(settings, TrainingSettings) and strategy_conflicts(launch, settings):
            continue
        is_listed = any(change.split(":")[0] == other.split(":")[0] for other in alternatives)
        if not is_listed and (count := needed(launch, settings)) <= most:
            alternatives[change] = count
    if _processes_of(plan, step)[0] > 1:
        for text, other in _lighter_launches(launch, lambda other: needed(other, step.settings) <= most):
            count = needed(other, step.settings)
            if count <= most and not strategy_conflicts(other, step.settings):
                alternatives[f"launch: {{{text}}}"] = count
    return alternatives


def _lighter_launches(
    launch: LaunchSettings, fits: Callable[[LaunchSettings], bool]
) -> Iterator[tuple[str, LaunchSettings]]:
    """Yield the most processes that fit, and a strategy that divides all, as changes of `launch`."""
    if not external_processes():
        smaller_launches = [
            launch.model_copy(update={"num_processes": n}) for n in range(launch.num_processes - 1, 0, -1)
        ]
        index = bisect_left(smaller_launches, True, key=fits)  # more processes need more
        if index < len(smaller_launches):
            yield f"num_processes: {smaller_launches[index].num_processes}", smaller_launches[index]
    if launch.strategy == "ddp":
        yield "strategy: fsdp", launch.model_copy(update={"strategy": "fsdp"})
    elif launch.divides < 3:
        yield "zero_stage: 3", launch.model_copy(update={"zero_stage": 3})


def _advice(fitting: Mapping[str, int]) -> str:
    """Return a sentence with the settings that fit, or what else helps."""
    if not fitting:
        return "Make the model smaller first, or use a machine with more memory."
    texts = [f"{change} ({format_bytes(needed_bytes)})" for change, needed_bytes in fitting.items()]
    return f"By the same estimate this fits: {'; or '.join(texts)}."


def require_fitting(messages: Sequence[Message]) -> None:
    """Require that there are no errors among messages.

    Raises:
        InputError: there are; the message lists them.
    """
    if errors := [message for message in messages if message.severity == "error"]:
        raise combined_error(errors)


def format_bytes(count: float) -> str:
    """Return a number of bytes as text, from 100 MB on in GB."""
    return f"{count / 1e9:.1f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"

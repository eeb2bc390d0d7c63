"""The estimated memory, disk and work of every step of a plan, and the refusal of what cannot fit.

Sizes follow the model's config through the tree of steps; each stage estimates its cost
(`Stage.estimate_cost`), in units of work that `smelt.pipeline.execute.run_costs` turns into seconds.
Lengths of samples are estimated from their characters and the tokens of a few of them: the libraries
tokenizers and sentencepiece, which load in milliseconds, read the tokenizer's files; without such a file a
token has four bytes, as in English text.

A refusal is certain: it compares the weights that a step must hold with all memory of the machine or its
container, and the artifacts with the free disk. The whole estimate gives warnings only.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smelt.core.errors import combined_error, rust_panics_as_errors
from smelt.core.messages import Message, error_message, warning
from smelt.core.stage import Settings
from smelt.data.splits import Example, Split
from smelt.data.tasks import Task, task_traits
from smelt.evaluate.environment import physical_cores
from smelt.models.costs import (
    INTERPRETER_BYTES,
    Batch,
    CostInputs,
    SampleLengths,
    StepCost,
    Work,
    generated,
    generation_over,
    load_work,
    one_shot_cost,
    pass_bytes,
    passes_over,
)
from smelt.models.model_size import (
    FLOAT_BYTES,
    ModelSize,
    read_model_size,
    size_from_config,
    sum_of_weights,
)
from smelt.models.text_rules import DEFAULT_WINDOW_LENGTH, position_limit
from smelt.pipeline.inspect.machine import training_device
from smelt.pipeline.inspect.model_folder import read_config
from smelt.pipeline.plan.untrained_checks import config_file, read_untrained_config
from smelt.pipeline.recipe.model_and_data import UntrainedModel
from smelt.pipeline.recipe.stages import MODEL_STEP
from smelt.runtimes.device import cuda_device_count
from smelt.training.processes import (
    LaunchSettings,
    external_machines,
    external_processes,
    strategy_conflicts,
)
from smelt.training.settings import TrainingSettings

if TYPE_CHECKING:
    from smelt.pipeline.plan.plan import Plan, PlanStep


_BYTES_PER_TOKEN = 4.0
_MAX_SAMPLES = 20_000  # that are measured
_TOKENIZED, _CHARACTERS = 64, 2000  # texts that are tokenized, and characters of each
_SENTENCEPIECE = (("source.spm", "target.spm"), ("spiece.model",) * 2, ("sentencepiece.bpe.model",) * 2)


@dataclass(frozen=True)
class TokenRate:
    """Tokens of a text: `added` to each, and some for each byte of UTF-8."""

    per_byte: float = 1 / _BYTES_PER_TOKEN
    added: int = 1

    def tokens(self, text: str) -> int:
        """Return the estimated tokens of `text`."""
        return self.added + round(self.per_byte * len(text.encode()))


def _fit_rate(texts: Sequence[str], count: Callable[[str], int] | None) -> TokenRate:
    """Return the rate of a tokenizer on some of `texts`."""
    if count is None or not texts:
        return TokenRate()
    step = max(1, len(texts) // _TOKENIZED)
    samples = [text[:_CHARACTERS] for text in texts[::step][:_TOKENIZED]]
    size = sum(len(text.encode()) for text in samples)
    try:
        with rust_panics_as_errors():
            added = count("")
            tokens = sum(count(text) - added for text in samples)
    except Exception:  # of a tokenizer or text that the step itself will report
        return TokenRate()
    return TokenRate(tokens / max(1, size), max(added, 1))


def token_counters(folder: Path | None) -> tuple[Callable[[str], int] | None, Callable[[str], int] | None]:
    """Return functions that count the tokens of sources and targets; None without a known tokenizer file."""
    if folder is None:
        return None, None
    try:
        if (folder / "tokenizer.json").is_file():
            from tokenizers import Tokenizer

            with rust_panics_as_errors():
                tokenizer: Any = Tokenizer.from_file(str(folder / "tokenizer.json"))
            tokenizer.no_truncation()
            tokenizer.no_padding()
            return (lambda text: len(tokenizer.encode(text).ids),) * 2
        for names in _SENTENCEPIECE:
            if all((folder / name).is_file() for name in names):
                from sentencepiece import SentencePieceProcessor

                processors: list[Any] = [
                    SentencePieceProcessor(model_file=str(folder / name)) for name in names
                ]
                return tuple((lambda text, p=p: len(p.encode(text)) + 1) for p in processors)  # type: ignore[return-value]
    except (
        Exception
    ):  # a damaged file is reported when the tokenizer is loaded; the libraries raise many types
        pass
    return None, None


def measure_lengths(
    splits: Mapping[str, Split], task: Task, folder: Path | None, config: Mapping[str, Any]
) -> dict[str, SampleLengths]:
    """Return the lengths of the samples of each split; empty for arrays.

    Args:
        splits: those that were read.
        task: of the recipe.
        folder: of the tokenizer; None: not available.
        config: of the model; limits the lengths.
    """
    if task_traits(task).modality == "arrays":
        return {}
    if task_traits(task).modality == "image":
        return {
            name: SampleLengths((0,) * min(len(s), _MAX_SAMPLES), (0,) * min(len(s), _MAX_SAMPLES), len(s))
            for name, s in splits.items()
        }
    counters = token_counters(folder)
    limit = position_limit(config) or DEFAULT_WINDOW_LENGTH
    return {name: _lengths(split, task, counters, limit) for name, split in splits.items() if len(split)}


def _lengths(split: Split, task: Task, counters: tuple[Any, Any], limit: int) -> SampleLengths:
    step = max(1, len(split) // _MAX_SAMPLES)
    examples = split.examples[::step]
    if task_traits(task).samples == "running-text":
        return _windows(split, examples, counters[0], limit)
    pairs = [(text, target) for example in examples for text, target in _texts(example, task)]
    rates = [_fit_rate([pair[column] for pair in pairs], counters[column]) for column in (0, 1)]
    has_target = task_traits(task).has_target_text
    source = tuple(min(limit, rates[0].tokens(text)) for text, _ in pairs)
    target = tuple(min(limit, rates[1].tokens(text)) if has_target else 0 for _, text in pairs)
    return SampleLengths(source, target, round(len(pairs) * len(split) / max(1, len(examples))))


def _texts(example: Example, task: Task) -> list[tuple[str, str]]:
    """Return the texts of a sample: the inputs of the first stack, and of the second one or the target."""
    if task_traits(task).output == "embedding":
        return [(example.text, example.text_pair or "")]
    if example.references:
        return [(example.text, reference) for reference in example.references]
    pair = example.text_pair
    return [(example.text if pair is None else f"{example.text} {pair}", "")]


def _windows(split: Split, examples: Sequence[Example], count: Any, limit: int) -> SampleLengths:
    rate = _fit_rate([example.text for example in examples if example.text], count)
    size = sum(len(example.text.encode()) + 1 for example in examples) * len(split) / max(1, len(examples))
    length = min((split.windows.length if split.windows else None) or DEFAULT_WINDOW_LENGTH, limit)
    number = max(1, round(rate.per_byte * size / length))
    num_sampled = min(number, _MAX_SAMPLES)
    return SampleLengths((length,) * num_sampled, (0,) * num_sampled, number)


# Of the estimated size of the artifacts, what is certainly needed: some layers may become smaller.
_CERTAIN_DISK = 0.7


@dataclass(frozen=True)
class MachineLimits:
    """Bytes: all memory that a process may ever have, the free part of it, the free disk, memory of a GPU."""

    memory_bytes: int
    free_bytes: int
    disk_bytes: int
    device_bytes: int | None = None


@dataclass(frozen=True)
class ScoreCost:
    """The work and the memory of scoring an artifact; work None: unknown."""

    work: Work | None
    memory_bytes: int


@dataclass(frozen=True)
class StepEstimate:
    """The estimates of one step: of its stage, and of scoring its artifact; None: unknown.

    kind: what records of earlier steps are compared by.
    """

    name: str
    kind: str
    cost: StepCost | None
    score: ScoreCost | None
    is_gpu: bool = False


def estimate_steps(plan: Plan, splits: Mapping[str, Split]) -> dict[str, StepEstimate]:
    """Return the estimates of the original model and of all steps that this machine can run, by name.

    Args:
        plan: a checked recipe.
        splits: the samples that were read; work on others is unknown.

    Raises:
        InputError: a weight file of the model is missing or damaged.
    """
    recipe, config = plan.recipe, _start_config(plan)
    folder = plan.local_model
    size = _start_size(plan, config)
    lengths = measure_lengths(splits, recipe.task, folder, config or {})
    start = None if size is None else _import_cost(size)
    estimates = {MODEL_STEP: StepEstimate(MODEL_STEP, MODEL_STEP, start, _score_cost(plan, size, lengths))}
    configs, sizes = {MODEL_STEP: config}, {MODEL_STEP: size}
    for step in plan.steps:
        if step.unavailable:
            continue
        parent_config = configs.get(step.parent)
        step_config = (
            None if parent_config is None else step.stage_class.check_model(step.settings, parent_config)[1]
        )
        inputs = _cost_inputs(plan, step, sizes, parent_config, step_config, lengths)
        can_estimate = inputs is not None and (bool(inputs.source.stacks) or not step.trains)
        cost = _estimate(step, step.settings, inputs) if inputs is not None and can_estimate else None
        result = None if cost is None else cost.result
        configs[step.name], sizes[step.name] = step_config, result
        score = None if step.unscored else _score_cost(plan, result, lengths, step.format == "onnx")
        is_gpu = inputs is not None and inputs.is_gpu
        estimates[step.name] = StepEstimate(step.name, step_kind(plan, step), cost, score, is_gpu)
    return estimates


def _processes_of(plan: Plan, step: PlanStep) -> tuple[int, int]:
    """Return the processes that train a step together, and their machines; 1 and 1 if only one does."""
    count = external_processes() or plan.recipe.launch.num_processes
    divided = count > 1 and isinstance(step.settings, TrainingSettings)
    return (count, external_machines()) if divided else (1, 1)


def step_kind(plan: Plan, step: PlanStep) -> str:
    """Return what measurements of steps are compared by.

    That is the stage, its method, target or techniques, and the processes with their strategy.
    """
    settings: Any = step.settings
    terms = [step.stage, *(str(getattr(settings, n)) for n in ("method", "target") if hasattr(settings, n))]
    terms += [
        n
        for n in ("lora", "qat", "sparsify", "learned_masks", "sequence_level")
        if getattr(settings, n, None)
    ]
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
        return sum_of_weights("graph", sum(file.stat().st_size for file in files) // FLOAT_BYTES)
    if plan.local_model is None or isinstance(plan.recipe.model, UntrainedModel):
        return None if config is None else size_from_config(config)
    return None if config is None else read_model_size(plan.local_model, config)


def _cost_inputs(
    plan: Plan,
    step: PlanStep,
    sizes: Mapping[str, ModelSize | None],
    before: Mapping[str, Any] | None,
    after: Mapping[str, Any] | None,
    lengths: Mapping[str, SampleLengths],
) -> CostInputs | None:
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
    cores = physical_cores()
    # each of several processes has a GPU, or threads; without `threads` they share all cores
    at_once = cuda_device_count() if is_gpu else cores // (plan.recipe.threads or cores)
    referenced_sizes = {
        setting: size
        for setting, name in step.settings.step_references().items()
        if (size := sizes.get(name)) is not None
    }
    return CostInputs(
        source=source,
        result=result,
        task=plan.recipe.task,
        samples=lengths,
        named=referenced_sizes,
        is_gpu=is_gpu,
        processes=processes,
        zero_stage=launch.divides if processes > 1 else 0,
        offloaded=processes > 1 and launch.cpu_offload,
        by_deepspeed=processes > 1 and launch.strategy == "deepspeed",
        machines=machines,
        cores=cores,
        concurrent=min(processes, machines * max(1, at_once)),
    )


def _kept_ratio(size: ModelSize, config: Mapping[str, Any] | None) -> float:
    """Return the part of the blocks' weights in `config` that the model of it still has."""
    full_size = None if config is None else size_from_config(config)
    return (
        size.block_weights / full_size.block_weights
        if full_size is not None and full_size.block_weights
        else 1.0
    )


def _estimate(step: PlanStep, settings: Settings, inputs: CostInputs) -> StepCost:
    """Return the estimate of a step with these settings; without blocks the operations are not known."""
    estimated: StepCost = step.stage_class.estimate_cost(settings, inputs) or replace(
        one_shot_cost(inputs), least_bytes=0
    )
    estimated = (
        estimated if inputs.source.stacks else replace(estimated, least_bytes=0)
    )  # a graph may be mapped
    return estimated if inputs.source.stacks else replace(estimated, work=None)


def _import_cost(size: ModelSize) -> StepCost:
    """Return the cost of the first artifact: every value of the model's files is read, checked and copied."""
    work = load_work(size) + Work.of("written", size.stored_bytes) + Work.of("moved", 3 * size.float_bytes)
    memory_bytes = size.stored_bytes + 2 * FLOAT_BYTES * size.largest_matrix
    return StepCost(work, memory_bytes, 0, size, size.stored_bytes)


def _score_cost(
    plan: Plan, size: ModelSize | None, lengths: Mapping[str, SampleLengths], is_graph: bool = False
) -> ScoreCost | None:
    """Return the cost of scoring a model of `size`; None if it is not known."""
    recipe, samples = plan.recipe, lengths.get(plan.judged_on)
    if size is None or not size.stacks or samples is None or recipe.traits.modality == "arrays":
        return None
    score, work = recipe.score, load_work(size)
    largest = max(samples.batches(score.batch_size), key=lambda b: b.samples * (b.source + b.target))
    # a quantized matrix is kept as it is and dequantized; a session of ONNX Runtime packs its weights again
    memory_bytes = size.stored_bytes + (size.stored_bytes if is_graph else size.float_bytes)
    memory_bytes -= 0 if is_graph or size.bytes_per_weight < 2 else size.stored_bytes
    if generated(recipe.task):
        beams = score.generation.num_beams
        work += generation_over(samples, size, score.batch_size, beams)
        memory_bytes += _generation_bytes(size, largest, beams)
    else:
        stride = recipe.data.windows.stride
        times = samples.source[0] / stride if recipe.traits.samples == "running-text" and stride else 1.0
        work += passes_over(samples, size, recipe.task, score.batch_size) * times
        memory_bytes += pass_bytes(size, largest)
    on_gpu = training_device(recipe.device) == "cuda"
    return ScoreCost(None if on_gpu else work, round(memory_bytes))


def _generation_bytes(size: ModelSize, batch: Batch, beams: int) -> int:
    """Return the bytes of caches and logits while a batch is generated; caches exist twice when reordered."""
    num_sequences, stack = batch.samples * beams, size.stacks[-1]
    cache = 2 * FLOAT_BYTES * num_sequences * (batch.source + batch.target) * stack.layers * stack.kv_width
    prompt = pass_bytes(replace(size, stacks=size.stacks[:1]), replace(batch, target=1))
    return round(max(cache, prompt) + 4 * FLOAT_BYTES * num_sequences * size.output_width)


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
        cost = estimates[step.name].cost if step.name in estimates else None
        if cost is None or step.name in stored:
            continue
        location: Any = {"file": file, "line": step.line}
        total = cost.memory_bytes + INTERPRETER_BYTES
        for kind, minimum, expected_bytes, capacity, free in (
            ("memory", cost.least_bytes, total, limits.memory_bytes, limits.free_bytes),
            (
                "GPU memory",
                cost.least_device_bytes,
                cost.device_bytes,
                limits.device_bytes,
                limits.device_bytes,
            ),
        ):
            if capacity is None or free is None:
                continue
            if minimum > capacity and not step.optional:
                alternatives = fitting_settings(plan, step, estimates, capacity) if kind == "memory" else {}
                text = (
                    f"'{step.name}' needs at least {format_bytes(minimum)} of {kind}, for its weights alone,"
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
    new_costs = {n: e.cost for n, e in estimates.items() if e.cost is not None and n not in stored}
    optional = {step.name for step in plan.steps if step.optional}
    costs, artifacts = [*new_costs.values()], sum(cost.disk_bytes for cost in new_costs.values())
    minimum = _CERTAIN_DISK * sum(cost.disk_bytes for name, cost in new_costs.items() if name not in optional)
    total = artifacts + max((cost.temporary_bytes for cost in costs), default=0)
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
    step_cost = estimates[step.name].cost
    sizes = {name: None if e.cost is None else e.cost.result for name, e in estimates.items()}
    lengths = measure_lengths(plan.splits, plan.recipe.task, plan.local_model, _start_config(plan) or {})
    if step_cost is None or sizes.get(step.parent) is None:
        return {}

    def needed(launch: LaunchSettings, settings: Settings) -> int:
        changed_plan = replace(plan, recipe=plan.recipe.model_copy(update={"launch": launch}))
        inputs = _cost_inputs(changed_plan, step, sizes, None, None, lengths)
        assert inputs is not None
        return (
            _estimate(step, settings, replace(inputs, result=step_cost.result)).memory_bytes
            + INTERPRETER_BYTES
        )

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

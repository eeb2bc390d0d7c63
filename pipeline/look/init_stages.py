"""The stages that `smelt init` proposes: by task, by what there is to train on, and by the machine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from smelt.core.data import IMAGES, SIMILARITY, TEXT_TO_TEXT, Task
from smelt.families.registry import FAMILIES, blockless
from smelt.look.model import ModelLook
from smelt.recipe.stage_table import load_stage
from smelt.runtime.schemes.registry import DEFAULT

# Training rows from which a list of likely words is proposed: from 2,000 rows it cost a translator 2.4 BLEU,
# from 29,000 little (docs/measurements/techniques.md); between them nothing was measured.
ENOUGH = 10_000
# Training rows from which a first recipe distils a pruned classifier: of 1,000 and 2,000 rows (SST-2, MiniLM)
# one pass of it gained nothing over what pruning had left, which lost 0 and 1 points.
_WORTH_DISTILLING = 5_000
CLASSES: Task = "text-classification"
# The parts of the loss of `distill`, where they are not those of logits.
_PARTS = {"sentence-similarity": "sentence_embedding: 1.0, pairwise_similarity: 1.0"}
_LOGITS, _COLUMNS = "losses: {logits: 1.0, labels: 0}, temperature: 1.0", 80


@dataclass(frozen=True)
class Machine:
    """What of this machine a recipe depends on. cores: physical ones. provider: TensorRT in ONNX Runtime."""

    cores: int
    gpu: bool
    tensorrt: bool
    openvino: bool = False
    provider: bool = False


@dataclass(frozen=True)
class Step:
    """A line of the list of stages, and why it is there."""

    word: str
    settings: str = "{}"
    why: str = ""
    name: str = ""
    parent: str = ""
    optional: bool = False


def steps(
    seen: ModelLook,
    machine: Machine,
    train: bool,
    fast: bool = False,
    rows: int = ENOUGH,
    judge: str = "",
) -> Iterator[Step]:
    """Yield the stages that work for the task, as far as there are rows to train on.

    Args:
        seen: the model.
        machine: what runs there.
        train: whether there are training rows.
        fast: as fast as we know to make a model, by a longer training, instead of a first try.
        rows: training rows, as far as they were counted.
        judge: the metric that chooses checkpoints of a long training; empty where no rows are there for it.
    """
    plain = blockless(seen.config) is not None  # convolutions stay float
    trained = _fast(seen, rows, judge) if fast and not plain else _trained(seen, rows)
    whole = "" if plain else "tuned" if train and seen.new_head else "model"
    wanted = [*(trained if train else _untrained(plain)), *_leaving(machine, plain, whole)]
    for step in wanted:
        if seen.task in load_stage(step.word).tasks:
            yield step


def _tuned(seen: ModelLook) -> Iterator[Step]:
    if seen.new_head:
        yield Step("finetune", "{epochs: 3, learning_rate: 5.0e-5}", "a classifier for your labels", "tuned")


def _losses(task: Task) -> str:
    """Return the losses of `distill`: the teacher's distribution alone, but where people's labels help it."""
    if task in TEXT_TO_TEXT or task == "language-modeling":
        return _LOGITS
    return f"losses: {{{_PARTS.get(task, 'logits: 1.0, labels: 0.5')}}}"


def _teacher(seen: ModelLook) -> str:
    return "teacher: tuned, " if seen.new_head else ""


def _trained(seen: ModelLook, rows: int) -> Iterator[Step]:
    yield from _tuned(seen)
    teacher = _teacher(seen)
    if blockless(seen.config):
        yield Step("factorize", "{method: tucker, keep_ratio: 0.5}", "convolutions become thinner ones")
        how = f"{{{teacher}losses: {{logits: 1.0, labels: 0.5}}, epochs: 3}}"
        yield Step("distill", how, "recovers what that lost", "small")
        return
    # by magnitude, where the rows may have no scores to make a loss of
    how = ", importance: magnitude" if seen.task == SIMILARITY else ""
    few = seen.task == CLASSES and rows < _WORTH_DISTILLING
    name = "small" if few else ""
    yield Step(
        "prune", f"{{targets: [ffn], keep_ratio: 0.75{how}}}", "a quarter of the FFN neurons goes", name
    )
    if few:
        return
    how = f"{{{teacher}{_losses(seen.task)}, epochs: 1}}"
    yield Step("distill", how, "recovers what that lost", "small")


def _fast(seen: ModelLook, rows: int, judge: str) -> Iterator[Step]:
    """Yield the chain that each task got furthest with, as it was trained for docs/measurements/README.md."""
    yield from _tuned(seen)
    teacher, counts = _teacher(seen), layers(seen)
    select = f", metric_for_best_model: {judge}" if judge else ""
    if seen.task in TEXT_TO_TEXT:
        yield Step("onnx", "{target: ort-cpu}", "writes the texts that the student learns from", "whole-onnx")
        few = f"student: {{decoder_layers: {max(1, counts['decoder_layers'] // 3)}}}"
        how = (
            f"{few}, sequence_level: {{num_beams: 5, original_ratio: 0.5, generator: whole-onnx}}, {_LOGITS}"
        )
        how += f", epochs: 6, lr_schedule: cosine{select}"
        why = "few decoder layers are fast, since each token goes through all of them"
        enough = rows >= ENOUGH
        yield Step("distill", f"{{{how}}}", why, "shallow" if enough else "small", "model")
        if enough:
            yield Step("shortlist", "{}", "each source has few words to choose from", "small")
        return
    if seen.task in (CLASSES, IMAGES):
        yield from _narrow(teacher, select, *counts.items())
        return
    ((name, count), *_) = counts.items()
    if seen.task == "language-modeling":  # it writes worse for each layer that goes
        if count > 1:
            few = f"{{{name}: {min(count - 1, round(0.8 * count))}}}"
            yield Step("drop-layers", few, "few layers go, those that matter least", "shallow")
        yield Step("prune", "{targets: [ffn], keep_ratio: 0.5}", "half of the FFN neurons goes")
        how = "{losses: {logits: 0.5, labels: 0.5}, temperature: 2.0, epochs: 1, lr_schedule: cosine}"
        yield Step("distill", how, "recovers what that lost", "small")
        return
    few = f"student: {{{name}: {max(1, round(count / 3))}}}"
    losses = _losses(seen.task)
    yield Step("distill", f"{{{teacher}{few}, {losses}, epochs: 3}}", "few layers are fast", "shallow")
    how = "{targets: [ffn], keep_ratio: 0.5, importance: magnitude}"
    yield Step("prune", how, "half of the FFN neurons goes")
    yield Step("distill", f"{{{teacher}{losses}, epochs: 2}}", "recovers what that lost", "small")


def _narrow(teacher: str, select: str, stack: tuple[str, int]) -> Iterator[Step]:
    """Yield what keeps half of the layers and half of the neurons: a third of the layers was less good."""
    name, count = stack
    if count > 1:
        how = f"{{{name}: {round(count / 2)}}}"
        yield Step("drop-layers", how, "half of the layers goes, those that matter least", "shallow")
    yield Step("prune", "{targets: [ffn], keep_ratio: 0.5}", "half of the FFN neurons goes")
    how = f"{{{teacher}losses: {{logits: 1.0, labels: 0}}, temperature: 2.0, epochs: 3{select}}}"
    yield Step("distill", how, "recovers what that lost", "small")


def layers(seen: ModelLook) -> dict[str, int]:
    """Return how many layers each stack has, by its name in settings; 1 where a config does not say."""
    stacks = FAMILIES[seen.family].stacks
    return {} if stacks is None else {s.name: s.count(seen.config) or 1 for s in stacks(seen.config)}


def _untrained(plain: bool) -> Iterator[Step]:
    if plain:
        how = "{method: tucker, energy: 0.9}"
        yield Step("factorize", how, "with training rows: distill behind it", "small")
        return
    yield Step(
        "factorize",
        "{method: svd, energy: 0.98}",
        "needs no training rows; with some: prune, then distill",
        "small",
    )


def _leaving(machine: Machine, plain: bool, whole: str) -> Iterator[Step]:
    """Yield the ways out of `small`, and that of int8 alone from the step `whole`, where it is named."""
    why = "what you deploy on a CPU" if plain else "a branch without quantization, to compare with"
    yield Step("onnx", "{target: ort-cpu}", why, "onnx-fp32")
    if machine.openvino:
        yield Step("onnx", "{target: openvino}", "the same in OpenVINO", "openvino", "small", optional=True)
    if not plain:
        yield Step("quantize", f"{{scheme: {DEFAULT}}}", "int8 weights", "int8", "small")
        yield Step("onnx", "{target: ort-cpu}", "what you deploy on a CPU", "onnx-int8")
    if whole:  # it often loses least
        yield Step(
            "quantize", f"{{scheme: {DEFAULT}}}", "int8 alone: what the rest must beat", "int8-alone", whole
        )
        yield Step("onnx", "{target: ort-cpu}", "", "onnx-int8-alone")
    if machine.gpu or machine.tensorrt:
        yield Step("onnx", "{target: tensorrt, dtype: fp16}", "a branch for GPUs", "onnx-fp16", "small")
        yield Step("tensorrt", "{}", "skipped where it cannot run", optional=True)
    if machine.provider:
        how = "{target: ort-tensorrt, dtype: fp16}"
        yield Step("onnx", how, "engines that ONNX Runtime builds", "ort-tensorrt", "small", optional=True)


def lines_of(step: Step) -> Iterator[str]:
    """Yield the step; its reason stands above it, and its settings in several lines, where 80 columns end."""
    text = f"  - {step.word}: {step.settings}"
    why = f"    # {step.why}" if step.why else ""
    if len(text) + len(why) > _COLUMNS:
        yield from [f"  # {step.why}:"] if step.why else []
        why = ""
    if len(text) > _COLUMNS:
        yield f"  - {step.word}:"
        yield from _block(step.settings)
    else:
        yield text + why
    for key, value in (("name", step.name), ("from", step.parent), ("optional", step.optional and "true")):
        if value:
            yield f"    {key}: {value}"


def _block(settings: str) -> Iterator[str]:
    """Yield a mapping in braces with a line for each of its own keys."""
    depth, line = 0, "      "
    for letter in settings[1:-1]:
        depth += (letter in "{[") - (letter in "]}")
        if letter == "," and not depth:
            yield line
            line = "     "  # a space follows the comma
        else:
            line += letter
    yield line

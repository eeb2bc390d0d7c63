"""What can be known of a recipe that starts from an ONNX graph before any work: graph, rows, texts.

The graph is opened in a process of its own, with limits of memory and time (`smelt.runtime.foreign`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from smelt.core.data import CUSTOM, SIMILARITY, Task
from smelt.core.errors import InputError
from smelt.core.files import placed
from smelt.core.messages import Message, mistake, warning
from smelt.families.registry import FAMILIES
from smelt.look.foreign import OTHER_FLOATS, ForeignModel, examined, find_graph, is_onnx, texts_beside
from smelt.look.model_folder import check_tokenizer, read_config
from smelt.planning.foreign.generators import GENERATES, check_generator
from smelt.recipe.errors import Mistakes, touches
from smelt.recipe.problem import has_classifier
from smelt.recipe.recipe import Recipe
from smelt.runtime.text.sentence_files import MODULES, POOLINGS

if TYPE_CHECKING:
    from smelt.planning.plan import Step
    from smelt.recipe.yaml_file import Where
    from smelt.runtime.foreign.signature import Signature

# What a graph of each task gives.
_GIVES: dict[Task, str] = {"text-classification": "logits", SIMILARITY: "sentence_embedding"}
HIDDEN = "last_hidden_state"  # of which an embedder's vectors are pooled
_NAMED = 3  # nodes in a warning
_OF_TEXTS = ("prefix", "source_language", "target_language")


def check_foreign(
    recipe: Recipe, mistakes: Mistakes, bad: set[str], warnings: list[Message]
) -> ForeignModel | None:
    """Check the ONNX graph that `recipe` starts from; return what it is, None where it is none or is wrong.

    Args:
        recipe: as it was read.
        mistakes: gets what is wrong.
        bad: what is wrong already, as dotted paths, and of which nothing more is said.
        warnings: gets what a person should know.
    """
    if touches(bad, "model"):
        return None
    if not is_onnx(recipe.model, recipe.base):
        _not_onnx(recipe, mistakes, bad)
        return None
    path = placed(recipe.base, str(recipe.model))
    if recipe.task in GENERATES and not touches(bad, "task"):
        return check_generator(recipe, path, mistakes)
    return _one_graph(recipe, path, mistakes, bad, warnings)


def _one_graph(
    recipe: Recipe, path: Path, mistakes: Mistakes, bad: set[str], warnings: list[Message]
) -> ForeignModel | None:
    """Check the graph that `path`, a file or a folder, means; as `check_foreign`."""
    try:
        file = find_graph(path)
    except InputError as error:
        mistakes.refuse(("model",), error)
        return None
    found = examined(file)
    for problem in found.problems:
        mistakes.add(("model",), f"{file}: {problem}.", code="unsupported-graph")
    if found.signature is None or touches(bad, "task"):
        return None
    model = ForeignModel(file, found.signature, found.files, details=dict(found.details or {}))
    if random := model.details.get("random"):
        more = f" and {len(random) - _NAMED} more" if len(random) > _NAMED else ""
        warnings.append(
            warning(
                "random-outputs",
                f"{file.name} draws random numbers ({', '.join(random[:_NAMED])}{more}): outputs differ in"
                " each run, and so do scores. Export it in inference mode (model.eval()).",
            )
        )
    if recipe.task == CUSTOM:
        known = _with_axes(recipe, model, mistakes, bad)
        if known is not None:
            _check_arrays(recipe, known, mistakes, bad, warnings)
        return known
    if recipe.data.axes and not touches(bad, "data.axes"):
        mistakes.add(
            ("data", "axes"),
            f"is for arrays, task: {CUSTOM}; {recipe.task} reads texts.",
            code="does-not-fit-task",
        )
    folder = _check_texts(recipe, model, mistakes)
    return None if folder is None else replace(model, texts=folder)


def _with_axes(recipe: Recipe, model: ForeignModel, mistakes: Mistakes, bad: set[str]) -> ForeignModel | None:
    """Return the model with the axes of its rows; None where they are wrong or not clear, which is noted."""
    if touches(bad, "data.axes"):
        return None
    given = recipe.data.axes
    wrong = list(model.signature.wrong_axes(given))
    for problem in wrong:
        mistakes.add(("data", "axes"), problem, code="wrong-axis")
    signature = model.signature if wrong else model.signature.with_axes(given)
    unclear = [] if wrong else list(signature.unclear_axes(given))
    for problem in unclear:
        mistakes.add(("data",), problem, code="unclear-axes")
    if wrong or unclear:
        bad.add("data.axes")  # so nothing more can be said of the rows
        return None
    return replace(model, signature=signature)


def check_floats(
    model: ForeignModel | None, steps: Sequence[Step], places: Mapping[str, Where], mistakes: Mistakes
) -> None:
    """Note the steps that change float32 weights where the graph has others: codes, or halves."""
    details = model.details if model is not None else {}
    codes, floats = details.get("codes"), details.get("floats")
    if codes:
        weights = f"{codes:,} weight{'s' * (codes > 1)} of 8 bits or fewer"
        why = f"this file is quantized already: {weights}. Start from the float32 file"
    elif floats in OTHER_FLOATS:
        why = f"the weights of this file are {floats}. Start from a float32 file"
    else:
        return
    for step in steps:
        if getattr(step.cls, "needs_float", False):
            told = f"{why}, or leave this step out; simplify, onnx runtimes and engines take it as it is."
            mistakes.add(places[step.name], told, code="already-narrow")


def fit_batches(recipe: Recipe, model: ForeignModel | None, mistakes: Mistakes) -> Recipe:
    """Return `recipe` with the batch that the graph takes, where that is fixed and the recipe names none."""
    latency = recipe.score.latency
    size = model.signature.batch if model is not None and recipe.task == CUSTOM else None
    if size is None or not latency:
        return recipe
    if "batch_sizes" in latency.model_fields_set and latency.batch_sizes != (size,):
        mistakes.add(
            ("score", "latency", "batch_sizes"),
            f"the graph takes exactly {size} rows in a call; say [{size}], or leave it out.",
            code="fixed-batch-size",
        )
        return recipe
    chosen = latency.model_copy(update={"batch_sizes": (size,)})
    return recipe.model_copy(update={"score": recipe.score.model_copy(update={"latency": chosen})})


def fit_axes(recipe: Recipe, model: ForeignModel | None) -> Recipe:
    """Return `recipe` with the axis of the rows of every input of a graph of arrays, as it was found."""
    if model is None or recipe.task != CUSTOM:
        return recipe
    return recipe.model_copy(update={"data": recipe.data.model_copy(update={"axes": model.signature.axes})})


def _not_onnx(recipe: Recipe, mistakes: Mistakes, bad: set[str]) -> None:
    """Note what only fits an ONNX model."""
    if recipe.task == CUSTOM and not touches(bad, "task"):
        mistakes.add(
            ("task",),
            f"'{CUSTOM}' is for a model that is an .onnx file; {recipe.model!s} is none.",
            code="needs-onnx-model",
        )
    if recipe.tokenizer is not None and not touches(bad, "tokenizer"):
        mistakes.add(
            ("tokenizer",),
            "is for a model that is an .onnx file; others bring their own.",
            code="needs-onnx-model",
        )
    if recipe.data.axes and not touches(bad, "data.axes"):
        mistakes.add(
            ("data", "axes"),
            f"is for arrays of an ONNX model, task: {CUSTOM}.",
            code="needs-onnx-model",
        )


def _check_arrays(
    recipe: Recipe, model: ForeignModel, mistakes: Mistakes, bad: set[str], warnings: list[Message]
) -> None:
    """Compare the arrays of every split with the graph's inputs, by their headers."""
    from smelt.core.rows.arrays import rows_of, shapes_in

    data = recipe.data
    if recipe.tokenizer is not None:
        mistakes.add(
            ("tokenizer",),
            f"means nothing for task: {CUSTOM}, where no text is read.",
            code="does-not-fit-task",
        )
    for name in _OF_TEXTS:
        if getattr(data, name) is not None:
            mistakes.add(
                ("data", name), f"is for texts; task: {CUSTOM} reads arrays.", code="does-not-fit-task"
            )
    if "columns" in data.model_fields_set:
        mistakes.add(
            ("data", "columns"),
            "is for rows of text; arrays are found by the names of the inputs.",
            code="does-not-fit-task",
        )
    for name, origin in data.files().items():
        if touches(bad, f"data.{name}"):
            continue
        try:
            path = placed(recipe.base, origin)
            shapes = shapes_in(path, name)
            problems = [f"{origin}: {problem}" for problem in model.signature.problems(shapes)]
            if not problems:
                axes = model.signature.axes
                taken = {key: shape for key, shape in shapes.items() if key in axes}
                rows_of(taken, path, axes, by_name=model.signature.by_name)
        except InputError as error:
            mistakes.refuse(("data", name), error)
            continue
        except (OSError, RuntimeError, ValueError) as error:
            mistakes.add(("data", name), str(error), code="unreadable-file")
            continue
        for problem in problems:
            mistakes.add(("data", name), problem, code="does-not-fit-graph")
        if problems:
            bad.add(f"data.{name}")  # nothing more can be said of its rows
        unread = model.signature.unread(list(shapes))
        if unread:
            warnings.append(
                warning(
                    "unread-arrays",
                    f"{origin}: these arrays are no inputs of the graph and are ignored:"
                    f" {', '.join(unread)}.",
                )
            )


def _check_texts(recipe: Recipe, model: ForeignModel, mistakes: Mistakes) -> Path | None:
    """Check that the graph is for the task; return the folder with config and tokenizer."""
    if recipe.task not in _GIVES:
        mistakes.add(
            ("task",),
            f"an ONNX model is for {', '.join((*_GIVES, *GENERATES, CUSTOM))}. For {recipe.task} start from"
            f" the folder with weights that it was exported from, or give task: {CUSTOM}.",
            code="unsupported-task",
        )
        return None
    for problem in _unfit(model.signature, recipe.task):
        mistakes.note(("model",), problem.prefixed(f"{model.file}: "))
    folder = texts_folder(recipe, model.file)
    place: tuple[str, ...] = ("model",) if recipe.tokenizer is None else ("tokenizer",)
    if folder is None:
        mistakes.add(
            place,
            f"{model.file}: there is no config.json beside it. Name the folder with config.json and the"
            " tokenizer that it was exported from, as tokenizer: FOLDER.",
            code="missing-config",
        )
        return None
    config, problems = read_config(folder)
    kind = str(config.get("model_type", ""))
    problems += check_tokenizer(folder, kind) if kind in FAMILIES else _no_tokenizer(folder)
    if config and recipe.task == "text-classification" and not has_classifier(config):
        problems.append(
            mistake(
                "unsupported-architecture",
                f"{folder / 'config.json'}: 'architectures' names no ...ForSequenceClassification, so nobody"
                " can tell the classes. Take the config of the model that was exported.",
            )
        )
    for problem in problems:
        mistakes.note(place, problem)
    if recipe.task == SIMILARITY and not problems:
        _require_pooling(recipe, model.signature, folder, mistakes)
    return None if problems else folder


def _require_pooling(recipe: Recipe, signature: Signature, folder: Path, mistakes: Mistakes) -> None:
    """Require that somebody says how hidden states become a vector, where the graph gives them alone."""
    pooled = any(value.name == _GIVES[SIMILARITY] for value in signature.outputs)
    if not pooled and recipe.embedding.pooling is None and not (folder / MODULES).is_file():
        mistakes.add(
            ("model",),
            f"the graph gives {HIDDEN}, and there is no {MODULES} beside it that says how these become a"
            f" vector. Name it: embedding: {{pooling: {' | '.join(POOLINGS)}}}.",
            code="missing-pooling",
        )


def _unfit(signature: Signature, task: Task) -> Iterator[Message]:
    """Yield what keeps a graph from being one that reads texts for `task`."""
    inputs, outputs = ([v.name for v in values] for values in (signature.inputs, signature.outputs))
    lacking = {"input_ids", "attention_mask"} - set(inputs)
    strange = set(inputs) - {"input_ids", "attention_mask", "token_type_ids"}
    if lacking or strange:
        yield mistake(
            "wrong-graph-inputs",
            f"its inputs are {', '.join(inputs)}; a graph for {task} takes input_ids, attention_mask and"
            f" maybe token_type_ids. Export it with these names, or give task: {CUSTOM}.",
        )
    given = {_GIVES[task], *([HIDDEN] if task == SIMILARITY else [])}
    if not given & set(outputs):
        yield mistake(
            "wrong-graph-outputs",
            f"its outputs are {', '.join(outputs)}; a graph for {task} gives {' or '.join(sorted(given))}."
            f" Export it with this name, or give task: {CUSTOM}.",
        )


def _no_tokenizer(folder: Path) -> list[Message]:
    if (folder / "tokenizer.json").is_file():
        return []
    return [mistake("missing-tokenizer", f"{folder}: no tokenizer; expected tokenizer.json.")]


def texts_folder(recipe: Recipe, file: Path) -> Path | None:
    """Return the folder with config.json and the tokenizer that belong to the graph in `file`."""
    named = None if recipe.tokenizer is None else placed(recipe.base, recipe.tokenizer)
    return texts_beside(file, named)

"""What can be known of a recipe that starts from an ONNX graph before any work: graph, rows, texts.

The graph is opened in a process of its own, with limits of memory and time (`smelt.runtime.foreign`).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from smelt.core.data import TENSORS
from smelt.core.errors import InputError
from smelt.look.foreign import ForeignModel, examined, find_graph, is_onnx, texts_beside
from smelt.recipe.errors import Mistakes, touches
from smelt.recipe.recipe import Recipe

_OF_TEXTS = ("prefix", "source_language", "target_language")


def check_foreign(
    recipe: Recipe, mistakes: Mistakes, bad: set[str], warnings: list[str]
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
    path = (recipe.base / str(recipe.model)).expanduser()
    try:
        file = find_graph(path)
    except InputError as error:
        mistakes.add(("model",), str(error))
        return None
    found = examined(file)
    for problem in found.problems:
        mistakes.add(("model",), f"{file}: {problem}.")
    if found.signature is None or touches(bad, "task"):
        return None
    model = ForeignModel(file, found.signature, found.files, facts=dict(found.facts or {}))
    if recipe.task == TENSORS:
        _check_arrays(recipe, model, mistakes, bad, warnings)
        return model
    mistakes.add(("task",), f"an ONNX model is for task: {TENSORS} in this version.")
    return None


def fit_batches(recipe: Recipe, model: ForeignModel | None, mistakes: Mistakes) -> Recipe:
    """Return `recipe` with the batch that the graph takes, where that is fixed and the recipe names none."""
    latency = recipe.score.latency
    size = model.signature.batch if model is not None and recipe.task == TENSORS else None
    if size is None or not latency:
        return recipe
    if "batch_sizes" in latency.model_fields_set and latency.batch_sizes != (size,):
        mistakes.add(
            ("score", "latency", "batch_sizes"),
            f"the graph takes exactly {size} rows in a call; say [{size}], or leave it out.",
        )
        return recipe
    chosen = latency.model_copy(update={"batch_sizes": (size,)})
    return recipe.model_copy(update={"score": recipe.score.model_copy(update={"latency": chosen})})


def _not_onnx(recipe: Recipe, mistakes: Mistakes, bad: set[str]) -> None:
    """Note what only fits an ONNX model."""
    if recipe.task == TENSORS and not touches(bad, "task"):
        mistakes.add(
            ("task",), f"'{TENSORS}' is for a model that is an .onnx file; {recipe.model!s} is none."
        )
    if recipe.tokenizer is not None and not touches(bad, "tokenizer"):
        mistakes.add(("tokenizer",), "is for a model that is an .onnx file; others bring their own.")


def _check_arrays(
    recipe: Recipe, model: ForeignModel, mistakes: Mistakes, bad: set[str], warnings: list[str]
) -> None:
    """Compare the arrays of every split with the graph's inputs, by their headers."""
    from smelt.core.rows.arrays import shapes_in

    data = recipe.data
    if recipe.tokenizer is not None:
        mistakes.add(("tokenizer",), f"means nothing for task: {TENSORS}, where no text is read.")
    for name in _OF_TEXTS:
        if getattr(data, name) is not None:
            mistakes.add(("data", name), f"is for texts; task: {TENSORS} reads arrays.")
    if data.split.given():
        mistakes.add(("data", "split"), f"is for rows of text; give task: {TENSORS} a file for each split.")
    if "columns" in data.model_fields_set:
        mistakes.add(("data", "columns"), "is for rows of text; arrays are found by the names of the inputs.")
    for name, origin in data.files().items():
        if touches(bad, f"data.{name}"):
            continue
        try:
            shapes = shapes_in((recipe.base / origin).expanduser(), name)
        except (InputError, OSError, RuntimeError, ValueError) as error:
            mistakes.add(("data", name), str(error))
            continue
        for problem in model.signature.problems(shapes):
            mistakes.add(("data", name), f"{origin}: {problem}")
        unread = model.signature.unread(list(shapes))
        if unread:
            warnings.append(
                f"{origin}: not read, since they are no inputs of the graph: {', '.join(unread)}."
            )


def described(model: ForeignModel) -> Iterator[str]:
    """Yield what `smelt plan` says of a graph."""
    facts = model.facts
    made = f", written by {facts['producer']}" if facts.get("producer") else ""
    nodes = f"{facts['nodes']:,} node{'' if facts['nodes'] == 1 else 's'}"
    yield f"graph       {nodes} of opset {facts['opset']}{made}"
    yield f"inputs      {'; '.join(value.described() for value in model.signature.inputs)}"
    yield f"outputs     {'; '.join(value.described() for value in model.signature.outputs)}"


def texts_folder(recipe: Recipe, file: Path) -> Path | None:
    """Return the folder with config.json and the tokenizer that belong to the graph in `file`."""
    named = None if recipe.tokenizer is None else (recipe.base / recipe.tokenizer).expanduser()
    return texts_beside(file, named)

"""What can be known of a recipe's model and data before work starts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from smelt.core.data import Split, Task
from smelt.core.errors import InputError
from smelt.core.files import placed
from smelt.core.messages import Message, info, mistake
from smelt.core.scripts import bleu_tokenizer
from smelt.families.registry import BY_TASK
from smelt.look.machine import cuda_lacks
from smelt.look.model_folder import check_model_folder, local_folder, read_config
from smelt.planning.splits import read_source
from smelt.planning.text_rules import text_rules
from smelt.recipe.errors import Mistakes, touches
from smelt.recipe.recipe import Recipe
from smelt.recipe.stages import ROOT

# Files up to this size are read when the plan is made, so that their mistakes are known at once.
_READ_AT_ONCE_BYTES = 8_000_000
# What `text_rules` reads of the data.
_OF_TEXTS = ("data.prefix", "data.source_language", "data.target_language")


def check_model(
    recipe: Recipe, mistakes: Mistakes, bad: set[str], warnings: list[Message], notes: list[Message]
) -> Path | None:
    """Check the model's folder; return it, or None for an id on the hub.

    bad: what is wrong already, as dotted paths, and of which nothing more is said. warnings, notes: get
    what the user should know of the model, and of the plan alone.
    """
    model = recipe.model
    if touches(bad, "model"):
        return None
    if not isinstance(model, str):  # see smelt.planning.untrained
        return None
    if not model.strip() or "\0" in model:
        mistakes.add(
            ("model",), "expected a model's folder or a hub id, read an empty name.", code="empty-text"
        )
        return None
    try:
        folder = local_folder(model, recipe.base)
        if folder is None:
            notes.append(
                info("from-the-hub", f"'{model}' is no local folder; the run downloads it from the hub.")
            )
            return None
        task = None if touches(bad, "task") else recipe.task
        problems, advice = check_model_folder(folder, task, recipe.baseline == ROOT)
    except (OSError, RuntimeError) as error:  # too long a name, a home folder that does not exist
        problems, advice, folder = [mistake("unreadable-file", f"cannot be read: {error}.")], [], None
    for problem in problems:
        mistakes.note(("model",), problem)
    warnings += [doubt.prefixed("model: ") for doubt in advice]
    if folder is not None and not touches(bad, "task", *_OF_TEXTS) and _has_family(folder, recipe.task):
        try:
            text_rules(recipe, folder)
        except InputError as error:
            mistakes.refuse(("data",), error)
    return folder


def _has_family(folder: Path, task: Task) -> bool:
    """Say whether the config can be read and is of a model for `task`, whatever else the folder lacks."""
    return read_config(folder)[0].get("model_type") in BY_TASK[task]


def check_device(recipe: Recipe, mistakes: Mistakes, bad: set[str]) -> None:
    """Check that a device that is asked for is there."""
    if recipe.device == "cuda" and not touches(bad, "device") and (lack := cuda_lacks()):
        mistakes.add(("device",), lack, code="no-gpu")


def check_data(recipe: Recipe, mistakes: Mistakes, bad: set[str]) -> dict[str, Split]:
    """Check that the files of the data are there, and read the small ones."""
    # of rows nothing can be said without the task and the names of their columns
    readable = not touches(bad, "task", "data.columns", "data.axes")
    splits: dict[str, Split] = {}
    for name, origin in recipe.data.files().items():
        if touches(bad, f"data.{name}"):
            continue
        try:
            path = placed(recipe.base, origin)
            if _is_hub(origin, path) or (path.is_file() and path.stat().st_size > _READ_AT_ONCE_BYTES):
                continue
            if readable or not path.exists():
                splits |= read_source(recipe, name)
        except InputError as error:
            if error.found:
                mistakes.refuse(("data", name), error)
            for line in str(error).splitlines() if not error.found else ():
                mistakes.add(("data", name), line, code=error.code)
        except (OSError, RuntimeError, ValueError) as error:  # a name that no file can have
            mistakes.add(("data", name), f"cannot be read: {error}.", code="unreadable-file")
    return splits if readable else {}


def check_tokenizer(recipe: Recipe, splits: Mapping[str, Split], mistakes: Mistakes) -> None:
    """Check that the tokenizer named for BLEU can split the references."""
    for name in ("test", "validation"):
        if recipe.tokenize is None or name not in splits:
            continue
        try:
            bleu_tokenizer((t for e in splits[name].examples for t in e.references), recipe.tokenize)
        except InputError as error:
            at = next((n for n, metric in enumerate(recipe.score.quality) if metric == "bleu"), 0)
            place = ("score", "quality", at, "bleu", "tokenize")
            mistakes.add(place, f"data.{name}: {error}", code=error.code)
            return


def _is_hub(origin: str, path: Path) -> bool:
    """Say whether `read_split` would ask the hub for `origin`."""
    local = bool(path.suffix) or origin.startswith((".", "/", "~")) or "/" not in origin
    return not local and not path.exists()

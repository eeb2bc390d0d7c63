"""What can be known of a recipe's model and data before work starts."""

from __future__ import annotations

from pathlib import Path

from smelt.core.data import Split
from smelt.core.errors import InputError
from smelt.machine import cuda_lacks
from smelt.model_folder import check_model_folder, local_folder
from smelt.plan import read_origin
from smelt.recipe import Recipe
from smelt.recipe_errors import Mistakes
from smelt.text_rules import text_rules

# Files up to this size are read when the plan is made, so that their mistakes are known at once.
_READ_AT_ONCE_BYTES = 8_000_000


def check_model(recipe: Recipe, mistakes: Mistakes, bad: set[str], warnings: list[str]) -> Path | None:
    """Check the model's folder; return it, or None for an id on the hub.

    bad: the top-level keys that are wrong already, and of which nothing more is said.
    """
    model = recipe.model
    if "model" in bad:
        return None
    if not isinstance(model, str):  # see smelt.untrained
        return None
    if not model.strip() or "\0" in model:
        mistakes.add(("model",), "expected a model's folder or a hub id, read an empty name.")
        return None
    try:
        folder = local_folder(model, recipe.base)
        if folder is None:
            warnings.append(f"model: '{model}' is no folder here; the run fetches it from the hub.")
            return None
        problems, advice = check_model_folder(folder, None if "task" in bad else recipe.task)
    except (OSError, RuntimeError) as error:  # too long a name, a home folder that does not exist
        problems, advice, folder = [f"cannot be read: {error}."], [], None
    for problem in problems:
        mistakes.add(("model",), problem)
    warnings += [f"model: {line}" for line in advice]
    if folder is not None and not problems and not bad & {"task", "data"}:
        try:
            text_rules(recipe, folder)
        except InputError as error:
            mistakes.add(("data",), str(error))
    return folder


def check_device(recipe: Recipe, mistakes: Mistakes, bad: set[str]) -> None:
    """Check that a device that is asked for is there."""
    if recipe.device == "cuda" and "device" not in bad and (lack := cuda_lacks()):
        mistakes.add(("device",), lack)


def check_data(recipe: Recipe, mistakes: Mistakes, bad: set[str]) -> dict[str, Split]:
    """Check that the files of the data are there, and read the small ones."""
    if bad & {"data", "task"}:
        return {}
    splits: dict[str, Split] = {}
    for name, origin in recipe.data.splits().items():
        path = recipe.base / origin
        try:
            path = path.expanduser()
            large = path.is_file() and path.stat().st_size > _READ_AT_ONCE_BYTES
            if large or _is_hub(origin, path):
                continue
            splits[name] = read_origin(recipe, origin, name)
        except InputError as error:
            mistakes.add(("data", name), str(error))
        except (OSError, RuntimeError, ValueError) as error:  # a name that no file can have
            mistakes.add(("data", name), f"cannot be read: {error}.")
    return splits


def _is_hub(origin: str, path: Path) -> bool:
    """Say whether `read_split` would ask the hub for `origin`."""
    local = bool(path.suffix) or origin.startswith((".", "/", "~")) or "/" not in origin
    return not local and not path.is_file()

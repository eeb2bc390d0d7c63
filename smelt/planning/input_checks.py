"""Check a recipe's model, data and device before a run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from smelt.core.bleu_tokenizer import bleu_tokenizer
from smelt.core.data import Split, Task
from smelt.core.errors import InputError
from smelt.core.files import resolve_path
from smelt.core.messages import Message, error_message, info
from smelt.families.registry import FAMILIES_BY_TASK
from smelt.inspect.machine import cuda_missing_reason
from smelt.inspect.model_folder import check_model_folder, local_model_folder, read_config
from smelt.planning.splits import read_split_source
from smelt.planning.text_rules import resolve_text_rules
from smelt.recipe.mistakes import Mistakes, has_mistake
from smelt.recipe.recipe import ParsedRecipe
from smelt.recipe.stages import MODEL_STEP

# Files up to this size are read for the plan, so that their mistakes are reported with the others.
_EAGER_READ_BYTES = 8_000_000
# Keys that `resolve_text_rules` reads.
_TEXT_KEYS = ("data.prefix", "data.source_language", "data.target_language")


def check_model(
    recipe: ParsedRecipe, mistakes: Mistakes, bad: set[str], warnings: list[Message], notes: list[Message]
) -> Path | None:
    """Check the model's folder and return it; None for a hub id.

    bad: dotted paths of parts that are known to be invalid. warnings, notes: receive the warnings, and the
    notes for the plan.
    """
    model = recipe.model
    if has_mistake(bad, "model"):
        return None
    if not isinstance(model, str):  # see smelt.planning.untrained_checks
        return None
    if not model.strip() or "\0" in model:
        mistakes.add(
            ("model",), "expected a model's folder or a hub id, got an empty name.", code="empty-text"
        )
        return None
    try:
        folder = local_model_folder(model, recipe.base)
        if folder is None:
            notes.append(
                info("from-the-hub", f"'{model}' is not a local folder; the run downloads it from the hub.")
            )
            return None
        task = None if has_mistake(bad, "task") else recipe.task
        problems, advice = check_model_folder(folder, task, recipe.baseline == MODEL_STEP)
    except (OSError, RuntimeError) as error:  # too long a name, a home folder that does not exist
        problems, advice, folder = [error_message("unreadable-file", f"cannot be read: {error}.")], [], None
    for problem in problems:
        mistakes.add_message(("model",), problem)
    warnings += [doubt.with_prefix("model: ") for doubt in advice]
    if (
        folder is not None
        and not has_mistake(bad, "task", *_TEXT_KEYS)
        and _is_supported_model(folder, recipe.task)
    ):
        try:
            resolve_text_rules(recipe, folder)
        except InputError as error:
            mistakes.add_error(("data",), error)
    return folder


def _is_supported_model(folder: Path, task: Task) -> bool:
    """Return whether the config can be read and its model_type supports `task`."""
    return read_config(folder)[0].get("model_type") in FAMILIES_BY_TASK[task]


def check_device(recipe: ParsedRecipe, mistakes: Mistakes, bad: set[str]) -> None:
    """Check that the requested device is available."""
    if recipe.device == "cuda" and not has_mistake(bad, "device") and (lack := cuda_missing_reason()):
        mistakes.add(("device",), lack, code="no-gpu")


def check_data(recipe: ParsedRecipe, mistakes: Mistakes, bad: set[str]) -> dict[str, Split]:
    """Check that the data files exist; read and return the small ones."""
    # samples cannot be checked without the task and the names of the columns
    readable = not has_mistake(bad, "task", "data.columns", "data.axes")
    splits: dict[str, Split] = {}
    for name, origin in recipe.data.split_files().items():
        if has_mistake(bad, f"data.{name}"):
            continue
        try:
            path = resolve_path(recipe.base, origin)
            if _is_hub_dataset(origin, path) or (path.is_file() and path.stat().st_size > _EAGER_READ_BYTES):
                continue
            if readable or not path.exists():
                splits |= read_split_source(recipe, name)
        except InputError as error:
            if error.found:
                mistakes.add_error(("data", name), error)
            for line in str(error).splitlines() if not error.found else ():
                mistakes.add(("data", name), line, code=error.code)
        except (OSError, RuntimeError, ValueError) as error:  # such as an invalid file name
            mistakes.add(("data", name), f"cannot be read: {error}.", code="unreadable-file")
    return splits if readable else {}


def check_bleu_tokenizer(recipe: ParsedRecipe, splits: Mapping[str, Split], mistakes: Mistakes) -> None:
    """Check that the tokenizer set for BLEU can split the references."""
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


def _is_hub_dataset(origin: str, path: Path) -> bool:
    """Return whether `read_split` would download `origin` from the hub."""
    local = bool(path.suffix) or origin.startswith((".", "/", "~")) or "/" not in origin
    return not local and not path.exists()

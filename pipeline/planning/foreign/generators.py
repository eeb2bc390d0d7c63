"""What can be known before any work of a recipe that starts from graphs which generate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smelt.core.data import TEXT_TO_TEXT
from smelt.core.errors import InputError
from smelt.core.files import placed
from smelt.core.messages import mistake
from smelt.families.registry import BY_TASK
from smelt.look.foreign import ForeignModel, examined, find_parts, texts_beside
from smelt.look.model_folder import check_tokenizer, read_config, unknown_family
from smelt.recipe.errors import Mistakes
from smelt.recipe.recipe import Recipe
from smelt.runtime.foreign.generators.layout import MODEL, misfits

if TYPE_CHECKING:
    from smelt.planning.plan import Step
    from smelt.recipe.yaml_file import Where

GENERATES = (*TEXT_TO_TEXT, "language-modeling")


def check_generator(recipe: Recipe, path: Path, mistakes: Mistakes) -> ForeignModel | None:
    """Check the graphs in `path` and what lies beside them; return what they are, None where not all fits."""
    try:
        parts = find_parts(path)
    except InputError as error:
        mistakes.refuse(("model",), error)
        return None
    looked = {name: examined(file) for name, file in parts.items()}
    wrong = [f"{parts[name]}: {problem}" for name, found in looked.items() for problem in found.problems]
    for name, found in looked.items():
        if found.signature is not None:
            wrong += [f"{parts[name]}: {problem}" for problem in misfits(name, found.signature)]
    for problem in wrong:
        mistakes.add(("model",), f"{problem}.", code="unsupported-graph")
    last = next(reversed(parts))
    named = None if recipe.tokenizer is None else placed(recipe.base, recipe.tokenizer)
    folder = _texts(recipe, parts, named, mistakes)
    signature = looked[last].signature
    if wrong or folder is None or signature is None:
        return None
    files = tuple(dict.fromkeys(name for found in looked.values() for name in found.files))
    details: dict[str, Any] = dict(looked[last].details or {})
    details["nodes"] = sum(int((found.details or {}).get("nodes", 0)) for found in looked.values())
    return ForeignModel(parts[last], signature, files, folder, details, parts)


def check_engines(
    model: ForeignModel | None, steps: Sequence[Step], places: Mapping[str, Where], mistakes: Mistakes
) -> None:
    """Note steps that build engines of graphs which generate: their sizes are laid out for smelt's own."""
    for step in steps if model is not None and model.parts else ():
        if step.cls.produces == "tensorrt":
            mistakes.add(
                places[step.name],
                "no engine is built of graphs that generate and that somebody else exported; start from the"
                " folder with weights, and put onnx: {target: tensorrt} before this step.",
                code="unsupported-graph",
            )


def _texts(recipe: Recipe, parts: dict[str, Path], named: Path | None, mistakes: Mistakes) -> Path | None:
    """Return the folder with config and tokenizer where they fit graphs and task; else note why not."""
    place: tuple[str, ...] = ("model",) if recipe.tokenizer is None else ("tokenizer",)
    graph = next(iter(parts.values()))
    folder = texts_beside(graph, named)
    if folder is None:
        mistakes.add(
            place,
            f"{graph.parent}: there is no config.json. Name the folder with config.json and the tokenizer"
            " that the graphs were exported from, as tokenizer: FOLDER.",
            code="missing-config",
        )
        return None
    config, problems = read_config(folder)
    kind = str(config.get("model_type", ""))
    families = BY_TASK[recipe.task]
    if config and kind not in families:
        problems.append(unknown_family(kind, recipe.task).prefixed(f"{folder / 'config.json'}: "))
    else:
        problems += check_tokenizer(folder, kind)
    reads = bool(config.get("is_encoder_decoder"))
    if config and not problems and reads == (MODEL in parts):
        have = "a decoder alone" if MODEL in parts else "an encoder and a decoder"
        problems.append(
            mistake(
                "config-differs-from-graph",
                f"{folder / 'config.json'}: is_encoder_decoder is {str(reads).lower()}, and the graphs are"
                f" {have}.",
            )
        )
    for problem in problems:
        mistakes.note(place, problem)
    return None if problems else folder

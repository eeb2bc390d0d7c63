"""Check a recipe that starts from the ONNX graphs of a generative model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smelt.core.data import TEXT_TO_TEXT_TASKS
from smelt.core.errors import InputError
from smelt.core.files import resolve_path
from smelt.core.messages import error_message
from smelt.families.registry import FAMILIES_BY_TASK
from smelt.inspect.model_folder import check_tokenizer_files, read_config, unknown_family_message
from smelt.inspect.onnx_files import (
    ThirdPartyModel,
    find_generation_graphs,
    find_tokenizer_folder,
    inspect_graph,
)
from smelt.recipe.mistakes import Mistakes
from smelt.recipe.recipe import ParsedRecipe
from smelt.runtime.third_party.generators.optimum_layout import MODEL_GRAPH, layout_problems

if TYPE_CHECKING:
    from smelt.planning.plan import PlanStep
    from smelt.recipe.yaml_file import KeyPath

GENERATIVE_TASKS = (*TEXT_TO_TEXT_TASKS, "language-modeling")


def check_generation_graphs(recipe: ParsedRecipe, path: Path, mistakes: Mistakes) -> ThirdPartyModel | None:
    """Check the graphs in `path` with config and tokenizer; return the model, None if there are mistakes."""
    try:
        parts = find_generation_graphs(path)
    except InputError as error:
        mistakes.add_error(("model",), error)
        return None
    looked = {name: inspect_graph(file) for name, file in parts.items()}
    wrong = [f"{parts[name]}: {problem}" for name, found in looked.items() for problem in found.problems]
    for name, found in looked.items():
        if found.signature is not None:
            wrong += [f"{parts[name]}: {problem}" for problem in layout_problems(name, found.signature)]
    for problem in wrong:
        mistakes.add(("model",), f"{problem}.", code="unsupported-graph")
    last = next(reversed(parts))
    named = None if recipe.tokenizer is None else resolve_path(recipe.base, recipe.tokenizer)
    folder = _check_tokenizer_folder(recipe, parts, named, mistakes)
    signature = looked[last].signature
    if wrong or folder is None or signature is None:
        return None
    files = tuple(dict.fromkeys(name for found in looked.values() for name in found.files))
    details: dict[str, Any] = dict(looked[last].details or {})
    details["nodes"] = sum(int((found.details or {}).get("nodes", 0)) for found in looked.values())
    return ThirdPartyModel(parts[last], signature, files, folder, details, parts)


def check_generation_engines(
    model: ThirdPartyModel | None,
    steps: Sequence[PlanStep],
    setting_paths: Mapping[str, KeyPath],
    mistakes: Mistakes,
) -> None:
    """Add a mistake for steps that build engines of third-party generation graphs, which is unsupported."""
    for step in steps if model is not None and model.graphs else ():
        if step.stage_class.produces == "tensorrt":
            mistakes.add(
                setting_paths[step.name],
                "cannot build an engine from generation graphs of another exporter. Start from the folder"
                " with weights, and put onnx: {target: tensorrt} before this step.",
                code="unsupported-graph",
            )


def _check_tokenizer_folder(
    recipe: ParsedRecipe, graphs: dict[str, Path], named: Path | None, mistakes: Mistakes
) -> Path | None:
    """Return the folder with config and tokenizer; None, with mistakes added, if they do not fit."""
    place: tuple[str, ...] = ("model",) if recipe.tokenizer is None else ("tokenizer",)
    graph = next(iter(graphs.values()))
    folder = find_tokenizer_folder(graph, named)
    if folder is None:
        mistakes.add(
            place,
            f"{graph.parent}: no config.json. Set tokenizer: FOLDER, the folder with config.json and the"
            " tokenizer of the exported model.",
            code="missing-config",
        )
        return None
    config, problems = read_config(folder)
    kind = str(config.get("model_type", ""))
    families = FAMILIES_BY_TASK[recipe.task]
    if config and kind not in families:
        problems.append(unknown_family_message(kind, recipe.task).with_prefix(f"{folder / 'config.json'}: "))
    else:
        problems += check_tokenizer_files(folder, kind)
    reads = bool(config.get("is_encoder_decoder"))
    if config and not problems and reads == (MODEL_GRAPH in graphs):
        have = "only a decoder" if MODEL_GRAPH in graphs else "an encoder and a decoder"
        problems.append(
            error_message(
                "config-differs-from-graph",
                f"{folder / 'config.json'}: is_encoder_decoder is {str(reads).lower()}, but the graphs are"
                f" {have}. Use the config of the exported model.",
            )
        )
    for problem in problems:
        mistakes.add_message(place, problem)
    return None if problems else folder

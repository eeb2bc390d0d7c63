"""What can be seen of a model's folder without loading it, for `smelt init`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from smelt.core.artifact import MANIFEST
from smelt.core.data import CLASSIFICATION, SIMILARITY, Task
from smelt.core.errors import InputError, together
from smelt.core.files import load_json
from smelt.core.hub import cache_alone, hub_lacks
from smelt.core.text import article
from smelt.families.registry import BY_TASK, FAMILIES
from smelt.look.coded_model import CodedModel, coded_model
from smelt.look.model_folder import (
    check_model_folder,
    local_folder,
    not_given,
    read_config,
    unknown_family,
)
from smelt.recipe.problem import has_classifier
from smelt.runtime.models.coded.headers import CODES, values_by_type
from smelt.runtime.models.coded.said import BITS, coding_of
from smelt.runtime.text.limits import position_limit
from smelt.runtime.text.sentence_files import MODULES, read_sentence_rules

# safetensors' words for the types of floating numbers, and that for codes.
_TYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    CODES: f"{BITS}-bit codes",
}


@dataclass(frozen=True)
class ModelLook:
    """What a model is.

    folder: None for an id on the hub, of which only the config was read. family: the config's model_type.
    task: what it is for; tasks: all that its family can be for. parameters: values in its weights;
    None where they were not read. dtype: of most of them. limit: the most tokens of a text.
    new_head: it has no classifier yet. config: its Hugging Face config. languages: source and target, as its
    tokenizer calls them, where its files say them. coded: its codes; None for floats.
    """

    folder: Path | None
    family: str
    task: Task
    tasks: tuple[Task, ...]
    parameters: int | None
    dtype: str | None
    limit: int | None
    new_head: bool
    config: Mapping[str, Any] = field(default_factory=dict)
    languages: tuple[str | None, str | None] = (None, None)
    coded: CodedModel | None = None


def look(model: str, task: Task | None = None, base: Path | None = None) -> ModelLook:
    """Look at `model`, a folder or a hub id; only the config of the latter is downloaded.

    Raises:
        InputError: it is not a model that smelt can start from, or not for `task`.
    """
    folder = local_folder(model, base or Path.cwd())
    place = _config_from_hub(model) if folder is None else folder
    config, problems = read_config(place) if place.is_dir() else ({}, [])
    family = str(config.get("model_type", ""))
    tasks = tuple(t for t, families in BY_TASK.items() if family in families)
    if config and not tasks:
        raise together([unknown_family(family).prefixed(f"{place / 'config.json'}: ")])
    chosen = _choose(config, family, tasks, task, embeds=(place / MODULES).is_file()) if tasks else None
    if folder is not None:
        problems, _ = check_model_folder(folder, chosen)
    if problems:
        raise together(problems)
    if chosen is None:
        raise InputError(f"{model}: not a model's folder.", code="missing-config")
    coded = _coded(place, config)
    count, dtype = _weights(folder, coded) if folder is not None else (None, None)
    return ModelLook(
        folder=folder,
        family=family,
        task=chosen,
        tasks=tasks,
        parameters=count,
        dtype=dtype,
        limit=_limit(folder, config, chosen),
        new_head=chosen in CLASSIFICATION and not has_classifier(config),
        config=config,
        languages=_languages(folder) if folder is not None else (None, None),
        coded=coded,
    )


def _limit(folder: Path | None, config: Mapping[str, Any], task: Task) -> int | None:
    """Return how many tokens the model reads: of a sentence embedder what its own files say, if less."""
    rules = read_sentence_rules(folder) if folder is not None and task == SIMILARITY else None
    said = [n for n in (position_limit(config), rules.max_length if rules else None) if n is not None]
    return min(said, default=None)


def _config_from_hub(model: str) -> Path:
    import huggingface_hub

    lack = hub_lacks()
    try:
        with cache_alone(lack):
            return Path(huggingface_hub.hf_hub_download(model, "config.json")).parent
    except Exception as error:  # the hub client raises many kinds; all mean: not to be had
        raise not_given(model, lack, error) from error


def _choose(
    config: Mapping[str, Any], family: str, tasks: tuple[Task, ...], wanted: Task | None, embeds: bool
) -> Task:
    """Return the task: the one that was asked for, else what the model's files say, else the usual.

    embeds: the folder was written by sentence-transformers.
    """
    if wanted is not None:
        if wanted not in tasks:
            raise InputError(
                f"--task {wanted}: {article(family)} model is for {' or '.join(tasks)}.",
                code="unsupported-task",
            )
        return wanted
    if embeds and SIMILARITY in tasks:
        return SIMILARITY
    params = config.get("task_specific_params")
    named = {t for t in tasks for word in (params if isinstance(params, dict) else ()) if word.startswith(t)}
    if len(named) == 1:
        return named.pop()
    return FAMILIES[family].tasks[0]


def _languages(folder: Path) -> tuple[str | None, str | None]:
    """Return the languages that the tokenizer was saved with (mBART's `src_lang` and `tgt_lang`)."""
    try:
        said = load_json(folder / "tokenizer_config.json")
        found = [said.get(name) for name in ("src_lang", "tgt_lang")]
    except (OSError, ValueError, AttributeError, RecursionError):
        return None, None
    source, target = (name if isinstance(name, str) else None for name in found)
    return source, target


def _coded(place: Path, config: Mapping[str, Any]) -> CodedModel | None:
    """Return what codes the model has; of a hub id nobody else has asked the config for it.

    Raises:
        InputError: they are none that smelt reads.
    """
    try:
        coding_of(config)
    except InputError as error:
        raise InputError(f"{place / 'config.json'}: {error}", code=error.code) from error
    return coded_model(place, config)


def _weights(folder: Path, coded: CodedModel | None) -> tuple[int | None, str]:
    """Return how many values the weights hold, and the type of most of them; of an artifact as it says."""
    if coded is not None and (folder / MANIFEST).is_file():
        try:
            details = load_json(folder / MANIFEST)["details"]
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            details = {}
        told = details.get("parameters") if isinstance(details, dict) else None
        return told if isinstance(told, int) else None, f"{coded.said} codes"
    counts = values_by_type(folder)
    most = max(counts, key=counts.__getitem__, default="F32")
    return sum(counts.values()), _TYPES.get(most, most)

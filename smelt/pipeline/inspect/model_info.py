"""Inspect a model's folder without loading the model, for `smelt init`.

Quantized weights are detected too: those of a third-party checkpoint or of a smelt artifact.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from smelt.core.errors import InputError, combined_error
from smelt.core.files import MANIFEST, load_json
from smelt.core.hub import hub_cache_only, hub_unreachable_reason
from smelt.core.messages import with_article
from smelt.data.splits import CLASSIFICATION_TASKS, SENTENCE_SIMILARITY, Task
from smelt.models.families.registry import FAMILIES, FAMILIES_BY_TASK
from smelt.models.quantization_config import (
    CHECKPOINT_BITS,
    INT4_DTYPE,
    count_values_by_dtype,
    parse_quantization_config,
)
from smelt.models.text_rules import MODULES_FILE, position_limit, read_sentence_rules
from smelt.pipeline.inspect.model_folder import (
    check_model_folder,
    hub_error,
    local_model_folder,
    read_config,
    unknown_family_message,
)
from smelt.pipeline.recipe.model_and_data import has_classifier
from smelt.quantization.scheme import EXPORT_TARGETS, SchemeOptions
from smelt.quantization.schemes.registry import (
    CHECKPOINT_SCHEME,
    SCHEMES,
    default_options,
    unsupported_reason,
    unsupported_scheme_options,
)


@dataclass(frozen=True)
class QuantizedModelInfo:
    """Quantized weights of a model before any stage.

    description: name of the format. schemes: options by scheme, the most frequent scheme first. float_source:
    the model to start from if float weights are needed.
    """

    description: str
    schemes: Mapping[str, SchemeOptions]
    float_source: str

    def unsupported_by(self, target: str) -> str | None:
        """Return the quantized layers that `target` does not support; None if it supports all."""
        known = ((SCHEMES[name], options) for name, options in self.schemes.items())
        words = [
            scheme.exported_as
            for scheme, own in known
            if unsupported_reason(scheme, target) or unsupported_scheme_options(scheme, own, target)
        ]
        return " and ".join(words) or None

    @property
    def targets(self) -> list[str]:
        """The export targets that support these weights."""
        return [target for target in EXPORT_TARGETS if self.unsupported_by(target) is None]


def inspect_quantization(folder: Path, config: Mapping[str, Any]) -> QuantizedModelInfo | None:
    """Return the quantized weights of the model in `folder`; None for float or unreadable weights.

    config: its Hugging Face config.
    """
    try:
        coding = parse_quantization_config(config)
    except InputError:  # reported by the checks of the model's folder
        return None
    if coding is not None:
        taken = {CHECKPOINT_SCHEME: default_options(SCHEMES[CHECKPOINT_SCHEME])}
        return QuantizedModelInfo(coding.method, taken, "the float model")
    found = list(_quantized_matrices(folder))
    counted = Counter(name for name, _ in found)
    options = dict(found)
    schemes = {name: options[name] for name, _ in counted.most_common()}
    again = "an artifact from before `quantize`"
    return QuantizedModelInfo(" and ".join(schemes), schemes, again) if schemes else None


def _quantized_matrices(folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield scheme and options of each matrix that smelt has quantized."""
    try:
        edits = load_json(folder / "structure.json")["edits"]
        coded = [edit for edit in edits if edit["op"] == "quantize"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return  # not an artifact; an invalid file is reported when the model is loaded
    for edit in coded:
        if edit.get("scheme") in SCHEMES:
            options = {name: value for name, value in edit.items() if name not in ("op", "module", "scheme")}
            yield str(edit["scheme"]), options


# Names of safetensors' dtypes of float and quantized weights.
_DTYPE_NAMES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    INT4_DTYPE: f"{CHECKPOINT_BITS}-bit quantized weights",
}


@dataclass(frozen=True)
class ModelInfo:
    """Properties of a model.

    folder: None for a hub id, of which only the config was read. family: the config's model_type.
    task: its task; tasks: all tasks of its family. parameters: number of weights; None if not read.
    dtype: of most weights. max_tokens: maximum length of a text. needs_classifier: whether it has no
    classifier yet. config: its Hugging Face config. languages: source and target in its tokenizer's codes, if
    its files have them. quantization: its quantized weights; None for floats.
    """

    folder: Path | None
    family: str
    task: Task
    tasks: tuple[Task, ...]
    parameters: int | None
    dtype: str | None
    max_tokens: int | None
    needs_classifier: bool
    config: Mapping[str, Any] = field(default_factory=dict)
    languages: tuple[str | None, str | None] = (None, None)
    quantization: QuantizedModelInfo | None = None


def inspect_model(model: str, task: Task | None = None, base: Path | None = None) -> ModelInfo:
    """Return the properties of `model`, a folder or a hub id; of the latter only the config is downloaded.

    Raises:
        InputError: the model is not supported, or not for `task`.
    """
    folder = local_model_folder(model, base or Path.cwd())
    place = _config_from_hub(model) if folder is None else folder
    config, problems = read_config(place) if place.is_dir() else ({}, [])
    family = str(config.get("model_type", ""))
    tasks = tuple(t for t, families in FAMILIES_BY_TASK.items() if family in families)
    if config and not tasks:
        raise combined_error([unknown_family_message(family).with_prefix(f"{place / 'config.json'}: ")])
    chosen = (
        _choose_task(config, family, tasks, task, is_embedder=(place / MODULES_FILE).is_file())
        if tasks
        else None
    )
    if folder is not None:
        problems, _ = check_model_folder(folder, chosen)
    if problems:
        raise combined_error(problems)
    if chosen is None:
        raise InputError(f"{model}: not a model's folder. Expected config.json in it.", code="missing-config")
    coded = _inspect_quantization(place, config)
    count, dtype = _weight_count_and_dtype(folder, coded) if folder is not None else (None, None)
    return ModelInfo(
        folder=folder,
        family=family,
        task=chosen,
        tasks=tasks,
        parameters=count,
        dtype=dtype,
        max_tokens=_max_tokens(folder, config, chosen),
        needs_classifier=chosen in CLASSIFICATION_TASKS and not has_classifier(config),
        config=config,
        languages=_tokenizer_languages(folder) if folder is not None else (None, None),
        quantization=coded,
    )


def _max_tokens(folder: Path | None, config: Mapping[str, Any], task: Task) -> int | None:
    """Return the model's maximum input length; for a sentence embedder also limited by its own files."""
    rules = read_sentence_rules(folder) if folder is not None and task == SENTENCE_SIMILARITY else None
    limits = [n for n in (position_limit(config), rules.max_length if rules else None) if n is not None]
    return min(limits, default=None)


def _config_from_hub(model: str) -> Path:
    import huggingface_hub

    lack = hub_unreachable_reason()
    try:
        with hub_cache_only(lack):
            return Path(huggingface_hub.hf_hub_download(model, "config.json")).parent
    except Exception as error:  # the hub client raises many types; all mean that the download failed
        raise hub_error(model, lack, error) from error


def _choose_task(
    config: Mapping[str, Any], family: str, tasks: tuple[Task, ...], requested: Task | None, is_embedder: bool
) -> Task:
    """Return the requested task, else the one in the model's files, else the family's default.

    is_embedder: whether the folder was written by sentence-transformers.
    """
    if requested is not None:
        if requested not in tasks:
            raise InputError(
                f"--task {requested}: not supported by {with_article(family)} model. Use"
                f" {' or '.join(tasks)}.",
                code="unsupported-task",
            )
        return requested
    if is_embedder and SENTENCE_SIMILARITY in tasks:
        return SENTENCE_SIMILARITY
    params = config.get("task_specific_params")
    named = {t for t in tasks for word in (params if isinstance(params, dict) else ()) if word.startswith(t)}
    if len(named) == 1:
        return named.pop()
    return FAMILIES[family].tasks[0]


def _tokenizer_languages(folder: Path) -> tuple[str | None, str | None]:
    """Return the languages in the tokenizer's config (mBART's `src_lang` and `tgt_lang`)."""
    try:
        config = load_json(folder / "tokenizer_config.json")
        found = [config.get(name) for name in ("src_lang", "tgt_lang")]
    except (OSError, ValueError, AttributeError, RecursionError):
        return None, None
    source, target = (name if isinstance(name, str) else None for name in found)
    return source, target


def _inspect_quantization(place: Path, config: Mapping[str, Any]) -> QuantizedModelInfo | None:
    """Return the quantized weights of the model; None for floats.

    Raises:
        InputError: the quantization format is not supported.
    """
    try:
        parse_quantization_config(config)
    except InputError as error:
        raise InputError(f"{place / 'config.json'}: {error}", code=error.code) from error
    return inspect_quantization(place, config)


def _weight_count_and_dtype(folder: Path, coded: QuantizedModelInfo | None) -> tuple[int | None, str]:
    """Return the number of weights and the dtype of most of them; for an artifact, from its manifest."""
    if coded is not None and (folder / MANIFEST).is_file():
        try:
            details = load_json(folder / MANIFEST)["details"]
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            details = {}
        declared = details.get("parameters") if isinstance(details, dict) else None
        return declared if isinstance(declared, int) else None, coded.description
    counts = count_values_by_dtype(folder)
    most = max(counts, key=counts.__getitem__, default="F32")
    return sum(counts.values()), _DTYPE_NAMES.get(most, most)

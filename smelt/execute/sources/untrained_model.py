"""Create the first artifact of a recipe that starts from a config: a model with random weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from smelt.core.artifact import Artifact, Manifest
from smelt.core.data import IMAGE_CLASSIFICATION, Split
from smelt.core.errors import InputError, combined_error
from smelt.core.files import json_hash, sha256_of, write_json
from smelt.core.hub import hub_cache_only, hub_unreachable_reason
from smelt.core.labels import class_names
from smelt.core.messages import Message
from smelt.execute.step_runner import StepRunner
from smelt.execute.task_setup import TaskSetup
from smelt.inspect.model_folder import local_model_folder
from smelt.planning.untrained_checks import config_file, preprocessor_config, read_untrained_config
from smelt.recipe.model_and_data import NewTokenizer, UntrainedModel
from smelt.recipe.problem_type import has_classifier
from smelt.recipe.recipe import ParsedRecipe
from smelt.recipe.stages import MODEL_STEP
from smelt.runtime.images.image_processor import PROCESSOR_FILE
from smelt.runtime.text.text_preprocessing import TextRules

_TOKENIZER_FILES = ["*.json", "*.txt", "*.model", "*.spm"]


def make_untrained_model(
    step_runner: StepRunner, recipe: ParsedRecipe, task_setup: TaskSetup, rebuild: bool
) -> tuple[Artifact, bool]:
    """Return the untrained model of the recipe, and whether it was in the store already.

    Raises:
        InputError: config or tokenizer is missing, invalid, or they do not fit each other.
    """
    model = recipe.model
    assert isinstance(model, UntrainedModel)
    config, problems = read_untrained_config(config_file(model, recipe.base))
    if problems:
        raise combined_error(problems)
    tokenizer = model.tokenizer
    ready = _fetch_tokenizer(tokenizer, recipe.base) if isinstance(tokenizer, str) else None
    pixels = (
        preprocessor_config(model, recipe.base, config) if step_runner.task == IMAGE_CLASSIFICATION else None
    )
    key = json_hash(
        {
            "stage": "untrained",
            "version": 1,
            "config": config,
            **({} if pixels is None else {"images": pixels}),
            **({} if tokenizer is None else {"tokenizer": _tokenizer_key(ready, tokenizer, step_runner)}),
            "task": step_runner.task,
            "labels": task_setup.labels,
            **task_setup.key_parts,
            "seed": step_runner.seed,
            "libraries": dict(step_runner.versions),
            **step_runner.windows_details,
        }
    )

    def make(space: Path) -> Artifact:
        out, words = space / "out", ready or space / "tokenizer"
        out.mkdir()
        if pixels is not None:
            words.mkdir()
            write_json(words / PROCESSOR_FILE, pixels)
        notes = _write_model(step_runner, config, tokenizer, words, out, task_setup)
        return _commit_artifact(
            step_runner, key, config, tokenizer, task_setup.text_rules, out, notes, rebuild
        )

    return step_runner.get_or_make(MODEL_STEP, key, rebuild, make)


def _write_model(
    shop: StepRunner,
    config: Mapping[str, Any],
    tokenizer: str | NewTokenizer | None,
    words: Path,
    out: Path,
    head: TaskSetup,
) -> list[Message]:
    """Write the model into `out`; first train a new tokenizer into the folder `words`, if requested."""
    from smelt.runtime.models.create.new_model import create_model
    from smelt.runtime.text.length_limits import position_limit
    from smelt.runtime.text.train_tokenizer import train_tokenizer

    if isinstance(tokenizer, NewTokenizer):
        words.mkdir()
        train_tokenizer(
            _training_texts(shop.data["train"]),
            words,
            family=str(config["model_type"]),
            kind=tokenizer.train,
            vocab_size=tokenizer.vocab_size,
            max_length=position_limit(config),
        )
    problem, names = head.labels or (None, [])
    if has_classifier(config):
        names = class_names(config)
    return create_model(
        config,
        words,
        out,
        task=shop.task,
        seed=shop.seed,
        exact=isinstance(tokenizer, NewTokenizer),
        labels=names,
        problem=problem,
        sentences=head.sentences,
    )


def _commit_artifact(
    step_runner: StepRunner,
    key: str,
    config: Mapping[str, Any],
    tokenizer: str | NewTokenizer | None,
    rules: TextRules,
    out: Path,
    notes: list[Message],
    rebuild: bool,
) -> Artifact:
    from smelt.runtime.models.weights.count_parameters import count_parameters
    from smelt.runtime.text.write_text_rules import write_text_rules

    write_text_rules(out, rules)
    how = tokenizer.model_dump() if isinstance(tokenizer, NewTokenizer) else tokenizer
    details = {"parameters": count_parameters(out), "untrained": True, **step_runner.windows_details}
    manifest = Manifest(
        key=key,
        format="torch",
        task=step_runner.task,
        stage="model",
        settings={"config": dict(config), "tokenizer": how},
        seed=step_runner.seed,
        parent=None,
        versions=dict(step_runner.versions),
        warnings=notes,
        details=details | rules.model_dump(exclude_defaults=True),
    )
    return step_runner.store.commit(out, manifest, replace=rebuild)


def _fetch_tokenizer(tokenizer: str, base: Path) -> Path:
    """Return the tokenizer's folder; of a hub id only the tokenizer's files are downloaded."""
    folder = local_model_folder(tokenizer, base)
    if folder is not None:
        return folder
    import huggingface_hub

    lack = hub_unreachable_reason()
    try:
        with hub_cache_only(lack):
            return Path(huggingface_hub.snapshot_download(tokenizer, allow_patterns=_TOKENIZER_FILES))
    except Exception as error:  # the hub client raises many types; all mean that the download failed
        why = f"not in the local cache, and {lack}" if lack else f"cannot download it from the hub: {error}"
        code = "not-in-hub-cache" if lack else "not-on-hub"
        raise InputError(f"model.tokenizer: '{tokenizer}': {why}.", code=code) from error


def _tokenizer_key(
    ready: Path | None, tokenizer: str | NewTokenizer, step_runner: StepRunner
) -> dict[str, Any]:
    return _file_hashes(ready) if ready else _tokenizer_recipe(tokenizer, step_runner.data["train"])


def _file_hashes(folder: Path) -> dict[str, str]:
    suffixes = {pattern.removeprefix("*") for pattern in _TOKENIZER_FILES}
    files = sorted(path for path in folder.iterdir() if path.is_file() and path.suffix in suffixes)
    return {path.name: sha256_of(path) for path in files}


def _tokenizer_recipe(tokenizer: str | NewTokenizer, train: Split) -> dict[str, Any]:
    assert isinstance(tokenizer, NewTokenizer)
    return {**tokenizer.model_dump(), "data": train.fingerprint}


def _training_texts(split: Split) -> Iterator[str]:
    """Yield every text of the samples, including references and pairs."""
    for example in split.examples:
        yield example.text
        yield from example.references
        if example.text_pair is not None:
            yield example.text_pair

"""The first artifact of a recipe that starts from a config without weights: a model of random ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from smelt.core.artifact import Artifact, Manifest
from smelt.core.data import IMAGES, Split
from smelt.core.errors import InputError, together
from smelt.core.files import hash_of, sha256_of, write_json
from smelt.core.hub import cache_alone, hub_lacks
from smelt.core.labels import class_names
from smelt.core.messages import Message
from smelt.execute.head import Head
from smelt.execute.steps import Workshop
from smelt.look.model_folder import local_folder
from smelt.planning.untrained import config_file, processor_settings, read_outline
from smelt.recipe.inputs import NewTokenizer, Untrained
from smelt.recipe.problem import has_classifier
from smelt.recipe.recipe import Recipe
from smelt.recipe.stages import ROOT
from smelt.runtime.images.processor import FILE
from smelt.runtime.text.rules import TextRules

_TOKENIZER_FILES = ["*.json", "*.txt", "*.model", "*.spm"]


def start(shop: Workshop, recipe: Recipe, head: Head, fresh: bool) -> tuple[Artifact, bool]:
    """Make the model that the recipe describes, or take it from the store; return also whether it was there.

    Raises:
        InputError: config or tokenizer cannot be had or do not fit each other.
    """
    model = recipe.model
    assert isinstance(model, Untrained)
    config, problems = read_outline(config_file(model, recipe.base))
    if problems:
        raise together(problems)
    tokenizer = model.tokenizer
    ready = _fetch_tokenizer(tokenizer, recipe.base) if isinstance(tokenizer, str) else None
    pixels = processor_settings(model, recipe.base, config) if shop.task == IMAGES else None
    key = hash_of(
        {
            "stage": "untrained",
            "version": 1,
            "config": config,
            **({} if pixels is None else {"images": pixels}),
            **({} if tokenizer is None else {"tokenizer": _words_key(ready, tokenizer, shop)}),
            "task": shop.task,
            "labels": head.labels,
            **head.key,
            "seed": shop.seed,
            "libraries": dict(shop.versions),
            **shop.remembered,
        }
    )

    def make(space: Path) -> Artifact:
        out, words = space / "out", ready or space / "tokenizer"
        out.mkdir()
        if pixels is not None:
            words.mkdir()
            write_json(words / FILE, pixels)
        notes = _make(shop, config, tokenizer, words, out, head)
        return _commit(shop, key, config, tokenizer, head.rules, out, notes, fresh)

    return shop.obtain(ROOT, key, fresh, make)


def _make(
    shop: Workshop,
    config: Mapping[str, Any],
    tokenizer: str | NewTokenizer | None,
    words: Path,
    out: Path,
    head: Head,
) -> list[Message]:
    """Write the model into `out`, its tokenizer trained into the folder `words` before, if it is to be."""
    from smelt.runtime.models.making.new_model import make_model
    from smelt.runtime.text.limits import position_limit
    from smelt.runtime.text.new_tokenizer import train_tokenizer

    if isinstance(tokenizer, NewTokenizer):
        words.mkdir()
        train_tokenizer(
            _texts(shop.data["train"]),
            words,
            family=str(config["model_type"]),
            kind=tokenizer.train,
            vocab_size=tokenizer.vocab_size,
            max_length=position_limit(config),
        )
    problem, names = head.labels or (None, [])
    if has_classifier(config):
        names = class_names(config)
    return make_model(
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


def _commit(
    shop: Workshop,
    key: str,
    config: Mapping[str, Any],
    tokenizer: str | NewTokenizer | None,
    rules: TextRules,
    out: Path,
    notes: list[Message],
    fresh: bool,
) -> Artifact:
    from smelt.runtime.models.places.parameters import count_parameters
    from smelt.runtime.text.write_rules import write_text_rules

    write_text_rules(out, rules)
    how = tokenizer.model_dump() if isinstance(tokenizer, NewTokenizer) else tokenizer
    details = {"parameters": count_parameters(out), "untrained": True, **shop.remembered}
    manifest = Manifest(
        key=key,
        format="torch",
        task=shop.task,
        stage="model",
        settings={"config": dict(config), "tokenizer": how},
        seed=shop.seed,
        parent=None,
        versions=dict(shop.versions),
        warnings=notes,
        details=details | rules.model_dump(exclude_defaults=True),
    )
    return shop.store.commit(out, manifest, replace=fresh)


def _fetch_tokenizer(tokenizer: str, base: Path) -> Path:
    """Return the tokenizer's folder; of an id on the hub texts are downloaded, nothing else."""
    folder = local_folder(tokenizer, base)
    if folder is not None:
        return folder
    import huggingface_hub

    lack = hub_lacks()
    try:
        with cache_alone(lack):
            return Path(huggingface_hub.snapshot_download(tokenizer, allow_patterns=_TOKENIZER_FILES))
    except Exception as error:  # the hub client raises many kinds; all mean: not to be had
        why = f"it is not in the cache here, and {lack}" if lack else f"the hub does not give it: {error}"
        code = "not-in-hub-cache" if lack else "not-on-hub"
        raise InputError(f"model.tokenizer: '{tokenizer}': {why}.", code=code) from error


def _words_key(ready: Path | None, tokenizer: str | NewTokenizer, shop: Workshop) -> dict[str, Any]:
    return _contents(ready) if ready else _recipe_of(tokenizer, shop.data["train"])


def _contents(folder: Path) -> dict[str, str]:
    suffixes = {pattern.removeprefix("*") for pattern in _TOKENIZER_FILES}
    files = sorted(path for path in folder.iterdir() if path.is_file() and path.suffix in suffixes)
    return {path.name: sha256_of(path) for path in files}


def _recipe_of(tokenizer: str | NewTokenizer, train: Split) -> dict[str, Any]:
    assert isinstance(tokenizer, NewTokenizer)
    return {**tokenizer.model_dump(), "data": train.fingerprint}


def _texts(split: Split) -> Iterator[str]:
    """Yield every text of the rows, both sides of a pair."""
    for example in split.examples:
        yield example.text
        yield from example.references
        if example.text_pair is not None:
            yield example.text_pair

"""A recipe that starts from a config without weights: what is checked at once, and the first artifact."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smelt.core.artifact import Artifact, Manifest
from smelt.core.data import Split
from smelt.core.errors import InputError
from smelt.core.files import hash_of, sha256_of
from smelt.core.hub import cache_alone, hub_lacks
from smelt.core.labels import class_names
from smelt.families.registry import BY_TASK
from smelt.look.model_folder import (
    check_tokenizer,
    local_folder,
    read_config,
    read_config_file,
    unknown_family,
)
from smelt.recipe.errors import Mistakes, touches
from smelt.recipe.inputs import NewTokenizer, Untrained
from smelt.recipe.problem import has_classifier
from smelt.recipe.recipe import TRAINING_STAGES, Recipe
from smelt.recipe.stages import ROOT

if TYPE_CHECKING:
    from smelt.core.labels import ProblemType
    from smelt.execute.steps import Workshop
    from smelt.plan.plan import Step
    from smelt.runtime.text.rules import TextRules

NOT_SCORED = "its weights are random; the first trained step is the baseline"
_TOKENIZER_FILES = ["*.json", "*.txt", "*.model", "*.spm"]


def config_file(model: Untrained, base: Path) -> Path:
    """Return the file that `config` means: itself, or config.json in the folder."""
    path = (base / model.config).expanduser()
    return path if path.suffix == ".json" else path / "config.json"


def read_outline(file: Path) -> tuple[dict[str, Any], list[str]]:
    """Read the config of a model without weights; return it and what is wrong.

    The outputs of a new classifier are the labels of the data, whatever class the config names, unless
    it names the outputs too.
    """
    config, problems = read_config_file(file)
    if "id2label" not in config:
        config = {key: value for key, value in config.items() if key != "architectures"}
    return config, problems


def check_untrained(recipe: Recipe, steps: Sequence[Step], mistakes: Mistakes, bad: set[str]) -> None:
    """Check config and tokenizer, and that the model is trained before it is a teacher or the baseline.

    bad: what is wrong already, as dotted paths, and of which nothing more is said.
    """
    model = recipe.model
    if "model" in bad or not isinstance(model, Untrained):
        return
    config, problems = read_config_file(config_file(model, recipe.base))
    for problem in () if touches(bad, "model.config") else problems:
        mistakes.add(("model", "config"), problem)
    kind = str(config.get("model_type", ""))
    if config and not touches(bad, "task") and kind not in BY_TASK[recipe.task]:
        mistakes.add(("model", "config"), unknown_family(kind, recipe.task))
    elif config and not touches(bad, "model.tokenizer"):
        for where, problem in _tokenizer_mistakes(recipe, model, kind, bad):
            mistakes.add(("model", "tokenizer", *where), problem)
    if "stages" not in bad:
        _check_training(recipe, steps, mistakes)


def _tokenizer_mistakes(
    recipe: Recipe, model: Untrained, kind: str, bad: set[str]
) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield where in the tokenizer's settings something is wrong, and what."""
    tokenizer = model.tokenizer
    if isinstance(tokenizer, NewTokenizer):
        from smelt.runtime.text.new_tokenizer import refusal

        if reason := refusal(kind, tokenizer.train, tokenizer.vocab_size):
            yield ((), reason)
        if recipe.data.train is None and not touches(bad, "data.train"):
            yield (("train",), "there are no training rows to learn it from; name some: data: {train: FILE}.")
        return
    folder = local_folder(tokenizer, recipe.base)
    if folder is not None and not folder.is_dir():
        yield ((), f"{folder}: no such folder; expected one with a tokenizer's files, or {{train: bpe}}.")
    elif folder is not None:
        yield from (((), problem) for problem in check_tokenizer(folder, kind))


def _check_training(recipe: Recipe, steps: Sequence[Step], mistakes: Mistakes) -> None:
    if not any(step.stage in TRAINING_STAGES for step in steps):
        words = " or ".join(TRAINING_STAGES)
        mistakes.add(("stages",), f"no step trains the model, whose weights are random; add {words}.")
    elif recipe.baseline == ROOT:
        mistakes.add(("baseline",), f"'{ROOT}' has random weights; name a step that is trained.")
    _refuse_as_teacher(steps, "has random weights", mistakes)


def check_new_head(recipe: Recipe, steps: Sequence[Step], folder: Path | None, mistakes: Mistakes) -> None:
    """Check that a bare encoder, which gets a classifier of random weights, is nobody's teacher.

    folder: the model's, or None where it is still to be fetched or made; then the stage itself notices.
    """
    if recipe.task != "text-classification" or folder is None:
        return
    config, problems = read_config(folder)
    if not problems and not has_classifier(config):
        named = str((config.get("architectures") or ["encoder"])[0])
        why = f"is a bare {named}, whose new classifier has random weights"
        _refuse_as_teacher(steps, why, mistakes)


def _refuse_as_teacher(steps: Sequence[Step], why: str, mistakes: Mistakes) -> None:
    """Note every step that would learn from the untouched model."""
    for at, step in enumerate(steps):
        for setting, name in step.settings.references().items():
            if name == ROOT and setting not in step.wrong:
                trained = [s.name for s in steps[:at] if s.stage in TRAINING_STAGES]
                how = (
                    f"name a step that is trained ({setting}: {trained[0]})"
                    if trained
                    else f"put a finetune before it and name that as the {setting}"
                )
                what = f"{step.name}: {setting}: '{ROOT}' {why}; {how}."
                mistakes.add((), what, line=step.line)


def start(
    shop: Workshop,
    recipe: Recipe,
    labels: tuple[ProblemType, list[str]] | None,
    rules: TextRules,
    fresh: bool,
) -> tuple[Artifact, bool]:
    """Make the model that the recipe describes, or take it from the store; return also whether it was there.

    labels: of a classifier its problem type and the names of its outputs.

    Raises:
        InputError: config or tokenizer cannot be had or do not fit each other.
    """
    model = recipe.model
    assert isinstance(model, Untrained)
    config, problems = read_outline(config_file(model, recipe.base))
    if problems:
        raise InputError("\n".join(problems))
    tokenizer = model.tokenizer
    ready = None if isinstance(tokenizer, NewTokenizer) else _fetch_tokenizer(tokenizer, recipe.base)
    key = hash_of(
        {
            "stage": "untrained",
            "version": 1,
            "config": config,
            "tokenizer": _contents(ready) if ready else _recipe_of(tokenizer, shop.data["train"]),
            "task": shop.task,
            "labels": labels,
            "text": rules.model_dump(),
            "seed": shop.seed,
            "libraries": dict(shop.versions),
            **shop.remembered,
        }
    )

    def make(space: Path) -> Artifact:
        out, words = space / "out", ready or space / "tokenizer"
        out.mkdir()
        notes = _make(shop, config, tokenizer, words, out, labels)
        return _commit(shop, key, config, tokenizer, rules, out, notes, fresh)

    return shop.obtain(ROOT, key, fresh, make)


def _make(
    shop: Workshop,
    config: Mapping[str, Any],
    tokenizer: str | NewTokenizer,
    words: Path,
    out: Path,
    labels: tuple[ProblemType, list[str]] | None,
) -> list[str]:
    """Write the model into `out`, its tokenizer trained into the folder `words` before, if it is to be."""
    from smelt.runtime.models.new_model import make_model
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
    problem, names = labels or (None, [])
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
    )


def _commit(
    shop: Workshop,
    key: str,
    config: Mapping[str, Any],
    tokenizer: str | NewTokenizer,
    rules: TextRules,
    out: Path,
    notes: list[str],
    fresh: bool,
) -> Artifact:
    from smelt.runtime.models.checkpoint import count_parameters
    from smelt.runtime.text.rules import write_text_rules

    write_text_rules(out, rules)
    how = tokenizer if isinstance(tokenizer, str) else tokenizer.model_dump()
    facts = {"parameters": count_parameters(out), "untrained": True, **shop.remembered}
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
        facts=facts | rules.model_dump(exclude_defaults=True),
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
        raise InputError(f"model.tokenizer: '{tokenizer}': {why}.") from error


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

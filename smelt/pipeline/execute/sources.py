"""Create the first artifact of a run from a model, a config, or an ONNX model.

Import the user's model as the first artifact of a run.

Check models that steps name by folder (teacher, student) before the first step.

Create the first artifact of a recipe that starts from a config: a model with random weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smelt.core.artifact import Artifact, Manifest
from smelt.core.errors import InputError, combined_error
from smelt.core.files import json_hash, sha256_of, write_json
from smelt.core.hub import hub_cache_only, hub_unreachable_reason
from smelt.core.messages import Message
from smelt.data.labels import class_names
from smelt.data.splits import CLASSIFICATION_TASKS, IMAGE_CLASSIFICATION, SENTENCE_SIMILARITY, Split
from smelt.models.image_processor import PROCESSOR_FILE
from smelt.models.text_rules import TextRules
from smelt.pipeline.execute.latency_scores import require_texts_fit
from smelt.pipeline.execute.step_runner import StepRunner, TaskSetup, resolve_task
from smelt.pipeline.execute.third_party_onnx import import_onnx_model
from smelt.pipeline.inspect.model_folder import local_model_folder, read_config
from smelt.pipeline.inspect.model_info import inspect_quantization
from smelt.pipeline.plan.plan import Plan
from smelt.pipeline.plan.untrained_checks import config_file, preprocessor_config, read_untrained_config
from smelt.pipeline.plan.warnings import decoding_warnings
from smelt.pipeline.recipe.model_and_data import NewTokenizer, UntrainedModel, has_classifier
from smelt.pipeline.recipe.recipe import ParsedRecipe
from smelt.pipeline.recipe.stages import MODEL_STEP

if TYPE_CHECKING:
    from smelt.pipeline.execute.scoring import Scorer
    from smelt.pipeline.execute.step_runner import StepRunner
    from smelt.pipeline.plan.plan import Plan


def import_user_model(
    step_runner: StepRunner, source: Path, task_setup: TaskSetup, rebuild: bool
) -> tuple[Artifact, bool]:
    """Import the original model into the store; return the artifact, and whether it was there already.

    Raises:
        InputError: its quantized weights are not supported, or its weights are NaN or infinite.
    """
    from smelt.models.count_parameters import require_finite_weights
    from smelt.models.import_model import import_model, source_files
    from smelt.models.write_text_rules import write_text_rules

    labels, rules, config = task_setup.labels, task_setup.text_rules, read_config(source)[0]
    coded = inspect_quantization(source, config) is not None
    key = json_hash(
        {
            "stage": "model",
            "version": 4 if coded else 3,  # 4 records the bits of quantized weights
            "files": {p.name: sha256_of(p) for p in source_files(source)},
            "task": step_runner.task,
            "labels": labels and labels[1],
            "problem_type": labels and labels[0],
            **task_setup.key_parts,
            "seed": step_runner.seed,
            **step_runner.windows_details,
        }
    )

    def make(space: Path) -> Artifact:
        out = space / "out"
        out.mkdir()
        problem, names = labels or (None, None)
        notes = import_model(source, out, names, step_runner.seed, problem, task_setup.sentences)
        new_head = bool(labels) and not has_classifier(config)
        require_finite_weights(source, new_head, bool(task_setup.sentences))
        write_text_rules(out, rules)
        details = {
            **_model_details(source, out, coded),
            **rules.model_dump(exclude_defaults=True),
            **step_runner.windows_details,
        }
        if new_head:
            details["new_head"] = True  # random, so the model cannot be a teacher
        manifest = Manifest(
            key=key,
            format="torch",
            task=step_runner.task,
            stage="model",
            settings={},
            seed=step_runner.seed,
            parent=None,
            versions=dict(step_runner.versions),
            warnings=notes,
            details=details,
        )
        return step_runner.store.commit(out, manifest, replace=rebuild)

    return step_runner.get_or_make(MODEL_STEP, key, rebuild, make)


def _model_details(source: Path, out: Path, quantized: bool) -> dict[str, Any]:
    """Return details of the model in `source`, copied to `out`: parameters, bits per weight, licence."""
    from smelt.compress.quantize.plan_layers import quantized_weight_bits
    from smelt.models.count_parameters import count_parameters
    from smelt.models.empty_model import empty_model
    from smelt.models.import_model import read_licence
    from smelt.models.stored_dtype import stored_dtypes

    details: dict[str, Any] = {"parameters": count_parameters(out)}
    if quantized:
        details["bits_per_weight"] = quantized_weight_bits(
            empty_model(out)[0], stored_dtypes(out).default.itemsize
        )
    if (licence := read_licence(source)) is not None:
        details["licence"] = licence  # for `smelt package`
    return details


def require_finite_models(plan: Plan) -> None:
    """Require that no model that a step of `plan` names by folder has NaN or infinite weights.

    Raises:
        InputError: one has; the message gives line, step, file and tensor.
    """
    from smelt.models.count_parameters import require_finite_weights

    task = plan.recipe.task
    for step in plan.steps:
        paths = step.settings.paths()
        for folder in (Path(paths[place]) for place in step.settings.paths_to_models()):
            if not folder.is_dir():
                continue
            new_head = task in CLASSIFICATION_TASKS and not has_classifier(read_config(folder)[0])
            try:
                require_finite_weights(folder, new_head, task == SENTENCE_SIMILARITY)
            except InputError as error:
                raise InputError(
                    f"{plan.path}:{step.line}: step '{step.name}': {error}",
                    code=error.code,
                    file=str(plan.path),
                    line=step.line,
                ) from error


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
    from smelt.models.length_limits import position_limit
    from smelt.models.new_model import create_model
    from smelt.models.train_tokenizer import train_tokenizer

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
    from smelt.models.count_parameters import count_parameters
    from smelt.models.write_text_rules import write_text_rules

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


@dataclass(frozen=True)
class FirstArtifact:
    """The first artifact with step runner and scorer. cached: whether it was in the store already."""

    artifact: Artifact
    cached: bool
    step_runner: StepRunner
    scorer: Scorer


def make_first_artifact(
    plan: Plan,
    all_data: Mapping[str, Split],
    data: Mapping[str, Split],
    step_runner: StepRunner,
    scorer: Scorer,
    add_warnings: Callable[[Sequence[Message]], None],
    rebuild: bool,
) -> FirstArtifact:
    """Store the model that the recipe of `plan` starts from, and return the first artifact.

    Args:
        plan: plan of the run.
        all_data: all splits without `--limit`; they define the labels of a new classifier.
        data: the splits that the run uses.
        step_runner: step runner of the run.
        scorer: scorer of the run; gets the task's default metrics if the recipe names none.
        add_warnings: called with warnings.
        rebuild: create the artifact again, even if the store has it.

    Raises:
        InputError: model, labels, scores and metrics do not fit each other; a text is too long (`truncation:
            error`); weights of a model are NaN or infinite.
    """
    recipe, model, graph = plan.recipe, plan.recipe.model, plan.third_party_model
    if graph is not None and graph.tokenizer_folder is None:
        return FirstArtifact(*import_onnx_model(step_runner, graph, data, rebuild), step_runner, scorer)
    require_finite_models(plan)
    settled = resolve_task(plan, all_data, scorer.metrics)
    scorer = replace(scorer, metrics=settled.metrics)
    step_runner = replace(step_runner, validation_scorer=scorer)
    add_warnings(settled.warnings)
    add_warnings(decoding_warnings(recipe, settled.folder))
    if graph is not None:
        artifact, cached = import_onnx_model(step_runner, graph, data, rebuild, settled.task_setup)
    elif isinstance(model, str):
        artifact, cached = import_user_model(step_runner, settled.folder, settled.task_setup, rebuild)
    else:
        artifact, cached = make_untrained_model(step_runner, recipe, settled.task_setup, rebuild)
    if recipe.truncation == "error":
        require_texts_fit(artifact.path, recipe.task, data)
    return FirstArtifact(artifact, cached, step_runner, scorer)

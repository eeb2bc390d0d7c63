"""Create the first artifact of a run: from a user's model, an ONNX model, or a config with random weights.

An ONNX model is a third-party graph. Models that steps name by folder (teacher, student) are checked before
the first step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smelt.core.artifact import Artifact, Format, Manifest
from smelt.core.errors import InputError, combined_error
from smelt.core.files import MANIFEST, json_hash, read_json_object, sha256_of, write_json
from smelt.core.hub import hub_cache_only, hub_unreachable_reason
from smelt.core.messages import Message, warning
from smelt.data.labels import SINGLE_LABEL, class_names, has_classifier
from smelt.data.npz_arrays import ArrayHeader, dtype_name
from smelt.data.splits import Split
from smelt.data.tasks import task_traits
from smelt.models.text_rules import TextRules
from smelt.models.weight_files import source_files
from smelt.pipeline.execute.latency_scores import require_texts_fit
from smelt.pipeline.execute.step_runner import StepRunner, TaskSetup, resolve_task
from smelt.pipeline.inspect.find_model import local_model_folder
from smelt.pipeline.inspect.model_folder import read_config
from smelt.pipeline.inspect.model_info import inspect_quantization
from smelt.pipeline.plan.plan import Plan
from smelt.pipeline.plan.untrained_checks import config_file, preprocessor_config, read_untrained_config
from smelt.pipeline.plan.warnings import decoding_warnings
from smelt.pipeline.recipe.model_and_data import NewTokenizer, UntrainedModel
from smelt.pipeline.recipe.recipe import ParsedRecipe
from smelt.pipeline.recipe.stages import MODEL_STEP
from smelt.runtimes.images import PROCESSOR_FILE

if TYPE_CHECKING:
    from smelt.pipeline.execute.scoring import Scorer
    from smelt.pipeline.inspect.model_info import OnnxModel
    from smelt.runtimes.onnx_import.signature import GraphSignature


# Increased whenever the same files would be imported differently.
_VERSION = 5
_GENERATION_CONFIG = "generation_config.json"


def _model_manifest(
    step_runner: StepRunner,
    key: str,
    artifact_format: Format,
    notes: list[Message],
    details: dict[str, Any],
    settings: dict[str, Any] | None = None,
) -> Manifest:
    """Return the manifest of a run's first artifact, which has no parent."""
    return Manifest(
        key=key,
        format=artifact_format,
        task=step_runner.task,
        stage=MODEL_STEP,
        settings=settings or {},
        seed=step_runner.seed,
        parent=None,
        versions=dict(step_runner.versions),
        details=details,
        warnings=notes,
    )


def import_onnx_model(
    step_runner: StepRunner,
    model: OnnxModel,
    data: Mapping[str, Split],
    rebuild: bool,
    task_setup: TaskSetup | None = None,
) -> tuple[Artifact, bool]:
    """Import `model` into the store; return the artifact, and whether it was there already.

    task_setup: for text models, the task-specific settings.

    Raises:
        InputError: the graph fails on the first samples, or its files changed since they were checked.
    """
    graphs = list(model.graphs.values()) or [model.file]
    files = [*graphs, *(model.file.parent / name for name in model.weight_files)]
    key_fields: dict[str, Any] = {
        "stage": "model",
        "version": _VERSION,
        "graph": [sha256_of(path) for path in files],
        "task": step_runner.task,
    }
    axes = {value.name: value.axis for value in (*model.signature.inputs, *model.signature.outputs)}
    if task_traits(step_runner.task).modality == "arrays":
        key_fields["axes"] = axes
    if model.shapes:
        is_compared = bool(_calls_of_both_shapes(model, data["test"]))
        key_fields["shapes"] = [model.shapes, is_compared]  # else samples that allow it would not be used
    if task_setup is not None:
        labels = task_setup.labels and task_setup.labels[0]
        key_fields |= {
            "texts": _tokenizer_hashes(model),
            "problem_type": labels,
            "seed": step_runner.seed,
            **task_setup.key_parts,
        }
    key = json_hash(key_fields)

    def make(space: Path) -> Artifact:
        from smelt.runtimes.onnx_import.import_graph import GRAPH_FILE, add_pooling

        out = space / "out"
        out.mkdir()
        details: dict[str, Any] = {"foreign": True, "target": "ort-cpu", **model.details}
        warnings: list[Message] = []
        if model.graphs:
            _import_generation_graphs(model, out)
            details["parameters"] = _count_graph_parameters(out)
        else:
            warnings += _import_graph(model, data["test"], out)
        if task_setup is not None and task_setup.sentences is not None:
            add_pooling(out / GRAPH_FILE, task_setup.sentences)
        warnings += [] if task_setup is None else _import_tokenizer(model, task_setup, data, out, details)
        manifest = _model_manifest(step_runner, key, "onnx", warnings, details)
        return step_runner.store.commit(out, manifest, replace=rebuild)

    return step_runner.get_or_make("model", key, rebuild, make)


def _import_graph(model: OnnxModel, split: Split, out: Path) -> list[Message]:
    """Copy the graph into `out` and run it on the first samples; return warnings about its outputs."""
    from smelt.export.onnx_models.output_comparison import batch_dependence_warnings
    from smelt.runtimes.onnx_import.graph_interface import check_new_shapes, graph_of_arrays, write_adapted
    from smelt.runtimes.onnx_import.import_graph import GRAPH_FILE, import_graph
    from smelt.runtimes.onnx_import.signature import write_signature
    from smelt.runtimes.onnx_import.trial_run import trial_run

    if model.shapes or model.details.get("zipmaps"):
        graph = write_adapted(model.file, out / GRAPH_FILE, model.shapes)
    else:
        graph = import_graph(model.file, out, outside=bool(model.weight_files))
    size = model.signature.fixed_batch_size or 1
    if split.arrays is None:
        feeds = _ones_inputs(model.signature, size)
    else:
        write_signature(out, model.signature)
        feeds = model.signature.make_feeds(split.arrays.padded_to(size), 0, size)
    trial_run(graph, feeds, str(model.file))
    if model.shapes and (calls := _calls_of_both_shapes(model, split)):
        with graph_of_arrays(model.file, model.details.get("zipmaps", {})) as original_file:
            check_new_shapes(original_file, graph, model.signature, calls)
    if split.arrays is None:
        return []
    return batch_dependence_warnings(graph, model.signature, split.arrays, model.details)


def _calls_of_both_shapes(model: OnnxModel, split: Split) -> list[dict[str, Any]]:
    """Return inputs that the graph takes both with its own and with the recipe's shapes; empty: none are."""
    import onnx

    from smelt.runtimes.onnx_import.graph_files import graph_signature

    signature = graph_signature(onnx.load(str(model.file), load_external_data=False))
    axes = {value.name: value.axis for value in (*model.signature.inputs, *model.signature.outputs)}
    original = signature.with_batch_axes(axes)
    size = original.fixed_batch_size or 1
    if size != (model.signature.fixed_batch_size or size):
        return []
    if split.arrays is None:
        return [_ones_inputs(original, size)] * 2
    arrays = split.arrays.padded_to(2 * size)
    last = 1 if split.arrays.max_batch_size == 1 and split.arrays.num_samples == 1 else 2
    calls = [original.make_feeds(arrays, index * size, (index + 1) * size) for index in range(last)]
    headers = [{n: ArrayHeader(dtype_name(v.dtype), v.shape) for n, v in call.items()} for call in calls]
    return [] if any(list(original.shape_problems(part)) for part in headers) else calls


def _import_generation_graphs(model: OnnxModel, out: Path) -> None:
    """Write the graphs of a generative model and its generation config into `out`."""
    import shutil

    from smelt.runtimes.onnx_import.import_graph import import_generator

    assert model.tokenizer_folder is not None
    import_generator(model.graphs, read_json_object(model.tokenizer_folder / "config.json"), out)
    if (model.tokenizer_folder / _GENERATION_CONFIG).is_file():
        shutil.copyfile(model.tokenizer_folder / _GENERATION_CONFIG, out / _GENERATION_CONFIG)


def _count_graph_parameters(out: Path) -> int:
    """Return the number of parameters in the graphs in `out`; shared weights count in each graph."""
    import onnx

    from smelt.runtimes.onnx_import.graph_files import count_graph_parameters

    graphs = sorted(out.glob("*.onnx"))
    return sum(count_graph_parameters(onnx.load(str(path), load_external_data=False)) for path in graphs)


def _ones_inputs(signature: GraphSignature, rows: int) -> dict[str, Any]:
    """Return inputs of ones: token ids that every vocabulary has."""
    import numpy as np

    arrays = {}
    for value in signature.inputs:
        sample_shape = [size if isinstance(size, int) else 8 for size in (value.shape or (rows, 8))[1:]]
        arrays[value.name] = np.ones([rows, *sample_shape], value.dtype)
    return arrays


def _tokenizer_hashes(model: OnnxModel) -> dict[str, str]:
    """Return the hashes of the files that affect tokenization."""
    assert model.tokenizer_folder is not None
    suffixes = (".json", ".txt", ".model", ".spm")
    files = (
        path
        for path in sorted(model.tokenizer_folder.iterdir())
        if path.suffix in suffixes and path.name != MANIFEST
    )
    return {path.name: sha256_of(path) for path in files}


def _import_tokenizer(
    model: OnnxModel,
    task_setup: TaskSetup,
    data: Mapping[str, Split],
    out: Path,
    details: dict[str, Any],
) -> list[Message]:
    """Copy config and tokenizer into `out`, with the settings of the task; return warnings."""
    import shutil

    from smelt.export.tokenizer import export_tokenizer
    from smelt.models.checkpoint import copy_tokenizer, load_tokenizer, write_text_rules
    from smelt.models.import_model import configure_embedder

    assert model.tokenizer_folder is not None
    shutil.copyfile(model.tokenizer_folder / "config.json", out / "config.json")
    copy_tokenizer(model.tokenizer_folder, out)
    problem = task_setup.labels[0] if task_setup.labels else None
    config = read_json_object(out / "config.json")
    if problem not in (None, SINGLE_LABEL) and config.get("problem_type") is None:
        write_json(out / "config.json", config | {"problem_type": problem})
    if task_setup.sentences is not None:
        configure_embedder(out, task_setup.sentences)
    write_text_rules(out, task_setup.text_rules)
    exported = export_tokenizer(load_tokenizer(model.tokenizer_folder), model.tokenizer_folder, out, data)
    details["tokenizer"] = exported.reader
    message = f"Texts are tokenized by transformers, which takes seconds to import: {exported.reason}"
    return [warning("slow-tokenizer", message)] if exported.reason else []


def import_user_model(
    step_runner: StepRunner, source: Path, task_setup: TaskSetup, rebuild: bool
) -> tuple[Artifact, bool]:
    """Import the original model into the store; return the artifact, and whether it was there already.

    Raises:
        InputError: its quantized weights are not supported, or its weights are NaN or infinite.
    """
    labels, rules, config = task_setup.labels, task_setup.text_rules, read_config(source)[0]
    is_quantized = inspect_quantization(source, config) is not None
    key = json_hash(
        {
            "stage": "model",
            "version": 4 if is_quantized else 3,  # 4 records the bits of quantized weights
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
        from smelt.models.checkpoint import write_text_rules
        from smelt.models.import_model import import_model
        from smelt.models.weight_files import require_finite_weights

        out = space / "out"
        out.mkdir()
        problem, names = labels or (None, None)
        warnings = import_model(
            source, out, names, step_runner.seed, problem, task_setup.sentences,
            str(task_traits(step_runner.task).auto_class),
        )  # fmt: skip
        new_head = bool(labels) and not has_classifier(config, step_runner.task)
        require_finite_weights(source, new_head, bool(task_setup.sentences))
        write_text_rules(out, rules)
        details = {
            **_model_details(source, out, is_quantized),
            **rules.model_dump(exclude_defaults=True),
            **step_runner.windows_details,
        }
        if new_head:
            details["new_head"] = True  # random, so the model cannot be a teacher
        manifest = _model_manifest(step_runner, key, "torch", warnings, details)
        return step_runner.store.commit(out, manifest, replace=rebuild)

    return step_runner.get_or_make(MODEL_STEP, key, rebuild, make)


def _model_details(source: Path, out: Path, quantized: bool) -> dict[str, Any]:
    """Return details of the model in `source`, copied to `out`: parameters, bits per weight, license."""
    from smelt.compress.quantize.plan_layers import quantized_weight_bits
    from smelt.models.empty_model import empty_model, stored_dtypes
    from smelt.models.import_model import read_license
    from smelt.models.model_size import count_parameters

    details: dict[str, Any] = {"parameters": count_parameters(out)}
    if quantized:
        details["bits_per_weight"] = quantized_weight_bits(
            empty_model(out)[0], stored_dtypes(out).default.itemsize
        )
    if (license := read_license(source)) is not None:
        details["license"] = license  # for `smelt package`
    return details


def require_finite_models(plan: Plan) -> None:
    """Require that no model that a step of `plan` names by folder has NaN or infinite weights.

    Raises:
        InputError: one has; the message gives line, step, file and tensor.
    """
    from smelt.models.weight_files import require_finite_weights

    task = plan.recipe.task
    for step in plan.steps:
        paths = step.settings.paths()
        for folder in (Path(paths[setting]) for setting in step.settings.paths_to_models()):
            if not folder.is_dir():
                continue
            new_head = task_traits(task).classifies and not has_classifier(read_config(folder)[0], task)
            try:
                require_finite_weights(folder, new_head, task_traits(task).output == "embedding")
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
    tokenizer_folder = _fetch_tokenizer(tokenizer, recipe.base) if isinstance(tokenizer, str) else None
    pixels = (
        preprocessor_config(model, recipe.base, config)
        if task_traits(step_runner.task).modality == "image"
        else None
    )
    key = json_hash(
        {
            "stage": "untrained",
            "version": 2,
            "config": config,
            **({} if pixels is None else {"images": pixels}),
            **(
                {}
                if tokenizer is None
                else {"tokenizer": _tokenizer_key(tokenizer_folder, tokenizer, step_runner)}
            ),
            "task": step_runner.task,
            "labels": task_setup.labels,
            **task_setup.key_parts,
            "seed": step_runner.seed,
            "libraries": dict(step_runner.versions),
            **step_runner.windows_details,
        }
    )

    def make(space: Path) -> Artifact:
        out, words_folder = space / "out", tokenizer_folder or space / "tokenizer"
        out.mkdir()
        if pixels is not None:
            words_folder.mkdir()
            write_json(words_folder / PROCESSOR_FILE, pixels)
        warnings = _write_model(step_runner, config, tokenizer, words_folder, out, task_setup)
        return _commit_artifact(
            step_runner, key, config, tokenizer, task_setup.text_rules, out, warnings, rebuild
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
    from smelt.models.new_model import create_model, train_tokenizer
    from smelt.models.text_rules import position_limit

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
    if has_classifier(config, shop.task):
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
    from smelt.models.checkpoint import write_text_rules
    from smelt.models.model_size import count_parameters

    write_text_rules(out, rules)
    tokenizer_source = tokenizer.model_dump() if isinstance(tokenizer, NewTokenizer) else tokenizer
    details = {"parameters": count_parameters(out), "untrained": True, **step_runner.windows_details}
    all_details = details | rules.model_dump(exclude_defaults=True)
    made_from = {"config": dict(config), "tokenizer": tokenizer_source}
    manifest = _model_manifest(step_runner, key, "torch", notes, all_details, made_from)
    return step_runner.store.commit(out, manifest, replace=rebuild)


def _fetch_tokenizer(tokenizer: str, base: Path) -> Path:
    """Return the tokenizer's folder; of a hub id only the tokenizer's files are downloaded."""
    folder = local_model_folder(tokenizer, base)
    if folder is not None:
        return folder
    import huggingface_hub

    offline_reason = hub_unreachable_reason()
    try:
        with hub_cache_only(offline_reason):
            return Path(huggingface_hub.snapshot_download(tokenizer, allow_patterns=_TOKENIZER_FILES))
    except Exception as error:  # the hub client raises many types; all mean that the download failed
        problem = (
            f"not in the local cache, and {offline_reason}"
            if offline_reason
            else f"cannot download it from the hub: {error}"
        )
        code = "not-in-hub-cache" if offline_reason else "not-on-hub"
        raise InputError(f"model.tokenizer: '{tokenizer}': {problem}.", code=code) from error


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
    recipe, model, graph = plan.recipe, plan.recipe.model, plan.onnx_model
    if graph is not None and graph.tokenizer_folder is None:
        return FirstArtifact(*import_onnx_model(step_runner, graph, data, rebuild), step_runner, scorer)
    require_finite_models(plan)
    resolved = resolve_task(plan, all_data, scorer.metrics)
    scorer = replace(scorer, metrics=resolved.metrics)
    step_runner = replace(step_runner, validation_scorer=scorer)
    add_warnings(resolved.warnings)
    add_warnings(decoding_warnings(recipe, resolved.folder))
    if graph is not None:
        artifact, cached = import_onnx_model(step_runner, graph, data, rebuild, resolved.task_setup)
    elif isinstance(model, str):
        artifact, cached = import_user_model(step_runner, resolved.folder, resolved.task_setup, rebuild)
    else:
        artifact, cached = make_untrained_model(step_runner, recipe, resolved.task_setup, rebuild)
    if recipe.truncation == "error":
        require_texts_fit(artifact.path, recipe.task, data)
    return FirstArtifact(artifact, cached, step_runner, scorer)

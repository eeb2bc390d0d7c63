"""A PyTorch module of the user's own as the model of a recipe: build it, check it, write its folder.

The folder is that of a transformers model, so that everything after it needs no special case: a config with
the module's name and the hash of its code, the user's weights, and the processor of images or the signature
of arrays. It is temporary; the first step copies it into the store.
"""

from __future__ import annotations

import atexit
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smelt.core.errors import InputError
from smelt.core.files import read_json_object, resolve_path, write_json
from smelt.core.messages import Message, error_message, info
from smelt.core.user_code import record_source, user_code_errors
from smelt.models.families.family import MODULE_PREFIX
from smelt.models.families.torch_module import MODULE_FAMILIES
from smelt.models.weight_files import WEIGHTS_FILE, read_header
from smelt.pipeline.inspect.model_info import OnnxModel
from smelt.pipeline.plan.array_samples import read_array_module
from smelt.pipeline.plan.check_context import CheckContext, skip_if_invalid
from smelt.pipeline.recipe.model_and_data import ModuleModel
from smelt.pipeline.recipe.validation_errors import Finding, error_findings
from smelt.runtimes.images import PROCESSOR_FILE, default_processor_config, parse_processor

if TYPE_CHECKING:
    from torch import Tensor, nn

    from smelt.models.user_module import TrialRun
    from smelt.pipeline.recipe.recipe import ParsedRecipe
    from smelt.runtimes.onnx_import.signature import GraphSignature

_MAX_LISTED = 5  # tensors that a message names


@skip_if_invalid("model", "task")
def read_user_module(context: CheckContext) -> Iterator[Finding]:
    """Import and build the module, check it with its weights, and write the folder that becomes the model."""
    recipe, model = context.recipe, context.recipe.module
    if model is None:
        return
    findings: list[Finding] = []
    signature = None
    supported = [task for family in MODULE_FAMILIES.values() for task in family.tasks]
    if recipe.task not in supported:
        text = f"a PyTorch module is supported for {', '.join(supported)}; the task is {recipe.task}."
        findings = [(("task",), error_message("does-not-fit-task", text))]
    else:
        try:
            _require_settings_of_task(model, recipe)
            if recipe.traits.modality == "arrays":
                folder, signature = _write_arrays_folder(model, context)
            else:
                is_text = recipe.traits.modality == "text"
                folder = (_write_text_folder if is_text else _write_folder)(model, recipe.base)
        except InputError as error:
            path = ("model", error.setting) if error.setting else ("model",)
            findings = [*error_findings(path, error)]
        else:
            context.recipe = recipe.model_copy(update={"model": str(folder)})
            text = (
                f"model: imports '{model.module}' from {recipe.base.absolute()}, which runs its code, also in"
            )
            text += " this check."
            yield (), info("module-imported", text)
            if signature is not None:
                yield from read_array_module(context, OnnxModel(folder / WEIGHTS_FILE, signature))
    if findings:
        context.invalid_paths.add("model")
    yield from findings


_SETTINGS_BY_MODALITY = {
    "image": {"labels", "image_size", "processor"},
    "text": {"labels", "tokenizer"},
    "arrays": set[str](),
}


def _require_settings_of_task(model: ModuleModel, recipe: ParsedRecipe) -> None:
    """Require that `model` has no settings of modules with other inputs.

    Raises:
        InputError: `does-not-fit-task`.
    """
    for setting in ("labels", "image_size", "processor", "tokenizer"):
        if (
            getattr(model, setting) is not None
            and setting not in _SETTINGS_BY_MODALITY[recipe.traits.modality]
        ):
            text = f"not used by a module for {recipe.task}. Remove it."
            raise InputError(text, code="does-not-fit-task", setting=setting)


def _write_folder(model: ModuleModel, base: Path) -> Path:
    """Return a new folder with the model, which is removed when the process ends.

    Raises:
        InputError: the code, the weights or the processor are invalid, or do not fit each other.
    """
    processor, (height, width) = _read_processor(model, base)
    network, source_hash, weights = _build_with_weights(model, base)
    import torch

    from smelt.models.user_module import UserModuleForImageClassification

    run = _run_classifier(network, "images", torch.zeros(2, 3, height, width))
    labels = _output_names(model, run.output.shape[1])
    config = _config(UserModuleForImageClassification, model.module, source_hash, labels, network, run)
    folder = _new_folder(config | ({"image_size": height} if height == width else {}), weights)
    write_json(folder / PROCESSOR_FILE, processor)
    return folder


def _write_text_folder(model: ModuleModel, base: Path) -> Path:
    """Return a new folder with a classifier of texts and its tokenizer.

    Raises:
        InputError: the code, the weights or the tokenizer are invalid, or do not fit each other.
    """
    import torch

    from smelt.models.checkpoint import copy_tokenizer, load_tokenizer
    from smelt.models.user_module import UserModuleForSequenceClassification

    if model.tokenizer is None:
        text = "set the folder of a tokenizer, as tokenizer.save_pretrained(FOLDER) writes it."
        raise InputError(text, code="missing-setting", setting="tokenizer")
    path = resolve_path(base, model.tokenizer)
    if not path.is_dir():
        raise InputError(f"{path}: no such folder.", code="missing-folder", setting="tokenizer")
    tokenizer = _named("tokenizer", load_tokenizer, path)
    network, source_hash, weights = _build_with_weights(model, base)
    largest = max(tokenizer.get_vocab().values())
    ids, mask = (
        torch.full((2, _TRIAL_LENGTHS[0]), largest),
        torch.ones(2, _TRIAL_LENGTHS[0], dtype=torch.int64),
    )
    mask[1, 1:] = 0
    run = _run_classifier(network, "tokens and mask", ids, mask)
    longer = torch.ones(2, _TRIAL_LENGTHS[1], dtype=torch.int64)
    _run_classifier(network, "tokens and mask", longer, longer.clone())
    labels = _output_names(model, run.output.shape[1])
    config = _config(UserModuleForSequenceClassification, model.module, source_hash, labels, network, run)
    sizes = {"vocab_size": largest + 1, "pad_token_id": tokenizer.pad_token_id}
    folder = _new_folder(config | sizes, weights)
    copy_tokenizer(path, folder)
    return folder


_TRIAL_LENGTHS = (16, 24)  # of texts, in tokens


def _output_names(model: ModuleModel, outputs: int) -> Sequence[str]:
    """Return the names of a classifier's outputs.

    Raises:
        InputError: `labels-mismatch`: the recipe has another number of labels.
    """
    if model.labels is not None and len(model.labels) != outputs:
        raise InputError(
            f"there are {len(model.labels)} labels, but the module has {outputs} outputs. List a name for"
            " each output, in order.",
            code="labels-mismatch",
            setting="labels",
        )
    return model.labels or [f"LABEL_{index}" for index in range(outputs)]


def _new_folder(config: Mapping[str, Any], weights: Path) -> Path:
    """Return a new temporary folder with a config and weights."""
    folder = Path(tempfile.mkdtemp(prefix="smelt-module-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    write_json(folder / "config.json", config)
    (folder / WEIGHTS_FILE).symlink_to(weights.absolute())
    return folder


def _build_with_weights(model: ModuleModel, base: Path) -> tuple[nn.Module, str, Path]:
    """Return the module with random weights, the hash of its code, and the file of its weights.

    Raises:
        InputError: the code or the weights are invalid, or do not fit each other.
    """
    weights = _find_weights(model, base)
    source_hash = _named("module", record_source, model.module, base)
    network = _build(model.module, source_hash)
    if errors := [*_shared_weight_errors(network), *_weight_errors(network, weights)]:
        raise InputError(errors[0].message, code=errors[0].code, setting=errors[0].setting)
    return network, source_hash, weights


def _write_arrays_folder(model: ModuleModel, context: CheckContext) -> tuple[Path, GraphSignature]:
    """Return a new folder with a module of arrays, and its signature, which is also in the folder.

    Raises:
        InputError: the code, the weights or the samples are invalid, or do not fit each other.
    """
    from smelt.models.user_module import UserModuleForArrays
    from smelt.pipeline.plan.module_arrays import try_arrays
    from smelt.runtimes.onnx_import.signature import write_signature

    recipe = context.recipe
    network, source_hash, weights = _build_with_weights(model, recipe.base)
    trial = _named("module", try_arrays, network, recipe)
    config = _layers_config(UserModuleForArrays, model.module, source_hash, network, trial.run)
    config["inputs"] = {v.name: [v.dtype, *v.shape[1:]] for v in trial.signature.inputs}
    config["outputs"] = [value.name for value in trial.signature.outputs]
    config["output_layers"] = [f"{MODULE_PREFIX}.{name}" for name in trial.run.output_layers]
    folder = _new_folder(config, weights)
    write_signature(folder, trial.signature)
    return folder, trial.signature


def _layers_config(
    model_class: Any, function: str, source_hash: str, network: nn.Module, run: TrialRun
) -> dict[str, Any]:
    """Return the part of the config that modules of images and of arrays have in common."""
    from torch import nn

    layers = [module for name, module in network.named_modules() if name not in run.fixed_layers]
    return {
        "architectures": [model_class.__name__],
        "model_type": model_class.config_class.model_type,
        "module": function,
        "source_hash": source_hash,
        "fixed_layers": [f"{MODULE_PREFIX}.{name}" for name in run.fixed_layers],
        "linear_layers": sum(isinstance(layer, nn.Linear) for layer in layers) - len(run.output_layers),
        "linear_output_layers": len(run.output_layers),
        "convolutions": sum(isinstance(layer, nn.Conv2d) for layer in layers),
    }


def _config(
    model_class: Any,
    function: str,
    source_hash: str,
    labels: Sequence[str],
    network: nn.Module,
    run: TrialRun,
) -> dict[str, Any]:
    """Return the config of a classifier."""
    from torch import nn

    linears = [(n, m) for n, m in network.named_modules() if isinstance(m, nn.Linear)]
    # a classifier's last layer of that size, also if its output is reshaped
    last = [n for n, m in linears if n not in run.fixed_layers and m.out_features == len(labels)][-1:]
    run = replace(run, output_layers=last)
    names = {str(index): label for index, label in enumerate(labels)}
    return {
        **_layers_config(model_class, function, source_hash, network, run),
        "id2label": names,
        "label2id": {label: int(index) for index, label in names.items()},
    }


def _named(setting: str, function: Any, *arguments: Any) -> Any:
    """Return `function(*arguments)`; an error is about `setting`."""
    try:
        return function(*arguments)
    except InputError as error:
        raise InputError(str(error), code=error.code, setting=setting) from error


def _find_weights(model: ModuleModel, base: Path) -> Path:
    path = resolve_path(base, model.weights)
    if path.suffix != ".safetensors":
        raise InputError(
            f"{path.name} is not a .safetensors file; pickle files, which can run arbitrary code, are not"
            " read. Convert it where you trust it:"
            " safetensors.torch.save_file(module.state_dict(), 'model.safetensors').",
            code="pickled-weights",
            setting="weights",
        )
    if not path.is_file():
        raise InputError(f"{path}: no such file.", code="missing-file", setting="weights")
    return path


def _read_processor(model: ModuleModel, base: Path) -> tuple[dict[str, Any], tuple[int, int]]:
    """Return the processor of images, and the height and width of the module's input."""
    if (model.processor is None) == (model.image_size is None):
        text = "set either image_size, such as image_size: 224, or processor, a preprocessor_config.json."
        code = "missing-setting" if model.processor is None else "settings-conflict"
        raise InputError(text, code=code, setting="image_size")
    if model.image_size is not None:
        return default_processor_config(model.image_size), (model.image_size, model.image_size)
    path = resolve_path(base, str(model.processor))
    values = _named("processor", read_json_object, path)
    shape = _named("processor", parse_processor, values, path).shape
    if shape is None:
        raise InputError(
            f"{path}: the size of the images is not fixed. Set size with height and width, or"
            " do_center_crop.",
            code="missing-image-size",
            setting="processor",
        )
    return values, shape


def _build(function: str, source_hash: str) -> nn.Module:
    from smelt.models.user_module import build_module

    network: nn.Module = _named("module", build_module, function, source_hash)
    if MODULE_PREFIX in dict(network.named_children()):
        raise InputError(
            f"the module has a submodule '{MODULE_PREFIX}', a name that smelt uses. Rename it.",
            code="reserved-name",
            setting="module",
        )
    return network


def _shared_weight_errors(network: nn.Module) -> Iterator[Message]:
    names: dict[int, str] = {}
    for name, parameter in network.named_parameters(remove_duplicate=False):
        first = names.setdefault(id(parameter), name)
        if first != name:
            text = f"'{first}' and '{name}' are one parameter. Modules with shared weights are not supported."
            yield error_message("shared-weights", text, setting="module")


def _weight_errors(network: nn.Module, weights: Path) -> Iterator[Message]:
    """Yield errors if the tensors in the file `weights` are not those of the module."""
    header: Mapping[str, Any] = _named("weights", read_header, weights)
    shapes = {name: entry["shape"] for name, entry in header.items() if name != "__metadata__"}
    expected = {name: list(tensor.shape) for name, tensor in network.state_dict().items()}
    differences = {
        "missing-tensor": (expected.keys() - shapes.keys(), "does not have these tensors of the module"),
        "unknown-tensor": (shapes.keys() - expected.keys(), "has tensors that the module does not have"),
    }
    for code, (names, problem) in differences.items():
        if names:
            listed = ", ".join(sorted(names)[:_MAX_LISTED]) + (", ..." if len(names) > _MAX_LISTED else "")
            text = f"{weights.name} {problem}: {listed}. Save the state_dict of the module that is built."
            yield error_message(code, text, setting="weights")
    for name in sorted(shapes.keys() & expected.keys()):
        if shapes[name] != expected[name]:
            text = f"{weights.name}: '{name}' is {shapes[name]}, but the module expects {expected[name]}."
            yield error_message("shape-mismatch", text, setting="weights")


def _run_classifier(network: nn.Module, kind: str, *inputs: Tensor) -> TrialRun:
    """Return a run of the module on two samples. kind: what the inputs are, for messages.

    Raises:
        InputError: it fails, or does not return one row of scores for each sample.
    """
    import torch

    from smelt.models.user_module import run_once

    shapes = f"{kind} {', '.join(str(list(value.shape)) for value in inputs)}"
    try:
        with redirect_stdout(sys.stderr), user_code_errors(f"the module fails on {shapes}"):
            run = run_once(network, *inputs)
    except InputError as error:
        raise InputError(str(error), code=error.code, setting="module") from error
    output = run.output
    if not isinstance(output, torch.Tensor) or output.dim() != 2 or len(output) != 2 or not output.numel():
        shape = list(output.shape) if isinstance(output, torch.Tensor) else type(output).__name__
        raise InputError(
            f"the module returned {shape} for {shapes}. Return one tensor of logits, [samples, classes].",
            code="wrong-output",
            setting="module",
        )
    return run

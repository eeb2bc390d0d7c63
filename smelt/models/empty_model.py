"""The model of a folder's config and edits, with its weights on the meta device.

GPT-2's linear layers are `Conv1D` in transformers, with a transposed weight. In memory they are plain
`nn.Linear`, so that pruning, factorization and quantization need no special case; in the file a plain one
keeps transformers' layout [in, out], so that `from_pretrained` can still read a model whose structure no
stage has changed.

Each tensor has a float type in the file that is read, and one in which it is saved. Everything is computed in
float32. Reading 16-bit weights widens them, which is exact; saving them rounds to nearest, once per step: by
at most 2^-11 of a weight in float16 and 2^-8 in bfloat16, and not at all where a step did not change it. So a
step keeps the type of a checkpoint, and a pruned model is not larger than the original.
"""

from __future__ import annotations

import contextlib
import functools
import re
import threading
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from smelt.core.errors import InputError
from smelt.core.files import read_json_object
from smelt.core.messages import Message, warning
from smelt.data.labels import CLASSIFIER_SUFFIXES
from smelt.models.edits import Edit, apply_edits, read_edits
from smelt.models.experts import separate_experts
from smelt.models.families.registry import family_of
from smelt.models.sentence_model import sentence_class
from smelt.models.text_rules import read_sentence_rules
from smelt.models.user_module import USER_MODULE_CLASSES, empty_user_module
from smelt.models.weight_files import has_weights, value_count, weight_tensors
from smelt.quantization.layers import QuantizedActivation, QuantizedMatrix
from smelt.stage import StoredDtype


def replace_conv1d(model: Any) -> None:
    """Replace every `Conv1D` of `model` by an `nn.Linear` of the same sizes; works on the meta device."""
    for name, module in list(model.named_modules()):
        if isinstance(module, Conv1D):
            parent, _, child = name.rpartition(".")
            in_features, columns = module.weight.shape
            new = nn.Linear(in_features, columns, bias=True, device="meta")
            if not module.weight.is_meta:
                new.weight = nn.Parameter(module.weight.detach().t().contiguous())
                new.bias = nn.Parameter(module.bias.detach())
            setattr(model.get_submodule(parent), child, new)


def transpose_conv1d_tensors(model: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return `tensors` with those transposed whose layout in the file differs from the one in memory."""
    family = family_of(model)
    if family is None or not family.transposed_suffixes:
        return tensors
    names = {
        f"{name}.weight"
        for name, module in model.named_modules()
        if type(module) is nn.Linear and name.endswith(family.transposed_suffixes)
    }
    return {n: t.t().contiguous() if n in names else t for n, t in tensors.items()}


# torch's functions that initialize weights: normal_, kaiming_uniform_, ...
_INIT_FUNCTIONS: dict[str, Any] = {
    name: draw for name, draw in vars(nn.init).items() if name.endswith("_") and not name.startswith("_")
}


def load_config(folder: Path) -> transformers.PretrainedConfig:
    """Return the config in `config.json`; code of a checkpoint is never run.

    Raises:
        InputError: it is missing or not a config of transformers.
    """
    path = folder / "config.json"
    try:
        return transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # each family checks its own keys and raises different exceptions
        raise InputError(
            f"{path}: transformers cannot read this model config: {error}", code="wrong-config"
        ) from error


def empty_model(folder: Path) -> tuple[Any, list[Edit]]:
    """Return the model of `folder` with its edits applied and weights on the meta device, and its edits.

    Raises:
        InputError: config and edits do not define a model.
    """
    config = load_config(folder)
    config.dtype = torch.float32  # in memory, whatever the file holds
    kind = _model_class(config, folder)
    edits = read_edits(folder)
    is_user_module = kind in USER_MODULE_CLASSES.values()
    model = empty_user_module(kind, config) if is_user_module else _empty_transformer(kind, config, folder)
    apply_edits(model, edits)
    if (folder / "generation_config.json").is_file() and model.can_generate():
        read_json_object(folder / "generation_config.json")  # reports errors with our own messages
        model.generation_config = transformers.GenerationConfig.from_pretrained(folder)
        if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
            # newer files have it only there, and training reads the config
            config.decoder_start_token_id = model.generation_config.decoder_start_token_id
    return model, edits


def _empty_transformer(kind: Any, config: Any, folder: Path) -> Any:
    """Return a model of transformers on the meta device.

    Raises:
        InputError: the config does not define a model.
    """
    from accelerate import init_empty_weights

    try:
        with init_empty_weights(include_buffers=False), _skip_weight_init():
            model = kind(config)
    except Exception as error:  # invalid or inconsistent sizes
        raise InputError(
            f"{folder}/config.json: transformers cannot create a {kind.__name__} from it:"
            f" {type(error).__name__}: {error}",
            code="wrong-config",
        ) from error
    replace_conv1d(model)
    separate_experts(model)
    return model


@contextlib.contextmanager
def _skip_weight_init() -> Iterator[None]:
    """Skip the initialization of weights on the meta device: it has no effect and takes half of the time."""
    from transformers import initialization

    model_class, initialize = _initialization_of_models()
    torch_functions: dict[str, Any] = getattr(
        initialization, "TORCH_INIT_FUNCTIONS", {}
    )  # what transformers' own call
    guarded_functions = {name: _unless_meta(draw) for name, draw in _INIT_FUNCTIONS.items()}
    vars(nn.init).update(guarded_functions)
    torch_functions.update(
        {name: guarded_functions[name] for name in torch_functions.keys() & guarded_functions}
    )
    # some models compute tables there: Marian's of positions takes 0.6 s for 512 positions of 512 values
    model_class.initialize_weights = lambda model: (
        any(not weight.is_meta for weight in model.parameters()) and initialize(model)
    )
    try:
        yield
    finally:  # the original ones, not the replaced ones: another thread may be in here too
        model_class.initialize_weights = initialize
        vars(nn.init).update(_INIT_FUNCTIONS)
        torch_functions.update(
            {name: _INIT_FUNCTIONS[name] for name in torch_functions.keys() & _INIT_FUNCTIONS}
        )


@functools.cache
def _initialization_of_models() -> tuple[Any, Any]:
    """Return transformers' class of all models, and its method that initializes their weights."""
    return transformers.PreTrainedModel, transformers.PreTrainedModel.initialize_weights


def _unless_meta(draw: Any) -> Any:
    def draws(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        return tensor if tensor.is_meta else draw(tensor, *args, **kwargs)

    return draws


def _model_class(config: Any, folder: Path) -> Any:
    """Return the model's class: a sentence embedder if the folder has its files, else the config's.

    That of a user's module is ours.

    Raises:
        InputError: it is not a class of transformers.
    """
    names = config.architectures or []
    class_name = str(names[0]) if isinstance(names, list) and names else ""
    # classifiers that smelt created from a sentence embedder in early versions still have the file
    rules = None if class_name.endswith(CLASSIFIER_SUFFIXES) else read_sentence_rules(folder)
    if rules is not None:
        return sentence_class(config, rules)
    if class_name in USER_MODULE_CLASSES:
        return USER_MODULE_CLASSES[class_name]
    kind = getattr(transformers, class_name, None)
    if not (isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)):
        raise InputError(
            f"{folder}/config.json: 'architectures' is {names}; expected the name of one transformers class.",
            code="unknown-architecture",
        )
    return kind


_quiet = threading.RLock()


@contextlib.contextmanager
def silence_transformers() -> Iterator[None]:
    """Suppress transformers' progress bars, load reports and advice.

    These settings are process-wide, so only one thread at a time changes and restores them.
    """
    with _quiet:
        yield from _silenced()


def _silenced() -> Iterator[None]:
    warning_filter = warnings.catch_warnings()
    warning_filter.__enter__()
    warnings.simplefilter("ignore")  # MarianTokenizer recommends a package that changes nothing here
    level = transformers.logging.get_verbosity()
    had_progress_bar = transformers.logging.is_progress_bar_enabled()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        yield
    finally:
        warning_filter.__exit__(None, None, None)
        transformers.logging.set_verbosity(level)
        if had_progress_bar:
            transformers.logging.enable_progress_bar()


# safetensors' names; wider or narrower types are read as float32
_TYPES = {"F16": torch.float16, "BF16": torch.bfloat16}
_WORDS = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_FLOATS = frozenset({"F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2"})
_OLD_NORM = re.compile(r"(?<=LayerNorm\.)(gamma|beta)$")
_OF_CODES = ".matrix."  # in the names of a quantized matrix's tensors
_LOW_RANK_SUFFIX = re.compile(r"(?:\.shared|(?:\.difference)?\.(?:up|down))+(\.(?:weight|bias))$")


@dataclass(frozen=True)
class StoredDtypes:
    """The float type of each tensor by name, and the one that most values have (for new tensors).

    Tensors of quantized weights do not count there: their scales have the type of the scheme.
    """

    by_name: Mapping[str, torch.dtype]
    default: torch.dtype

    def dtype_for(self, names: Iterable[str]) -> torch.dtype:
        """Return the type for a tensor with the names `names` in a model.

        A checkpoint may have it under any of them, or without the first part (`transformer.`); the factors of
        a layer have the type of the layer.
        """
        for name in names:
            corrected_name = _LOW_RANK_SUFFIX.sub(r"\1", name)
            for candidate in (name, corrected_name, name.partition(".")[2], corrected_name.partition(".")[2]):
                if candidate in self.by_name:
                    return self.by_name[candidate]
        return self.default


def stored_dtypes(folder: Path, wanted: StoredDtype = "keep") -> StoredDtypes:
    """Return the storage types of the model in `folder`, or, unless `wanted` is keep, that one type for all.

    Without weights in `folder` it is float32.

    Raises:
        InputError: a file of the weights is missing or damaged.
    """
    if wanted != "keep":
        return StoredDtypes({}, _WORDS[wanted])
    names: dict[str, torch.dtype] = {}
    values: Counter[torch.dtype] = Counter()
    of_codes: Counter[torch.dtype] = Counter()
    for _, name, entry in weight_tensors(folder) if has_weights(folder) else ():
        if entry["dtype"] in _FLOATS:
            names[_OLD_NORM.sub(_current_norm_name, name)] = kind = _TYPES.get(entry["dtype"], torch.float32)
            (of_codes if _OF_CODES in name else values)[kind] += value_count(entry)
    dtype_counts = values or of_codes
    return StoredDtypes(names, dtype_counts.most_common(1)[0][0] if dtype_counts else torch.float32)


def _current_norm_name(match: re.Match[str]) -> str:
    """Return the current name of a norm's `gamma` or `beta`, in files of the first BERTs."""
    return {"gamma": "weight", "beta": "bias"}[match[0]]


def cast_to_stored(
    tensors: Mapping[str, Tensor], types: Mapping[str, torch.dtype]
) -> tuple[dict[str, Tensor], list[Message]]:
    """Return `tensors` rounded to their `types` (others unchanged), and warnings.

    A tensor with a value beyond its type's range stays float32.
    """
    rounded, overflows = {}, []
    for name, tensor in tensors.items():
        rounded[name] = tensor.to(types.get(name, tensor.dtype))
        if rounded[name] is tensor:  # its type was not changed
            continue
        # torch 2.13 has no isfinite for float8
        is_finite = torch.isfinite(rounded[name].to(tensor.dtype)).all()
        if not bool(is_finite) and bool(torch.isfinite(tensor).all()):
            overflows.append(f"{name} (up to {float(tensor.abs().max()):,.6g})")
            rounded[name] = tensor
    if not overflows:
        return rounded, []
    omitted = f" and {len(overflows) - 1} more" if len(overflows) > 1 else ""
    return rounded, [
        warning(
            "beyond-16-bits",
            "Tensors with values outside the range of 16-bit floats are stored as float32:"
            f" {overflows[0]}{omitted}. Set `dtype: fp32` to store all weights as float32.",
            setting="dtype",
        )
    ]


def config_dtype(tensors: Iterable[Tensor]) -> str:
    """Return the dtype of a config for `tensors`: the float type of most values, if it can hold all of them.

    transformers converts all weights to that type at loading.
    """
    floats = [t for t in tensors if t.is_floating_point()]
    values: Counter[torch.dtype] = Counter()
    for tensor in floats:
        values[tensor.dtype] += tensor.numel()
    common = values.most_common(1)[0][0] if values else torch.float32
    is_representable = all(bool(torch.isfinite(t.to(common)).all()) for t in floats)
    return str(common if is_representable else torch.float32).removeprefix("torch.")


def quantized_dtypes(model: nn.Module) -> dict[str, torch.dtype]:
    """Return the storage types of the tensors of quantized matrices, by tensor name."""
    types = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, QuantizedMatrix):
            specs = module.scheme.stored_tensors(len(module.codes), module.width, module.options)
            for tensor_name, tensor in specs.items():
                types[f"{name}.{tensor_name}"] = getattr(torch, tensor.file_dtype or tensor.dtype)
        elif isinstance(module, QuantizedActivation):  # equal in layers that read the same states
            types[f"{name}.scale"] = torch.float32
    return types


def quantized_bytes(model: nn.Module) -> int:
    """Return the bytes of the quantized weights and scales of `model` in a file, shared ones counted once."""
    types = quantized_dtypes(model)
    return sum(p.numel() * types[n].itemsize for n, p in model.named_parameters() if n in types)

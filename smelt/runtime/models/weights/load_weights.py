"""Assigns tensors to a model's parameters by name, and ties shared ones."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from smelt.core.errors import InputError
from smelt.families.registry import family_of
from smelt.runtime.models.sentence_model import is_sentence_model
from smelt.runtime.models.weights.check_tensors import require_no_missing, require_no_unexpected

_NORMS = {"gamma": "LayerNorm.weight", "beta": "LayerNorm.bias"}


def add_model_prefix(model: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return `tensors` with the names of the model.

    A checkpoint that was saved without its head (such as the first GPT-2) has names relative to the body; the
    first BERTs call the weight and bias of a norm gamma and beta; a family defines its older names.
    """
    family = family_of(model)
    tensors = {
        rename_tensor(
            re.sub(r"LayerNorm\.(gamma|beta)$", lambda found: _NORMS[found[1]], n),
            family.renamed_tensors if family else (),
        ): t
        for n, t in tensors.items()
    }
    prefix = f"{model.base_model_prefix}."
    if prefix == "." or any(name.startswith(prefix) for name in tensors):
        return tensors
    wanted = {name.removeprefix(prefix) for name in model.state_dict() if name.startswith(prefix)}
    return {prefix + n if n in wanted else n: t for n, t in tensors.items()}


def rename_tensor(name: str, pairs: Iterable[tuple[str, str]]) -> str:
    """Return the name of a tensor with each pattern of `pairs` replaced, in order."""
    for pattern, instead in pairs:
        name = re.sub(pattern, instead, name)
    return name


def load_weights(model: Any, tensors: dict[str, Tensor], folder: Path) -> None:
    """Assign `tensors`, tie shared weights, and compute the ones that are in no file (fixed positions)."""
    try:
        loaded = model.load_state_dict(tensors, strict=False, assign=True)
    except RuntimeError as error:
        odd = _shape_mismatch(model, tensors) or str(error)[:500]
        raise InputError(
            f"{folder}: the weights do not match the config: {odd}", code="shape-mismatch"
        ) from error
    require_no_unexpected(
        model.config.model_type, loaded.unexpected_keys, folder, embeds=is_sentence_model(model)
    )
    _untie_different_weights(model, tensors)
    _tie_weights(model)
    ignorable = set(getattr(model, "_keys_to_ignore_on_load_missing", None) or ())
    for module_name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.track_running_stats:
            means = f"{module_name}.running_mean"
            require_no_missing([means] if means in loaded.missing_keys else [], folder)
        empty = [n for n, p in module.named_parameters(recurse=False) if p.is_meta]
        if not empty:
            continue
        names = [f"{module_name}.{n}".removeprefix(".") for n in empty]
        require_no_missing((n for n in names if n not in ignorable), folder)
        module.to_empty(device="cpu", recurse=False)
        with torch.no_grad():
            model._init_weights(module)


def _shape_mismatch(model: Any, tensors: dict[str, Tensor]) -> str | None:
    """Return the error text for the first tensor with another shape than its parameter, None if all match."""
    for name, place in model.state_dict().items():
        if name in tensors and tensors[name].shape != place.shape:
            return (
                f"the tensor '{name}' is {list(tensors[name].shape)}, but the model expects"
                f" {list(place.shape)}."
            )
    return None


def _untie_different_weights(model: Any, tensors: dict[str, Tensor]) -> None:
    """Remove the ties of weights that the file has twice, with different values, as transformers does.

    T5 v1.1 has an untied output layer while its config, as transformers reads it, ties everything.
    """
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    for target, source in list(tied.items()):
        if target in tensors and source in tensors and not torch.equal(tensors[target], tensors[source]):
            del tied[target]


def _tie_weights(model: Any) -> None:
    """Tie tied parameters again, wherever both are still plain parameters."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    for target, source in tied.items():  # a file may have the tensor under any of its names
        if target in parameters and source in parameters and parameters[source].is_meta:
            owner, _, name = source.rpartition(".")
            setattr(model.get_submodule(owner), name, parameters[target])
            parameters[source] = parameters[target]
    for target, source in tied.items():
        if target in parameters and source in parameters:
            owner, _, name = target.rpartition(".")
            setattr(model.get_submodule(owner), name, model.get_parameter(source))

"""Tensors go to their places in a model: found by name, tied where one serves two."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from smelt.core.errors import InputError
from smelt.families.registry import family_of
from smelt.runtime.models.places.weights_fit import require_all_read, require_all_there
from smelt.runtime.models.sentence_model import is_sentence_model

_NORMS = {"gamma": "LayerNorm.weight", "beta": "LayerNorm.bias"}


def with_prefix(model: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return `tensors` named as the model names them.

    A checkpoint that was saved without its head (the first GPT-2 is one) names tensors from the body on; the
    first BERTs call the weight and bias of a norm gamma and beta; older names of a family it knows itself.
    """
    family = family_of(model)
    tensors = {
        renamed(
            re.sub(r"LayerNorm\.(gamma|beta)$", lambda found: _NORMS[found[1]], n),
            family.renamed if family else (),
        ): t
        for n, t in tensors.items()
    }
    prefix = f"{model.base_model_prefix}."
    if prefix == "." or any(name.startswith(prefix) for name in tensors):
        return tensors
    wanted = {name.removeprefix(prefix) for name in model.state_dict() if name.startswith(prefix)}
    return {prefix + n if n in wanted else n: t for n, t in tensors.items()}


def renamed(name: str, pairs: Iterable[tuple[str, str]]) -> str:
    """Return the name of a tensor, each pattern of `pairs` replaced by what stands beside it, in order."""
    for pattern, instead in pairs:
        name = re.sub(pattern, instead, name)
    return name


def fill(model: Any, tensors: dict[str, Tensor], folder: Path) -> None:
    """Assign `tensors`, tie what shares weights, and compute what no file holds (fixed positions)."""
    try:
        loaded = model.load_state_dict(tensors, strict=False, assign=True)
    except RuntimeError as error:
        odd = _first_odd_shape(model, tensors) or str(error)[:500]
        raise InputError(
            f"{folder}: the weights do not fit the config: {odd}", code="shape-mismatch"
        ) from error
    require_all_read(model.config.model_type, loaded.unexpected_keys, folder, embeds=is_sentence_model(model))
    _untie_what_differs(model, tensors)
    _tie_weights(model)
    ignorable = set(getattr(model, "_keys_to_ignore_on_load_missing", None) or ())
    for module_name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.track_running_stats:
            means = f"{module_name}.running_mean"
            require_all_there([means] if means in loaded.missing_keys else [], folder)
        empty = [n for n, p in module.named_parameters(recurse=False) if p.is_meta]
        if not empty:
            continue
        names = [f"{module_name}.{n}".removeprefix(".") for n in empty]
        require_all_there((n for n in names if n not in ignorable), folder)
        module.to_empty(device="cpu", recurse=False)
        with torch.no_grad():
            model._init_weights(module)


def _first_odd_shape(model: Any, tensors: dict[str, Tensor]) -> str | None:
    """Return what to say of the first tensor that has another shape than its place in the model."""
    for name, place in model.state_dict().items():
        if name in tensors and tensors[name].shape != place.shape:
            return (
                f"the tensor '{name}' is {list(tensors[name].shape)}, and its place is {list(place.shape)}."
            )
    return None


def _untie_what_differs(model: Any, tensors: dict[str, Tensor]) -> None:
    """Forget the ties of weights that the file holds twice, with different values, as transformers does.

    T5 v1.1 has an output head of its own while its config, as transformers reads it, says that all is tied.
    """
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    for target, source in list(tied.items()):
        if target in tensors and source in tensors and not torch.equal(tensors[target], tensors[source]):
            del tied[target]


def _tie_weights(model: Any) -> None:
    """Make tied parameters one again, wherever both ends are still plain parameters."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    for target, source in tied.items():  # a file may hold the tensor under any of its names
        if target in parameters and source in parameters and parameters[source].is_meta:
            owner, _, name = source.rpartition(".")
            setattr(model.get_submodule(owner), name, parameters[target])
            parameters[source] = parameters[target]
    for target, source in tied.items():
        if target in parameters and source in parameters:
            owner, _, name = target.rpartition(".")
            setattr(model.get_submodule(owner), name, model.get_parameter(source))

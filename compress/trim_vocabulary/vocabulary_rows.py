"""Rows of a model's matrices that belong to tokens: of its embedding, output layer and its bias."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from smelt.core.errors import InputError
from smelt.models.families.family import Family
from smelt.models.families.model_blocks import is_token_embedding, output_modules
from smelt.models.families.registry import FAMILIES, family_of
from smelt.models.layers import LowRankEmbedding, LowRankLinear


def keep_vocabulary_rows(model: Any, kept: list[int]) -> None:
    """Keep the rows `kept` of every matrix of `model` with a row for each token, in place.

    Tied matrices stay tied. The config gets the new vocabulary size; its token ids are unchanged (see
    `renumber_config`).

    Raises:
        InputError: an unsupported family, or an embedding or output layer that is no plain matrix.
    """
    family = family_of(model)
    if family is None:
        raise InputError(
            f"trim-vocabulary: {model.config.model_type} models are not supported."
            f" Supported: {', '.join(FAMILIES)}.",
            code="unsupported-family",
        )
    size, places = int(model.config.vocab_size), torch.tensor(kept)
    matrices: dict[int, nn.Parameter] = {}  # by the original matrix
    found = _vocabulary_modules(model, family)
    for name, module in found.items():
        _require_plain_matrix(name, module)
        old = module.weight
        if len(old) != size:
            raise InputError(
                f"trim-vocabulary: {name} has {len(old)} rows, but vocab_size in the config is {size}."
                " Use the config that belongs to the model.",
                code="shape-mismatch",
            )
        if id(old) not in matrices:
            matrices[id(old)] = nn.Parameter(
                old.detach().index_select(0, places), requires_grad=old.requires_grad
            )
    for module in dict.fromkeys(found.values()):
        _cut_rows(module, matrices[id(module.weight)], places)
    if family.logits_bias is not None and hasattr(model, family.logits_bias):
        old = getattr(model, family.logits_bias)
        setattr(model, family.logits_bias, old.index_select(1, places))  # [1, V]
    for word in ("vocab_size", "decoder_vocab_size"):
        if getattr(model.config, word, None) is not None:
            setattr(model.config, word, len(kept))


def _vocabulary_modules(model: Any, family: Family) -> dict[str, Any]:
    """Return the modules of `model` with a row for each token, by name."""
    config = model.config.to_dict()
    tables = {stack.stream.embeddings[0] for stack in family.stacks(config)}
    found = {
        name.removesuffix(".weight"): model.get_submodule(name.removesuffix(".weight"))
        for name in (f"{n}.weight" for n, _ in model.named_modules(remove_duplicate=False))
        if name in tables or is_token_embedding(family, config, name)
    }
    if model.can_generate():
        name = output_modules(model)[-1]
        found[name] = model.get_submodule(name)
    return dict(_row_module(name, module) for name, module in found.items())


def _row_module(name: str, module: Any) -> tuple[str, Any]:
    """Return the name and the module with a row for each token; of a factorized one its table."""
    if isinstance(module, LowRankEmbedding):
        return f"{name}.table", module.table
    if isinstance(module, LowRankLinear):
        return f"{name}.up", module.up
    return name, module


def _require_plain_matrix(name: str, module: Any) -> None:
    if not isinstance(module, nn.Embedding | nn.Linear):
        raise InputError(
            f"trim-vocabulary: {name} is a {type(module).__name__}, which does not have one row per"
            " token. Put 'trim-vocabulary' before the stage that created it.",
            code="embedding-changed",
        )


def _cut_rows(module: Any, weight: nn.Parameter, places: torch.Tensor) -> None:
    if isinstance(module, nn.Embedding):
        pad = module.padding_idx
        module.weight, module.num_embeddings = weight, len(weight)
        if pad is not None:
            module.padding_idx = int((places == pad).nonzero()) if bool((places == pad).any()) else None
        return
    if module.bias is not None and len(module.bias) != len(weight):
        module.bias = nn.Parameter(module.bias.detach().index_select(0, places))
    module.weight, module.out_features = weight, len(weight)

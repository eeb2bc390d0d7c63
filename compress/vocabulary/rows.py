"""The rows of a model that belong to words: of its embedding, of its head and its bias."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from smelt.core.errors import InputError
from smelt.families.family import Family
from smelt.families.registry import FAMILIES, family_of
from smelt.families.walk import head_of, is_word_table
from smelt.runtime.layers.low_rank import LowRankEmbedding, LowRankLinear


def keep_rows(model: Any, kept: list[int]) -> None:
    """Keep the rows `kept` of every matrix of `model` that has one for each word, in place.

    A matrix that is embedding and head at once stays one. The config says the new number of words; the
    tokens that it names keep their numbers (`renumber`).

    Raises:
        InputError: a family that smelt does not know, or an embedding or a head that is no plain matrix.
    """
    family = family_of(model)
    if family is None:
        raise InputError(
            f"trim-vocabulary: the embedding of a {model.config.model_type} model is not known."
            f" Known: {', '.join(FAMILIES)}.",
            code="unsupported-family",
        )
    size, places = int(model.config.vocab_size), torch.tensor(kept)
    matrices: dict[int, nn.Parameter] = {}  # by the one that they come from
    found = _of_words(model, family)
    for name, module in found.items():
        _require_plain(name, module)
        old = module.weight
        if len(old) != size:
            raise InputError(
                f"trim-vocabulary: {name} has {len(old)} rows, and the config says {size} words.",
                code="shape-mismatch",
            )
        if id(old) not in matrices:
            matrices[id(old)] = nn.Parameter(
                old.detach().index_select(0, places), requires_grad=old.requires_grad
            )
    for module in dict.fromkeys(found.values()):
        _cut(module, matrices[id(module.weight)], places)
    if family.logits_bias is not None and hasattr(model, family.logits_bias):
        old = getattr(model, family.logits_bias)
        setattr(model, family.logits_bias, old.index_select(1, places))  # [1, V]
    for word in ("vocab_size", "decoder_vocab_size"):
        if getattr(model.config, word, None) is not None:
            setattr(model.config, word, len(kept))


def _of_words(model: Any, family: Family) -> dict[str, Any]:
    """Return the modules of `model` whose rows are words, by name."""
    config = model.config.to_dict()
    tables = {stack.stream.tables[0] for stack in family.stacks(config)}
    found = {
        name.removesuffix(".weight"): model.get_submodule(name.removesuffix(".weight"))
        for name in (f"{n}.weight" for n, _ in model.named_modules(remove_duplicate=False))
        if name in tables or is_word_table(family, config, name)
    }
    if model.can_generate():
        name = head_of(model)[-1]
        found[name] = model.get_submodule(name)
    return dict(_rows_of(name, module) for name, module in found.items())


def _rows_of(name: str, module: Any) -> tuple[str, Any]:
    """Return the name and the module that has a row for each word: of a pair the thin half."""
    if isinstance(module, LowRankEmbedding):
        return f"{name}.table", module.table
    if isinstance(module, LowRankLinear):
        return f"{name}.up", module.up
    return name, module


def _require_plain(name: str, module: Any) -> None:
    if not isinstance(module, nn.Embedding | nn.Linear):
        raise InputError(
            f"trim-vocabulary: {name} is a {type(module).__name__}, whose rows are no words any more. Put"
            " 'trim-vocabulary' before the stage that made it.",
            code="embedding-changed",
        )


def _cut(module: Any, weight: nn.Parameter, places: torch.Tensor) -> None:
    if isinstance(module, nn.Embedding):
        pad = module.padding_idx
        module.weight, module.num_embeddings = weight, len(weight)
        if pad is not None:
            module.padding_idx = int((places == pad).nonzero()) if bool((places == pad).any()) else None
        return
    if module.bias is not None and len(module.bias) != len(weight):
        module.bias = nn.Parameter(module.bias.detach().index_select(0, places))
    module.weight, module.out_features = weight, len(weight)

"""Count the tokens of a split, and select the rows of a model's matrices that belong to kept tokens.

The matrices are the embedding, and the output layer with its bias. Tokenizations before and after trimming
are compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from smelt.compress.trim_vocabulary.select_tokens import TokenCounts
from smelt.core.errors import InputError
from smelt.models.families.family import Family
from smelt.models.families.registry import FAMILIES, family_of, is_token_embedding, predicts_tokens
from smelt.models.layers import LowRankEmbedding, LowRankLinear


def keep_vocabulary_rows(model: Any, kept_ids: list[int]) -> None:
    """Keep the rows `kept_ids` of every matrix of `model` with a row for each token, in place.

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
    size, indices = int(model.config.vocab_size), torch.tensor(kept_ids)
    matrices: dict[int, nn.Parameter] = {}  # by the original matrix
    modules = _vocabulary_modules(model, family)
    for name, module in modules.items():
        _require_plain_matrix(name, module)
        matrix = module.weight
        if len(matrix) != size:
            raise InputError(
                f"trim-vocabulary: {name} has {len(matrix)} rows, but vocab_size in the config is {size}."
                " Use the config that belongs to the model.",
                code="shape-mismatch",
            )
        if id(matrix) not in matrices:
            matrices[id(matrix)] = nn.Parameter(
                matrix.detach().index_select(0, indices), requires_grad=matrix.requires_grad
            )
    for module in dict.fromkeys(modules.values()):
        bias = getattr(module, "bias", None)
        _cut_rows(module, matrices[id(module.weight)], indices)
        for owner in model.modules() if bias is not None else ():  # BERT's belongs to two modules
            if getattr(owner, "bias", None) is bias:
                owner.bias = module.bias
    if family.logits_bias is not None and hasattr(model, family.logits_bias):
        matrix = getattr(model, family.logits_bias)
        setattr(model, family.logits_bias, matrix.index_select(1, indices))  # [1, V]
    for key in ("vocab_size", "decoder_vocab_size"):
        if getattr(model.config, key, None) is not None:
            setattr(model.config, key, len(kept_ids))


def _vocabulary_modules(model: Any, family: Family) -> dict[str, Any]:
    """Return the modules of `model` with a row for each token, by name."""
    config = model.config.to_dict()
    tables = {stack.stream.embeddings[0] for stack in family.stacks(config)}
    modules = {
        name.removesuffix(".weight"): model.get_submodule(name.removesuffix(".weight"))
        for name in (f"{n}.weight" for n, _ in model.named_modules(remove_duplicate=False))
        if name in tables or is_token_embedding(family, config, name)
    }
    if predicts_tokens(model):
        output = model.get_output_embeddings()
        name = next(name for name, module in model.named_modules() if module is output)
        modules[name] = output
    return dict(_row_module(name, module) for name, module in modules.items())


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


def count_tokens(token_rows: Sequence[Sequence[int]], vocabulary_size: int) -> TokenCounts:
    """Return the number of occurrences of each id in `token_rows`, int64 [vocabulary_size]."""
    ids = np.fromiter((token_id for row in token_rows for token_id in row), dtype=np.int64)
    return np.bincount(ids, minlength=vocabulary_size)


@dataclass(frozen=True)
class TokenizationChange:
    """How a trimmed vocabulary changes the tokenization of texts.

    texts: number of texts. changed: number of texts that are tokenized differently. tokens, tokens_after: of
    all texts. kept: share of the tokens that are kept. unknown, unknown_after: number of unknown tokens.
    wrong: texts whose tokens are all kept and that are tokenized differently; must be 0.
    """

    texts: int
    changed: int
    tokens: int
    tokens_after: int
    kept: float
    unknown: int
    unknown_after: int
    wrong: int

    def details(self) -> dict[str, float]:
        """Return the details for the report."""
        values = {name: value for name, value in vars(self).items() if name != "wrong"}
        return {**values, "kept": round(self.kept, 6)}


def compare_tokenizations(
    before: Sequence[Sequence[int]],
    after: Sequence[Sequence[int]],
    new_ids: Mapping[int, int],
    unknown: int | None,
) -> TokenizationChange:
    """Compare the token ids of texts before and after trimming.

    Args:
        before: ids by the original tokenizer.
        after: ids of the same texts by the trimmed one.
        new_ids: new id of each kept token.
        unknown: id of the unknown token before; None if there is none.
    """
    num_changed = num_wrong = num_kept = 0
    for ids_before, ids_after in zip(before, after, strict=True):
        expected = [new_ids.get(token_id) for token_id in ids_before]
        num_kept += sum(token_id is not None for token_id in expected)
        num_changed += expected != list(ids_after)
        num_wrong += all(token_id is not None for token_id in expected) and expected != list(ids_after)
    tokens, tokens_after = (sum(map(len, texts)) for texts in (before, after))
    num_unknown, unknown_after = (
        0 if token_id is None else sum(list(row).count(token_id) for row in texts)
        for texts, token_id in ((before, unknown), (after, None if unknown is None else new_ids.get(unknown)))
    )
    share = num_kept / max(1, tokens)
    return TokenizationChange(
        len(before), num_changed, tokens, tokens_after, share, num_unknown, unknown_after, num_wrong
    )

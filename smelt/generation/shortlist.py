"""A shortlist: the tokens that are allowed in a text, by the tokens of its source.

It is part of the artifact, in `shortlist.safetensors`, which every stage copies with the tokenizer's
files. The model itself is complete: the runner excludes all other tokens of a row, so that training, scores
and every runtime are consistent, and a row's result does not depend on its batch. The graph with the
generation loop also multiplies only with the rows of the output layer that some source of the batch needs.

Source: Jean et al. 2015, On Using Very Large Target Vocabulary for Neural Machine Translation,
arXiv:1412.2007 (section 3.3); L'Hostis et al. 2016, arXiv:1610.00072.

Shapes: B = batch, L = source length, S = tokens of the source vocabulary, V = tokens of the output layer,
n = candidates of a source token, k = tokens that are always allowed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from smelt.core.errors import InputError
from smelt.runtimes.backend import Batch, Tokens

SHORTLIST_FILE = "shortlist.safetensors"
# the tensors in it
TABLE_TENSOR, ALWAYS_TENSOR = "shortlist.table", "shortlist.always"
_SMALL = 2**16


@dataclass(frozen=True)
class Shortlist:
    """table: uint16 or int32 [S, n], padded by repetition. always: int64 [k], rising, two or more."""

    table: NDArray[Any]
    always: Tokens

    def allowed_tokens(self, batch: Batch, vocabulary: int) -> NDArray[np.bool_]:
        """Return bool [B, V]: which tokens are allowed in each row of the batch."""
        found = np.zeros((len(batch.input_ids), vocabulary), dtype=bool)
        found[:, self.always] = True
        rows, places = np.nonzero(batch.attention_mask)
        words = self.table[batch.input_ids[rows, places]]  # [tokens, n]
        found[rows[:, None], words] = True
        return found


def vocabulary_sizes(config: Mapping[str, Any]) -> tuple[int, int]:
    """Return S and V of a model with this config (config.json)."""
    source = int(config["vocab_size"])
    return source, int(config.get("decoder_vocab_size") or source)


def make_shortlist(table: NDArray[Any], always: Tokens, vocabulary: int) -> Shortlist:
    """Return a shortlist whose table has the smallest type that holds every token; V is `vocabulary`."""
    kind = np.uint16 if vocabulary <= _SMALL else np.int32
    return Shortlist(np.ascontiguousarray(table, dtype=kind), np.unique(always).astype(np.int64))


def write_shortlist(shortlist: Shortlist, folder: Path) -> None:
    """Store `shortlist` in `folder`."""
    from safetensors.numpy import save_file

    save_file({TABLE_TENSOR: shortlist.table, ALWAYS_TENSOR: shortlist.always}, folder / SHORTLIST_FILE)


def read_shortlist(folder: Path, config: Mapping[str, Any]) -> Shortlist | None:
    """Return the shortlist in `folder`, None where there is none; `config` is the model's.

    Raises:
        InputError: it is damaged, or belongs to another model.
    """
    path = folder / SHORTLIST_FILE
    if not path.is_file():
        return None
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    try:
        tensors = load_file(path)
        table, always = tensors[TABLE_TENSOR], tensors[ALWAYS_TENSOR]
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        raise InputError(
            f"{path}: this version of smelt cannot read this shortlist: {type(error).__name__}: {error}.",
            code="damaged-file",
        ) from error
    source, vocabulary = vocabulary_sizes(config)
    fits = table.ndim == 2 and len(table) == source and table.dtype in (np.uint16, np.int32)
    fits = fits and always.dtype == np.int64 and always.ndim == 1 and len(always) > 1
    words = [part for part in (table, always) if part.size]
    if not fits or not all(part.min() >= 0 and part.max() < vocabulary for part in words):
        raise InputError(
            f"{path}: this shortlist has {table.dtype} {list(table.shape)} and {always.dtype}"
            f" {list(always.shape)}, which does not fit a model with {source} source and {vocabulary} target"
            " tokens. It belongs to another model, or is damaged; run the stage 'shortlist' again.",
            code="does-not-fit-model",
        )
    return Shortlist(table, always)

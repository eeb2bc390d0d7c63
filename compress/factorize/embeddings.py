"""The word embedding as a thin table and a product, and the output layer with it where both are one matrix.

ALBERT (Lan et al. 2020, arXiv:1909.11942, section 3.1) trains V x r and r x D instead of V x D. Of a trained
table E [V, D] the best pair of rank r is its projection on r directions, the first right singular vectors P
[D, r] (Eckart & Young 1936): rows E P and the product P^T. By frequency, they are those of diag(sqrt f) E:
then it is sum_v f_v |e_v - P P^T e_v|^2 that is least, and tokens that are never met lose most. A head with
the same matrix gives h (E P P^T)^T = (h P) (E P)^T, with a matrix P of its own, as ALBERT has one there.

Shapes: V = words, D = width, r = rank.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn

from smelt.compress.calibration.rows import calibration_rows
from smelt.compress.factorize.ranks import rank_of_energy
from smelt.compress.factorize.settings import DEFAULT_ENERGY, FactorizeSettings
from smelt.compress.quantize.planned import input_tables
from smelt.compress.train.data import IGNORE
from smelt.core.artifact import Artifact
from smelt.core.errors import InputError
from smelt.core.stage import Context
from smelt.core.text import article
from smelt.runtime.layers.low_rank import LowRankEmbedding, LowRankLinear
from smelt.runtime.layers.quantized import is_table, keep_scale
from smelt.runtime.models.edits.tie import tie
from smelt.runtime.models.structure import Edit, names_of, replace_layer, replace_module


def factorize_tables(
    model: Any, edits: list[Edit], src: Artifact, settings: FactorizeSettings, ctx: Context
) -> None:
    """Make every word embedding of `model` a pair where that has fewer values; the details say what was done.

    Args:
        model: float32, on the CPU; changed in place.
        edits: its structure, to which the new one is appended.
        src: where the tokenizer lies.
        settings: rank, ratio or energy, and whether rows of data are counted.
        ctx: rows, details, warnings.

    Raises:
        InputError: an embedding is no plain table; there are no rows to count.
    """
    counts = _counted(model, src, settings, ctx) if _counts(settings, ctx) else None
    ranks: dict[str, int] = {}
    errors: dict[str, float] = {}
    alone: dict[str, str] = {}
    thin = [names[0] for module, names in names_of(model).items() if isinstance(module, LowRankEmbedding)]
    for tables, heads in _found(model):
        weight = model.get_submodule(tables[0]).weight.detach()
        directions, sigma = _directions(weight, counts)
        limit = weight.numel() / (len(weight) + weight.shape[1] * (2 if heads else 1))
        rank = _rank(weight, sigma, limit, settings)
        if rank >= limit:
            alone[tables[0]] = (
                f"rank {rank} of {len(weight)} x {weight.shape[1]} saves nothing; it would have to be below"
                f" {limit:.1f}"
            )
            continue
        _replace(model, edits, tables, heads, directions[:, :rank])
        ranks[tables[0]] = rank
        squares = sigma.square()
        errors[tables[0]] = round(float((squares[rank:].sum() / squares.sum().clamp(min=1e-300)).sqrt()), 4)
    ctx.details.update(ranks=ranks, relative_error=errors, left_alone=alone)
    if thin:
        ctx.warn(
            "already-factorized",
            f"{', '.join(thin)} is not factorized again: it has low rank already.",
        )
    if alone and not ranks:
        ctx.warn(
            "no-rank-saves",
            "The embeddings are not factorized: no rank saves weights with these settings: "
            + "; ".join(f"{name}: {why}" for name, why in alone.items()),
        )


def _counts(settings: FactorizeSettings, ctx: Context) -> bool:
    """Say whether tokens are counted: where it is asked for, or nothing is said and there are rows."""
    if settings.frequency_weighted is not None:
        return settings.frequency_weighted
    split = ctx.data.get("calibration") or ctx.data.get("train")
    if split is None or not len(split):
        ctx.warn(
            "no-calibration-data",
            "Without samples all tokens of the embedding have equal weight, and the error is larger. Add"
            " data: {calibration: FILE} or data: {train: FILE}, or set frequency_weighted: false.",
        )
        return False
    return True


def _found(model: Any) -> list[tuple[list[str], list[str]]]:
    """Return for each matrix of words the names of the embeddings, and of the output layers, that have it."""
    matrices: dict[int, tuple[list[str], list[str]]] = {}
    names = names_of(model)
    for table in input_tables(model):
        if isinstance(table, LowRankEmbedding):
            continue
        if not is_table(table):
            raise InputError(
                f"factorize: targets: embeddings: {names[table][0]} is {article(type(table).__name__)},"
                f" which is"
                " no table of the model's width any more.",
                code="embedding-changed",
                setting="targets",
            )
        matrices.setdefault(id(table.weight), ([], []))
    for module, (name, *_) in names.items():
        if isinstance(module, nn.Embedding | nn.Linear) and id(module.weight) in matrices:
            matrices[id(module.weight)][isinstance(module, nn.Linear)].append(name)
    return list(matrices.values())


def _directions(weight: Tensor, counts: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the right singular vectors [D, min(V, D)] and values of the table, rows weighed by `counts`."""
    rows = weight.double()
    if counts is not None:
        rows = rows * counts.sqrt().unsqueeze(1)
    _, sigma, vt = torch.linalg.svd(rows, full_matrices=False)
    return vt.t(), sigma


def _rank(weight: Tensor, sigma: Tensor, limit: float, settings: FactorizeSettings) -> int:
    if isinstance(settings.rank, int):  # vbmf is for convolutions, and settings refuse it here
        return min(settings.rank, weight.shape[0], weight.shape[1])
    if settings.keep_ratio is not None:
        return max(1, int(settings.keep_ratio * limit))
    return rank_of_energy(sigma, settings.energy or DEFAULT_ENERGY)


@torch.no_grad()
def _replace(model: Any, edits: list[Edit], tables: list[str], heads: list[str], basis: Tensor) -> None:
    """Put pairs in the place of all modules with one matrix; `basis` is P, float64 [D, r]."""
    rank = basis.shape[1]
    first = tables[0]
    thin = (model.get_submodule(first).weight.double() @ basis).float()
    for name in tables:
        old = model.get_submodule(name)
        new = LowRankEmbedding(old.num_embeddings, old.embedding_dim, rank, old.padding_idx).eval()
        keep_scale(new, old)
        replace_layer(model, edits, name, new, {"op": "low_rank_table", "module": name, "rank": rank})
        if name == first:
            new.table.weight.copy_(thin)
            new.up.weight.copy_(basis)
            continue
        for part in ("table", "up"):
            replace_module(model, f"{name}.{part}", model.get_submodule(f"{first}.{part}"))
            edits.append({"op": "share", "module": f"{name}.{part}", "with": f"{first}.{part}"})
    for name in heads:
        old = model.get_submodule(name)
        pair = LowRankLinear(old.in_features, old.out_features, rank, old.bias is not None).eval()
        pair.down.weight.copy_(basis.t())
        if old.bias is not None:
            pair.up.bias.copy_(old.bias)
        replace_layer(model, edits, name, pair, {"op": "low_rank", "module": name, "rank": rank})
        edits.append(tie(model, f"{name}.up", f"{first}.table"))


def _counted(model: Any, src: Artifact, settings: FactorizeSettings, ctx: Context) -> Tensor:
    """Return how often each token is met on rows, read or written, and once more, float64 [V]."""
    # to count tokens costs no pass of the model, so all rows are counted unless the recipe says how many
    wanted = (
        settings.calibration_samples if "calibration_samples" in settings.model_fields_set else sys.maxsize
    )
    rows = calibration_rows(model, src, wanted, ctx, "factorize", padded=True)
    counts = torch.ones(model.get_input_embeddings().num_embeddings, dtype=torch.float64)
    for batch in rows.batches:
        found = [batch["input_ids"][batch["attention_mask"].bool()]]
        if "decoder_input_ids" in batch:
            found.append(batch["labels"][batch["labels"] != IGNORE])
        ids = torch.cat([part.flatten() for part in found])
        counts += torch.bincount(ids, minlength=len(counts))
    ctx.details["calibration"] = {"origin": rows.origin, "rows": rows.rows, "tokens": rows.tokens}
    return counts

"""Factorize the token embedding into a thin table and a linear layer, with a tied output layer.

ALBERT (Lan et al. 2020, arXiv:1909.11942, section 3.1) trains V x r and r x D instead of V x D. For a trained
table E [V, D] the best factors of rank r are its projection on r directions, the first right singular vectors
P [D, r] (Eckart & Young 1936): the table E P and the linear layer P^T. With frequency_weighted, the vectors
are those of diag(sqrt f) E: this minimizes sum_v f_v |e_v - P P^T e_v|^2, and unused tokens have the largest
error. An output layer with the same matrix computes h (E P P^T)^T = (h P) (E P)^T, with its own matrix P, as
in ALBERT.

Shapes: V = vocabulary, D = width, r = rank.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn

from smelt.calibration.samples import load_calibration_samples
from smelt.compress.factorize.ranks import rank_of_energy
from smelt.compress.factorize.settings import DEFAULT_ENERGY, FactorizeSettings
from smelt.core.artifact import Artifact
from smelt.core.errors import InputError
from smelt.core.messages import with_article
from smelt.models.edits import Edit, module_names, replace_layer, replace_module, tie_linear
from smelt.models.families.registry import token_lookup_modules
from smelt.models.layers import LowRankEmbedding, LowRankLinear
from smelt.quantization.layers import copy_embed_scale, is_embedding_table
from smelt.stage import Context
from smelt.tasks.samples import IGNORE_INDEX


def factorize_embeddings(
    model: Any, edits: list[Edit], src: Artifact, settings: FactorizeSettings, ctx: Context
) -> None:
    """Factorize every token embedding of `model` where that saves weights; report in the details.

    Args:
        model: float32, on the CPU; changed in place.
        edits: its edits; the new ones are appended.
        src: the artifact with the tokenizer.
        settings: rank, keep_ratio or energy, and whether tokens are counted.
        ctx: samples, details, warnings.

    Raises:
        InputError: an embedding is no plain table, or there are no samples to count.
    """
    counts = _count_tokens(model, src, settings, ctx) if _uses_token_counts(settings, ctx) else None
    ranks: dict[str, int] = {}
    errors: dict[str, float] = {}
    kept_reasons: dict[str, str] = {}
    factorized = [
        names[0] for module, names in module_names(model).items() if isinstance(module, LowRankEmbedding)
    ]
    for tables, heads in _embedding_groups(model):
        weight = model.get_submodule(tables[0]).weight.detach()
        directions, sigma = _principal_directions(weight, counts)
        limit = weight.numel() / (len(weight) + weight.shape[1] * (2 if heads else 1))
        rank = _rank(weight, sigma, limit, settings)
        if rank >= limit:
            kept_reasons[tables[0]] = (
                f"rank {rank} of {len(weight)} x {weight.shape[1]} saves no weights; the rank must be below"
                f" {limit:.1f}"
            )
            continue
        _replace_embeddings(model, edits, tables, heads, directions[:, :rank])
        ranks[tables[0]] = rank
        squares = sigma.square()
        errors[tables[0]] = round(float((squares[rank:].sum() / squares.sum().clamp(min=1e-300)).sqrt()), 4)
    ctx.details.update(ranks=ranks, relative_error=errors, left_alone=kept_reasons)
    if factorized:
        ctx.warn(
            "already-factorized",
            f"{', '.join(factorized)} is already factorized and is not factorized again.",
        )
    if kept_reasons and not ranks:
        ctx.warn(
            "no-rank-saves",
            "The embeddings are not factorized, because this would not save weights. Lower rank,"
            " keep_ratio or energy: "
            + "; ".join(f"{name}: {reason}" for name, reason in kept_reasons.items()),
        )


def _uses_token_counts(settings: FactorizeSettings, ctx: Context) -> bool:
    """Return whether tokens are counted: if set, or by default if there are samples."""
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


def _embedding_groups(model: Any) -> list[tuple[list[str], list[str]]]:
    """Return the names of the embeddings and output layers that use each embedding matrix."""
    matrices: dict[int, tuple[list[str], list[str]]] = {}
    names = module_names(model)
    for table in token_lookup_modules(model):
        if isinstance(table, LowRankEmbedding):
            continue
        if not is_embedding_table(table):
            raise InputError(
                f"factorize: targets: [embeddings]: {names[table][0]} is"
                f" {with_article(type(table).__name__)}, not an unmodified embedding. Factorize"
                " the embeddings before other stages that change them.",
                code="embedding-changed",
                setting="targets",
            )
        matrices.setdefault(id(table.weight), ([], []))
    for module, (name, *_) in names.items():
        if isinstance(module, nn.Embedding | nn.Linear) and id(module.weight) in matrices:
            matrices[id(module.weight)][isinstance(module, nn.Linear)].append(name)
    return list(matrices.values())


def _principal_directions(weight: Tensor, counts: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the right singular vectors [D, min(V, D)] and values of the table, rows weighted by `counts`."""
    table = weight.double()
    if counts is not None:
        table = table * counts.sqrt().unsqueeze(1)
    _, sigma, vt = torch.linalg.svd(table, full_matrices=False)
    return vt.t(), sigma


def _rank(weight: Tensor, sigma: Tensor, limit: float, settings: FactorizeSettings) -> int:
    if isinstance(settings.rank, int):  # vbmf is for convolutions only; settings reject it here
        return min(settings.rank, weight.shape[0], weight.shape[1])
    if settings.keep_ratio is not None:
        return max(1, int(settings.keep_ratio * limit))
    return rank_of_energy(sigma, settings.energy or DEFAULT_ENERGY)


@torch.no_grad()
def _replace_embeddings(
    model: Any, edits: list[Edit], tables: list[str], heads: list[str], basis: Tensor
) -> None:
    """Replace all modules with one matrix by factors; `basis` is P, float64 [D, r]."""
    rank = basis.shape[1]
    owner = tables[0]
    reduced = (model.get_submodule(owner).weight.double() @ basis).float()
    for name in tables:
        old = model.get_submodule(name)
        new = LowRankEmbedding(old.num_embeddings, old.embedding_dim, rank, old.padding_idx).eval()
        copy_embed_scale(new, old)
        replace_layer(model, edits, name, new, {"op": "low_rank_table", "module": name, "rank": rank})
        if name == owner:
            new.table.weight.copy_(reduced)
            new.up.weight.copy_(basis)
            continue
        for submodule in ("table", "up"):
            replace_module(model, f"{name}.{submodule}", model.get_submodule(f"{owner}.{submodule}"))
            edits.append({"op": "share", "module": f"{name}.{submodule}", "with": f"{owner}.{submodule}"})
    for name in heads:
        old = model.get_submodule(name)
        pair = LowRankLinear(old.in_features, old.out_features, rank, old.bias is not None).eval()
        pair.down.weight.copy_(basis.t())
        if old.bias is not None:
            pair.up.bias.copy_(old.bias)
        replace_layer(model, edits, name, pair, {"op": "low_rank", "module": name, "rank": rank})
        edits.append(tie_linear(model, f"{name}.up", f"{owner}.table"))


def _count_tokens(model: Any, src: Artifact, settings: FactorizeSettings, ctx: Context) -> Tensor:
    """Return one plus the occurrences of each token in inputs and targets of samples, float64 [V]."""
    max_samples = settings.calibration_samples or sys.maxsize  # counting needs no pass of the model
    samples = load_calibration_samples(model, src, max_samples, ctx, "factorize", padded=True)
    counts = torch.ones(model.get_input_embeddings().num_embeddings, dtype=torch.float64)
    for batch in samples.batches:
        id_tensors = [batch["input_ids"][batch["attention_mask"].bool()]] if "input_ids" in batch else []
        if "decoder_input_ids" in batch:
            id_tensors.append(batch["labels"][batch["labels"] != IGNORE_INDEX])
        ids = torch.cat([tensor.flatten() for tensor in id_tensors])
        counts += torch.bincount(ids, minlength=len(counts))
    ctx.details["calibration"] = samples.details
    return counts

"""Biases of attention scores that depend on the distance of query and key, as an exported graph has them.

T5's is computed in torch with logarithmic buckets. All distances beyond a maximum share one bucket, so a
table over the distances is complete: the graph only needs a subtraction, a Clip and a Gather. DeBERTa's also
depends on queries and keys. The projections of its embeddings of distances are constants of the graph.

Shapes: B = batch, S = queries (input tokens), T = keys, H = heads, d = width of a head, D = width of the
model, R = embeddings of distances.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from smelt.models.families.family import Family


@dataclass(frozen=True)
class DistanceEmbeddings:
    """Embeddings of distances, for all attentions of a stack.

    rows: see `Family.distance_rows`. table: [R, D]. norm: of the table.
    """

    rows: Tensor
    table: Tensor
    norm: nn.Module

    @property
    def values(self) -> Tensor:
        """The normed embeddings, [R, D]."""
        value: Tensor = self.norm(self.table)
        return value


def distance_embeddings(model: Any, family: Family) -> DistanceEmbeddings | None:
    """Return the embeddings of distances of `model`, None if it has none."""
    if family.distance_rows is None:
        return None
    config = model.config.to_dict()
    stream = family.stacks(config)[0].stream
    table = model.get_parameter(stream.distance_embeddings)
    return DistanceEmbeddings(family.distance_rows(config), table, model.get_submodule(stream.distance_norm))


def projected_bias(
    query: Tensor, key: Tensor, distance_queries: Tensor, distance_keys: Tensor, rows: Tensor
) -> Tensor:
    """Return the sum of products of query i and key j with the key and the query of their distance i - j.

    Source: He et al. 2021, arXiv:2006.03654, equation 4.

    Args:
        query: [B, H, S, d].
        key: [B, H, S, d].
        distance_queries: the queries of distances, [1, H, R, d].
        distance_keys: their keys, [1, H, R, d].
        rows: see `Family.distance_rows`.

    Returns:
        [B, H, S, S], not scaled.
    """
    length, farthest = query.shape[2], rows.shape[0] // 2
    distances = torch.arange(2 * length - 1) - (length - 1)
    # the rows of falling distances are looked up as those of rising ones: TensorRT cannot reverse a tensor
    falling, rising = (rows[d.clamp(-farthest, farthest) + farthest] for d in (-distances, distances))
    by_query = query @ distance_keys.index_select(2, falling).transpose(2, 3)
    by_key = key @ distance_queries.index_select(2, rising).transpose(2, 3)
    return _align_distances(by_query) + _align_distances(by_key).transpose(2, 3)


def _align_distances(products: Tensor) -> Tensor:
    """Return [B, H, S, S], in column j of row i the entry S - 1 - i + j of the row, from [B, H, S, 2 S - 1].

    With a padded column the rows begin one entry earlier each if they are divided again (Dai et al. 2019,
    arXiv:1901.02860, appendix B), which is cheaper than a gather.
    """
    length, width = products.shape[2:]
    flat = F.pad(products, (0, 1)).flatten(2)[:, :, length - 1 : -1]
    aligned: Tensor = flat.unflatten(2, (length, width))[..., :length]
    return aligned


def relative_bias(by_distance: Tensor, length: int, total: int) -> Tensor:
    """Return the bias [1, H, S, T] of the last `length` of `total` positions."""
    heads, farthest = by_distance.shape[0], by_distance.shape[1] // 2
    keys = torch.arange(total)
    distances = keys[None, :] - keys[total - length :, None]
    bucket_indices = distances.clamp(-farthest, farthest) + farthest
    values: Tensor = by_distance.index_select(1, bucket_indices.flatten())
    return values.reshape(1, heads, length, total)

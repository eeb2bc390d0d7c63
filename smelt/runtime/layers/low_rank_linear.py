"""A linear layer, or an embedding, as the product of two smaller ones."""

from __future__ import annotations

from torch import Tensor, nn


class LowRankLinear(nn.Module):
    """y = up(down(x)): [in -> rank] without bias, then [rank -> out] with the layer's bias.

    Both halves are plain `nn.Linear` (named `down` and `up`), so that quantization finds them.
    """

    weight = None  # T5 reads the type of its layers' weight, and skips layers without one

    def __init__(self, in_features: int, out_features: int, rank: int, bias: bool = True) -> None:
        super().__init__()
        self.down = nn.Linear(in_features, rank, bias=False)
        self.up = nn.Linear(rank, out_features, bias=bias)

    @property
    def in_features(self) -> int:
        """Return the width of the input; pruning may have changed it."""
        return self.down.in_features

    @property
    def out_features(self) -> int:
        """Return the width of the output; pruning may have changed it."""
        return self.up.out_features

    @property
    def rank(self) -> int:
        """Return the width between the two factors."""
        return self.down.out_features

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., in_features] to [..., out_features]."""
        out: Tensor = self.up(self.down(x))
        return out


class LowRankEmbedding(nn.Module):
    """A narrow embedding, [V -> rank], projected to the model's width, [rank -> D], without bias.

    Source: the factorized embedding of ALBERT, Lan et al. 2020, arXiv:1909.11942, section 3.1. Both parts are
    plain modules (`table` and `up`), so that quantization finds them.
    """

    weight = None  # see LowRankLinear

    def __init__(self, words: int, width: int, rank: int, padding_idx: int | None = None) -> None:
        super().__init__()
        self.table = nn.Embedding(words, rank, padding_idx)
        self.up = nn.Linear(rank, width, bias=False)

    @property
    def num_embeddings(self) -> int:
        """Return the number of rows."""
        return self.table.num_embeddings

    @property
    def embedding_dim(self) -> int:
        """Return the width of the output."""
        return self.up.out_features

    @property
    def padding_idx(self) -> int | None:
        """Return the row of padding."""
        return self.table.padding_idx

    @property
    def rank(self) -> int:
        """Return the width of the table."""
        return self.table.embedding_dim

    def forward(self, ids: Tensor) -> Tensor:
        """Map int64 [...] to float [..., D]."""
        out: Tensor = self.up(self.table(ids))
        return out

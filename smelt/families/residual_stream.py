"""The hidden states of a stack of blocks, from the embeddings to the output layer.

Every block adds to the same states, so that one of their channels affects all that reads or writes them.
`Attention` and `FeedForward` describe the linear layers of a block, a `ResidualStream` the rest.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ResidualStream:
    """The hidden states of one stack.

    embeddings: the embeddings whose sum is the input of the stack, token embedding first, by the names of
    their tensors in the model, [rows, width]. embedding_norm: the norm of their sum, if there is one.
    part_norms: the norms of the parts of a block, attentions in order and then the feed-forward part, with
    names relative to the block. pre_norm: a norm is before its part and nothing else uses its output
    (pre-norm); otherwise it normalizes the sum of the part's input and output, which is the input of the
    next part (post-norm). final_norm: the norm after the last block, if there is one. other_tensors: other
    tensors of the states, each with the axis of their width (patches of an image, its first token).
    """

    embeddings: tuple[str, ...]
    part_norms: tuple[str, ...]
    pre_norm: bool
    embedding_norm: str | None = None
    final_norm: str | None = None
    other_tensors: tuple[tuple[str, int], ...] = ()

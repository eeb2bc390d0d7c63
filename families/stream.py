"""What flows through a stack of blocks: hidden states, from the embeddings over the blocks to the head.

Every block adds to the same states, so that one channel of them runs through all that reads or writes them.
Which products of a block do, its `Attention`s and its `FeedForward` say; what is beside them says a `Stream`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Stream:
    """The hidden states of one stack.

    tables: the embeddings whose rows are added up to what the stack begins with, words first, by the names of
    these tensors in the model, [rows, width]. opening: the norm of their sum, where there is one. norms: of a
    block, the norm that belongs to each part, attentions in order and then the feed-forward part, with names
    relative to the block. norms_first: a norm stands before its part and nothing else reads what it gives
    (pre-norm); otherwise it norms the sum of what the part read and gave, which the next part reads and adds
    to (post-norm). closing: the norm after the last block, where there is one. beside: other tensors that the
    states are made of, each with the axis that is as wide as they are (patches of an image, its first token).
    """

    tables: tuple[str, ...]
    norms: tuple[str, ...]
    norms_first: bool
    opening: str | None = None
    closing: str | None = None
    beside: tuple[tuple[str, int], ...] = ()

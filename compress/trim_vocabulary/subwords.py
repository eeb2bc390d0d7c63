"""The tokens that a kept token depends on, and those that replace a removed token.

Texts whose tokens are all kept must be tokenized as before, and no text may get new unknown tokens. Which
other tokens that requires depends on the algorithm:

- WordPiece takes the longest match, Unigram the likeliest segmentation: removing others changes neither.
- BPE merges neighbours, so the intermediate merges of a kept token are kept.
- In each, single characters (bytes, in byte-level models) are kept, and tokens that they cannot spell.

Tokens are strings here, as the tokenizer stores them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from itertools import pairwise

# The rank of a pair of neighbours (the smallest is merged first), None if they are not merged.
MergeRank = Callable[[str, str], float | None]
_BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")


def is_byte_token(token: str) -> bool:
    """Return whether `token` is a byte-fallback token."""
    return _BYTE_TOKEN.fullmatch(token) is not None


def apply_bpe(text: str, rank: MergeRank) -> tuple[list[str], set[str]]:
    """Tokenize `text` by BPE: merge the neighbours of the smallest rank, from the left, until none is left.

    Returns:
        The pieces, and all intermediate pieces. Source: Sennrich et al. 2016, arXiv:1508.07909.
    """
    pieces, seen = list(text), set(text)
    while len(pieces) > 1:
        ranks = [rank(a, b) for a, b in pairwise(pieces)]
        there = [(value, at) for at, value in enumerate(ranks) if value is not None]
        if not there:
            break
        _, at = min(there)
        pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]
        seen.add(pieces[at])
    return pieces, seen


def merge_ancestors(token: str, rank: MergeRank) -> frozenset[str]:
    """Return the tokens that BPE merges into `token`; empty if it is not merged.

    Within a text a token is merged as in isolation: if a neighbour outside had been merged with a part of
    it, the token would not occur.
    """
    pieces, seen = apply_bpe(token, rank)
    return frozenset(seen - {token}) if pieces == [token] else frozenset()


def rank_by_merges(merges: Iterable[tuple[str, str]]) -> MergeRank:
    """Return the rank function of a list of merges: the position in the list."""
    places: dict[tuple[str, str], float] = {}
    for at, pair in enumerate(merges):
        places.setdefault(pair, at)
    return lambda a, b: places.get((a, b))


def rank_by_scores(scores: Mapping[str, float]) -> MergeRank:
    """Return the rank function of SentencePiece's BPE: by the score of the merged piece, highest first."""

    def rank(a: str, b: str) -> float | None:
        score = scores.get(a + b)
        return None if score is None else -score

    return rank


def required_pieces(tokens: Collection[str], scores: Mapping[str, float] | None = None) -> set[str]:
    """Return the pieces to keep of a model without continuation marks: characters, bytes, what they lack.

    Args:
        tokens: all of them.
        scores: of Unigram; unknown costs a little more than the rarest piece, so that piece is kept too.
    """
    single = {token for token in tokens if len(token) == 1 or is_byte_token(token)}
    bytes_too = sum(map(is_byte_token, tokens)) == 256
    stay = single | {t for t in tokens if not bytes_too and not single.issuperset(t)}
    if scores:
        stay.add(min(scores, key=lambda token: scores[token]))
    return stay


def required_wordpieces(tokens: Collection[str], mark: str) -> set[str]:
    """Return the WordPiece tokens to keep; continuation tokens begin with `mark` (##)."""
    there = set(tokens)

    def characters(token: str) -> list[str]:
        later = bool(mark) and token.startswith(mark) and len(token) > len(mark)
        letters = list(token.removeprefix(mark) if later else token)
        return [mark + c if later or at else c for at, c in enumerate(letters)]

    return {token for token in there if len(found := characters(token)) == 1 or not there.issuperset(found)}

"""What a token of a vocabulary needs beside it, and what it can be said with when it is gone.

A text whose tokens all stay must be cut as before, and no text may become unknown that was not. Which other
tokens that asks for depends on how the tokenizer cuts:

- WordPiece takes the longest token that fits, Unigram the likeliest way: a way that is left is still that.
- BPE joins neighbours, so what a token is joined from, step by step, stays with it.
- In each, single characters (bytes, where it works on them) stay, and whatever could not be said with them.

Tokens are strings here, as the tokenizer writes them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from itertools import pairwise

# The rank of a pair of neighbours (the smaller one is joined first), None where they are not joined.
Rank = Callable[[str, str], float | None]
_BYTE = re.compile(r"<0x[0-9A-F]{2}>")


def is_byte(token: str) -> bool:
    """Return whether `token` stands for a byte that no character was found for."""
    return _BYTE.fullmatch(token) is not None


def joined(text: str, rank: Rank) -> tuple[list[str], set[str]]:
    """Cut `text` as BPE does: join the neighbours of the smallest rank, from the left, until none is left.

    Returns:
        The pieces, and all that stood there on the way. Source: Sennrich et al. 2016, arXiv:1508.07909.
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


def steps_to(token: str, rank: Rank) -> frozenset[str]:
    """Return the tokens from which BPE joins `token`; none where it is not made so.

    Within a text a token is joined as it is alone: had a neighbour outside taken a part of it, the token
    would not have come out.
    """
    pieces, seen = joined(token, rank)
    return frozenset(seen - {token}) if pieces == [token] else frozenset()


def by_merges(merges: Iterable[tuple[str, str]]) -> Rank:
    """Return the rank of a list of merges: the place in it."""
    places: dict[tuple[str, str], float] = {}
    for at, pair in enumerate(merges):
        places.setdefault(pair, at)
    return lambda a, b: places.get((a, b))


def by_scores(scores: Mapping[str, float]) -> Rank:
    """Return the rank of SentencePiece's BPE: what two pieces give together, the highest score first."""

    def rank(a: str, b: str) -> float | None:
        score = scores.get(a + b)
        return None if score is None else -score

    return rank


def single_pieces(tokens: Collection[str], scores: Mapping[str, float] | None = None) -> set[str]:
    """Return what must stay of pieces without marks inside of words: characters, bytes, what they cannot say.

    Args:
        tokens: all of them.
        scores: of Unigram; what is unknown costs a little more than the rarest piece, so that one stays too.
    """
    single = {token for token in tokens if len(token) == 1 or is_byte(token)}
    bytes_too = sum(map(is_byte, tokens)) == 256
    stay = single | {t for t in tokens if not bytes_too and not single.issuperset(t)}
    if scores:
        stay.add(min(scores, key=lambda token: scores[token]))
    return stay


def single_wordpieces(tokens: Collection[str], mark: str) -> set[str]:
    """Return what must stay of WordPiece tokens, whose later parts begin with `mark` (##)."""
    there = set(tokens)

    def characters(token: str) -> list[str]:
        later = bool(mark) and token.startswith(mark) and len(token) > len(mark)
        letters = list(token.removeprefix(mark) if later else token)
        return [mark + c if later or at else c for at, c in enumerate(letters)]

    return {token for token in there if len(found := characters(token)) == 1 or not there.issuperset(found)}

"""Beam search, step for step as transformers does it (generation/utils.py, `_beam_search`, 5.23).

float32 throughout, sums and penalties in the same order, so that the same beams win. A score of -1e9
marks what is out of the race: beams that repeat the first one at the beginning, and texts that ended.

Shapes: B = sentences, N = beams, K = candidates kept in a step, T = tokens so far, V = vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from smelt.runtime.batch import Batch, Logits, Tokens
from smelt.runtime.generate.decoder_only import first_logits
from smelt.runtime.generate.rules import Rules
from smelt.runtime.runner import Runner

_OUT = np.float32(-1e9)
_GROUP = 64
_AT_ONCE = 64 * 1024
Bools = NDArray[np.bool_]


@dataclass
class _Running:
    """Beams that go on. texts: int64 [B, N, longest]; scores: float32 [B, N], sums of log-probabilities."""

    texts: Tokens
    scores: Logits

    def of(self, sentences: Tokens) -> _Running:
        """Return those of some sentences."""
        return _Running(self.texts[sentences], self.scores[sentences])


@dataclass
class _Finished:
    """The best texts so far, best first. ended: whether a place is taken by a text that has ended.

    texts: int64 [B, N, longest]; scores: float32 [B, N], with the length penalty; ended: bool [B, N].
    """

    texts: Tokens
    scores: Logits
    ended: Bools

    def of(self, sentences: Tokens) -> _Finished:
        """Return those of some sentences."""
        return _Finished(self.texts[sentences], self.scores[sentences], self.ended[sentences])


@dataclass
class _Candidates:
    """K continuations per sentence, best first.

    texts: int64 [B, K, T + 1]; scores: float32 [B, K]; beams: int64 [B, K], the beam that each goes on
    from; stop: bool [B, K].
    """

    texts: Tokens
    scores: Logits
    beams: Tokens
    stop: Bools


def beam_search(runner: Runner, batch: Batch, rules: Rules, at_once: bool = False) -> list[list[int]]:
    """Return the new tokens of the best text of each row, the end-of-sequence token included."""
    return [texts[0] for texts in best_texts(runner, batch, rules, 1, at_once)]


def best_texts(
    runner: Runner, batch: Batch, rules: Rules, count: int, at_once: bool = False
) -> list[list[list[int]]]:
    """Return the new tokens of the `count` best texts of each row, at most as many as beams, best first.

    A sentence whose finished texts nothing can beat any more is settled: its beams leave the batch once an
    eighth of all sentences are. at_once: see `first_logits`.
    """
    beams, start = rules.decoding.num_beams, rules.prompt_length
    running, finished = _begin(rules)
    found: list[list[list[int]]] = [[] for _ in running.texts]
    places = np.arange(len(found))  # of the sentences that are still in the batch
    improvable = np.ones((len(found), 1), dtype=bool)
    state, first = first_logits(runner, batch, rules.prompt[:, -1], at_once)
    # all beams are the same at first: the runner computes them once
    logits = np.repeat(first, beams, axis=0)
    for length in range(start, rules.longest):
        if length > start:
            logits = runner.decode_step(state, running.texts[:, :, length - 1].reshape(-1))
        candidates = _candidates(logits, running, rules, length)
        chosen = _go_on(running, candidates, length)
        _gather_finished(finished, candidates, improvable, rules, length)
        improvable &= _could_improve(running, finished, rules, length + 1)
        settled = ~improvable[:, 0]
        if rules.decoding.early_stopping is True:
            settled |= finished.ended.all(axis=1)
        if candidates.stop.all() or settled.all():
            break
        sentences = np.arange(len(chosen))[:, None]
        old = sentences.repeat(beams, axis=1) if length == start else sentences * beams + chosen
        if np.count_nonzero(settled) >= max(1, len(settled) // 8):
            for place, texts in zip(places[settled], finished.texts[settled], strict=True):
                found[place] = [rules.new_tokens(text) for text in texts[:count]]
            kept = (~settled).nonzero()[0]
            running, finished = running.of(kept), finished.of(kept)
            places, improvable, old = places[kept], improvable[kept], old[kept]
            rules.keep(kept)
        state = runner.reorder(state, old.ravel())
    for place, texts in zip(places, finished.texts, strict=True):
        found[place] = [rules.new_tokens(text) for text in texts[:count]]
    return found


def _begin(rules: Rules) -> tuple[_Running, _Finished]:
    beams, sentences = rules.decoding.num_beams, len(rules.prompt)
    texts = np.full((sentences, beams, rules.longest), rules.decoding.pad, dtype=np.int64)
    texts[:, :, : rules.prompt_length] = rules.prompt[:, None]
    scores = np.zeros((sentences, beams), dtype=np.float32)
    scores[:, 1:] = _OUT  # or all beams would say the same
    nothing = np.full((sentences, beams), _OUT, dtype=np.float32)
    return _Running(texts, scores), _Finished(texts.copy(), nothing, np.zeros(nothing.shape, dtype=bool))


def _candidates(logits: Logits, running: _Running, rules: Rules, length: int) -> _Candidates:
    """Return the K best continuations: so many that N are left even if all others end."""
    sentences, beams = running.scores.shape
    _log_softmax(logits)
    rules.apply(logits, running.texts[:, :, :length].reshape(sentences * beams, length))
    if rules.decoding.renormalize_logits:
        _log_softmax(logits)
    vocabulary = logits.shape[1]
    logits += running.scores.reshape(-1, 1)
    totals = logits.reshape(sentences, beams * vocabulary)
    places = _best(totals, max(2, 1 + len(rules.eos)) * beams)
    came_from, tokens = places // vocabulary, places % vocabulary
    texts = np.empty((sentences, places.shape[1], length + 1), dtype=np.int64)
    texts[:, :, :length] = np.take_along_axis(running.texts[:, :, :length], came_from[:, :, None], axis=1)
    texts[:, :, length] = tokens
    stop = rules.ends(tokens) | (length + 1 >= rules.longest)
    return _Candidates(texts, np.take_along_axis(totals, places, axis=1), came_from, stop)


def _go_on(running: _Running, candidates: _Candidates, length: int) -> Tokens:
    """Make the N best candidates that did not end the running beams; return the beam each came from."""
    scores = candidates.scores + candidates.stop.astype(np.float32) * _OUT
    order = _best(scores, running.scores.shape[1])
    running.texts[:, :, : length + 1] = np.take_along_axis(candidates.texts, order[:, :, None], axis=1)
    running.scores = np.take_along_axis(scores, order, axis=1)
    return np.take_along_axis(candidates.beams, order, axis=1)


def _gather_finished(
    finished: _Finished, candidates: _Candidates, improvable: Bools, rules: Rules, length: int
) -> None:
    """Put candidates that have just ended among the finished ones where they are better."""
    beams = finished.scores.shape[1]
    ended = candidates.stop & (np.arange(candidates.stop.shape[1]) < beams)  # the others are a reserve
    if not ended.any():
        return
    new_tokens = length + 1 - rules.prompt_length
    scores = candidates.scores / np.float32(new_tokens**rules.decoding.length_penalty)
    if rules.decoding.early_stopping is True:
        scores += finished.ended.all(axis=1, keepdims=True).astype(np.float32) * _OUT
    scores += (~improvable).astype(np.float32) * _OUT
    scores += (~ended).astype(np.float32) * _OUT
    merged = np.concatenate([finished.scores, scores], axis=1)
    order = _best(merged, beams)
    texts = np.concatenate([finished.texts[:, :, : length + 1], candidates.texts], axis=1)
    finished.texts[:, :, : length + 1] = np.take_along_axis(texts, order[:, :, None], axis=1)
    finished.scores = np.take_along_axis(merged, order, axis=1)
    finished.ended = np.take_along_axis(np.concatenate([finished.ended, ended], axis=1), order, axis=1)


def _could_improve(running: _Running, finished: _Finished, rules: Rules, length: int) -> Bools:
    """Say for which sentences (bool [B, 1]) the best running beam may still beat the worst finished text.

    "never" asks with the length that would be best for the beam, False with the present one.
    """
    wishes = rules.decoding
    far = wishes.early_stopping == "never" and wishes.length_penalty > 0
    hypothetical = (rules.longest if far else length) - rules.prompt_length
    possible = running.scores[:, :1] / np.float32(hypothetical**wishes.length_penalty)
    worst = np.where(finished.ended, finished.scores.min(axis=1, keepdims=True), _OUT)
    better: Bools = np.any(possible > worst, axis=1, keepdims=True)
    return better


def _best(scores: Logits, count: int) -> Tokens:
    """Return the places of the `count` highest of each row, highest first; int64 [B, count].

    Of equals the first one comes first. Of every group of 64 places only the highest value is looked at
    first: the best values lie in the `count` groups whose maxima are highest. (32 rows of 4 times 8,000
    values take 0.6 ms so and 2.0 ms with argpartition alone, 4 times 58,101 values 3.3 ms and 29 ms.)
    """
    rows, width = scores.shape
    count = min(count, width)
    groups = width // _GROUP
    if groups <= count:
        return _best_of_few(scores, count)
    # group g holds the places g, g + groups, g + 2 * groups, ...: maxima over whole stretches are fast
    maxima = scores[:, : groups * _GROUP].reshape(rows, _GROUP, groups).max(axis=1)
    chosen = np.argpartition(maxima, -count, axis=1)[:, -count:]
    places = (chosen[:, :, None] + np.arange(_GROUP) * groups).reshape(rows, -1)
    rest = np.arange(groups * _GROUP, width)
    places = np.concatenate([places, np.broadcast_to(rest, (rows, len(rest)))], axis=1)
    places.sort(axis=1)
    found = _best_of_few(np.take_along_axis(scores, places, axis=1), count)
    return np.take_along_axis(places, found, axis=1)


def _best_of_few(scores: Logits, count: int) -> Tokens:
    places = np.argpartition(scores, -count, axis=1)[:, -count:]
    places.sort(axis=1)
    order = np.argsort(-np.take_along_axis(scores, places, axis=1), axis=1, kind="stable")
    return np.take_along_axis(places, order, axis=1)


def _log_softmax(logits: Logits) -> None:
    """Turn float32 logits [B * N, V] into log-probabilities, in place, a few rows at a time.

    Fresh memory of the size of all logits in every step would cost more than the sums.
    """
    step = max(1, _AT_ONCE // logits.shape[1])
    for top in range(0, len(logits), step):
        part = logits[top : top + step]
        part -= part.max(axis=1, keepdims=True)
        part -= np.log(np.exp(part).sum(axis=1, keepdims=True))

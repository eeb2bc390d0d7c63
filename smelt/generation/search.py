"""The generation loop of all runners, equivalent to Hugging Face `generate`: greedy, sampling, beam search.

Greedy search and sampling pass each row's token to the next step; beam search does so for several texts per
row and keeps the best. All three apply the rules of the model's generation config
(`smelt.generation.logits_processors`).

Beam search follows transformers step by step (generation/utils.py, `_beam_search`, 5.23): float32 throughout,
sums and penalties in the same order, so that the same beams win. A score of -1e9 excludes a beam: copies of
the first one at the beginning, and texts that ended.

A graph with the generation loop is one call from `input_ids` to `sequences`. Its other inputs are a
`GenerationConfig` in numbers: a table with a row for each set of rules that depend on the length of a text
only, the row that applies in each step, and a few scalars. What such a graph does not support (sampling, bad
words of several tokens) runs in the Python loop with the step graphs, and so does greedy search after long
prompts, which is faster there.

Shapes: B = sentences, N = beams, K = candidates per step, T = tokens so far, V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from smelt.generation.backend import BEAM_SEARCH_GRAPH, GREEDY_GRAPH, Batch, Logits, Tokens, TopLogits
from smelt.generation.config import GenerationConfig, GenerationSettings, resolve_generation
from smelt.generation.generating_runners import prefill
from smelt.generation.logits_processors import BoolArray, LogitsProcessors, filter_logits, sample_tokens
from smelt.generation.runner import Runner
from smelt.generation.token_choice import TokenChoice, reducible_bans

_EXCLUDED_SCORE = np.float32(-1e9)
_GROUP = 64
_AT_ONCE = 64 * 1024


@dataclass
class _RunningBeams:
    """Active beams. texts: int64 [B, N, longest]; scores: float32 [B, N], sums of log-probabilities."""

    texts: Tokens
    scores: Logits

    def select(self, sentences: Tokens) -> _RunningBeams:
        """Return the beams of some sentences."""
        return _RunningBeams(self.texts[sentences], self.scores[sentences])


@dataclass
class _FinishedBeams:
    """The best finished texts so far, best first. ended: whether an entry holds a text that has ended.

    texts: int64 [B, N, longest]; scores: float32 [B, N], with the length penalty; ended: bool [B, N].
    """

    texts: Tokens
    scores: Logits
    ended: BoolArray

    def select(self, sentences: Tokens) -> _FinishedBeams:
        """Return the beams of some sentences."""
        return _FinishedBeams(self.texts[sentences], self.scores[sentences], self.ended[sentences])


@dataclass
class _Candidates:
    """K continuations per sentence, best first.

    texts: int64 [B, K, T + 1]; scores: float32 [B, K]; beams: int64 [B, K], the beam that each continues;
    stop: bool [B, K].
    """

    texts: Tokens
    scores: Logits
    beams: Tokens
    is_eos: BoolArray


def beam_search(
    runner: Runner, batch: Batch, rules: LogitsProcessors, single_prefill: bool = False
) -> list[list[int]]:
    """Return the new tokens of the best text of each row, including the end-of-sequence token."""
    return [texts[0] for texts in beam_search_n_best(runner, batch, rules, 1, single_prefill)]


def beam_search_n_best(
    runner: Runner, batch: Batch, rules: LogitsProcessors, count: int, single_prefill: bool = False
) -> list[list[list[int]]]:
    """Return the new tokens of the `count` best texts of each row, at most as many as beams, best first.

    A sentence is finished when no beam can improve its finished texts: its beams are removed from the batch
    once an eighth of all sentences are finished. single_prefill: see `prefill`.
    """
    beams, start = rules.decoding.num_beams, rules.prompt_length
    running, finished = _init_beams(rules)
    results: list[list[list[int]]] = [[] for _ in running.texts]
    batch_rows = np.arange(len(results))  # indices of the sentences that are still in the batch
    improvable = np.ones((len(results), 1), dtype=bool)
    state, first = prefill(runner, batch, rules.prompt, single_prefill)
    # all beams are equal at first: the runner computes them once
    logits = np.repeat(first, beams, axis=0)
    for length in range(start, rules.longest):
        candidates = None
        if length > start:
            tokens = running.texts[:, :, length - 1].reshape(-1)
            bans = reducible_bans(runner, rules, length)
            if bans is None or rules.decoding.renormalize_logits:
                logits = runner.decode_step(state, tokens)
            else:
                top = runner.decode_top(state, tokens, _num_candidates(rules) + len(bans))
                candidates = _candidates_of_top(top, running, rules, bans, length)
        if candidates is None:
            candidates = _top_candidates(logits, running, rules, length)
        beam_indices = _advance_beams(running, candidates, length)
        _update_finished(finished, candidates, improvable, rules, length)
        improvable &= _could_improve(running, finished, rules, length + 1)
        is_settled = ~improvable[:, 0]
        if rules.decoding.early_stopping is True:
            is_settled |= finished.ended.all(axis=1)
        if candidates.is_eos.all() or is_settled.all():
            break
        sentences = np.arange(len(beam_indices))[:, None]
        old = sentences.repeat(beams, axis=1) if length == start else sentences * beams + beam_indices
        if np.count_nonzero(is_settled) >= max(1, len(is_settled) // 8):
            for row_index, texts in zip(batch_rows[is_settled], finished.texts[is_settled], strict=True):
                results[row_index] = [rules.new_tokens(text) for text in texts[:count]]
            kept_rows = (~is_settled).nonzero()[0]
            running, finished = running.select(kept_rows), finished.select(kept_rows)
            batch_rows, improvable, old = batch_rows[kept_rows], improvable[kept_rows], old[kept_rows]
            rules.select_rows(kept_rows)
        state = runner.reorder_cache(state, old.ravel())
    for row_index, texts in zip(batch_rows, finished.texts, strict=True):
        results[row_index] = [rules.new_tokens(text) for text in texts[:count]]
    return results


def _init_beams(rules: LogitsProcessors) -> tuple[_RunningBeams, _FinishedBeams]:
    beams, sentences = rules.decoding.num_beams, len(rules.prompt)
    texts = np.full((sentences, beams, rules.longest), rules.decoding.pad, dtype=np.int64)
    texts[:, :, : rules.prompt_length] = rules.prompt[:, None]
    scores = np.zeros((sentences, beams), dtype=np.float32)
    scores[:, 1:] = _EXCLUDED_SCORE  # or all beams would be equal
    excluded = np.full((sentences, beams), _EXCLUDED_SCORE, dtype=np.float32)
    return _RunningBeams(texts, scores), _FinishedBeams(
        texts.copy(), excluded, np.zeros(excluded.shape, dtype=bool)
    )


def _num_candidates(rules: LogitsProcessors) -> int:
    """Return the number of continuations of a sentence: enough that all beams remain if all others end."""
    return max(2, 1 + len(rules.eos)) * rules.decoding.num_beams


def _candidates_of_top(
    top: TopLogits, running: _RunningBeams, rules: LogitsProcessors, bans: tuple[int, ...], length: int
) -> _Candidates:
    """Return the K best continuations, as `_top_candidates` does, of the highest logits of each row."""
    sentences, beams = running.scores.shape
    scores = top.log_probs + running.scores.reshape(-1, 1)
    scores[np.isin(top.tokens, bans)] = -np.inf
    width = scores.shape[1]
    totals = scores.reshape(sentences, beams * width)
    all_tokens = top.tokens.reshape(sentences, beams * width)
    indices = _top_k(totals, _num_candidates(rules))
    tokens = np.take_along_axis(all_tokens, indices, axis=1)
    return _make_candidates(totals, indices, indices // width, tokens, running, rules, length)


def _top_candidates(
    logits: Logits, running: _RunningBeams, rules: LogitsProcessors, length: int
) -> _Candidates:
    """Return the K best continuations: enough that N remain even if all others end."""
    sentences, beams = running.scores.shape
    _log_softmax(logits)
    rules.apply(logits, running.texts[:, :, :length].reshape(sentences * beams, length))
    if rules.decoding.renormalize_logits:
        _log_softmax(logits)
    vocabulary = logits.shape[1]
    logits += running.scores.reshape(-1, 1)
    totals = logits.reshape(sentences, beams * vocabulary)
    indices = _top_k(totals, _num_candidates(rules))
    came_from, tokens = indices // vocabulary, indices % vocabulary
    return _make_candidates(totals, indices, came_from, tokens, running, rules, length)


def _make_candidates(
    totals: Logits,
    indices: Tokens,
    came_from: Tokens,
    tokens: Tokens,
    running: _RunningBeams,
    rules: LogitsProcessors,
    length: int,
) -> _Candidates:
    """Return the continuations of the beams `came_from` by `tokens`, both int64 [B, K].

    Their scores are those of `totals` [B, n] at `indices` [B, K].
    """
    sentences = len(tokens)
    texts = np.empty((sentences, indices.shape[1], length + 1), dtype=np.int64)
    texts[:, :, :length] = np.take_along_axis(running.texts[:, :, :length], came_from[:, :, None], axis=1)
    texts[:, :, length] = tokens
    stop = rules.is_eos(tokens) | (length + 1 >= rules.longest)
    return _Candidates(texts, np.take_along_axis(totals, indices, axis=1), came_from, stop)


def _advance_beams(running: _RunningBeams, candidates: _Candidates, length: int) -> Tokens:
    """Make the N best unfinished candidates the running beams; return the beam that each continues."""
    scores = candidates.scores + candidates.is_eos.astype(np.float32) * _EXCLUDED_SCORE
    order = _top_k(scores, running.scores.shape[1])
    running.texts[:, :, : length + 1] = np.take_along_axis(candidates.texts, order[:, :, None], axis=1)
    running.scores = np.take_along_axis(scores, order, axis=1)
    return np.take_along_axis(candidates.beams, order, axis=1)


def _update_finished(
    finished: _FinishedBeams,
    candidates: _Candidates,
    improvable: BoolArray,
    rules: LogitsProcessors,
    length: int,
) -> None:
    """Add candidates that have just ended to the finished ones where they are better."""
    beams = finished.scores.shape[1]
    just_ended = candidates.is_eos & (
        np.arange(candidates.is_eos.shape[1]) < beams
    )  # the others are a reserve
    if not just_ended.any():
        return
    new_tokens = length + 1 - rules.prompt_length
    scores = candidates.scores / np.float32(new_tokens**rules.decoding.length_penalty)
    if rules.decoding.early_stopping is True:
        scores += finished.ended.all(axis=1, keepdims=True).astype(np.float32) * _EXCLUDED_SCORE
    scores += (~improvable).astype(np.float32) * _EXCLUDED_SCORE
    scores += (~just_ended).astype(np.float32) * _EXCLUDED_SCORE
    merged = np.concatenate([finished.scores, scores], axis=1)
    order = _top_k(merged, beams)
    texts = np.concatenate([finished.texts[:, :, : length + 1], candidates.texts], axis=1)
    finished.texts[:, :, : length + 1] = np.take_along_axis(texts, order[:, :, None], axis=1)
    finished.scores = np.take_along_axis(merged, order, axis=1)
    finished.ended = np.take_along_axis(np.concatenate([finished.ended, just_ended], axis=1), order, axis=1)


def _could_improve(
    running: _RunningBeams, finished: _FinishedBeams, rules: LogitsProcessors, length: int
) -> BoolArray:
    """Return for which sentences (bool [B, 1]) the best running beam may still beat the worst finished text.

    "never" uses the length that is best for the beam, False the present one.
    """
    decoding = rules.decoding
    uses_longest = decoding.early_stopping == "never" and decoding.length_penalty > 0
    hypothetical = (rules.longest if uses_longest else length) - rules.prompt_length
    possible = running.scores[:, :1] / np.float32(hypothetical**decoding.length_penalty)
    worst = np.where(finished.ended, finished.scores.min(axis=1, keepdims=True), _EXCLUDED_SCORE)
    better: BoolArray = np.any(possible > worst, axis=1, keepdims=True)
    return better


def _top_k(scores: Logits, count: int) -> Tokens:
    """Return the indices of the `count` highest values of each row, highest first; int64 [B, count].

    Ties are in index order. Of every group of 64 values only the maximum is compared
    first: the best values are in the `count` groups whose maxima are highest. (32 rows of 4 times 8,000
    values take 0.6 ms so and 2.0 ms with argpartition alone, 4 times 58,101 values 3.3 ms and 29 ms.)
    """
    num_rows, width = scores.shape
    count = min(count, width)
    groups = width // _GROUP
    if groups <= count:
        return _top_k_small(scores, count)
    # group g holds the indices g, g + groups, g + 2 * groups, ...: maxima over contiguous slices are fast
    maxima = scores[:, : groups * _GROUP].reshape(num_rows, _GROUP, groups).max(axis=1)
    group_indices = np.argpartition(maxima, -count, axis=1)[:, -count:]
    indices = (group_indices[:, :, None] + np.arange(_GROUP) * groups).reshape(num_rows, -1)
    remainder = np.arange(groups * _GROUP, width)
    indices = np.concatenate([indices, np.broadcast_to(remainder, (num_rows, len(remainder)))], axis=1)
    indices.sort(axis=1)
    top_positions = _top_k_small(np.take_along_axis(scores, indices, axis=1), count)
    return np.take_along_axis(indices, top_positions, axis=1)


def _top_k_small(scores: Logits, count: int) -> Tokens:
    indices = np.argpartition(scores, -count, axis=1)[:, -count:]
    indices.sort(axis=1)
    order = np.argsort(-np.take_along_axis(scores, indices, axis=1), axis=1, kind="stable")
    return np.take_along_axis(indices, order, axis=1)


def _log_softmax(logits: Logits) -> None:
    """Turn float32 logits [B * N, V] into log-probabilities, in place, a few rows at a time.

    New memory of the size of all logits in every step would cost more than the sums.
    """
    step = max(1, _AT_ONCE // logits.shape[1])
    for start in range(0, len(logits), step):
        chunk = logits[start : start + step]
        chunk -= chunk.max(axis=1, keepdims=True)
        chunk -= np.log(np.exp(chunk).sum(axis=1, keepdims=True))


def generate(runner: Runner, batch: Batch, generation: GenerationSettings, part: int = 0) -> list[list[int]]:
    """Continue or rewrite the texts of `batch`; return each row's new tokens, including the final one.

    Args:
        runner: a decoder-only model's `encode` takes all of a prompt but its last token, and that token is
            the first input; otherwise it is the decoder's start token.
        batch: padded on the left for a decoder-only model, on the right for an encoder-decoder.
        generation: the settings.
        part: the number of the batch; each draws from a stream of its own (seed, part).

    Raises:
        InputError: the generation config has a setting that this loop does not support.
    """
    return generate_resolved(runner, batch, resolve_generation(generation, runner), part)


def generate_n_best(
    runner: Runner, batch: Batch, decoding: GenerationConfig, count: int
) -> list[list[list[int]]]:
    """Return the new tokens of the `count` best texts of a beam search for each row, best first."""
    return beam_search_n_best(runner, batch, _make_processors(batch, decoding), count)


def forced_logits(
    runner: Runner, batch: Batch, decoding: GenerationConfig, tokens: Tokens
) -> Iterator[Logits]:
    """Yield the logits of each token of given outputs (teacher forcing), float32 [B, V], before any rule.

    Args:
        runner: of a generating model.
        batch: the prompts or source texts.
        decoding: has the decoder's first token.
        tokens: int64 [B, T], the outputs, padded at the end.
    """
    state, logits = prefill(runner, batch, _make_processors(batch, decoding).prompt, False)
    yield logits
    for position in range(tokens.shape[1] - 1):
        yield runner.decode_step(state, tokens[:, position])


def _make_processors(batch: Batch, decoding: GenerationConfig) -> LogitsProcessors:
    if decoding.start is None:
        return LogitsProcessors(decoding, batch.input_ids, batch.attention_mask)
    prompt = np.tile(np.array(decoding.decoder_prompt, dtype=np.int64), (batch.input_ids.shape[0], 1))
    return LogitsProcessors(decoding, prompt, None)


def generate_resolved(
    runner: Runner,
    batch: Batch,
    decoding: GenerationConfig,
    batch_index: int = 0,
    single_prefill: bool = False,
) -> list[list[int]]:
    """Generate with resolved settings, see `generate`; `single_prefill`: see `prefill`."""
    rules = _make_processors(batch, decoding)
    if decoding.num_beams > 1:
        return beam_search(runner, batch, rules, single_prefill)
    if not decoding.do_sample:
        greedy = TokenChoice(lambda scores: scores.argmax(axis=-1), 1)
        return _decode_loop(runner, batch, rules, greedy, True, single_prefill)
    random = np.random.default_rng([decoding.seed, batch_index])

    def sample(scores: Logits) -> Tokens:
        filter_logits(scores, decoding.temperature, decoding.top_k, decoding.top_p)
        return sample_tokens(scores, random)

    # each row has a number of its own in every draw, so all rows are kept until the end
    return _decode_loop(runner, batch, rules, TokenChoice(sample, decoding.top_k), False, single_prefill)


def _decode_loop(
    runner: Runner,
    batch: Batch,
    rules: LogitsProcessors,
    choice: TokenChoice,
    drop_finished: bool,
    single_prefill: bool,
) -> list[list[int]]:
    """Run each row with the token that `choice` selects from its scores until all rows have ended.

    drop_finished: rows that have ended are removed from the batch, once they are a quarter of it: removing
    them from the caches costs about as much as one of them does in a step. single_prefill: see `prefill`.
    """
    state, scores = prefill(runner, batch, rules.prompt, single_prefill)
    num_rows, length = rules.prompt.shape
    results: list[list[int]] = [[] for _ in range(num_rows)]
    batch_rows = np.arange(num_rows)  # indices of the rows that are still in the batch
    texts = np.full((num_rows, rules.longest), rules.decoding.pad, dtype=np.int64)
    texts[:, :length] = rules.prompt
    tokens = rules.prompt[:, -1]
    unfinished = np.ones(num_rows, dtype=bool)
    num_unfinished = num_rows
    while length < rules.longest:
        if drop_finished and num_unfinished <= num_rows - max(1, num_rows // 4):
            for row_index, text in zip(batch_rows[~unfinished], texts[~unfinished, :length], strict=True):
                results[row_index] = rules.new_tokens(text)
            kept_rows = unfinished.nonzero()[0]
            state = runner.reorder_cache(state, kept_rows)
            rules.select_rows(kept_rows)
            batch_rows, texts, tokens, unfinished, num_rows = (
                batch_rows[kept_rows],
                texts[kept_rows],
                tokens[kept_rows],
                unfinished[kept_rows],
                num_unfinished,
            )
        is_first = length == rules.prompt.shape[1]
        bans = None if is_first or not choice.highest else reducible_bans(runner, rules, length)
        if bans is not None:
            tokens = choice.next_tokens(runner, state, tokens, bans)
        else:
            scores = scores if is_first else runner.decode_step(state, tokens)
            rules.apply(scores, texts[:, :length])
            tokens = choice.choose(scores)
        if num_unfinished < num_rows:
            tokens = np.where(unfinished, tokens, rules.decoding.pad)
        texts[:, length] = tokens
        length += 1
        unfinished &= ~rules.is_eos(tokens)
        num_unfinished = np.count_nonzero(unfinished)
        if not num_unfinished:
            break
    for row_index, text in zip(batch_rows, texts[:, :length], strict=True):
        results[row_index] = rules.new_tokens(text)
    return results


_MAX_CACHED_FEEDS = 64
# Tokens of a prompt from which steps that append to their caches are faster than a loop whose caches grow
LONG_PROMPT = 256


def generate_in_graph(
    runner: Runner, batch: Batch, decoding: GenerationConfig, batch_index: int = 0
) -> list[list[int]]:
    """Return each row's new tokens, including the final one, by a graph with the generation loop if it can.

    See `smelt.generation.search.generate_resolved`, which handles everything else.
    """
    graph = generation_graph_name(decoding)
    if (
        graph_supports(decoding)
        and graph in runner.backend.generation_graphs
        and not _is_long(runner, batch, decoding)
    ):
        with runner.backend.acquire_graph(graph) as graph_is_open:
            if graph_is_open:
                return run_generation_graph(runner, batch, decoding)
    return generate_resolved(runner, batch, decoding, batch_index, graph_supports(decoding))


def _is_long(runner: Runner, batch: Batch, decoding: GenerationConfig) -> bool:
    """Return whether steps are faster than the graph; beams are reordered, which copies caches either way."""
    length = batch.input_ids.shape[1]
    greedy = decoding.start is None and decoding.num_beams == 1
    return greedy and length >= LONG_PROMPT and runner.backend.prefers_stepwise


def generation_graph_name(decoding: GenerationConfig) -> str:
    """Return the name of the graph with the search of `decoding`."""
    return BEAM_SEARCH_GRAPH if decoding.num_beams > 1 else GREEDY_GRAPH


def run_generation_graph(runner: Runner, batch: Batch, decoding: GenerationConfig) -> list[list[int]]:
    """Generate with the graph whatever else is open; `graph_supports(decoding)` must be true."""
    prompt = len(decoding.decoder_prompt) or batch.input_ids.shape[1]
    sequences_out = runner.generate_sequences(
        generation_graph_name(decoding), batch, _cached_feeds(runner, decoding, prompt)
    )
    return [trim_at_eos(row, prompt, decoding.eos) for row in sequences_out]


def _cached_feeds(runner: Runner, decoding: GenerationConfig, prompt_length: int) -> dict[str, NDArray[Any]]:
    """Return `generation_feeds`, cached for each runner's settings and length of prompt."""
    key = id(decoding), prompt_length
    entry = runner.generation_cache.get(key)
    if entry is None or entry[0] is not decoding:  # an entry of another one
        vocabulary = int(runner.config.get("decoder_vocab_size") or runner.config["vocab_size"])
        entry = decoding, generation_feeds(decoding, prompt_length, vocabulary)
        if len(runner.generation_cache) >= _MAX_CACHED_FEEDS:
            runner.generation_cache.clear()
        runner.generation_cache[key] = entry
    feeds: dict[str, NDArray[Any]] = entry[1]
    return feeds


def graph_supports(decoding: GenerationConfig) -> bool:
    """Return whether the graphs support the search of `decoding`."""
    sequences = any(len(banned_ids) > 1 for banned_ids in decoding.bad_words_ids)
    return not (decoding.do_sample or sequences or decoding.remove_invalid_values)


def generation_feeds(
    decoding: GenerationConfig, prompt_length: int, vocabulary: int
) -> dict[str, NDArray[Any]]:
    """Return the search inputs by name; those of beams only where there are several.

    Args:
        decoding: `graph_supports` must be true for it.
        prompt_length: of the batch, with padding; of an encoder-decoder that of `decoder_prompt`.
        vocabulary: V.
    """
    max_length = decoding.max_total_length(prompt_length)
    steps, biases, forced_tokens = _rule_tables(decoding, prompt_length, max_length, vocabulary)
    by_words = decoding.repetition_penalty != 1.0 or decoding.no_repeat_ngram_size > 0
    feeds: dict[str, NDArray[Any]] = {
        "max_new_tokens": np.array(max_length - prompt_length),
        "eos_token_ids": np.array(decoding.eos or [-1]),
        "pad_token_id": np.array(decoding.pad),
        "step_rules": steps,
        "rule_biases": biases,
        "forced_tokens": forced_tokens,
        "text_rules": np.array(by_words),
        "repetition_penalty": np.array(decoding.repetition_penalty, dtype=np.float32),
        "no_repeat_ngram_size": np.array(decoding.no_repeat_ngram_size),
    }
    if decoding.start is not None:
        prompt = decoding.decoder_prompt
        feeds["decoder_start_token_id"] = np.array(prompt if len(prompt) > 1 else decoding.start)
    if decoding.num_beams > 1:
        never_stops_early = decoding.early_stopping == "never" and decoding.length_penalty > 0
        feeds |= {
            "num_beams": np.array(decoding.num_beams),
            "length_penalty": np.array(decoding.length_penalty, dtype=np.float64),
            "early_stopping": np.array(decoding.early_stopping is True),
            "never_stop_early": np.array(never_stops_early),
            "renormalize_logits": np.array(decoding.renormalize_logits),
        }
    return feeds


def _rule_tables(
    decoding: GenerationConfig, prompt_length: int, longest: int, vocabulary: int
) -> tuple[NDArray[np.int64], NDArray[np.float32], NDArray[np.int64]]:
    """Return the rule of each step, its addends to the scores, and the token that each forces or -1.

    Two rows of scores, zeros and ones, detect the rules' effect: where both give the same, it is replaced.
    """
    rules = LogitsProcessors(decoding, np.zeros((1, prompt_length), dtype=np.int64), None)
    numbers: dict[tuple[bool, ...], int] = {}
    addends: list[NDArray[np.float32]] = []
    forced_tokens: list[int] = []
    steps: list[int] = []
    for length in range(prompt_length, max(longest, prompt_length + 1)):
        key = rules.active_at_length(length)
        if key not in numbers:
            numbers[key] = len(addends)
            probe = np.zeros((2, vocabulary), dtype=np.float32)
            probe[1] = 1.0
            rules.apply_length_processors(probe, length)
            forced_indices = np.flatnonzero(np.isfinite(probe[0]) & (probe[0] == probe[1]))
            if len(forced_indices) and decoding.num_beams > 1 and decoding.renormalize_logits:
                # the graph adds a forced step's row unchanged: each of k tokens has the probability 1 / k
                probe[0] -= np.log(np.exp(probe[0]).sum())
            addends.append(probe[0])
            # of several forced tokens all score the same, and the first of the best wins
            forced_tokens.append(int(forced_indices[0]) if len(forced_indices) else -1)
        steps.append(numbers[key])
    return np.array(steps), np.stack(addends), np.array(forced_tokens)


def trim_at_eos(row: NDArray[np.int64], prompt_length: int, eos: list[int]) -> list[int]:
    """Return the new tokens of int64 [T], up to and including the one that ends the text."""
    new: list[int] = row[prompt_length:].tolist()
    for index, token in enumerate(new):
        if token in eos:
            return new[: index + 1]
    return new

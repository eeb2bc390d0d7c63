"""Generation by a graph with the generation loop: one call from `input_ids` to `sequences`.

The graph's other inputs are a `GenerationConfig` in numbers: a table with a row for each set of rules
that depend on the length of a text only, the row that applies in each step, and a few scalars. What such a
graph does not support (sampling, bad words of several tokens) runs in the Python loop with the step graphs,
and so does greedy search after long prompts, which is faster there.

Shapes: B = batch, L = tokens of the longest row, V = vocabulary, K = different rules.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from smelt.generation.config import GenerationConfig
from smelt.generation.logits_processors import LogitsProcessors
from smelt.generation.search import generate_resolved
from smelt.runtimes.backend import BEAM_SEARCH_GRAPH, GREEDY_GRAPH, Batch
from smelt.runtimes.runner import Runner

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
        with runner.backend.acquire_graph(graph) as promised:
            if promised:
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
    prompt = 1 if decoding.start is not None else batch.input_ids.shape[1]
    found = runner.generate_sequences(
        generation_graph_name(decoding), batch, _cached_feeds(runner, decoding, prompt)
    )
    return [trim_at_eos(row, prompt, decoding.eos) for row in found]


def _cached_feeds(runner: Runner, decoding: GenerationConfig, prompt_length: int) -> dict[str, NDArray[Any]]:
    """Return `generation_feeds`, cached for each runner's settings and length of prompt."""
    key = id(decoding), prompt_length
    found = runner.generation_cache.get(key)
    if found is None or found[0] is not decoding:  # an entry of another one
        vocabulary = int(runner.config.get("decoder_vocab_size") or runner.config["vocab_size"])
        found = decoding, generation_feeds(decoding, prompt_length, vocabulary)
        if len(runner.generation_cache) >= _MAX_CACHED_FEEDS:
            runner.generation_cache.clear()
        runner.generation_cache[key] = found
    feeds: dict[str, NDArray[Any]] = found[1]
    return feeds


def graph_supports(decoding: GenerationConfig) -> bool:
    """Return whether the graphs support the search of `decoding`."""
    sequences = any(len(word) > 1 for word in decoding.bad_words_ids)
    return not (decoding.do_sample or sequences or decoding.remove_invalid_values)


def generation_feeds(
    decoding: GenerationConfig, prompt_length: int, vocabulary: int
) -> dict[str, NDArray[Any]]:
    """Return the search inputs by name; those of beams only where there are several.

    Args:
        decoding: `graph_supports` must be true for it.
        prompt_length: of the batch, with padding; 1 for an encoder-decoder.
        vocabulary: V.
    """
    longest = decoding.max_total_length(prompt_length)
    steps, biases, forced = _rule_tables(decoding, prompt_length, longest, vocabulary)
    by_words = decoding.repetition_penalty != 1.0 or decoding.no_repeat_ngram_size > 0
    feeds: dict[str, NDArray[Any]] = {
        "max_new_tokens": np.array(longest - prompt_length),
        "eos_token_ids": np.array(decoding.eos or [-1]),
        "pad_token_id": np.array(decoding.pad),
        "step_rules": steps,
        "rule_biases": biases,
        "forced_tokens": forced,
        "text_rules": np.array(by_words),
        "repetition_penalty": np.array(decoding.repetition_penalty, dtype=np.float32),
        "no_repeat_ngram_size": np.array(decoding.no_repeat_ngram_size),
    }
    if decoding.start is not None:
        feeds["decoder_start_token_id"] = np.array(decoding.start)
    if decoding.num_beams > 1:
        never = decoding.early_stopping == "never" and decoding.length_penalty > 0
        feeds |= {
            "num_beams": np.array(decoding.num_beams),
            "length_penalty": np.array(decoding.length_penalty, dtype=np.float64),
            "early_stopping": np.array(decoding.early_stopping is True),
            "never_stop_early": np.array(never),
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
    rows: list[NDArray[np.float32]] = []
    forced: list[int] = []
    steps: list[int] = []
    for length in range(prompt_length, max(longest, prompt_length + 1)):
        key = rules.active_at_length(length)
        if key not in numbers:
            numbers[key] = len(rows)
            probe = np.zeros((2, vocabulary), dtype=np.float32)
            probe[1] = 1.0
            rules.apply_length_processors(probe, length)
            replaced = np.flatnonzero(np.isfinite(probe[0]) & (probe[0] == probe[1]))
            if len(replaced) and decoding.num_beams > 1 and decoding.renormalize_logits:
                # the graph adds a forced step's row unchanged: each of k tokens has the probability 1 / k
                probe[0] -= np.log(np.exp(probe[0]).sum())
            rows.append(probe[0])
            # of several forced tokens all score the same, and the first of the best wins
            forced.append(int(replaced[0]) if len(replaced) else -1)
        steps.append(numbers[key])
    return np.array(steps), np.stack(rows), np.array(forced)


def trim_at_eos(row: NDArray[np.int64], prompt_length: int, eos: list[int]) -> list[int]:
    """Return the new tokens of int64 [T], up to and including the one that ends the text."""
    new: list[int] = row[prompt_length:].tolist()
    for place, token in enumerate(new):
        if token in eos:
            return new[: place + 1]
    return new

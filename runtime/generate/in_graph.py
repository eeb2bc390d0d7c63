"""Generation by a graph that holds the whole loop: one call from `input_ids` to `sequences`.

What the graph takes besides the texts is a `Decoding` in numbers: a table with a row for each set of rules
that depend on the length of a text alone, the row that holds in each step, and a few scalars. What such a
graph does not do (sampling, bad words of several tokens) the loop in Python does with the graphs of a step,
and greedy search behind long prompts, which it does faster.

Shapes: B = batch, L = tokens of the longest row, V = vocabulary, K = different rules.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from smelt.runtime.backends.backend import BEAMS, GREEDY
from smelt.runtime.batch import Batch
from smelt.runtime.generate.decoding import Decoding
from smelt.runtime.generate.loop import generate_with
from smelt.runtime.generate.rules import Rules
from smelt.runtime.runner import Runner

_KEPT = 64
# Tokens of a prompt from which steps that append to their caches are faster than a loop whose caches grow
LONG_PROMPT = 256


def generate_in_graph(runner: Runner, batch: Batch, decoding: Decoding, part: int = 0) -> list[list[int]]:
    """Return each row's new tokens, the one that ends it too: by a graph that holds the loop where one can.

    See `smelt.runtime.generate.loop.generate_with`, which does what no graph does.
    """
    graph = graph_of(decoding)
    if does(decoding) and graph in runner.backend.whole and not _is_long(runner, batch, decoding):
        with runner.backend.using(graph) as promised:
            if promised:
                return run_graph(runner, batch, decoding)
    return generate_with(runner, batch, decoding, part, does(decoding))


def _is_long(runner: Runner, batch: Batch, decoding: Decoding) -> bool:
    """Say whether steps are faster than the graph; beams change places, which copies caches either way."""
    length = batch.input_ids.shape[1]
    greedy = decoding.start is None and decoding.num_beams == 1
    return greedy and length >= LONG_PROMPT and runner.backend.long_in_steps


def graph_of(decoding: Decoding) -> str:
    """Return the name of the graph that holds the search of `decoding`."""
    return BEAMS if decoding.num_beams > 1 else GREEDY


def run_graph(runner: Runner, batch: Batch, decoding: Decoding) -> list[list[int]]:
    """As `generate_in_graph`, by the graph whatever else is open; `decoding` is one that `does` takes."""
    prompt = 1 if decoding.start is not None else batch.input_ids.shape[1]
    found = runner.sequences(graph_of(decoding), batch, _feeds(runner, decoding, prompt))
    return [cut_at_end(row, prompt, decoding.eos) for row in found]


def _feeds(runner: Runner, decoding: Decoding, prompt_length: int) -> dict[str, NDArray[Any]]:
    """As `feeds_of`, found once for each runner's settings and length of prompt."""
    key = id(decoding), prompt_length
    found = runner.searches.get(key)
    if found is None or found[0] is not decoding:  # of another one that lay there
        vocabulary = int(runner.config.get("decoder_vocab_size") or runner.config["vocab_size"])
        found = decoding, feeds_of(decoding, prompt_length, vocabulary)
        if len(runner.searches) >= _KEPT:
            runner.searches.clear()
        runner.searches[key] = found
    feeds: dict[str, NDArray[Any]] = found[1]
    return feeds


def does(decoding: Decoding) -> bool:
    """Say whether the graphs can search as `decoding` wants it."""
    sequences = any(len(word) > 1 for word in decoding.bad_words_ids)
    return not (decoding.do_sample or sequences or decoding.remove_invalid_values)


def feeds_of(decoding: Decoding, prompt_length: int, vocabulary: int) -> dict[str, NDArray[Any]]:
    """Return the inputs that say how to search, by name; those of beams only where there are several.

    Args:
        decoding: one that `does` takes.
        prompt_length: of the batch, padding counted; 1 for an encoder-decoder.
        vocabulary: V.
    """
    longest = decoding.longest(prompt_length)
    steps, biases, forced = _table(decoding, prompt_length, longest, vocabulary)
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


def _table(
    decoding: Decoding, prompt_length: int, longest: int, vocabulary: int
) -> tuple[NDArray[np.int64], NDArray[np.float32], NDArray[np.int64]]:
    """Return the rule of each step, what each adds to the scores, and the token that each forces or -1.

    Two rows of scores, zeros and ones, show what the rules do: where both come out alike, it is replaced.
    """
    rules = Rules(decoding, np.zeros((1, prompt_length), dtype=np.int64), None)
    numbers: dict[tuple[bool, ...], int] = {}
    rows: list[NDArray[np.float32]] = []
    forced: list[int] = []
    steps: list[int] = []
    for length in range(prompt_length, max(longest, prompt_length + 1)):
        key = rules.places_at(length)
        if key not in numbers:
            numbers[key] = len(rows)
            probe = np.zeros((2, vocabulary), dtype=np.float32)
            probe[1] = 1.0
            rules.apply_places(probe, length)
            replaced = np.flatnonzero(np.isfinite(probe[0]) & (probe[0] == probe[1]))
            if len(replaced) and decoding.num_beams > 1 and decoding.renormalize_logits:
                # the graph adds a forced step's row as it is: of k tokens each has the probability 1 / k
                probe[0] -= np.log(np.exp(probe[0]).sum())
            rows.append(probe[0])
            # of several forced tokens all score the same, and the first of the best wins
            forced.append(int(replaced[0]) if len(replaced) else -1)
        steps.append(numbers[key])
    return np.array(steps), np.stack(rows), np.array(forced)


def cut_at_end(row: NDArray[np.int64], prompt_length: int, eos: list[int]) -> list[int]:
    """Return the new tokens of int64 [T], up to the one that ends the text."""
    new: list[int] = row[prompt_length:].tolist()
    for place, token in enumerate(new):
        if token in eos:
            return new[: place + 1]
    return new

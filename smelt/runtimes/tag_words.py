"""Tags of words and entities, for every runner of a token classifier.

Shapes: B = batch, L = tokens, W = words of a text, C = tags.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import softmax

from smelt.core.errors import InputError
from smelt.core.messages import CONTROL_ESCAPES
from smelt.core.process_group import map_batches, merge_shares, process_count
from smelt.data.labels import class_names
from smelt.data.splits import Example
from smelt.data.tags import OUTSIDE, TagScheme, example_words, read_spans, tag_scheme, word_lists
from smelt.generation.backend import check_finite_outputs
from smelt.generation.prompt_batches import OnTruncate
from smelt.generation.runner import Runner
from smelt.models.split_words import encode_words
from smelt.models.tokenizer import EncodedTexts
from smelt.runtimes.predict_texts import length_sorted_batches
from smelt.stage import Progress, no_progress


class Entity(NamedTuple):
    """An entity of a text, as transformers' pipeline returns it with aggregation_strategy="first".

    entity_group: its type. score: the mean of its words' probabilities, 0 to 1. word: text[start:end]. start,
    end: its characters, end exclusive; of a sample that is split into words, in the words joined with spaces.
    """

    entity_group: str
    score: float
    word: str
    start: int
    end: int


class WordTags(NamedTuple):
    """The tags of a text's words, and their probabilities, 0 to 1.

    A word that was truncated, or has no token, has the tag `O` and the probability 0.
    """

    tags: list[str]
    scores: list[float]


def tag_words(
    runner: Runner,
    examples: Sequence[Example],
    batch_size: int = 32,
    progress: Progress = no_progress,
    on_truncate: OnTruncate | None = None,
) -> list[WordTags]:
    """Return the tag of each word of `examples`: the likeliest one at the word's first token.

    Args:
        runner: of a token classifier.
        examples: texts, split into words or not.
        batch_size: texts per batch.
        progress: called for each batch.
        on_truncate: called with the number of texts that were longer than the model's limit, and that limit.

    Raises:
        InputError: no texts, or the tokenizer does not return the words of its tokens.
        RunError: `non-finite-outputs`.
    """
    if not examples:
        raise InputError("No texts were given.", code="empty-data")
    tools, names = runner.text, class_names(runner.config)
    encoded = encode_words(tools.tokenizer, word_lists(examples), tools.max_input_length)
    if encoded.truncated and on_truncate is not None:
        on_truncate(encoded.truncated, tools.max_input_length)
    results: dict[int, WordTags] = {}
    token_rows = EncodedTexts(encoded.ids, None, encoded.truncated)
    batches = length_sorted_batches(token_rows, batch_size, tools.tokenizer.pad_token_id or 0)
    for (indices, _), outputs in map_batches(
        lambda _, item: runner.forward(item[1]), batches, runner.workers
    ):
        for i, logits in zip(indices, outputs, strict=True):
            results[i] = _word_tags(logits, encoded.first_tokens[i], names)
        progress(min(len(examples), len(results) * process_count()), len(examples), "texts")
    return merge_shares(results)


def _word_tags(logits: NDArray[np.float32], first_tokens: Sequence[int | None], names: list[str]) -> WordTags:
    """Return the tags of one text; logits: float32 [L, C]; first_tokens: of its words, [W]."""
    read_words = [index for index, position in enumerate(first_tokens) if position is not None]
    positions = [position for position in first_tokens if position is not None]
    tags, scores = [OUTSIDE] * len(first_tokens), [0.0] * len(first_tokens)
    if not positions:
        return WordTags(tags, scores)
    probabilities = softmax(check_finite_outputs(logits[positions]).astype(np.float64), axis=1)
    for index, row in zip(read_words, probabilities, strict=True):
        best = int(row.argmax())
        tags[index], scores[index] = names[best], float(row[best])
    return WordTags(tags, scores)


def find_entities(
    runner: Runner,
    examples: Sequence[Example],
    batch_size: int = 32,
    on_truncate: OnTruncate | None = None,
) -> list[list[Entity]]:
    """Return the entities of each example, in order; arguments and errors as of `tag_words`."""
    scheme = tag_scheme(class_names(runner.config))
    tagged = tag_words(runner, examples, batch_size, on_truncate=on_truncate)
    return [_entities(example, tags, scheme) for example, tags in zip(examples, tagged, strict=True)]


def _entities(example: Example, tagged: WordTags, scheme: TagScheme) -> list[Entity]:
    words = example_words(example)
    entities = []
    for first, end, label in read_spans(tagged.tags, scheme):
        begin, stop = words[first].start, words[end - 1].end
        score = float(np.mean(tagged.scores[first:end]))
        entities.append(Entity(label, score, example.text[begin:stop], begin, stop))
    return entities


def entity_text(entity: Entity) -> str:
    """Return an entity as `smelt predict` prints it: `Ada Lovelace [PER 0:12 0.998]`."""
    text, label = (value.translate(CONTROL_ESCAPES) for value in (entity.word, entity.entity_group))
    return f"{text} [{label} {entity.start}:{entity.end} {entity.score:.3f}]"

"""Tags of words and the entities that they mark, for token classification.

A tag is `O` (no entity), a type with a prefix (`B-PER`), or a type alone. The prefixes are those of IOB1 and
IOB2 (B, I), IOBES (also E, S) and BILOU (also L for E, U for S). A sequence is read leniently, as the script
`conlleval` of CoNLL-2000 and seqeval's default mode do: a span also begins at an I-, where the tag before it
is `O`, of another type, or ends a span. Types alone are read as I- if `O` is one of the model's tags;
otherwise, as for parts of speech, each word is a span of its own. E and S are prefixes only if a type of the
set of tags has one of them, and B or I too; likewise L and U. So E-MAIL with NAME and `O` is a type.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from functools import cache
from typing import Any, NamedTuple

from smelt.core.errors import InputError
from smelt.data.splits import Example

OUTSIDE = "O"
_PREFIXED = re.compile(r"([BIESLU])-(.+)", re.DOTALL)
# Of scripts without spaces between words, each character is a word.
_UNSPACED = r"[\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}\p{Lao}\p{Myanmar}\p{Khmer}]"


class Word(NamedTuple):
    """A word of a text, and its characters: text[start:end]."""

    text: str
    start: int
    end: int


class Span(NamedTuple):
    """The words `start` to `end` - 1, which are an entity of the type `label`."""

    start: int
    end: int
    label: str


def split_words(text: str) -> list[Word]:
    """Return the words of `text`: split at spaces, each punctuation mark a word, as BERT splits texts.

    So are the characters of scripts without spaces between words.
    """
    return [Word(text[start:end], start, end) for _, (start, end) in _splitter().pre_tokenize_str(text)]


@cache
def _splitter() -> Any:
    from tokenizers import Regex, pre_tokenizers

    parts = [pre_tokenizers.BertPreTokenizer(), pre_tokenizers.Split(Regex(_UNSPACED), "isolated")]
    return pre_tokenizers.Sequence(parts)


def example_words(example: Example) -> list[Word]:
    """Return the words of a sample, with their characters in its text."""
    if not example.words:
        return split_words(example.text)
    words, start = [], 0
    for text in example.words:
        words.append(Word(text, start, start + len(text)))
        start += len(text) + 1
    return words


def word_lists(examples: Sequence[Example]) -> list[list[str]]:
    """Return the words of each sample."""
    return [[item.text for item in example_words(example)] for example in examples]


class TagScheme(NamedTuple):
    """How tags are read. prefixes: the letters that are prefixes.

    joins: whether a tag without prefix continues the span before it, as I- does, and is no span of its own.
    """

    prefixes: str = "BIESLU"
    joins: bool = True


def tag_scheme(names: Collection[str]) -> TagScheme:
    """Return how the tags of a model with the classes `names` are read."""
    pairs = {(match[1], match[2]) for name in names if (match := _PREFIXED.fullmatch(name))}
    types = {label for prefix, label in pairs if prefix in "BI"}
    shown = {prefix for prefix, label in pairs if label in types}
    prefixes = "BI" + "".join(letters for letters in ("ES", "LU") if shown.intersection(letters))
    return TagScheme(prefixes, OUTSIDE in names or bool(types))


def read_spans(tags: Sequence[str], scheme: TagScheme = TagScheme()) -> list[Span]:  # noqa: B008 - immutable
    """Return the entities that `tags` mark, in order."""
    entities: list[Span] = []
    ends_before, type_before = True, ""
    for index, tag in enumerate(tags):
        match = _PREFIXED.fullmatch(tag)
        if match and match[1] in scheme.prefixes:
            prefix, label = match[1], match[2]
        else:
            prefix, label = "I" if scheme.joins else "S", tag
        if tag == OUTSIDE:
            ends_before, type_before = True, ""
            continue
        if ends_before or prefix in "BSU" or label != type_before:
            entities.append(Span(index, index + 1, label))
        else:
            entities[-1] = entities[-1]._replace(end=index + 1)
        ends_before, type_before = prefix in "ESLU", label
    return entities


def tags_of_entities(
    entities: Iterable[tuple[int, int, str]], text: str, location: str, column: str
) -> tuple[str, ...]:
    """Return the IOB2 tag of each word of `text`.

    Args:
        entities: start, end (characters, end exclusive) and type of each.
        text: of the sample.
        location: of the row, for messages.
        column: of the entities, for messages.

    Raises:
        InputError: an entity is outside of the text, overlaps another, has no word, or ends within a word.
    """
    words = split_words(text)
    tags = [OUTSIDE] * len(words)
    end_before = 0
    for start, end, label in sorted(entities):
        description = f"{location}: column '{column}': the entity {label[:40]!r} from {start} to {end}"
        if not 0 <= start < end <= len(text):
            raise InputError(
                f"{description} is not within the text of {len(text)} characters. Write start and end as"
                " characters, end exclusive.",
                code="entity-outside-text",
            )
        if start < end_before:
            raise InputError(
                f"{description} overlaps the entity before it, and a word has one tag. Remove one of them.",
                code="overlapping-entities",
            )
        cut_word = next((w for w in words if w.start < start < w.end or w.start < end < w.end), None)
        if cut_word is not None:
            raise InputError(
                f"{description}, {text[start:end][:40]!r}, begins or ends within the word"
                f" {cut_word.text[:40]!r}. Move it to the word's start or end, or write tokens and tags.",
                code="entity-within-word",
            )
        covered = [index for index, item in enumerate(words) if start <= item.start < end]
        if not covered:
            raise InputError(f"{description} has no words. Remove it.", code="empty-entity")
        for index in covered:
            tags[index] = f"{'B' if index == covered[0] else 'I'}-{label}"
        end_before = end
    return tuple(tags)

"""Token classification: a tag for each word of a text, such as named entities or parts of speech.

The first token of each word is labeled, as in transformers' example run_ner; the others and special tokens
have the label -100. Words beyond the model's limit get the tag `O`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smelt.core.errors import InputError
from smelt.data.conll_rows import LineValues
from smelt.data.csv_rows import TABLE_SUFFIXES
from smelt.data.dataset_rows import ClassIndices
from smelt.data.examples import missing_column, nonempty_text, reject_surrogates
from smelt.data.json_rows import data_suffix
from smelt.data.labels import class_names, class_targets, label_as_int
from smelt.data.splits import Columns, Example, Split
from smelt.data.tags import OUTSIDE, tags_of_entities, word_lists
from smelt.tasks.spec import PackageClass, TaskSpec

if TYPE_CHECKING:
    from smelt.generation.config import GenerationSettings
    from smelt.generation.prompt_batches import OnTruncate
    from smelt.runtimes.tag_words import Entity
    from smelt.tasks.samples import EncodedSample

HEAD_SUFFIX = "ForTokenClassification"


class TokenClassification(TaskSpec):
    """Token classification."""

    name = "token-classification"
    column_roles = ("tokens", "tags", "text", "entities")
    optional_roles = column_roles  # tokens with tags, or a text with entities
    target_roles = ("tags", "entities")
    input_roles = ("text", "tokens")
    method = "tag"
    call = "text to entities"
    call_includes = "tokenizing is"
    row_example = '{"tokens": ["...", "..."], "tags": ["B-PER", "O"]}, or "text" and "entities"'
    main_metric = "entity_f1"
    graph_output = "logits"
    package = PackageClass("token_classification", "Tagger", 'print(Tagger()(["TEXT"]))')

    def parse_row(
        self, row: Mapping[str, Any], location: str, columns: Columns, lacks_target: bool
    ) -> Example:
        """Return the sample of a row, as `TaskSpec.parse_row`; its label is the tags of its words."""
        if columns.tokens not in row and columns.text in row:
            text = nonempty_text(row, columns.text, location, "text")
            if lacks_target:
                return Example(text)
            if columns.entities not in row:
                raise missing_column(row, columns.entities, location, "entities")
            entities = _parse_entities(row[columns.entities], location, columns.entities)
            return Example(text, label=tags_of_entities(entities, text, location, columns.entities))
        if columns.tokens not in row:
            raise missing_column(row, columns.tokens, location, "tokens")
        words = _parse_words(row[columns.tokens], location, columns.tokens)
        if lacks_target:
            return Example(" ".join(words), words=words)
        if columns.tags not in row:
            raise missing_column(row, columns.tags, location, "tags")
        tags = _parse_tags(row[columns.tags], location, columns.tags)
        if len(tags) != len(words):
            raise InputError(
                f"{location}: {len(words)} words in column '{columns.tokens}', but {len(tags)} tags in column"
                f" '{columns.tags}'. Each word needs one tag.",
                code="tag-count-mismatch",
            )
        lines = _word_lines(row[columns.tokens])
        return Example(" ".join(words), label=tags, words=words, word_lines=lines)

    def required_roles(self, row: Mapping[str, Any], columns: Columns) -> tuple[str, ...]:
        """Return the columns of words, or those of a text with entities if the row has a text."""
        is_text = columns.text in row and columns.tokens not in row
        return ("text", "entities") if is_text else ("tokens", "tags")

    def label_examples(self, examples: Sequence[Example]) -> Sequence[Example]:
        """Return an example for each different tag, the first with it."""
        first: dict[tuple[type, Any], Example] = {}
        for example in examples:
            for index, tag in enumerate(example.label if isinstance(example.label, tuple) else ()):
                key = (type(tag), tag)
                if key not in first:
                    line = example.word_lines[index] if example.word_lines else example.line
                    first[key] = replace(example, label=tag, line=line)
        return tuple(first.values())

    def head_names(self, names: Sequence[str]) -> list[str]:
        """Return the tags of a new head: `O` first, the others sorted.

        Raises:
            InputError: the tags are numbers, whose names are not known.
        """
        if names and all(label_as_int(name) is not None for name in names):
            raise InputError(
                f"The tags are numbers ({', '.join(names[:5])}), and the model has no names for them. Write"
                " names such as B-PER into the data, or start from a model with id2label in its config.",
                code="unnamed-tags",
            )
        return [name for name in names if name == OUTSIDE] + [name for name in names if name != OUTSIDE]

    def package_settings(self, config: Mapping[str, Any], folder: Path) -> dict[str, Any]:
        """Return the tags, and whether the tokenizer reads the space before a word."""
        from tokenizers import Tokenizer

        from smelt.models.split_words import reads_spaces
        from smelt.models.tokenizer import TOKENIZER_FILE

        tokenizer = Tokenizer.from_file(str(folder / TOKENIZER_FILE))
        return {"labels": class_names(config), "spaces_words": reads_spaces(tokenizer)}

    def placeholder_row(self, text: str, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return a row of the words of `text`, each with the first tag of the model."""
        words = text.split()
        return {"tokens": words, "tags": [class_names(config)[0]] * len(words)}

    def recognizes_row(self, row: Mapping[str, Any], columns: Columns, named: Columns) -> bool:
        """Return whether the row has words and their tags, or a text and its entities."""
        words, tags = row.get(columns.tokens), row.get(columns.tags)
        if isinstance(words, list) and isinstance(tags, list):
            return len(words) == len(tags)
        return isinstance(row.get(columns.text), str) and isinstance(row.get(columns.entities), list)

    def recognizes_model(self, config: Mapping[str, Any], is_embedder: bool) -> bool:
        """Return whether the checkpoint has the head of a token classifier."""
        return any(str(name).endswith(HEAD_SUFFIX) for name in config.get("architectures") or ())

    def recognizes_graph(self, outputs: Set[str], config: Mapping[str, Any], is_embedder: bool) -> bool:
        """Return whether the graph returns logits of a token classifier."""
        return self.graph_output in outputs and self.recognizes_model(config, is_embedder)

    def encode(
        self, split: Split, config: Any, tokenizer: Any, limit: int, length: int | None
    ) -> tuple[list[EncodedSample], int]:
        """Return the tokens of the words with a label at the first of each, as `TaskSpec.encode`."""
        from smelt.models.split_words import encode_words
        from smelt.models.tokenizer import as_text_tokenizer
        from smelt.tasks.samples import IGNORE_INDEX, TokenLabelSample

        encoded = encode_words(as_text_tokenizer(tokenizer), word_lists(split.examples), limit)
        classes = tag_classes(split.examples, class_names({"id2label": config.id2label}), split.origin)
        samples: list[EncodedSample] = []
        for ids, first_tokens, tags in zip(encoded.ids, encoded.first_tokens, classes, strict=True):
            labels = [IGNORE_INDEX] * len(ids)
            if tags:  # a sample for calibration may have none
                for position, tag in zip(first_tokens, tags, strict=True):
                    if position is not None:
                        labels[position] = tag
            samples.append(TokenLabelSample(ids, None, labels))
        return samples, encoded.truncated

    def token_rows(self, split: Split, tokenizer: Any) -> list[list[int]]:
        """Return the ids of the words of each sample, as `TaskSpec.token_rows`."""
        from smelt.models.split_words import encode_words
        from smelt.models.text_rules import NO_LIMIT
        from smelt.models.tokenizer import as_text_tokenizer

        return encode_words(as_text_tokenizer(tokenizer), word_lists(split.examples), NO_LIMIT).ids

    def run(
        self,
        runner: Any,
        examples: Sequence[Example],
        generation: GenerationSettings,
        batch_size: int,
        on_truncate: OnTruncate | None = None,
    ) -> Sequence[list[Entity]]:
        """Return the entities of each example, as `TaskSpec.run`."""
        from smelt.runtimes.tag_words import find_entities

        return find_entities(runner, examples, batch_size, on_truncate=on_truncate)

    def result_line(self, result: list[Entity]) -> str:
        """Return the entities as `text [label start:end score]`, separated by tabs."""
        from smelt.runtimes.tag_words import entity_text

        return "\t".join(map(entity_text, result))

    def result_fields(self, result: list[Entity]) -> dict[str, Any]:
        """Return the entities with the names of transformers' pipeline."""
        return {"entities": [entity._asdict() for entity in result]}

    def count_truncated(
        self, runner: Any, examples: Sequence[Example], generation: GenerationSettings
    ) -> int:
        """Return the number of texts whose last words the runner does not read."""
        from smelt.models.split_words import encode_words

        tools = runner.text
        encoded = encode_words(tools.tokenizer, word_lists(examples), tools.max_input_length)
        return encoded.truncated

    def too_long_samples(self, split: Split, tokenizer: Any, limit: int) -> set[int]:
        """Return the indices of samples with more than `limit` tokens."""
        token_rows = self.token_rows(split, tokenizer)
        return {index for index, ids in enumerate(token_rows) if len(ids) > limit}


def tag_classes(examples: Sequence[Example], names: Sequence[str], origin: str) -> list[list[int]]:
    """Return the class of each tag of each sample; no classes for a sample without tags.

    Raises:
        InputError: a tag that is not one of `names`.
    """
    distinct = TASK.label_examples(examples)
    targets = class_targets(distinct, names, origin)
    by_tag = {(type(e.label), e.label): target for e, target in zip(distinct, targets, strict=True)}
    return [
        [by_tag[type(tag), tag] for tag in example.label] if isinstance(example.label, tuple) else []
        for example in examples
    ]


def _parse_words(value: Any, row_location: str, column: str) -> tuple[str, ...]:
    """Return the words of a sample.

    Raises:
        InputError: it is not a list of texts, or a word is empty.
    """
    items = _as_list(value, row_location, column, '["Ada", "codes"]')
    for number, item in enumerate(items, 1):
        location = _word_location(value, number, row_location)
        if not isinstance(item, str):
            raise InputError(
                f"{location}: column '{column}': word {number} is {repr(item)[:80]}, expected text.",
                code="wrong-column-type",
            )
        if not item.strip():
            raise InputError(
                f"{location}: column '{column}': word {number} is empty. Remove it and its tag.",
                code="empty-word",
            ).with_location(location)
        reject_surrogates(item, location, column)
    return tuple(items)


def _parse_tags(value: Any, row_location: str, column: str) -> tuple[int | str, ...]:
    """Return the tags of a sample: names, or numbers without names in the data.

    Raises:
        InputError: it is not a list of names or integers, or a name is empty.
    """
    items = _as_list(value, row_location, column, '["B-PER", "O"]')
    for number, item in enumerate(items, 1):
        location = _word_location(value, number, row_location)
        if isinstance(item, bool) or not isinstance(item, str | int):
            raise InputError(
                f"{location}: column '{column}': tag {number} is {repr(item)[:80]}, expected a name such as"
                " B-PER, or a number.",
                code="wrong-column-type",
            )
        if isinstance(item, str):
            if not item.strip():
                raise InputError(
                    f"{location}: column '{column}': tag {number} is empty. A word without entity has the tag"
                    " O.",
                    code="empty-label",
                ).with_location(location)
            reject_surrogates(item, location, column)
    if isinstance(value, ClassIndices) and all(0 <= item < len(value.names) for item in value):
        return tuple(value.names[item] for item in value)
    return tuple(items)


def _word_lines(value: Any) -> tuple[int, ...]:
    return value.lines if isinstance(value, LineValues) else ()


def _word_location(value: Any, number: int, row_location: str) -> str:
    """Return the position of word `number`, from 1: its line, else that of the row."""
    lines = _word_lines(value)
    return f"{row_location.rpartition(':')[0]}:{lines[number - 1]}" if lines else row_location


def _table_hint(location: str) -> str:
    """Return a hint for files whose values cannot be lists; "" for others."""
    suffix = data_suffix(Path(location.rpartition(":")[0]))
    if suffix not in TABLE_SUFFIXES:
        return ""
    return f" A {suffix} file cannot hold lists: write JSON lines (.jsonl), or sentences in columns (.conll)."


def _as_list(value: Any, location: str, column: str, example: str) -> list[Any]:
    if not isinstance(value, list | tuple):
        raise InputError(
            f"{location}: column '{column}' must be a list, such as {example}, got {repr(value)[:80]}."
            f"{_table_hint(location)}",
            code="wrong-column-type",
        )
    if not value:
        raise InputError(f"{location}: column '{column}' is empty. Remove the row.", code="empty-text")
    return list(value)


def _parse_entities(value: Any, location: str, column: str) -> list[tuple[int, int, str]]:
    """Return start, end and label of each entity.

    Raises:
        InputError: it is not a list of objects with these keys.
    """
    entities = []
    for number, item in enumerate(value if isinstance(value, list) else [value], 1):
        start, end, label = (
            item.get(k) if isinstance(item, Mapping) else None for k in ("start", "end", "label")
        )
        are_integers = all(isinstance(v, int) and not isinstance(v, bool) for v in (start, end))
        if not isinstance(value, list) or not are_integers or not isinstance(label, str) or not label.strip():
            raise InputError(
                f"{location}: column '{column}': entity {number} is {repr(item)[:80]}; expected"
                ' {"start": 0, "end": 3, "label": "PER"}, with characters of the text, end exclusive.'
                f"{_table_hint(location)}",
                code="wrong-column-type",
            )
        reject_surrogates(label, location, column)
        assert isinstance(start, int)
        assert isinstance(end, int)
        entities.append((start, end, label))
    return entities


TASK = TokenClassification()

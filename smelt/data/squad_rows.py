"""Questions of SQuAD's format as rows: articles with paragraphs, each a context with its questions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from smelt.core.errors import InputError

_Row = tuple[str, Mapping[str, Any]]


def flatten_articles(rows: Iterable[_Row]) -> Iterator[_Row]:
    """Yield each question of an article as a row; other rows are kept.

    An article has `paragraphs`, these a `context` and `qas`. A row has the keys of a question, such as `id`,
    `question`, `answers` and `is_impossible`, and the context. Its position is that of the article.

    Raises:
        InputError: a paragraph of an article is not such an object (`wrong-paragraph`).
    """
    for location, row in rows:
        paragraphs = row.get("paragraphs")
        is_empty = paragraphs == [] and row.keys() <= {"title", "paragraphs"}
        if not isinstance(paragraphs, list) or not (is_empty or any(map(_has_questions, paragraphs))):
            yield location, row
            continue
        for number, paragraph in enumerate(paragraphs, 1):
            is_valid = _has_questions(paragraph) and all(isinstance(qa, dict) for qa in paragraph["qas"])
            if not is_valid or "context" not in paragraph:
                raise InputError(
                    f"{location}: paragraph {number} of article {str(row.get('title', ''))[:40]!r} is"
                    f' {repr(paragraph)[:80]}; expected {{"context": "...", "qas": [{{...}}]}}, as in SQuAD.',
                    code="wrong-paragraph",
                ).with_location(location)
            for question in paragraph["qas"]:
                yield location, {**question, "context": paragraph["context"]}


def _has_questions(paragraph: Any) -> bool:
    return isinstance(paragraph, dict) and isinstance(paragraph.get("qas"), list)

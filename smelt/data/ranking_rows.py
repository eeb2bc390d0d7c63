"""Queries with lists of relevant and other passages as rows: one row for each pair."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from smelt.core.errors import InputError

_Row = tuple[str, Mapping[str, Any]]
_LABELS = {"positive": 1, "negative": 0}


def flatten_queries(rows: Iterable[_Row]) -> Iterator[_Row]:
    """Yield each pair of a query and a passage as a row with query, passage and label; keep other rows.

    A row with `query` and lists of texts in `positive` or `negative` is such a query. Its passages have the
    label 1 or 0, and its position.

    Raises:
        InputError: a passage is no text, or there is none (`wrong-passages`).
    """
    for location, row in rows:
        lists = {name: row[name] for name in _LABELS if isinstance(row.get(name), list)}
        if "query" not in row or not lists:
            yield location, row
            continue
        pairs = [(passage, _LABELS[name]) for name, passages in lists.items() for passage in passages]
        if not pairs or not all(isinstance(passage, str) for passage, _ in pairs):
            raise InputError(
                f"{location}: the passages of the query {str(row['query'])[:40]!r} are {repr(lists)[:80]};"
                ' expected texts: {"query": "...", "positive": ["..."], "negative": ["..."]}.',
                code="wrong-passages",
            ).with_location(location)
        for passage, label in pairs:
            yield location, {"query": row["query"], "passage": passage, "label": label}

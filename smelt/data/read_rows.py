"""Read the rows of a file, a folder or a hub data set, each with its position, independent of the task.

Formats: JSON lines and JSON (also .gz; SQuAD's as `smelt.data.squad_rows`, queries as
`smelt.data.ranking_rows`), CSV and TSV (`smelt.data.csv_rows`), sentences in columns
(`smelt.data.conll_rows`), Parquet, Arrow, folders and hub ids (`smelt.data.dataset_rows`).
Files are read as a stream: one row, or one batch of a table, is in memory at a time, not the file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from smelt.core.errors import InputError
from smelt.data.conll_rows import CONLL_SUFFIXES, read_conll_rows
from smelt.data.csv_rows import TABLE_SUFFIXES, read_csv_rows
from smelt.data.dataset_rows import ARROW_SUFFIXES, read_arrow_table, read_folder_rows, read_hub_rows
from smelt.data.json_rows import PLAIN_TEXT_HINT, data_suffix, read_json_lines, read_json_rows
from smelt.data.ranking_rows import flatten_queries
from smelt.data.squad_rows import flatten_articles

RowIterator = Iterator[tuple[str, Mapping[str, Any]]]
_JSON_LINES_SUFFIXES = (".jsonl", ".ndjson")


def read_file_rows(path: Path, split: str = "train") -> RowIterator:
    """Yield every row of a file, or of the `split` of a folder, with its position.

    Raises:
        InputError: the file cannot be read, or has an unknown format.
    """
    if path.is_dir():
        return _flatten_nested(read_folder_rows(path, split))
    kind = data_suffix(path)
    if kind in ARROW_SUFFIXES:
        return _flatten_nested(read_arrow_table(path))
    if kind in TABLE_SUFFIXES:
        return read_csv_rows(path)
    if kind in _JSON_LINES_SUFFIXES:
        return _flatten_nested(read_json_lines(path))
    if kind == ".json":
        return _flatten_nested(read_json_rows(path))
    if kind in CONLL_SUFFIXES:
        return read_conll_rows(path)
    text_hint = PLAIN_TEXT_HINT if kind == ".txt" else ""
    raise InputError(
        f"{path}: unknown file format '{kind}'. Supported: .jsonl, .json, .csv, .tsv, .conll, .conllu,"
        f" .bio, .iob (each also .gz), .parquet, .arrow.{text_hint}",
        code="unknown-file-type",
        file=str(path),
    )


def read_source_rows(origin: str, path: Path | None, split: str, streaming: bool = False) -> RowIterator:
    """Yield every row of `path`, or of the hub data set `origin` if it is None, as `read_file_rows`.

    streaming: as of `smelt.data.dataset_rows.read_hub_rows`.

    Raises:
        InputError: the rows cannot be read.
    """
    if path is not None:
        return read_file_rows(path, split)
    return _flatten_nested(read_hub_rows(origin, split, streaming))


@dataclass(frozen=True)
class RowDraw:
    """How many rows of a source are kept, and how they are drawn.

    max_samples: rows that are drawn; fewer if there are no more. buffer_size: rows in memory, of which the
    next is drawn. seed: of the draw.
    """

    max_samples: int
    buffer_size: int
    seed: int


def draw_rows(read: Callable[[], RowIterator], draw: RowDraw) -> RowIterator:
    """Yield rows of `read()`, drawn by the shuffle buffer of `datasets`; the others are not kept in memory.

    Few rows more than max_samples + buffer_size are read. `read` must be picklable: the
    library hashes it.
    """
    from datasets import IterableDataset

    stream = IterableDataset.from_generator(_rows_as_items, gen_kwargs={"read": read})
    shuffled = stream.shuffle(seed=draw.seed, buffer_size=draw.buffer_size)
    return ((item["location"], item["row"]) for item in shuffled.take(draw.max_samples))


def _rows_as_items(read: Callable[[], RowIterator]) -> Iterator[dict[str, Any]]:
    for location, row in read():
        yield {"location": location, "row": row}


def _flatten_nested(rows: RowIterator) -> RowIterator:
    return flatten_queries(flatten_articles(_flatten_translation(rows)))


def _flatten_translation(rows: RowIterator) -> RowIterator:
    """Yield rows with the columns inside of `translation`, which some hub data sets nest."""
    for location, row in rows:
        inner = row.get("translation")
        yield location, inner if isinstance(inner, Mapping) else row

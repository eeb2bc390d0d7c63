"""Texts without labels, on which a student learns what its teacher says of them."""

from __future__ import annotations

from pathlib import Path

from smelt.core.data import SIMILARITY, Columns, Example, Split, Task
from smelt.core.errors import InputError
from smelt.core.files import placed
from smelt.core.rows.examples import read_split
from smelt.core.rows.text_files import file_kind, read_text_file

UNLABELLED = "unlabelled"  # the split
_NO_COLUMN = "\0"  # the name of no column
# Tasks whose rows may lack what is to be learned: a teacher says it.
WITHOUT_LABELS: frozenset[Task] = frozenset({"text-classification", SIMILARITY})


def read_unlabelled(origin: str, task: Task, columns: Columns, base: Path) -> Split:
    """Read texts, or pairs of them: plain text (.txt, also .gz), one a line, or rows as `read_split` does.

    Whatever stands in the column of labels is not read. Lines with nothing in them are no texts.

    Raises:
        InputError: as `read_split`; no texts, or a task whose rows have no labels to lack.
    """
    if task not in WITHOUT_LABELS:
        raise InputError(
            f"{origin}: texts without labels are for {' and '.join(sorted(WITHOUT_LABELS))}, not for {task}.",
            code="unsupported-task",
        )
    path = placed(base, origin)
    if path.is_file() and file_kind(path) == ".txt":
        lines = read_text_file(path).splitlines()
        found = tuple(Example(line, line=at, row=at) for at, line in enumerate(lines, 1) if line.strip())
        if not found:
            raise InputError(f"{path}: no text in this file; '{UNLABELLED}' needs some.", code="empty-data")
        return Split(origin, found)
    # rows of sentence similarity are the same with and without a score
    texts = columns.model_copy(update={"label": _NO_COLUMN})
    texts.model_fields_set.discard("label")  # nobody asked for it
    return read_split(origin, SIMILARITY, texts, base, UNLABELLED)

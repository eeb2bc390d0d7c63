"""Read unlabelled samples, on which a student learns its teacher's outputs."""

from __future__ import annotations

from pathlib import Path

from smelt.core.data import SENTENCE_SIMILARITY, Columns, Example, Split, Task
from smelt.core.errors import InputError
from smelt.core.files import resolve_path
from smelt.core.readers.examples import read_split
from smelt.core.readers.text_files import data_suffix, read_text_file

UNLABELLED = "unlabelled"  # the split
_NO_COLUMN = "\0"  # a name that no column has
# Tasks whose samples may lack labels: a teacher provides the targets.
UNLABELLED_TASKS: frozenset[Task] = frozenset({"text-classification", SENTENCE_SIMILARITY})


def read_unlabelled(origin: str, task: Task, columns: Columns, base: Path) -> Split:
    """Return texts, or pairs of texts: plain text (.txt, also .gz), one per line, or rows as in `read_split`.

    The column of labels is not read. Empty lines are skipped.

    Raises:
        InputError: as `read_split`; no texts, or a task whose samples have no labels.
    """
    if task not in UNLABELLED_TASKS:
        raise InputError(
            f"{origin}: unlabelled samples are for {' and '.join(sorted(UNLABELLED_TASKS))}, not for {task}.",
            code="unsupported-task",
        )
    path = resolve_path(base, origin)
    if path.is_file() and data_suffix(path) == ".txt":
        lines = read_text_file(path).splitlines()
        found = tuple(Example(line, line=at, row=at) for at, line in enumerate(lines, 1) if line.strip())
        if not found:
            raise InputError(
                f"{path}: this file has no text, but '{UNLABELLED}' needs at least one line.",
                code="empty-data",
            )
        return Split(origin, found)
    # samples of sentence similarity are the same with and without a score
    texts = columns.model_copy(update={"label": _NO_COLUMN})
    texts.model_fields_set.discard("label")  # the user did not set it
    return read_split(origin, SENTENCE_SIMILARITY, texts, base, UNLABELLED)

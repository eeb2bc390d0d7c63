"""Read sentences in columns: CoNLL files (.conll, .bio, .iob, .iob2), and CoNLL-U (.conllu); each also .gz.

A line is a word and its values, separated by tabs, else by blanks; an empty line ends a sentence. The first
column is the word, the last one the tag. Lines of `-DOCSTART-` are skipped, and comments: lines with `#` as
their first character that have another number of columns, or `=`. In CoNLL-U the word is FORM, the tag UPOS.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from smelt.core.errors import InputError
from smelt.data.json_rows import data_suffix, open_text, read_lines

CONLLU_SUFFIX = ".conllu"
CONLL_SUFFIXES = (".conll", ".bio", ".iob", ".iob2", CONLLU_SUFFIX)
_CONLLU_COLUMNS = ("id", "form", "lemma", "upos", "xpos", "feats", "head", "deprel", "deps", "misc")


class LineValues(list[str]):
    """The values of a column in one sentence, with the line of each."""

    def __init__(self, values: Iterable[str], lines: Sequence[int]) -> None:
        super().__init__(values)
        self.lines = tuple(lines)


def read_conll_rows(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield each sentence as a row, with the position of its first word.

    A row has the lists `tokens` and `tags`, and each column of the file: `column_1`, ..., in CoNLL-U the
    names of its columns in lower case.

    Raises:
        InputError: the file cannot be read, or a line has another number of columns than the first one
            (`conll-column-count`).
    """
    is_conllu = data_suffix(path) == CONLLU_SUFFIX
    width = len(_CONLLU_COLUMNS) if is_conllu else _count_columns(path)
    names = _CONLLU_COLUMNS if is_conllu else tuple(f"column_{n}" for n in range(1, width + 1))
    words: list[Sequence[str]] = []
    lines: list[int] = []
    with open_text(path, newline="") as stream:
        for number, line in enumerate(read_lines(path, stream), start=1):
            fields = _split_line(line)
            if not fields:
                if words:
                    yield f"{path}:{lines[0]}", _as_row(words, lines, names, is_conllu)
                words, lines = [], []
                continue
            if _is_skipped(fields, width, is_conllu):
                continue
            if len(fields) != width:
                location = f"{path}:{number}"
                raise InputError(
                    f"{location}: this line has {len(fields)} columns, but the others have {width}: a word"
                    f" and its tag, separated by blanks or a tab. Got: {line.strip()[:80]!r}.",
                    code="conll-column-count",
                ).with_location(location)
            words.append(fields)
            lines.append(number)
    if words:
        yield f"{path}:{lines[0]}", _as_row(words, lines, names, is_conllu)


def _split_line(line: str) -> list[str]:
    """Return the fields of a line; none if it is empty."""
    text = line.rstrip("\r\n")
    if not text.strip():
        return []
    if "\t" in text:
        return [field.strip() for field in text.split("\t")]
    return [field for part in text.split(" ") if (field := part.strip())]


def _is_skipped(fields: Sequence[str], width: int, is_conllu: bool) -> bool:
    """Return whether a line is none of a word: a comment, a mark of a document, a CoNLL-U range."""
    if fields[0].startswith("#"):
        return is_conllu or len(fields) != width or "=" in "".join(fields)
    # 1-2 is a word of the text that the next lines split, 1.1 one that is not in the text
    return fields[0] == "-DOCSTART-" or (is_conllu and not fields[0].isdecimal())


def _count_columns(path: Path) -> int:
    """Return the number of columns of the first word.

    Raises:
        InputError: it has no tag.
    """
    with open_text(path, newline="") as stream:
        for number, line in enumerate(read_lines(path, stream), start=1):
            fields = _split_line(line)
            if not fields or fields[0].startswith("#") or fields[0] == "-DOCSTART-":
                continue
            if len(fields) == 1:
                location = f"{path}:{number}"
                raise InputError(
                    f"{location}: expected a word and its tag, separated by blanks or a tab, got"
                    f" {fields[0][:80]!r}.",
                    code="conll-column-count",
                ).with_location(location)
            return len(fields)
    return 0  # only comments: a file without samples


def _as_row(
    words: Sequence[Sequence[str]], lines: Sequence[int], names: Sequence[str], is_conllu: bool
) -> dict[str, Any]:
    values = (LineValues(column, lines) for column in zip(*words, strict=True))
    columns = dict(zip(names, values, strict=True))
    first, last = ("form", "upos") if is_conllu else (names[0], names[-1])
    return {"tokens": columns[first], "tags": columns[last], **columns}

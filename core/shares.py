"""Rows of one file as several splits: drawn with a seed, the same on every machine.

Which rows are drawn depends on their contents, the seed and the shares alone: each text gets the SHA-256 of
seed and text as its place in line. No random generator is used, whose stream another version may change,
and the order of the rows in the file means nothing.

- Rows with the same input (text and second text) stay together, so no split holds a copy of another's.
- Classes keep their proportions: each gives its share of rows, and what rounding leaves goes to those with
  the largest remainders (Hamilton's method). Train keeps at least one text of every class. Of several labels
  each set counts as a class, the sets of one text alone together as one. Amounts are drawn as they come.
- Running text of lines is not mixed: it is cut into stretches, and whole stretches are drawn.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from smelt.core.data import Label, Split
from smelt.core.errors import InputError
from smelt.core.labels import MULTI, REGRESSION, ProblemType, decide_problem, items_of, whole_number

# Lines of running text are drawn in so many stretches, or fewer where there are fewer lines.
STRETCHES = 100
# What a limit keeps of a running text: so many stretches, of at least so many lines.
_PARTS, _PART_LINES = 8, 32


@dataclass(frozen=True)
class _Group:
    """Rows that stay together. rows: their places in the file. kind: the class that is kept in proportion."""

    rows: tuple[int, ...]
    kind: str
    rank: str


def divide(split: Split, shares: Mapping[str, float], seed: int) -> dict[str, Split]:
    """Return `split` as `train` and a split for each of `shares`, rows in the order of the file.

    Args:
        split: all rows of a file.
        shares: by name of the split, the share of the rows that it gets, 0 to 1; together less than 1.
        seed: of the draw.

    Raises:
        InputError: there are fewer different texts than splits.
    """
    groups = _stretches(split, seed) if _is_lines(split) else _copies(split, seed)
    if len(groups) <= len(shares):
        kind = "row" if split.arrays is not None else "image" if split.images else "text"
        they = f"{len(groups)} different {kind}{'' if len(groups) == 1 else 's'}"
        raise InputError(
            f"{split.origin}: {they} cannot be divided into {len(shares) + 1} splits; equal ones stay"
            " together. Give more that differ, or a file for each split.",
            code="too-few-texts",
        )
    taken: dict[str, list[int]] = {}
    for name, share in shares.items():
        drawn = _draw(groups, round(share * len(split)))
        taken[name] = sorted(row for group in drawn for row in group.rows)
        groups = [group for group in groups if group not in drawn]
    taken["train"] = sorted(row for group in groups for row in group.rows)
    return {name: split.some(rows) for name, rows in taken.items()}


def limited(split: Split, rows: int | None) -> Split:
    """Return `rows` rows of `split`, in the order of the file; all for None.

    They are spread evenly over the file, so that a file sorted by class or by length is not cut to one kind.
    Classes keep their proportions, and each keeps a row if there are as many rows as classes. The lines of a
    running text are taken in up to 8 stretches.
    """
    if rows is None or rows >= len(split):
        return split
    if _is_lines(split):
        count = max(1, min(_PARTS, rows // _PART_LINES))
        sizes = [rows * (n + 1) // count - rows * n // count for n in range(count)]
        starts = [(len(split) - rows) * n // max(1, count - 1) + sum(sizes[:n]) for n in range(count)]
        return split.some(
            at for start, n in zip(starts, sizes, strict=True) for at in range(start, start + n)
        )
    problem = decide_problem(None, (example.label for example in split.examples))
    kinds: dict[str, list[int]] = {}
    for at, example in enumerate(split.examples):
        kinds.setdefault(_kind(example.label, problem), []).append(at)
    least = int(rows >= len(kinds))
    more = _quotas({kind: len(found) - least for kind, found in kinds.items()}, rows - least * len(kinds))
    chosen = []
    for kind, found in kinds.items():
        count = least + more[kind]
        chosen += [found[len(found) * n // count] for n in range(count)]
    return split.some(sorted(chosen))


def _draw(groups: Sequence[_Group], target: int) -> set[_Group]:
    """Choose groups of about `target` rows, from each kind in proportion, and never all of a kind."""
    kinds: dict[str, list[_Group]] = {}
    for group in sorted(groups, key=lambda group: group.rank):
        kinds.setdefault(group.kind, []).append(group)
    sizes = {kind: sum(len(g.rows) for g in found) for kind, found in kinds.items() if len(found) > 1}
    drawn: set[_Group] = set()
    for kind, quota in _quotas(sizes, target).items():
        left, spare = quota, len(kinds[kind]) - 1
        for group in kinds[kind]:
            if spare and len(group.rows) <= left:
                drawn.add(group)
                left, spare = left - len(group.rows), spare - 1
    # no share came to a row, or each text has many copies: then the text with the fewest
    return drawn or {min(groups, key=lambda group: (len(group.rows), group.rank))}


def _quotas(sizes: Mapping[str, int], target: int) -> dict[str, int]:
    """Return how many of `target` rows each kind gives, in proportion to its rows."""
    total = sum(sizes.values())
    exact = {kind: min(1.0, target / max(1, total)) * size for kind, size in sizes.items()}
    quotas = {kind: math.floor(value) for kind, value in exact.items()}
    rest = min(target, total) - sum(quotas.values())
    # ties go by a hash of the name, or the first classes of the alphabet would always win
    order = sorted(exact, key=lambda kind: (quotas[kind] - exact[kind], _digest(kind)))
    return quotas | {kind: quotas[kind] + 1 for kind in order[:rest]}


def _copies(split: Split, seed: int) -> list[_Group]:
    """Return the rows by their input: what has the same text and second text is one group."""
    places: dict[str, list[int]] = {}
    for at, (text, example) in enumerate(zip(split.contents, split.examples, strict=True)):
        content = json.dumps([text, example.text_pair], ensure_ascii=False)
        places.setdefault(content, []).append(at)
    problem = decide_problem(None, (example.label for example in split.examples))
    kinds = [_kind(example.label, problem) for example in split.examples]
    of_text = {content: _most_frequent([kinds[row] for row in rows]) for content, rows in places.items()}
    if problem == MULTI:
        texts = Counter(of_text.values())
        of_text = {content: kind if texts[kind] > 1 else "" for content, kind in of_text.items()}
    return [
        _Group(tuple(rows), of_text[content], _digest(f"{seed}\n{content}"))
        for content, rows in places.items()
    ]


def _stretches(split: Split, seed: int) -> list[_Group]:
    rows = len(split)
    count = min(STRETCHES, rows)
    edges = [rows * number // count for number in range(count + 1)]
    places = [tuple(range(edges[n], edges[n + 1])) for n in range(count)]
    texts = ["\n".join(split.examples[row].text for row in place) for place in places]
    return [
        _Group(place, "", _digest(f"{seed}\n{number}\n{text}"))
        for number, (place, text) in enumerate(zip(places, texts, strict=True))
    ]


def _is_lines(split: Split) -> bool:
    """Say whether the rows are the lines of a plain text: only those are joined by a line's end."""
    return split.windows is not None and split.windows.separator == "\n"


def _kind(label: Label | None, problem: ProblemType) -> str:
    """Return the class of a row; one and the same for all where they have amounts, or no labels."""
    if problem == REGRESSION:
        return ""
    items = items_of(label) if problem == MULTI else [label]
    numbers = {item: whole_number(item) for item in items}
    return json.dumps(sorted(str(item if number is None else number) for item, number in numbers.items()))


def _most_frequent(kinds: Sequence[str]) -> str:
    """Return the class of rows with one text; of several equally frequent the first by name."""
    return min(Counter(kinds).items(), key=lambda item: (-item[1], item[0]))[0]


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()

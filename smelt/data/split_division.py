"""Divide the samples of one file into several splits, by a seed, the same on every machine.

The division depends only on the samples' content, the seed and the shares: the SHA-256 of seed and text is
the sort key of each text. No random generator is used, whose stream another version may change, and the order
of the samples in the file does not matter.

- Samples with the same input (text and second text) are kept together, so splits share no inputs.
- Classes keep their proportions: each contributes its share of samples, and rounding remainders go to the
  largest ones (Hamilton's method). Train keeps at least one text of every class. In multi-label data
  each set counts as a class; all sets with a single text count as one. Regression has no classes.
- Running text of lines is not mixed: it is cut into stretches, and whole stretches are drawn.
"""

from __future__ import annotations

import hashlib
import json
import math
import operator
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from smelt.core.errors import InputError
from smelt.core.files import json_hash
from smelt.data.labels import (
    MULTI_LABEL,
    REGRESSION,
    ProblemType,
    infer_problem_type,
    label_as_int,
    split_labels,
)
from smelt.data.splits import Label, Split

# Lines of running text are drawn in this many stretches, or fewer if there are fewer lines.
NUM_SEGMENTS = 100
# A limit keeps this many stretches of a running text, each with at least this many lines.
_LIMITED_SEGMENTS, _MIN_SEGMENT_LINES = 8, 32


@dataclass(frozen=True)
class _RowGroup:
    """Samples that are kept together. rows: their indices. stratum: the class that is kept in proportion."""

    rows: tuple[int, ...]
    stratum: str
    rank: str


def divide_split(split: Split, shares: Mapping[str, float], seed: int) -> dict[str, Split]:
    """Return `split` divided into `train` and a split for each of `shares`, samples in file order.

    Args:
        split: all samples of a file.
        shares: by name of the split, its share of the samples, 0 to 1; together less than 1.
        seed: of the draw.

    Raises:
        InputError: there are fewer different texts than splits.
    """
    groups = _groups_by_segment(split, seed) if _is_plain_text(split) else _groups_by_input(split, seed)
    if len(groups) <= len(shares):
        kind = (
            "row"
            if split.arrays is not None
            else "image"
            if split.images
            else "file"
            if split.audio
            else "text"
        )
        description = f"{len(groups)} different {kind}{'' if len(groups) == 1 else 's'}"
        raise InputError(
            f"{split.origin}: {description} cannot be divided into {len(shares) + 1} splits, because equal"
            " samples are assigned to the same split. Add different samples, or use a file for"
            " each split.",
            code="too-few-texts",
        )
    rows_by_split: dict[str, list[int]] = {}
    for name, fraction in shares.items():
        drawn_groups = _draw_groups(groups, round(fraction * len(split)))
        rows_by_split[name] = sorted(row for group in drawn_groups for row in group.rows)
        groups = [group for group in groups if group not in drawn_groups]
    rows_by_split["train"] = sorted(row for group in groups for row in group.rows)
    return {name: split.select(indices) for name, indices in rows_by_split.items()}


def limit_split(split: Split, rows: int | None) -> Split:
    """Return `rows` samples of `split`, in file order; all for None.

    They are spread evenly over the file, so that a file sorted by class or length is represented.
    Classes keep their proportions, and each keeps a sample if there are as many samples as classes. The lines
    of a running text are taken in up to 8 stretches.
    """
    if rows is None or rows >= len(split):
        return split
    if _is_plain_text(split):
        count = max(1, min(_LIMITED_SEGMENTS, rows // _MIN_SEGMENT_LINES))
        sizes = [rows * (n + 1) // count - rows * n // count for n in range(count)]
        starts = [(len(split) - rows) * n // max(1, count - 1) + sum(sizes[:n]) for n in range(count)]
        return split.select(
            index for start, n in zip(starts, sizes, strict=True) for index in range(start, start + n)
        )
    problem = infer_problem_type(None, (example.label for example in split.examples))
    kinds: dict[str, list[int]] = {}
    for index, example in enumerate(split.examples):
        kinds.setdefault(_stratum(example.label, problem), []).append(index)
    minimum = int(rows >= len(kinds))
    quotas = _quotas(
        {kind: len(indices) - minimum for kind, indices in kinds.items()}, rows - minimum * len(kinds)
    )
    sample_indices = []
    for kind, indices in kinds.items():
        count = minimum + quotas[kind]
        sample_indices += [indices[len(indices) * n // count] for n in range(count)]
    return split.select(sorted(sample_indices))


def _draw_groups(groups: Sequence[_RowGroup], target: int) -> set[_RowGroup]:
    """Return groups of about `target` samples, from each class in proportion, never all of a class."""
    kinds: dict[str, list[_RowGroup]] = {}
    for group in sorted(groups, key=lambda group: group.rank):
        kinds.setdefault(group.stratum, []).append(group)
    sizes = {
        kind: sum(len(g.rows) for g in class_groups)
        for kind, class_groups in kinds.items()
        if len(class_groups) > 1
    }
    drawn_groups: set[_RowGroup] = set()
    for kind, quota in _quotas(sizes, target).items():
        remaining, max_groups = quota, len(kinds[kind]) - 1
        for group in kinds[kind]:
            if max_groups and len(group.rows) <= remaining:
                drawn_groups.add(group)
                remaining, max_groups = remaining - len(group.rows), max_groups - 1
    # all shares round to 0, or each text has many copies: use the text with the fewest
    return drawn_groups or {min(groups, key=lambda group: (len(group.rows), group.rank))}


def _quotas(sizes: Mapping[str, int], target: int) -> dict[str, int]:
    """Return the number of samples of each class among `target`, in proportion to its size."""
    total = sum(sizes.values())
    exact_quotas = {kind: min(1.0, target / max(1, total)) * size for kind, size in sizes.items()}
    quotas = {kind: math.floor(value) for kind, value in exact_quotas.items()}
    num_extra = min(target, total) - sum(quotas.values())
    # ties are broken by a hash of the name, not by the alphabet
    order = sorted(exact_quotas, key=lambda kind: (quotas[kind] - exact_quotas[kind], _rank_hash(kind)))
    return quotas | {kind: quotas[kind] + 1 for kind in order[:num_extra]}


def _groups_by_input(split: Split, seed: int) -> list[_RowGroup]:
    """Return the samples grouped by input: equal text and second text are one group."""
    indices_by_content: dict[str, list[int]] = {}
    for index, (text, example) in enumerate(zip(split.row_contents, split.examples, strict=True)):
        content = json.dumps([text, example.text_pair], ensure_ascii=False)
        indices_by_content.setdefault(content, []).append(index)
    problem = infer_problem_type(None, (example.label for example in split.examples))
    kinds = [_stratum(example.label, problem) for example in split.examples]
    of_text = {
        content: _most_frequent_label([kinds[row] for row in indices])
        for content, indices in indices_by_content.items()
    }
    if problem == MULTI_LABEL:
        texts = Counter(of_text.values())
        of_text = {content: kind if texts[kind] > 1 else "" for content, kind in of_text.items()}
    return [
        _RowGroup(tuple(indices), of_text[content], _rank_hash(f"{seed}\n{content}"))
        for content, indices in indices_by_content.items()
    ]


def _groups_by_segment(split: Split, seed: int) -> list[_RowGroup]:
    num_lines = len(split)
    count = min(NUM_SEGMENTS, num_lines)
    edges = [num_lines * number // count for number in range(count + 1)]
    segments = [tuple(range(edges[n], edges[n + 1])) for n in range(count)]
    texts = ["\n".join(split.examples[row].text for row in segment) for segment in segments]
    return [
        _RowGroup(segment, "", _rank_hash(f"{seed}\n{number}\n{text}"))
        for number, (segment, text) in enumerate(zip(segments, texts, strict=True))
    ]


def _is_plain_text(split: Split) -> bool:
    """Return whether the samples are the lines of a plain text: only those are joined by line breaks."""
    return split.windows is not None and split.windows.separator == "\n"


def _stratum(label: Label | None, problem: ProblemType) -> str:
    """Return the class of a sample; the same for all in regression, or without labels."""
    if problem == REGRESSION:
        return ""
    items = split_labels(label) if problem == MULTI_LABEL else [label]
    numbers = {item: label_as_int(item) for item in items}
    return json.dumps(sorted(str(item if number is None else number) for item, number in numbers.items()))


def _most_frequent_label(kinds: Sequence[str]) -> str:
    """Return the most frequent class of samples with one text; ties by name."""
    return min(Counter(kinds).items(), key=lambda item: (-item[1], item[0]))[0]


def _rank_hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def divide_folds(split: Split, folds: int, seed: int) -> list[tuple[Split, Split]]:
    """Return the samples to learn from and the held-out ones of each fold.

    Equal texts are in the same part. With one label per sample the parts have the same shares of the classes
    (scikit-learn's StratifiedGroupKFold), unless all classes have fewer samples than there are folds.

    Args:
        split: the training samples.
        folds: k.
        seed: of the division.

    Raises:
        InputError: there are fewer different texts than folds.
    """
    import numpy as np
    from sklearn.model_selection import GroupKFold, StratifiedGroupKFold

    groups = np.unique([json_hash([e.text, e.text_pair]) for e in split.examples], return_inverse=True)[1]
    if groups.max() + 1 < folds:
        raise InputError(
            f"score.folds: {split.origin} has {groups.max() + 1} different texts, fewer than {folds} folds.",
            code="too-few-samples",
            setting="score.folds",
        )
    labels = [e.label for e in split.examples]
    classes = None
    if all(isinstance(label, str | int) for label in labels):
        classes = np.unique([str(label) for label in labels], return_inverse=True)[1]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a class has fewer samples than there are folds
        if classes is not None and np.bincount(classes).max() >= folds:
            stratified = StratifiedGroupKFold(folds, shuffle=True, random_state=seed)
            parts = list(stratified.split(classes, classes, groups))
        else:
            grouped = GroupKFold(folds, shuffle=True, random_state=seed)
            parts = list(grouped.split(groups, groups=groups))
    return [
        (split.select(train_indices.tolist()), split.select(held_out.tolist()))
        for train_indices, held_out in parts
    ]


def checked_limit(limit: Any) -> int | None:
    """Return the limit as a number of samples.

    Raises:
        InputError: it is not an integer of at least 1.
    """
    if limit is None:
        return None
    with suppress(TypeError):
        if not isinstance(limit, bool) and (num_samples := operator.index(limit)) >= 1:
            return num_samples
    raise InputError(
        f"limit: expected a number of samples of at least 1, got {limit!r}.",
        code="wrong-value",
        setting="limit",
    )

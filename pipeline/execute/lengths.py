"""`truncation: error`: refuse texts longer than the model's limit, in any split, before the first step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from smelt.core.data import IMAGES, SIMILARITY, TEXT_TO_TEXT, Split, Task
from smelt.core.errors import together
from smelt.core.messages import mistake
from smelt.core.text import count


def require_lengths(folder: Path, task: Task, splits: Mapping[str, Split]) -> None:
    """Make sure that no row of `splits` has to be cut for the model in `folder`.

    Running text is cut into windows anyway, so for language modeling nothing is too long; images are resized.

    Raises:
        InputError: some are too long; every split is named with their lines (or rows, from 1).
    """
    from smelt.core.files import read_json
    from smelt.runtime.models.checkpoint import load_tokenizer
    from smelt.runtime.text.limits import length_limit

    if task in ("language-modeling", IMAGES):
        return
    tokenizer = load_tokenizer(folder)
    limit = length_limit(tokenizer, read_json(folder / "config.json"))
    problems = []
    for name, split in splits.items():
        rows = sorted(_too_long(split, task, tokenizer, limit))
        if rows:
            lines = [split.examples[row].line for row in rows[:5]]
            named = [str(line or row + 1) for line, row in zip(lines, rows[:5], strict=True)]
            first = (
                ("line " if all(lines) else "row ") + ", ".join(named) + (", ..." if len(rows) > 5 else "")
            )
            hold = f"{count(len(rows), 'row')} {'holds' if len(rows) == 1 else 'hold'}"
            problems.append(
                mistake(
                    "texts-too-long",
                    f"{split.origin} ({name}): {hold} texts of more than {limit} tokens, the"
                    f" model's limit (truncation: error): {first}. Shorten them; with truncation: warn they"
                    f" are truncated.",
                )
            )
    if problems:
        raise together(problems)


def _too_long(split: Split, task: Task, tokenizer: Any, limit: int) -> set[int]:
    """Return the places of the rows with a source, pair or target that is too long."""
    if task == SIMILARITY:
        both = [(i, text) for i, e in enumerate(split.examples) for text in (e.text, e.text_pair) if text]
        lengths = _lengths(tokenizer, [text for _, text in both])
        return {i for (i, _), n in zip(both, lengths, strict=True) if n > limit}
    firsts = [e.text for e in split.examples]
    paired = [i for i, e in enumerate(split.examples) if e.text_pair is not None]
    alone = [i for i, e in enumerate(split.examples) if e.text_pair is None]
    found = {
        i for i, n in zip(alone, _lengths(tokenizer, [firsts[i] for i in alone]), strict=True) if n > limit
    }
    seconds = [str(split.examples[i].text_pair) for i in paired]
    lengths = _lengths(tokenizer, [firsts[i] for i in paired], seconds)
    found |= {i for i, n in zip(paired, lengths, strict=True) if n > limit}
    if task in TEXT_TO_TEXT:
        owners = [(i, reference) for i, e in enumerate(split.examples) for reference in e.references]
        ids = tokenizer(text_target=[text for _, text in owners], truncation=False, verbose=False)[
            "input_ids"
        ]
        found |= {i for (i, _), row in zip(owners, ids, strict=True) if len(row) > limit}
    return found


def _lengths(tokenizer: Any, texts: Sequence[str], seconds: Sequence[str] | None = None) -> list[int]:
    if not texts:
        return []
    both = [list(texts)] if seconds is None else [list(texts), list(seconds)]
    return [len(ids) for ids in tokenizer(*both, truncation=False, verbose=False)["input_ids"]]

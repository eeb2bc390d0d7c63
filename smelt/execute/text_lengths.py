"""Check before the first step that no text exceeds the model's limit, for `truncation: error`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from smelt.core.data import IMAGE_CLASSIFICATION, SENTENCE_SIMILARITY, TEXT_TO_TEXT_TASKS, Split, Task
from smelt.core.errors import combined_error
from smelt.core.messages import error_message
from smelt.core.text import with_count


def require_texts_fit(folder: Path, task: Task, splits: Mapping[str, Split]) -> None:
    """Require that no sample of `splits` exceeds the limit of the model in `folder`.

    Language modeling splits text into windows and images are resized, so these tasks are not checked.

    Raises:
        InputError: some texts are too long; the message lists each split with line or row numbers (from 1).
    """
    from smelt.core.files import read_json_object
    from smelt.runtime.models.checkpoint import load_tokenizer
    from smelt.runtime.text.length_limits import max_input_length

    if task in ("language-modeling", IMAGE_CLASSIFICATION):
        return
    tokenizer = load_tokenizer(folder)
    limit = max_input_length(tokenizer, read_json_object(folder / "config.json"))
    problems = []
    for name, split in splits.items():
        rows = sorted(_too_long_rows(split, task, tokenizer, limit))
        if rows:
            lines = [split.examples[row].line for row in rows[:5]]
            named = [str(line or row + 1) for line, row in zip(lines, rows[:5], strict=True)]
            first = (
                ("line " if all(lines) else "row ") + ", ".join(named) + (", ..." if len(rows) > 5 else "")
            )
            hold = f"{with_count(len(rows), 'sample')} {'has' if len(rows) == 1 else 'have'}"
            problems.append(
                error_message(
                    "texts-too-long",
                    f"{split.origin} ({name}): {hold} texts of more than {limit} tokens, the model's limit:"
                    f" {first}. Shorten them, or set truncation: warn to truncate them.",
                )
            )
    if problems:
        raise combined_error(problems)


def _too_long_rows(split: Split, task: Task, tokenizer: Any, limit: int) -> set[int]:
    """Return the indices of samples with a source, pair or target that is too long."""
    if task == SENTENCE_SIMILARITY:
        both = [(i, text) for i, e in enumerate(split.examples) for text in (e.text, e.text_pair) if text]
        lengths = _token_counts(tokenizer, [text for _, text in both])
        return {i for (i, _), n in zip(both, lengths, strict=True) if n > limit}
    firsts = [e.text for e in split.examples]
    paired = [i for i, e in enumerate(split.examples) if e.text_pair is not None]
    alone = [i for i, e in enumerate(split.examples) if e.text_pair is None]
    found = {
        i
        for i, n in zip(alone, _token_counts(tokenizer, [firsts[i] for i in alone]), strict=True)
        if n > limit
    }
    seconds = [str(split.examples[i].text_pair) for i in paired]
    lengths = _token_counts(tokenizer, [firsts[i] for i in paired], seconds)
    found |= {i for i, n in zip(paired, lengths, strict=True) if n > limit}
    if task in TEXT_TO_TEXT_TASKS:
        owners = [(i, reference) for i, e in enumerate(split.examples) for reference in e.references]
        ids = tokenizer(text_target=[text for _, text in owners], truncation=False, verbose=False)[
            "input_ids"
        ]
        found |= {i for (i, _), row in zip(owners, ids, strict=True) if len(row) > limit}
    return found


def _token_counts(tokenizer: Any, texts: Sequence[str], seconds: Sequence[str] | None = None) -> list[int]:
    if not texts:
        return []
    both = [list(texts)] if seconds is None else [list(texts), list(seconds)]
    return [len(ids) for ids in tokenizer(*both, truncation=False, verbose=False)["input_ids"]]

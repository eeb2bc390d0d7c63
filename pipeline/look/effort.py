"""How long the trainings of a proposed recipe take on this machine's processor, roughly."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Mapping
from typing import Any

from smelt.compress.train.settings import TrainingSettings
from smelt.core.data import IMAGES, TEXT_TO_TEXT
from smelt.core.rows.reading import read_file
from smelt.core.rows.text_files import file_kind, read_text_file
from smelt.families.registry import FAMILIES
from smelt.look.data import DataLook
from smelt.look.init_stages import Step
from smelt.look.model import ModelLook
from smelt.recipe.yaml_file import parse_yaml

# Rows that are counted at most, and of those the ones whose letters are.
_MOST, _LOOKED = 300_000, 500
_LETTERS = 4  # of a token, in languages with spaces
# Operations for each weight and token: a multiplication and an addition forwards, and twice as many backwards
# (Kaplan et al. 2020, arXiv:2001.08361, section 2.1); a teacher reads the rows too.
_TRAINS, _READS = 6, 2
# Part of the processor's rate in one large product that a training reaches: 96 updates of a translator of 8.4
# million weights took 90 s where it would take 33 s.
_REACHED = 0.35


def training_time(seen: ModelLook, data: DataLook, steps: Iterable[Step]) -> str | None:
    """Return a sentence on how long the trainings of `steps` take here, None where nothing is known of it.

    An estimate by what is multiplied, for a person who wonders between minutes and days.
    """
    settings = [(step.word, _settings(step)) for step in steps if step.word in ("finetune", "distill")]
    if not settings or not seen.parameters or seen.task == IMAGES or "train" not in data.splits:
        return None
    rows, letters = _rows(data)
    # of a translator either half reads its side
    tokens = letters / _LETTERS / (2 if seen.task in TEXT_TO_TEXT else 1)
    epochs = work = 0.0
    for word, said in settings:
        passes = float(said.get("epochs", TrainingSettings.model_fields["epochs"].default))
        written: Mapping[str, Any] = said.get("sequence_level") or {}
        passes /= 1 - float(written.get("original_ratio", 0))
        epochs += passes
        work += passes * (_TRAINS + _READS * (word == "distill")) + _READS * float(
            written.get("num_beams", 0)
        )
    weights = seen.parameters - _looked_up(seen)
    seconds = work * weights * rows * tokens / (_REACHED * _operations_per_second())
    least = "at least " if rows >= _MOST * (1 - sum(data.shares.values())) else ""
    number = f"{epochs:g} pass{'' if epochs == 1 else 'es'}"
    return (
        f"training is {number} over {least}{rows:,} rows: on this processor {least}roughly {_told(seconds)}"
    )


def _looked_up(seen: ModelLook) -> int:
    """Return how many weights no product reads: the embedding of a model that writes nothing."""
    writes = seen.task in TEXT_TO_TEXT or seen.task == "language-modeling"
    words, width = seen.config.get("vocab_size"), seen.config.get(FAMILIES[seen.family].width)
    if writes or not isinstance(words, int) or not isinstance(width, int):
        return 0
    return min(words * width, seen.parameters or 0)


def _settings(step: Step) -> Mapping[str, Any]:
    found: Any = parse_yaml(f"a: {step.settings}", "").value
    return dict(found["a"])


def _rows(data: DataLook) -> tuple[int, float]:
    """Return how many rows are trained on, and the letters of one."""
    path = data.splits["train"]
    if file_kind(path) == ".txt":
        text = read_text_file(path)
        lines = text.removesuffix("\n").count("\n") + 1
        return round(lines * (1 - sum(data.shares.values()))), len(text) / lines
    found = read_file(path)
    looked = (row.values() for _, row in itertools.islice(found, _LOOKED))
    seen = [sum(len(value) for value in row if isinstance(value, str)) for row in looked]
    count = len(seen) + sum(1 for _ in itertools.islice(found, _MOST))
    return round(count * (1 - sum(data.shares.values()))), sum(seen) / max(1, len(seen))


def _operations_per_second(size: int = 512) -> float:
    """Return the operations of float32 that the processor does a second in a product, undisturbed."""
    import numpy as np

    a = np.ones((size, size), np.float32)
    best = float("inf")
    for _ in range(50):
        began = time.perf_counter()
        a @ a
        best = min(best, time.perf_counter() - began)
    return 2 * size**3 / best


def _told(seconds: float) -> str:
    """Return a time in words, to one digit or two: an estimate promises no more."""
    for unit, length in (("days", 86_400), ("hours", 3_600), ("minutes", 60)):
        if seconds >= 1.5 * length:
            return f"{float(f'{seconds / length:.2g}'):g} {unit}"
    return "a minute"

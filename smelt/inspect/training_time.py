"""Estimate the training time of a proposed recipe on this machine's CPU."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Mapping
from typing import Any

from smelt.compress.train.settings import TrainingSettings
from smelt.core.data import IMAGE_CLASSIFICATION, TEXT_TO_TEXT_TASKS
from smelt.core.readers.file_rows import read_file_rows
from smelt.core.readers.text_files import data_suffix, read_text_file
from smelt.families.registry import FAMILIES
from smelt.inspect.data_files import DataInfo
from smelt.inspect.init_stages import ProposedStep
from smelt.inspect.model_info import ModelInfo
from smelt.recipe.yaml_file import parse_yaml

# Maximum number of samples to count, and of samples whose characters are counted.
_MAX_COUNTED_ROWS, _MEASURED_ROWS = 300_000, 500
_CHARS_PER_TOKEN = 4  # in languages with spaces
# Operations per weight and token: a multiplication and an addition in the forward pass, twice as many in the
# backward pass (Kaplan et al. 2020, arXiv:2001.08361, section 2.1); a teacher adds a forward pass.
_TRAINING_OPS_PER_WEIGHT, _FORWARD_OPS_PER_WEIGHT = 6, 2
# Training throughput relative to one large matrix multiplication: 96 updates of a translator with 8.4 million
# weights took 90 s instead of 33 s.
_COMPUTE_EFFICIENCY = 0.35


def training_time_text(model_info: ModelInfo, data: DataInfo, steps: Iterable[ProposedStep]) -> str | None:
    """Return a note on the training time of `steps` on this machine; None if it cannot be estimated.

    A rough estimate from the number of operations, to distinguish minutes from days.
    """
    settings = [
        (step.stage, _parse_settings(step)) for step in steps if step.stage in ("finetune", "distill")
    ]
    if (
        not settings
        or not model_info.parameters
        or model_info.task == IMAGE_CLASSIFICATION
        or "train" not in data.splits
    ):
        return None
    rows, letters = _count_rows_and_chars(data)
    # in an encoder-decoder each half processes one side
    tokens = letters / _CHARS_PER_TOKEN / (2 if model_info.task in TEXT_TO_TEXT_TASKS else 1)
    epochs = work = 0.0
    for word, said in settings:
        passes = float(said.get("epochs", TrainingSettings.model_fields["epochs"].default))
        written: Mapping[str, Any] = said.get("sequence_level") or {}
        passes /= 1 - float(written.get("original_ratio", 0))
        epochs += passes
        work += passes * (
            _TRAINING_OPS_PER_WEIGHT + _FORWARD_OPS_PER_WEIGHT * (word == "distill")
        ) + _FORWARD_OPS_PER_WEIGHT * float(written.get("num_beams", 0))
    weights = model_info.parameters - _embedding_parameters(model_info)
    seconds = work * weights * rows * tokens / (_COMPUTE_EFFICIENCY * _operations_per_second())
    least = "at least " if rows >= _MAX_COUNTED_ROWS * (1 - sum(data.fractions.values())) else ""
    number = f"{epochs:g} epoch{'' if epochs == 1 else 's'}"
    time_text = f"{least}roughly {_duration_text(seconds)}"
    return f"training takes {number} on {least}{rows:,} samples; on this CPU {time_text}"


def _embedding_parameters(model_info: ModelInfo) -> int:
    """Return the number of weights without operations: the embedding of a model that does not generate."""
    writes = model_info.task in TEXT_TO_TEXT_TASKS or model_info.task == "language-modeling"
    words, width = (
        model_info.config.get("vocab_size"),
        model_info.config.get(FAMILIES[model_info.family].hidden_size_key),
    )
    if writes or not isinstance(words, int) or not isinstance(width, int):
        return 0
    return min(words * width, model_info.parameters or 0)


def _parse_settings(step: ProposedStep) -> Mapping[str, Any]:
    found: Any = parse_yaml(f"a: {step.settings}", "").value
    return dict(found["a"])


def _count_rows_and_chars(data: DataInfo) -> tuple[int, float]:
    """Return the number of training samples, and the mean number of characters per sample."""
    path = data.splits["train"]
    if data_suffix(path) == ".txt":
        text = read_text_file(path)
        lines = text.removesuffix("\n").count("\n") + 1
        return round(lines * (1 - sum(data.fractions.values()))), len(text) / lines
    found = read_file_rows(path)
    looked = (row.values() for _, row in itertools.islice(found, _MEASURED_ROWS))
    seen = [sum(len(value) for value in row if isinstance(value, str)) for row in looked]
    count = len(seen) + sum(1 for _ in itertools.islice(found, _MAX_COUNTED_ROWS))
    return round(count * (1 - sum(data.fractions.values()))), sum(seen) / max(1, len(seen))


def _operations_per_second(size: int = 512) -> float:
    """Return the float32 operations per second of the CPU in a matrix multiplication (best of 50)."""
    import numpy as np

    a = np.ones((size, size), np.float32)
    best = float("inf")
    for _ in range(50):
        began = time.perf_counter()
        a @ a
        best = min(best, time.perf_counter() - began)
    return 2 * size**3 / best


def _duration_text(seconds: float) -> str:
    """Return a duration as text with at most two significant digits."""
    for unit, length in (("days", 86_400), ("hours", 3_600), ("minutes", 60)):
        if seconds >= 1.5 * length:
            return f"{float(f'{seconds / length:.2g}'):g} {unit}"
    return "a minute"

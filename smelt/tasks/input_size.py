"""The mean size of a task's inputs: the lengths of its texts in tokens, or the size of its images."""

from __future__ import annotations

from pathlib import Path
from statistics import mean

from smelt.data.splits import Split
from smelt.data.tasks import Task, task_traits
from smelt.models.text_rules import max_input_length
from smelt.runtimes.images import DEFAULT_IMAGE_SIZE
from smelt.tasks.registry import task_spec
from smelt.tasks.samples import encode_inputs, load_processor


def mean_input_size(folder: Path, split: Split, task: Task) -> tuple[int, int]:
    """Return the mean length of the samples of `split` and of their targets in tokens, rounded, at least 1.

    The tokenizer is that of the model in `folder`, and texts are truncated to its limit. A window of running
    text, or a prompt with its response, is one sequence without target. Of pairs that are embedded
    separately, each text counts. For images, with or without texts: height and width after preprocessing.

    Raises:
        InputError: files of the tokenizer are missing or do not match.
    """
    from smelt.models.empty_model import load_config

    traits, processor = task_traits(task), load_processor(folder)
    if traits.reads_images:
        return processor.shape or (DEFAULT_IMAGE_SIZE, DEFAULT_IMAGE_SIZE)
    if traits.modality == "arrays":
        return (0, 0)  # the config has the sizes
    config = load_config(folder)
    limit = max_input_length(processor, config.to_dict())
    targets: list[int] = []
    if traits.output in ("labels", "embedding"):
        lengths = [len(ids) for ids in encode_inputs(split, processor, limit, task)[0].ids]
    else:
        samples, _ = task_spec(task).encode(split, config, processor, limit, None)
        counts = [sample.token_counts for sample in samples]
        is_window = traits.architecture == "decoder"
        lengths = [source - is_window for source, _ in counts]  # the last token of a window is only a target
        targets = [target for _, target in counts]
    return _rounded_mean(lengths), _rounded_mean(targets)


def _rounded_mean(lengths: list[int]) -> int:
    return max(1, round(mean(lengths or [1])))

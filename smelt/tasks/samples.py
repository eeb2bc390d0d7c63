"""Samples as token ids, and their batches: what encoding, collation and packing of all tasks share.

Shapes: B = batch, L = source length, T = target length. Pairs of texts that are embedded separately (sentence
similarity) give 2 B texts in a batch of B.
"""

from __future__ import annotations

import bisect
import itertools
import math
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from smelt.core.files import read_json_object
from smelt.data.images import image_hash
from smelt.data.labels import (
    MULTI_LABEL,
    NO_CLASS,
    REGRESSION,
    ProblemType,
    class_names,
    class_targets,
    multi_label_targets,
    problem_type,
    regression_targets,
)
from smelt.data.splits import Example, Split, input_texts
from smelt.data.tasks import Task
from smelt.models.checkpoint import load_tokenizer
from smelt.models.families.registry import reads_arrays, reads_audio, reads_images, reads_images_and_texts
from smelt.models.masked_windows import TokenMasker, WindowTokens, fixed_masks
from smelt.models.tokenizer import EncodedTexts, encode_texts, uses_token_types
from smelt.runtimes.audio import read_speech_processor
from smelt.runtimes.image_text import read_image_text_processor
from smelt.runtimes.images import ImageInput, read_processor, stack_image_inputs
from smelt.runtimes.onnx_import.signature import read_signature

TensorBatch: TypeAlias = dict[str, Tensor]
CACHE_INDEX_KEY = "rows"  # key of a batch: the cache indices of its samples, if any
# Key of a batch of packed samples: which positions are tokens. The model gets no attention mask then.
TOKEN_MASK_KEY = "token_mask"
IGNORE_INDEX = -100  # the label of ignored positions, as in torch and transformers


@dataclass(frozen=True, slots=True)
class EncodedSample:
    """One tokenized sample: source ids, type ids of a text pair, and the target.

    target: target ids; a class index; for multi-label or regression one float per output; for a pair
    its score (NaN if it has none); None for a window of running text, whose targets are its own
    tokens shifted by one. is_target: of a window, which of its tokens are targets; None: all but the first.
    second_ids: ids of the second text of a pair that is embedded separately.
    cache_index: key of cached values of the sample. image: of an image sample, which has no ids; it is
    decoded when its batch is made. packed: the windows in one sequence, which has no ids of its own.
    """

    input_ids: list[int]
    token_type_ids: list[int] | None
    target: list[int] | int | tuple[float, ...] | None
    second_ids: list[int] | None = None
    cache_index: int | None = None
    image: ImageInput | None = None
    is_target: list[bool] | None = None
    packed: tuple[EncodedSample, ...] | None = None

    @property
    def token_counts(self) -> tuple[int, int]:
        """Source and target length in tokens; for two texts, twice the longer one.

        An image counts as patches of 16 x 16 pixels.
        """
        if self.image is not None:
            return self.image.patches, 0
        if self.packed is not None:
            return sum(window.num_inputs for window in self.packed), 0
        if self.second_ids is not None:
            longer = max(len(self.input_ids), len(self.second_ids))
            return longer, longer
        return len(self.input_ids), len(self.target) if isinstance(self.target, list) else 0

    @property
    def content(self) -> str:
        """What identifies inputs that are not token ids: the bytes and the preprocessing of an image."""
        return "" if self.image is None else f"{image_hash(self.image.reference)} {self.image.processor!r}"

    @property
    def num_inputs(self) -> int:
        """The number of inputs of a window, whose last token is only a target."""
        return len(self.input_ids) - 1

    def draw(self, key: Sequence[int]) -> EncodedSample:
        """Return the sample with its random parts drawn by `key`; most samples have none."""
        return self

    @staticmethod
    def collate(samples: Sequence[EncodedSample], config: Any) -> TensorBatch:
        """Return the batch of samples of this class, as `collate`; a task's own class has its own."""
        if samples[0].image is not None:
            return _collate_images(samples)
        if samples[0].packed is not None:
            return _collate_packed([sample.packed or () for sample in samples])
        return _collate_windows(samples) if samples[0].target is None else _collate_texts(samples, config)


@dataclass(frozen=True, slots=True)
class TokenLabelSample(EncodedSample):
    """A sample with labels of tokens; `target` is the label of each, -100 where there is none."""

    @property
    def token_counts(self) -> tuple[int, int]:
        """The length in tokens; a target is no token of its own."""
        return len(self.input_ids), 0

    @staticmethod
    def collate(samples: Sequence[EncodedSample], config: Any) -> TensorBatch:
        """Return input_ids, attention_mask and labels, int64 [B, L], padded on the right."""
        return {
            "input_ids": pad_lists([r.input_ids for r in samples], int(config.pad_token_id or 0)),
            "attention_mask": pad_lists([[1] * len(r.input_ids) for r in samples], 0),
            "labels": pad_lists([r.target for r in samples if isinstance(r.target, list)], IGNORE_INDEX),
        }


@dataclass(frozen=True, slots=True)
class MaskedSample(TokenLabelSample):
    """A window of running text with masked tokens; `target` is the token at each of them, -100 elsewhere.

    window: the tokens without masks. masker: draws the masks.
    """

    window: WindowTokens | None = None
    masker: TokenMasker | None = None

    def draw(self, key: Sequence[int]) -> MaskedSample:
        """Return the window with other masks."""
        assert self.window is not None
        assert self.masker is not None
        masked = self.masker.mask(self.window.ids, self.window.is_special, key)
        return replace(self, input_ids=masked.input_ids, target=masked.labels)


@dataclass(frozen=True, slots=True)
class ArraySample(EncodedSample):
    """A sample of a module of arrays. arrays: the inputs by name, each [1, ...]; `target` is not used."""

    arrays: Mapping[str, NDArray[Any]] = field(default_factory=dict)

    @property
    def token_counts(self) -> tuple[int, int]:
        """The number of values in units of a patch of 16 x 16 pixels, at least 1."""
        return max(1, sum(value.size for value in self.arrays.values()) // _VALUES_PER_TOKEN), 0

    @staticmethod
    def collate(samples: Sequence[EncodedSample], config: Any) -> TensorBatch:
        """Return the arrays, each [B, ...], and `labels` of zeros, int64 [B], which count the samples."""
        rows = [sample.arrays for sample in samples if isinstance(sample, ArraySample)]
        batch = {name: torch.from_numpy(np.concatenate([row[name] for row in rows])) for name in rows[0]}
        return batch | {"labels": torch.zeros(len(rows), dtype=torch.int64)}


_VALUES_PER_TOKEN = 3 * 16 * 16


def masked_samples(windows: Sequence[WindowTokens], masker: TokenMasker) -> list[EncodedSample]:
    """Return the samples of `windows`, with the masks on which all steps of a run are compared."""
    return [
        MaskedSample(masked.input_ids, None, masked.labels, window=window, masker=masker)
        for window, masked in zip(windows, fixed_masks(windows, masker), strict=True)
    ]


def encode_inputs(
    split: Split, tokenizer: Any, limit: int, task: Task
) -> tuple[EncodedTexts, Sequence[list[int] | None]]:
    """Return the ids of the input texts of `split` (see `input_texts`), and each text's type ids or None."""
    texts, second_texts = input_texts(split.examples, task)
    sources = encode_texts(texts, tokenizer, limit, second_texts)
    return sources, sources.types or [None] * len(texts)


def load_processor(folder: Path) -> Any:
    """Return the tokenizer of the model in `folder`, its processor, or the signature of its arrays.

    Raises:
        InputError: its files are missing or do not match.
    """
    config = read_json_object(folder / "config.json")
    if reads_images(config):
        return read_processor(folder)
    if reads_images_and_texts(config):
        return read_image_text_processor(folder)
    if reads_audio(config):
        return read_speech_processor(folder)
    return read_signature(folder) if reads_arrays(config) else load_tokenizer(folder)


def encode_targets(texts: list[str], tokenizer: Any, limit: int) -> tuple[list[list[int]], int]:
    """Return the target ids and the number of texts that were truncated to `limit` tokens.

    The tokenizer truncates, because it adds the special tokens around a text: the end (Marian, T5),
    beginning and end (BART), a language code before the text (mBART-50) or after its end (mBART).
    """
    target_ids: list[list[int]] = tokenizer(text_target=texts, truncation=False, verbose=False)["input_ids"]
    long_indices = [i for i, ids in enumerate(target_ids) if len(ids) > limit]
    if long_indices:
        truncated = tokenizer(
            text_target=[texts[i] for i in long_indices], truncation=True, max_length=limit, verbose=False
        )
        for i, ids in zip(long_indices, truncated["input_ids"], strict=True):
            target_ids[i] = ids
    return target_ids, len(long_indices)


def classifier_targets(
    examples: Sequence[Example], config: Any, split_name: str = ""
) -> Sequence[int | tuple[float, ...]]:
    """Return the class of each example; for multi-label C numbers, 1 or 0; for regression C numbers.

    Of a sample with `NO_LABEL` the class is -1, and numbers are NaN.

    Raises:
        InputError: a label that the model lacks; the message has the label, its samples and the known ones.
    """
    names, problem = class_names({"id2label": config.id2label}), model_problem_type(config)
    if problem == REGRESSION:
        return regression_targets(examples, names, split_name)
    if problem == MULTI_LABEL:
        sets = multi_label_targets(examples, names, split_name)
        return [
            tuple(math.nan if NO_CLASS in label_set else float(i in label_set) for i in range(len(names)))
            for label_set in sets
        ]
    return class_targets(examples, names, split_name)


def model_problem_type(config: Any) -> ProblemType:
    """Return the problem type of a transformers config, by the number of outputs, not their names."""
    names = dict.fromkeys(range(config.num_labels), "")
    return problem_type({"problem_type": getattr(config, "problem_type", None), "id2label": names})


def collate(samples: Sequence[EncodedSample], config: Any) -> TensorBatch:
    """Pad `samples` on the right into the model's inputs plus `labels`.

    Returns input_ids, attention_mask (and token_type_ids if there are any) as int64 [B, L]. For a
    translation model labels are int64 [B, T] with -100 for padding, and decoder_input_ids [B, T] are the
    labels shifted right after the decoder's start token; for a classifier labels are int64 [B], or
    float32 [B, C] for multi-label and regression. For a language model labels are int64
    [B, L], the token after each of input_ids, -100 for padding and for tokens that are no targets. For pairs
    that are embedded separately the inputs are [2 B, L], all first texts first, and labels are float32
    [B, 1]. Packed windows have no attention_mask: position_ids, int64 [B, L], begin at 0 for each window, and
    again for padding, by which transformers masks attention between windows; token_mask is int64 [B, L], 0
    for padding. For images the input is pixel_values, float32 [B, 3, h, w]. Cache indices of samples are in
    `rows`, int64 [B].
    """
    batch = samples[0].collate(samples, config)
    numbers = [row.cache_index for row in samples if row.cache_index is not None]
    return batch | ({CACHE_INDEX_KEY: torch.tensor(numbers)} if numbers else {})


def _collate_texts(samples: Sequence[EncodedSample], config: Any) -> TensorBatch:
    pad = int(config.pad_token_id or 0)
    texts = [r.input_ids for r in samples] + [r.second_ids for r in samples if r.second_ids is not None]
    batch = {"input_ids": pad_lists(texts, pad)}
    batch["attention_mask"] = pad_lists([[1] * len(ids) for ids in texts], 0)
    types = [r.token_type_ids for r in samples if r.token_type_ids is not None]
    if types and uses_token_types({"model_type": config.model_type}):
        batch["token_type_ids"] = pad_lists(types, 0)
    targets = [r.target for r in samples if isinstance(r.target, list)]
    if targets:
        batch["labels"] = pad_lists(targets, IGNORE_INDEX)
        start = config.decoder_start_token_id
        batch["decoder_input_ids"] = pad_lists([[start, *ids[:-1]] for ids in targets], pad)
    else:
        batch["labels"] = _class_labels(samples)
    return batch


def _class_labels(samples: Sequence[EncodedSample]) -> Tensor:
    kind = torch.float32 if isinstance(samples[0].target, tuple) else torch.int64
    return torch.tensor([r.target for r in samples], dtype=kind)


def _collate_images(samples: Sequence[EncodedSample]) -> TensorBatch:
    pixels = stack_image_inputs([row.image for row in samples if row.image is not None])
    return {"pixel_values": torch.from_numpy(pixels), "labels": _class_labels(samples)}


def _collate_windows(samples: Sequence[EncodedSample]) -> TensorBatch:
    return {
        "input_ids": pad_lists([r.input_ids[:-1] for r in samples], 0),
        "attention_mask": pad_lists([[1] * (len(r.input_ids) - 1) for r in samples], 0),
        "labels": pad_lists([_window_labels(r) for r in samples], IGNORE_INDEX),
    }


def _collate_packed(sequences: Sequence[Sequence[EncodedSample]]) -> TensorBatch:
    lengths = [[window.num_inputs for window in windows] for windows in sequences]
    longest = max(map(sum, lengths))
    positions = [[*sizes, longest - sum(sizes)] for sizes in lengths]
    return {
        "input_ids": pad_lists([[i for w in windows for i in w.input_ids[:-1]] for windows in sequences], 0),
        "position_ids": torch.stack([torch.cat([torch.arange(n) for n in sizes]) for sizes in positions]),
        "labels": pad_lists(
            [[i for w in windows for i in _window_labels(w)] for windows in sequences], IGNORE_INDEX
        ),
        TOKEN_MASK_KEY: pad_lists([[1] * sum(sizes) for sizes in lengths], 0),
    }


def _window_labels(sample: EncodedSample) -> list[int]:
    """Return the token after each input of a window, -100 where it is no target."""
    if sample.is_target is None:
        return sample.input_ids[1:]
    following = zip(sample.input_ids[1:], sample.is_target[1:], strict=True)
    return [token if target else IGNORE_INDEX for token, target in following]


def pad_lists(lists: Sequence[Sequence[int]], value: int) -> Tensor:
    """Return `lists` as int64 [B, L], padded on the right with `value`."""
    out = torch.full((len(lists), max(map(len, lists))), value, dtype=torch.int64)
    for row, values in zip(out, lists, strict=True):
        row[: len(values)] = torch.tensor(values, dtype=torch.int64)
    return out


def group_by_length(
    samples: Sequence[EncodedSample],
    batch_size: int,
    tokens: int | None,
    shuffle: random.Random | None,
    balanced: bool = False,
) -> list[list[int]]:
    """Return batches of indices into `samples`; samples of similar length share one.

    With `tokens`, a batch has at most that many padded source plus target tokens (a longer sample is a
    batch of its own). With `shuffle`, samples are sorted only within pools of 50 batches and the
    order of the batches is random, so that batches differ between epochs. `balanced`: as many indices are
    drawn with `shuffle`, with replacement, each class equally often on average.
    """
    order = list(range(len(samples)))
    if balanced and shuffle is not None:
        counts = Counter(sample.target for sample in samples if isinstance(sample.target, int))
        weights = [1 / counts[sample.target] for sample in samples if isinstance(sample.target, int)]
        order = shuffle.choices(order, weights, k=len(order))
    pool = len(order)
    if shuffle is not None:
        shuffle.shuffle(order)
        mean = sum(sum(r.token_counts) for r in samples) / max(1, len(samples))
        pool = 50 * (batch_size if tokens is None else max(1, int(tokens / mean)))
    batches: list[list[int]] = []
    for start in range(0, len(order), max(1, pool)):
        batches += _fill_batches(
            sorted(order[start : start + pool], key=lambda i: samples[i].token_counts),
            samples,
            batch_size,
            tokens,
        )
    if shuffle is not None:
        shuffle.shuffle(batches)
    return batches


def _fill_batches(
    order: list[int], samples: Sequence[EncodedSample], batch_size: int, tokens: int | None
) -> list[list[int]]:
    if tokens is None:
        return [order[start : start + batch_size] for start in range(0, len(order), batch_size)]
    batches: list[list[int]] = []
    batch: list[int] = []
    longest = (0, 0)
    for i in order:
        source, target = samples[i].token_counts
        widened = (max(longest[0], source), max(longest[1], target))
        if batch and sum(widened) * (len(batch) + 1) > tokens:
            batches.append(batch)
            batch, widened = [], (source, target)
        batch.append(i)
        longest = widened
    return [*batches, batch] if batch else batches


def pack_samples(samples: Sequence[EncodedSample], length: int | None) -> list[EncodedSample]:
    """Return windows packed into as few sequences as best-fit decreasing finds.

    Args:
        samples: windows (`target` is None).
        length: inputs of a sequence; None: of the longest window. A longer window is a sequence of its own.

    Source: Ding et al. 2024, Fewer Truncations Improve Language Modeling, arXiv:2404.10830.
    """
    order = sorted(samples, key=lambda window: window.num_inputs, reverse=True)
    most = length or max((window.num_inputs for window in order), default=0)
    packs: list[list[EncodedSample]] = []
    open_packs: list[tuple[int, int]] = []  # of each sequence with room: inputs left, number; rising
    for window in order:
        size = window.num_inputs
        index = bisect.bisect_left(open_packs, (size, 0))
        space, number = open_packs.pop(index) if index < len(open_packs) else (most, len(packs))
        if number == len(packs):
            packs.append([])
        packs[number].append(window)
        if space > size:
            bisect.insort(open_packs, (space - size, number))
    return [EncodedSample([], None, None, packed=tuple(windows)) for windows in packs]


def plan_batches(
    samples: Sequence[EncodedSample],
    batch_size: int,
    tokens: int | None,
    *,
    epochs: float,
    steps: int | None,
    seed: int,
    balanced: bool = False,
) -> list[list[int]]:
    """Return all batches of a training in order: `steps` of them, or `epochs` passes over `samples`.

    The index of a sample is its number plus that of the pass times the number of samples, so that each pass
    can draw a sample's random parts again. balanced: see `group_by_length`; samples have one class each.
    """
    shuffle = random.Random(seed)
    batches = group_by_length(samples, batch_size, tokens, shuffle, balanced)
    num_batches = steps if steps is not None else max(1, round(epochs * len(batches)))
    for number in itertools.count(1):
        if len(batches) >= num_batches:
            break
        again = group_by_length(samples, batch_size, tokens, shuffle, balanced)
        batches += [[number * len(samples) + index for index in batch] for batch in again]
    return batches[:num_batches]

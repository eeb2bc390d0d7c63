"""Rows as token ids, and batches of rows of similar length.

Shapes: B = batch, L = source length, T = target length. Of pairs that are read one by one (sentence
similarity) there are 2 B texts in a batch of B.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from smelt.compress.train.losses.of_classes import problem_of
from smelt.core.data import IMAGES, SIMILARITY, TEXT_TO_TEXT, Example, Split, texts_read
from smelt.core.files import read_json
from smelt.core.labels import MULTI, REGRESSION, class_names
from smelt.core.rows.targets import read_class_sets, read_classes, read_numbers
from smelt.core.stage import Context
from smelt.core.text import count
from smelt.families.registry import reads_images
from smelt.runtime.images.inputs import ImageInput, images_of, pack_inputs
from smelt.runtime.images.processor import read_processor
from smelt.runtime.models.checkpoint import load_tokenizer
from smelt.runtime.predict import encode_texts, takes_types
from smelt.runtime.text.limits import length_limit
from smelt.runtime.text.windows import cut_windows

ROWS = "rows"  # of a batch: the numbers of its rows, where they have some
_NOT_FED = frozenset({"labels", ROWS})
IGNORE = -100  # the label of positions that no loss sees, as in torch and transformers
TensorBatch: TypeAlias = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Row:
    """One tokenized row: source ids, type ids of a text pair, and what is to come out.

    target: target ids; a class index; for several classes or a number one float for each output, for a pair
    its score (not a number where there is none); None for a window of running text, whose tokens are to come
    out one place earlier. second: ids of the second text of a pair that is read one by one. number: by which
    something is kept of the row. image: of a row of images, which has no ids; it is decoded when its batch is
    made.
    """

    source: list[int]
    types: list[int] | None
    target: list[int] | int | tuple[float, ...] | None
    second: list[int] | None = None
    number: int | None = None
    image: ImageInput | None = None

    @property
    def tokens(self) -> tuple[int, int]:
        """Source and target length, tokens; of two texts that of the longer one counts twice.

        An image counts as patches of 16 x 16 pixels.
        """
        if self.image is not None:
            return self.image.patches, 0
        if self.second is not None:
            longer = max(len(self.source), len(self.second))
            return longer, longer
        return len(self.source), len(self.target) if isinstance(self.target, list) else 0


def encode_split(
    split: Split,
    config: Any,
    tokenizer: Any,
    ctx: Context,
    *,
    max_length: int | None = None,
    what: str = "train",
) -> list[Row]:
    """Tokenize all rows of `split` once. A translation or summary with several references gives several rows.

    Texts longer than the model's limit (or `max_length` tokens) are cut and counted in a warning. For a
    language model all rows are one text, cut in windows (of `max_length` tokens, where that is given). For a
    model of images `tokenizer` is its image processor (see `reader_of`).

    Raises:
        InputError: a label that the model's config does not know.
    """
    limit = 0 if ctx.task == IMAGES else min(max_length or 10**9, length_limit(tokenizer, config.to_dict()))
    if ctx.task == "language-modeling":
        text = cut_windows(split, tokenizer, limit, length=max_length, strided=False)
        return [Row(ids.tolist(), None, None) for ids in text.ids]
    examples = split.examples
    if ctx.task == IMAGES:
        labels = classifier_targets(examples, config, split.origin)
        images = images_of(split, tokenizer)
        return [Row([], None, y, image=image) for image, y in zip(images, labels, strict=True)]
    texts, pairs = texts_read(examples, ctx.task)
    sources = encode_texts(texts, tokenizer, limit, pairs)
    cut = sources.truncated
    types: Sequence[list[int] | None] = sources.types or [None] * len(examples)
    if ctx.task in TEXT_TO_TEXT:
        references = [reference for e in examples for reference in e.references]
        targets = encode_targets(references, tokenizer, limit)
        cut += targets[1]
        owner = [i for i, e in enumerate(examples) for _ in e.references]
        rows = [Row(sources.ids[i], types[i], ids) for i, ids in zip(owner, targets[0], strict=True)]
    elif ctx.task == SIMILARITY:
        rows = [_pair(sources.ids, len(examples), i, e.label) for i, e in enumerate(examples)]
    else:
        labels = classifier_targets(examples, config, split.origin)
        rows = [Row(ids, t, y) for ids, t, y in zip(sources.ids, types, labels, strict=True)]
    if cut:
        those = f"{count(cut, 'text')} of {len(examples)} rows"
        ctx.warn(
            "truncated-texts", f"{what}: {those} {'was' if cut == 1 else 'were'} truncated to {limit} tokens."
        )
    return rows


def reader_of(folder: Path) -> Any:
    """Return what the rows of the model in `folder` are read with: its tokenizer, or its image processor.

    Raises:
        InputError: its files are missing or do not fit together.
    """
    if reads_images(read_json(folder / "config.json")):
        return read_processor(folder)
    return load_tokenizer(folder)


def _pair(ids: Sequence[list[int]], rows: int, at: int, score: object) -> Row:
    """Return row `at` of `rows`; of pairs the second texts' ids stand behind those of all first ones."""
    second = ids[rows + at] if len(ids) > rows else None
    return Row(ids[at], None, (score if isinstance(score, float) else math.nan,), second)


def encode_targets(texts: list[str], tokenizer: Any, limit: int) -> tuple[list[list[int]], int]:
    """Return the target side's ids and how many were cut at `limit` tokens.

    The tokenizer cuts, because it knows which tokens belong around a text: the end (Marian, T5), beginning
    and end (BART), a language's code before the text (mBART-50) or behind its end (mBART).
    """
    found: list[list[int]] = tokenizer(text_target=texts, truncation=False, verbose=False)["input_ids"]
    long = [i for i, ids in enumerate(found) if len(ids) > limit]
    if long:
        again = tokenizer(
            text_target=[texts[i] for i in long], truncation=True, max_length=limit, verbose=False
        )
        for i, ids in zip(long, again["input_ids"], strict=True):
            found[i] = ids
    return found, len(long)


def classifier_targets(
    examples: Sequence[Example], config: Any, what: str = ""
) -> Sequence[int | tuple[float, ...]]:
    """Return each example's class; for several classes C numbers, 1 where one holds; for regression one.

    Raises:
        InputError: a label that the model does not know; the message names it, its rows and the known ones.
    """
    names, problem = class_names({"id2label": config.id2label}), problem_of(config)
    if problem == REGRESSION:
        return [(value,) for value in read_numbers(examples, what)]
    if problem == MULTI:
        sets = read_class_sets(examples, names, what)
        return [tuple(float(i in found) for i in range(len(names))) for found in sets]
    return read_classes(examples, names, what)


def inputs_of(batch: Mapping[str, Tensor]) -> TensorBatch:
    """Return what of `batch` a model is fed."""
    return {name: value for name, value in batch.items() if name not in _NOT_FED}


def collate(rows: Sequence[Row], config: Any) -> TensorBatch:
    """Pad `rows` on the right into the model's inputs plus `labels`.

    Returns input_ids, attention_mask (and token_type_ids where there are any) as int64 [B, L]. For a
    translator labels are int64 [B, T] with -100 for padding, and decoder_input_ids [B, T] are the
    labels shifted right behind the decoder's start token; for a classifier labels are int64 [B], or
    float32 [B, C] where a text has several classes or a number. For a language model labels are int64
    [B, L], the token after each of input_ids, -100 for padding. For pairs that are read one by one the inputs
    are [2 B, L], first all first texts, and labels are float32 [B, 1]. For images the input is pixel_values,
    float32 [B, 3, h, w]. Rows that have numbers give them as `rows`, int64 [B].
    """
    numbers = [row.number for row in rows if row.number is not None]
    if rows[0].image is not None:
        found = _collate_images(rows)
    else:
        found = _collate_windows(rows) if rows[0].target is None else _collate_texts(rows, config)
    return found | ({ROWS: torch.tensor(numbers)} if numbers else {})


def _collate_texts(rows: Sequence[Row], config: Any) -> TensorBatch:
    pad = int(config.pad_token_id or 0)
    texts = [r.source for r in rows] + [r.second for r in rows if r.second is not None]
    batch = {"input_ids": _pad(texts, pad)}
    batch["attention_mask"] = _pad([[1] * len(ids) for ids in texts], 0)
    types = [r.types for r in rows if r.types is not None]
    if types and takes_types({"model_type": config.model_type}):
        batch["token_type_ids"] = _pad(types, 0)
    targets = [r.target for r in rows if isinstance(r.target, list)]
    if targets:
        batch["labels"] = _pad(targets, IGNORE)
        start = config.decoder_start_token_id
        batch["decoder_input_ids"] = _pad([[start, *ids[:-1]] for ids in targets], pad)
    else:
        batch["labels"] = _class_labels(rows)
    return batch


def _class_labels(rows: Sequence[Row]) -> Tensor:
    kind = torch.float32 if isinstance(rows[0].target, tuple) else torch.int64
    return torch.tensor([r.target for r in rows], dtype=kind)


def _collate_images(rows: Sequence[Row]) -> TensorBatch:
    pixels = pack_inputs([row.image for row in rows if row.image is not None])
    return {"pixel_values": torch.from_numpy(pixels), "labels": _class_labels(rows)}


def _collate_windows(rows: Sequence[Row]) -> TensorBatch:
    return {
        "input_ids": _pad([r.source[:-1] for r in rows], 0),
        "attention_mask": _pad([[1] * (len(r.source) - 1) for r in rows], 0),
        "labels": _pad([r.source[1:] for r in rows], IGNORE),
    }


def _pad(lists: Sequence[Sequence[int]], value: int) -> Tensor:
    out = torch.full((len(lists), max(map(len, lists))), value, dtype=torch.int64)
    for row, values in zip(out, lists, strict=True):
        row[: len(values)] = torch.tensor(values, dtype=torch.int64)
    return out


def group_by_length(
    rows: Sequence[Row], batch_size: int, tokens: int | None, shuffle: random.Random | None
) -> list[list[int]]:
    """Return batches of indices into `rows`; rows of similar length share one.

    With `tokens`, a batch holds at most so many padded source plus target tokens (one row that is
    longer stands alone). With `shuffle`, rows are sorted only within pools of 50 batches and the
    order of the batches is random, so that every epoch meets other companions.
    """
    order = list(range(len(rows)))
    pool = len(order)
    if shuffle is not None:
        shuffle.shuffle(order)
        mean = sum(sum(r.tokens) for r in rows) / max(1, len(rows))
        pool = 50 * (batch_size if tokens is None else max(1, int(tokens / mean)))
    batches: list[list[int]] = []
    for at in range(0, len(order), max(1, pool)):
        batches += _cut(sorted(order[at : at + pool], key=lambda i: rows[i].tokens), rows, batch_size, tokens)
    if shuffle is not None:
        shuffle.shuffle(batches)
    return batches


def _cut(order: list[int], rows: Sequence[Row], batch_size: int, tokens: int | None) -> list[list[int]]:
    if tokens is None:
        return [order[at : at + batch_size] for at in range(0, len(order), batch_size)]
    batches: list[list[int]] = []
    batch: list[int] = []
    longest = (0, 0)
    for i in order:
        source, target = rows[i].tokens
        wider = (max(longest[0], source), max(longest[1], target))
        if batch and sum(wider) * (len(batch) + 1) > tokens:
            batches.append(batch)
            batch, wider = [], (source, target)
        batch.append(i)
        longest = wider
    return [*batches, batch] if batch else batches


def spread_out(count: int, wanted: int, seed: int) -> list[int]:
    """Return `wanted` of the places 0 to `count` - 1 (all where there are fewer), rising.

    One is drawn from each of `wanted` equal parts: a file whose rows are sorted is seen from end to end.
    """
    if wanted >= count:
        return list(range(count))
    draw = random.Random(seed)
    return [draw.randrange(k * count // wanted, (k + 1) * count // wanted) for k in range(wanted)]


def plan_batches(
    rows: Sequence[Row], batch_size: int, tokens: int | None, *, epochs: float, steps: int | None, seed: int
) -> list[list[int]]:
    """Return every batch of a whole run, in order: `steps` of them, or `epochs` passes over `rows`."""
    shuffle = random.Random(seed)
    batches = group_by_length(rows, batch_size, tokens, shuffle)
    wanted = steps if steps is not None else max(1, round(epochs * len(batches)))
    while len(batches) < wanted:
        batches += group_by_length(rows, batch_size, tokens, shuffle)
    return batches[:wanted]

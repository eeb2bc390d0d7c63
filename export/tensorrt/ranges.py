"""Which lengths and batches engines are built for: from the data, or as the recipe says."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from smelt.core.data import IMAGES, TEXT_TO_TEXT, Example, Task, texts_read
from smelt.core.errors import InputError
from smelt.core.files import load_json
from smelt.core.stage import Context
from smelt.export.tensorrt.profile import Range, causal_ranges, input_range, past_range
from smelt.export.tensorrt.settings import TensorrtSettings

Ranges = dict[str, Range]
# Tokenizing more examples than this changes no percentile that matters.
_MOST_EXAMPLES = 5000
_PLACES = ("train", "calibration", "validation")


def profile_ranges(
    folder: Path, settings: TensorrtSettings, ctx: Context, under: str = "tensorrt: {%s}"
) -> tuple[list[Ranges], int | None]:
    """Return the range of each dimension (batch, input, past) for each profile, and the position limit.

    Of images only the batch changes. The profiles are those of the recipe, in its order. under: where in a
    recipe such settings stand, for what is said of them.

    Raises:
        InputError: no data to take lengths from and none given, or no profile takes what all others take.
    """
    from smelt.runtime.text.limits import position_limit

    config = load_json(folder / "config.json")
    limit = position_limit(config)
    parts = settings.each_profile()
    if ctx.task == IMAGES:
        made: list[Ranges] = [{"batch": _batch(part)} for part in parts]
    elif ctx.task == "language-modeling":
        made = _of_prompts(folder, config, parts, limit or 10**6, ctx)
    else:
        made = _of_texts(folder, parts, limit or 10**6, ctx, under)
    largest(made)
    return made, limit


def largest(profiles: Sequence[Mapping[str, Range]]) -> int:
    """Return which profile takes all that any of them takes.

    Raises:
        InputError: none does, so that a large batch of long texts would fit nowhere.
    """
    for at, profile in enumerate(profiles):
        if all(profile[name].max >= other[name].max for other in profiles for name in profile):
            return at
    listed = "; ".join(
        ", ".join(f"{name} up to {size.max}" for name, size in profile.items()) for profile in profiles
    )
    raise InputError(
        f"tensorrt: no profile takes what all others take ({listed}), so a large batch of long texts would"
        " fit none. Add one with the largest max_batch_size and the longest lengths.",
        code="no-covering-profile",
        setting="profiles",
    )


def _batch(settings: TensorrtSettings) -> Range:
    return Range(1, settings.opt_batch_size, settings.max_batch_size)


def _of_prompts(
    folder: Path, config: dict[str, Any], parts: Sequence[TensorrtSettings], limit: int, ctx: Context
) -> list[Ranges]:
    """Return the ranges of a decoder-only graph; the cache is as long in each as the longest text."""
    prompts = [_prompt_length(folder, config, part, ctx) for part in parts]
    usual = [part.lengths.opt if part.lengths is not None and len(parts) > 1 else 1 for part in parts]
    longest = parts[0].max_new_tokens or longest_output(folder, ctx.task)
    return [
        {"batch": _batch(part)} | causal_ranges(prompt, longest, limit, max(prompts), opt)
        for part, prompt, opt in zip(parts, prompts, usual, strict=True)
    ]


def _of_texts(
    folder: Path, parts: Sequence[TensorrtSettings], limit: int, ctx: Context, under: str
) -> list[Ranges]:
    """Return the ranges of a graph that reads whole texts, and of the decoder behind it if there is one."""
    examples = [e for place in _PLACES if place in ctx.data for e in ctx.data[place].examples]
    examples = examples[:: max(1, len(examples) // _MOST_EXAMPLES)]
    if not examples and any(part.lengths is None for part in parts):
        raise InputError(
            "tensorrt: there is no train, calibration or validation data to take the lengths of texts from."
            f" Name some in the recipe, or give {under % 'lengths: {opt: 32, max: 128}'}.",
            code="missing-data",
        )
    lengths, outputs = _token_lengths(folder, examples, ctx.task)
    made: list[Ranges] = []
    for part in parts:
        ranges = {"batch": _batch(part), "input": _input(part, lengths, limit)}
        if ctx.task in TEXT_TO_TEXT:
            longest = part.max_new_tokens or longest_output(folder, ctx.task)
            ranges["past"] = past_range(outputs or lengths or [2], longest, limit)
        made.append(ranges)
    most = max(ranges["input"].max for ranges in made)
    longer = sum(n > most for n in lengths)
    if longer:
        are = "is" if longer == 1 else "are"
        ctx.warn(
            "longer-than-engine",
            f"{longer:,} of {len(lengths):,} texts {are} longer than the {most} tokens of the engine and"
            f" would be truncated. See {under % 'length_percentile, lengths'}.",
        )
    return made


def _input(settings: TensorrtSettings, lengths: Sequence[int], limit: int) -> Range:
    if settings.lengths is not None:
        return Range(1, settings.lengths.opt, settings.lengths.max)
    return input_range(lengths, settings.length_percentile, limit)


def longest_output(folder: Path, task: Task) -> int:
    """Return how many new tokens the model in `folder` may put out where nobody asks for a number.

    A `max_length` counts the prompt too, a decoder's one start token or a text; where a text alone is
    longer than that, generation falls back on its own number.
    """
    from smelt.runtime.generate.decoding import MAX_NEW_TOKENS, Decoding

    files = (folder / "generation_config.json", folder / "config.json")
    own = json.loads(next(path for path in files if path.is_file()).read_text(encoding="utf-8"))
    said = {n: own[n] for n in ("max_new_tokens", "max_length") if isinstance(own.get(n), int)}
    longest = Decoding.model_validate(said).longest(1) - 1
    prompted = task == "language-modeling" and "max_new_tokens" not in said
    return max(longest, MAX_NEW_TOKENS) if prompted else longest


def _prompt_length(folder: Path, config: dict[str, Any], settings: TensorrtSettings, ctx: Context) -> int:
    """Return how many tokens are fed at once: `lengths: {max}`, else the windows that texts are cut in."""
    if settings.lengths is not None:
        return settings.lengths.max
    from smelt.runtime.models.checkpoint import load_tokenizer
    from smelt.runtime.text.limits import length_limit
    from smelt.runtime.text.windows import window_length

    windows = next((ctx.data[name].windows for name in _PLACES if name in ctx.data), None)
    return window_length(windows, length_limit(load_tokenizer(folder), config))


def _token_lengths(folder: Path, examples: Sequence[Example], task: Task) -> tuple[list[int], list[int]]:
    """Return the lengths in tokens of the inputs, and of the references where texts are generated."""
    if not examples:
        return [], []
    from smelt.runtime.models.checkpoint import load_tokenizer
    from smelt.runtime.predict import encode_texts

    tokenizer = load_tokenizer(folder)
    texts, pairs = texts_read(examples, task)
    inputs = [len(ids) for ids in encode_texts(texts, tokenizer, 10**9, pairs).ids]
    if task not in TEXT_TO_TEXT:
        return inputs, []
    references = [e.references[0] for e in examples if e.references]
    targets = tokenizer(text_target=references, verbose=False)["input_ids"] if references else []
    return inputs, [len(ids) for ids in targets]

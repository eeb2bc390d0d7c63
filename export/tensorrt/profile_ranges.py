"""Return the lengths and batch sizes that engines are built for, from the data or the recipe."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from smelt.core.data import IMAGE_CLASSIFICATION, TEXT_TO_TEXT_TASKS, Example, Task, input_texts
from smelt.core.errors import InputError
from smelt.core.files import load_json
from smelt.core.stage import Context
from smelt.export.tensorrt.optimization_profile import SizeRange, causal_ranges, input_range, past_range
from smelt.export.tensorrt.settings import TensorrtSettings

DimensionRanges = dict[str, SizeRange]
# Tokenizing more examples does not change a percentile noticeably.
_MAX_EXAMPLES = 5000
_SPLIT_ORDER = ("train", "calibration", "validation")


def profile_ranges(
    folder: Path, settings: TensorrtSettings, ctx: Context, setting_path: str = "tensorrt: {%s}"
) -> tuple[list[DimensionRanges], int | None]:
    """Return the range of each dimension (batch, input, past) for each profile, and the position limit.

    For images only the batch varies. Profiles are those of the recipe, in its order. setting_path: where such
    settings are in a recipe, used in messages.

    Raises:
        InputError: there are no data to compute lengths from and no lengths are set, or no profile covers all
            others.
    """
    from smelt.runtime.text.length_limits import position_limit

    config = load_json(folder / "config.json")
    limit = position_limit(config)
    parts = settings.each_profile()
    if ctx.task == IMAGE_CLASSIFICATION:
        made: list[DimensionRanges] = [{"batch": _batch_range(part)} for part in parts]
    elif ctx.task == "language-modeling":
        made = _decoder_only_ranges(folder, config, parts, limit or 10**6, ctx)
    else:
        made = _text_ranges(folder, parts, limit or 10**6, ctx, setting_path)
    largest_profile(made)
    return made, limit


def largest_profile(profiles: Sequence[Mapping[str, SizeRange]]) -> int:
    """Return the index of the profile that covers all others.

    Raises:
        InputError: none does, so that a large batch of long texts would not fit any profile.
    """
    for at, profile in enumerate(profiles):
        if all(profile[name].max >= other[name].max for other in profiles for name in profile):
            return at
    listed = "; ".join(
        ", ".join(f"{name} up to {size.max}" for name, size in profile.items()) for profile in profiles
    )
    raise InputError(
        f"tensorrt: no profile covers all others ({listed}), so a large batch of long texts would not fit"
        " any. Add one with the largest max_batch_size and the longest lengths.",
        code="no-covering-profile",
        setting="profiles",
    )


def _batch_range(settings: TensorrtSettings) -> SizeRange:
    return SizeRange(1, settings.opt_batch_size, settings.max_batch_size)


def _decoder_only_ranges(
    folder: Path, config: dict[str, Any], parts: Sequence[TensorrtSettings], limit: int, ctx: Context
) -> list[DimensionRanges]:
    """Return the ranges of a decoder-only graph; the cache is as long in each as the longest text."""
    prompts = [_max_prompt_length(folder, config, part, ctx) for part in parts]
    usual = [part.lengths.opt if part.lengths is not None and len(parts) > 1 else 1 for part in parts]
    longest = parts[0].max_new_tokens or max_output_tokens(folder, ctx.task)
    return [
        {"batch": _batch_range(part)} | causal_ranges(prompt, longest, limit, max(prompts), opt)
        for part, prompt, opt in zip(parts, prompts, usual, strict=True)
    ]


def _text_ranges(
    folder: Path, parts: Sequence[TensorrtSettings], limit: int, ctx: Context, under: str
) -> list[DimensionRanges]:
    """Return the ranges of a graph that reads whole texts, and of the decoder after it if there is one."""
    examples = [e for place in _SPLIT_ORDER if place in ctx.data for e in ctx.data[place].examples]
    examples = examples[:: max(1, len(examples) // _MAX_EXAMPLES)]
    if not examples and any(part.lengths is None for part in parts):
        raise InputError(
            "tensorrt: there is no train, calibration or validation data to compute text lengths from."
            f" Add some to the recipe, or set {under % 'lengths: {opt: 32, max: 128}'}.",
            code="missing-data",
        )
    lengths, outputs = _token_lengths(folder, examples, ctx.task)
    made: list[DimensionRanges] = []
    for part in parts:
        ranges = {"batch": _batch_range(part), "input": _input_range(part, lengths, limit)}
        if ctx.task in TEXT_TO_TEXT_TASKS:
            longest = part.max_new_tokens or max_output_tokens(folder, ctx.task)
            ranges["past"] = past_range(outputs or lengths or [2], longest, limit)
        made.append(ranges)
    most = max(ranges["input"].max for ranges in made)
    longer = sum(n > most for n in lengths)
    if longer:
        are = "is" if longer == 1 else "are"
        ctx.warn(
            "longer-than-engine",
            f"{longer:,} of {len(lengths):,} texts {are} longer than the {most} tokens of the engine and"
            f" would be truncated. Increase {under % 'length_percentile, lengths'}.",
        )
    return made


def _input_range(settings: TensorrtSettings, lengths: Sequence[int], limit: int) -> SizeRange:
    if settings.lengths is not None:
        return SizeRange(1, settings.lengths.opt, settings.lengths.max)
    return input_range(lengths, settings.length_percentile, limit)


def max_output_tokens(folder: Path, task: Task) -> int:
    """Return the maximum number of new tokens of the model in `folder`, if no number is requested.

    `max_length` counts the prompt too: a decoder's one start token, or a text. If the text alone is longer,
    generation uses its own default.
    """
    from smelt.runtime.generate.generation_config import MAX_NEW_TOKENS, GenerationConfig

    files = (folder / "generation_config.json", folder / "config.json")
    own = json.loads(next(path for path in files if path.is_file()).read_text(encoding="utf-8"))
    said = {n: own[n] for n in ("max_new_tokens", "max_length") if isinstance(own.get(n), int)}
    longest = GenerationConfig.model_validate(said).max_total_length(1) - 1
    prompted = task == "language-modeling" and "max_new_tokens" not in said
    return max(longest, MAX_NEW_TOKENS) if prompted else longest


def _max_prompt_length(folder: Path, config: dict[str, Any], settings: TensorrtSettings, ctx: Context) -> int:
    """Return the largest number of input tokens: `lengths: {max}`, else the window of cut texts."""
    if settings.lengths is not None:
        return settings.lengths.max
    from smelt.runtime.models.checkpoint import load_tokenizer
    from smelt.runtime.text.length_limits import max_input_length
    from smelt.runtime.text.text_windows import window_length

    windows = next((ctx.data[name].windows for name in _SPLIT_ORDER if name in ctx.data), None)
    return window_length(windows, max_input_length(load_tokenizer(folder), config))


def _token_lengths(folder: Path, examples: Sequence[Example], task: Task) -> tuple[list[int], list[int]]:
    """Return the lengths in tokens of the inputs, and of the references if texts are generated."""
    if not examples:
        return [], []
    from smelt.runtime.models.checkpoint import load_tokenizer
    from smelt.runtime.predict_texts import encode_texts

    tokenizer = load_tokenizer(folder)
    texts, pairs = input_texts(examples, task)
    inputs = [len(ids) for ids in encode_texts(texts, tokenizer, 10**9, pairs).ids]
    if task not in TEXT_TO_TEXT_TASKS:
        return inputs, []
    references = [e.references[0] for e in examples if e.references]
    targets = tokenizer(text_target=references, verbose=False)["input_ids"] if references else []
    return inputs, [len(ids) for ids in targets]

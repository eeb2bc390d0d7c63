"""The ranges of sizes for the profiles of engines, from the data and the recipe, and the shapes of inputs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from smelt.core.errors import InputError, RunError
from smelt.core.files import load_json
from smelt.data.splits import Example, input_texts
from smelt.data.tasks import Task, task_traits
from smelt.export.settings import TensorrtSettings
from smelt.export.tensorrt.build_engine import (
    ProfileShapes,
    SizeRange,
    causal_ranges,
    input_range,
    past_range,
)
from smelt.models.text_rules import max_input_length, position_limit, window_length
from smelt.stage import Context

DimensionRanges = dict[str, SizeRange]
# Tokenizing more examples does not change a percentile noticeably.
_MAX_EXAMPLES = 5000
_SPLIT_ORDER = ("train", "calibration", "validation")


def profile_ranges(
    folder: Path,
    settings: TensorrtSettings,
    ctx: Context,
    setting_path: str = "tensorrt: {%s}",
    cache_length: int | None = None,
) -> tuple[list[DimensionRanges], int | None]:
    """Return the range of each dimension (batch, input, past) for each profile, and the position limit.

    For images only the batch varies. Profiles are those of the recipe, in its order. setting_path: where such
    settings are in a recipe, used in messages. cache_length: of caches that do not grow.

    Raises:
        InputError: there are no data to compute lengths from and no lengths are set, or no profile covers all
            others.
    """
    config = load_json(folder / "config.json")
    limit = min(filter(None, (position_limit(config), cache_length)), default=None)
    parts = settings.each_profile()
    if ctx.traits.modality == "image":
        ranges: list[DimensionRanges] = [{"batch": _batch_range(part)} for part in parts]
    elif ctx.traits.architecture == "decoder":
        ranges = _decoder_only_ranges(folder, config, parts, limit or 10**6, ctx)
    else:
        ranges = _text_ranges(folder, parts, limit or 10**6, ctx, setting_path)
    largest_profile(ranges)
    return ranges, limit


def largest_profile(profiles: Sequence[Mapping[str, SizeRange]]) -> int:
    """Return the index of the profile that covers all others.

    Raises:
        InputError: none does, so that a large batch of long texts would not fit any profile.
    """
    for profile_index, profile in enumerate(profiles):
        if all(profile[name].max >= other[name].max for other in profiles for name in profile):
            return profile_index
    profile_texts = "; ".join(
        ", ".join(f"{name} up to {size.max}" for name, size in profile.items()) for profile in profiles
    )
    raise InputError(
        f"tensorrt: no profile covers all others ({profile_texts}), so a large batch of long texts "
        "would not fit"
        " any. Add one with the largest max_batch_size and the longest lengths.",
        code="no-covering-profile",
        setting="profiles",
    )


def _batch_range(settings: TensorrtSettings) -> SizeRange:
    return SizeRange(1, settings.opt_batch_size, settings.max_batch_size)


def _row_range(settings: TensorrtSettings) -> SizeRange:
    """Return the range of the rows of a decoder: texts by beams."""
    beams = settings.num_beams or 1
    return SizeRange(1, settings.opt_batch_size * beams, settings.max_batch_size * beams)


def _decoder_only_ranges(
    folder: Path, config: dict[str, Any], parts: Sequence[TensorrtSettings], limit: int, ctx: Context
) -> list[DimensionRanges]:
    """Return the ranges of a decoder-only graph; the cache is as long in each as the longest text."""
    prompts = [_max_prompt_length(folder, config, part, ctx) for part in parts]
    opt_lengths = [part.lengths.opt if part.lengths is not None and len(parts) > 1 else 1 for part in parts]
    longest = parts[0].max_new_tokens or max_output_tokens(folder, ctx.task)
    return [
        {"batch": _batch_range(part), "rows": _row_range(part)}
        | causal_ranges(prompt, longest, limit, max(prompts), opt)
        for part, prompt, opt in zip(parts, prompts, opt_lengths, strict=True)
    ]


def _text_ranges(
    folder: Path, parts: Sequence[TensorrtSettings], limit: int, ctx: Context, under: str
) -> list[DimensionRanges]:
    """Return the ranges of a graph that reads whole texts, and of the decoder after it if there is one."""
    examples = _sample_examples(ctx)
    if not examples and any(part.lengths is None for part in parts):
        raise InputError(
            "tensorrt: there is no train, calibration or validation data to compute text lengths from."
            f" Add some to the recipe, or set {under % 'lengths: {opt: 32, max: 128}'}.",
            code="missing-data",
        )
    lengths, outputs = _token_lengths(folder, examples, ctx.task)
    profiles: list[DimensionRanges] = []
    for part in parts:
        ranges = {"batch": _batch_range(part), "input": _input_range(part, lengths, limit)}
        if ctx.traits.architecture == "encoder-decoder":
            longest = part.max_new_tokens or max_output_tokens(folder, ctx.task)
            ranges["past"] = past_range(outputs or lengths or [2], longest, limit)
            ranges["rows"] = _row_range(part)
        profiles.append(ranges)
    max_length = max(ranges["input"].max for ranges in profiles)
    num_longer = sum(n > max_length for n in lengths)
    if num_longer:
        verb = "is" if num_longer == 1 else "are"
        ctx.warn(
            "longer-than-engine",
            f"{num_longer:,} of {len(lengths):,} texts {verb} longer than the {max_length} tokens of "
            "the engine and"
            f" would be truncated. Increase {under % 'length_percentile, lengths'}.",
        )
    return profiles


def _sample_examples(ctx: Context) -> list[Example]:
    examples = [
        e for split_name in _SPLIT_ORDER if split_name in ctx.data for e in ctx.data[split_name].examples
    ]
    return examples[:: max(1, len(examples) // _MAX_EXAMPLES)]


def _input_range(settings: TensorrtSettings, lengths: Sequence[int], limit: int) -> SizeRange:
    if settings.lengths is not None:
        return SizeRange(1, settings.lengths.opt, settings.lengths.max)
    return input_range(lengths, settings.length_percentile, limit)


def max_output_tokens(folder: Path, task: Task) -> int:
    """Return the maximum number of new tokens of the model in `folder`, if no number is requested.

    `max_length` counts the prompt too: a decoder's one start token, or a text. If the text alone is longer,
    generation uses its own default.
    """
    from smelt.generation.config import MAX_NEW_TOKENS, GenerationConfig

    files = (folder / "generation_config.json", folder / "config.json")
    generation_config = json.loads(next(path for path in files if path.is_file()).read_text(encoding="utf-8"))
    limits = {
        n: generation_config[n]
        for n in ("max_new_tokens", "max_length")
        if isinstance(generation_config.get(n), int)
    }
    longest = GenerationConfig.model_validate(limits).max_total_length(1) - 1
    has_prompt = task_traits(task).architecture == "decoder" and "max_new_tokens" not in limits
    return max(longest, MAX_NEW_TOKENS) if has_prompt else longest


def _max_prompt_length(folder: Path, config: dict[str, Any], settings: TensorrtSettings, ctx: Context) -> int:
    """Return the largest number of input tokens: `lengths: {max}`, else the window of cut texts.

    For text generation it is the percentile of the prompts' lengths, of the data if there are any.
    """
    if settings.lengths is not None:
        return settings.lengths.max
    from smelt.models.checkpoint import load_tokenizer

    if ctx.traits.samples == "prompts":
        examples = _sample_examples(ctx)
        lengths, _ = _token_lengths(folder, examples, ctx.task)
        if lengths:
            limit = max_input_length(load_tokenizer(folder), config)
            return input_range(lengths, settings.length_percentile, limit).max
    windows = next((ctx.data[name].windows for name in _SPLIT_ORDER if name in ctx.data), None)
    return window_length(windows, max_input_length(load_tokenizer(folder), config))


def _token_lengths(folder: Path, examples: Sequence[Example], task: Task) -> tuple[list[int], list[int]]:
    """Return the lengths in tokens of the inputs, and of the references if texts are generated."""
    if not examples:
        return [], []
    from smelt.models.checkpoint import load_tokenizer
    from smelt.models.tokenizer import encode_texts

    tokenizer = load_tokenizer(folder)
    texts, pairs = input_texts(examples, task)
    inputs = [len(ids) for ids in encode_texts(texts, tokenizer, 10**9, pairs).ids]
    if task_traits(task).architecture != "encoder-decoder":
        return inputs, []
    references = [e.references[0] for e in examples if e.references]
    targets = tokenizer(text_target=references, verbose=False)["input_ids"] if references else []
    return inputs, [len(ids) for ids in targets]


_THIRD_PARTY_SPLIT_ORDER = ("calibration", "validation", "train")


def imported_ranges(
    folder: Path, settings: TensorrtSettings, ctx: Context
) -> tuple[list[DimensionRanges], int | None]:
    """Return for each profile the range of the batch, and of each further axis of each input by `NAME.AXIS`.

    Raises:
        InputError: an axis has no fixed size, and there are no samples that a stage may use.
    """
    if ctx.traits.modality != "arrays":
        return profile_ranges(folder, settings, ctx)
    from smelt.runtimes.onnx_import.signature import read_signature

    arrays = next(
        (ctx.data[array_axis].arrays for array_axis in _THIRD_PARTY_SPLIT_ORDER if array_axis in ctx.data),
        None,
    )
    sizes: DimensionRanges = {}
    batches: list[str] = []
    for value in read_signature(folder).inputs:
        for axis, length in enumerate(value.shape or ()):
            if isinstance(length, int):
                continue
            if axis == value.axis:
                batches += [f"{value.name}.{axis}"] if axis else []  # axis 0 is the batch for texts too
                continue
            if arrays is None:
                raise InputError(
                    f"tensorrt: the input '{value.name}' has dynamic axes, and there are no calibration"
                    " samples to take their sizes from. Add data: {calibration: FILE.npz}.",
                    code="no-calibration-data",
                )
            # a sample has no batch axis
            sample_axis = axis if value.axis is None or axis < value.axis else axis - 1
            num_shapes = arrays.num_samples if arrays.max_batch_size == 1 else 1  # others have one shape
            samples = [arrays.sample(index)[value.name] for index in range(num_shapes)]
            lengths = sorted(int(sample.shape[sample_axis]) for sample in samples)
            sizes[f"{value.name}.{axis}"] = SizeRange(lengths[0], lengths[len(lengths) // 2], lengths[-1])
    profiles: list[DimensionRanges] = []
    for part in settings.each_profile():
        batch = SizeRange(1, part.opt_batch_size, part.max_batch_size)
        profiles.append({"batch": batch, **dict.fromkeys(batches, batch), **sizes})
    largest_profile(profiles)
    return profiles, None


def imported_shapes(model: Any, ranges: Mapping[str, SizeRange], graph: str) -> ProfileShapes:
    """Return min, opt and max shape of every input of an ONNX model with an axis without a fixed size.

    Raises:
        RunError: an input has more such axes than texts have.
    """
    weights = {tensor.name for tensor in model.graph.initializer}
    shapes: ProfileShapes = {}
    for value in model.graph.input:
        sizes = value.type.tensor_type.shape.dim
        if value.name in weights or all(d.dim_value > 0 for d in sizes):
            continue
        axes = [_axis_range(value.name, axis, size, ranges, graph) for axis, size in enumerate(sizes)]
        shapes[value.name] = (
            tuple(r.min for r in axes), tuple(r.opt for r in axes), tuple(r.max for r in axes),
        )  # fmt: skip
    return shapes


def _axis_range(name: str, axis: int, size: Any, ranges: Mapping[str, SizeRange], graph: str) -> SizeRange:
    if size.dim_value > 0:
        return SizeRange(size.dim_value, size.dim_value, size.dim_value)
    size_range = ranges.get(f"{name}.{axis}") or (ranges.get("batch") if axis == 0 else None)
    size_range = size_range or (ranges.get("input") if axis == 1 else None)
    if size_range is None:
        raise RunError(
            f"{graph}: axis {axis} of input '{name}' is dynamic, and no size is known for it. Export the"
            " graph with a fixed size.",
            code="unknown-axis-size",
            file=graph,
        )
    return size_range

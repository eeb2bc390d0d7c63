"""ONNX to TensorRT: an engine per graph, for the lengths that the data has."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field, model_validator

from smelt.core.artifact import Artifact, Format
from smelt.core.data import TASKS, TEXT_TO_TEXT, Example, Task, texts_read
from smelt.core.errors import InputError, RunError
from smelt.core.stage import Context, Need, Settings
from smelt.export.tensorrt.build import BuildOptions, Compatibility, build_engine, timing_cache_path
from smelt.export.tensorrt.preflight import Problem, check_profile, load_graph, preflight
from smelt.export.tensorrt.profile import (
    Range,
    Shapes,
    causal_ranges,
    input_range,
    past_range,
    shapes_of,
)
from smelt.runtime.backends.tensorrt_module import import_tensorrt

# Tokenizing more examples than this changes no percentile that matters.
_MOST_EXAMPLES = 5000
_PLACES = ("train", "calibration", "validation")


class Lengths(Settings):
    """Input lengths in tokens that the engine is built for: it is fastest at `opt`, refuses above `max`."""

    opt: int = Field(ge=1)
    max: int = Field(ge=1)

    @model_validator(mode="after")
    def _ordered(self) -> Lengths:
        if self.opt > self.max:
            raise ValueError(f"opt ({self.opt}) must not be greater than max ({self.max})")
        return self


class TensorrtSettings(Settings):
    """Settings of `tensorrt`.

    workspace_mib: GPU memory that kernels may use for themselves, MiB. optimization_level: 0 (quick
    build) to 5 (longest search). tf32: let fp32 products use TF32. timing_cache: keep kernel timings in
    the user's cache folder, so that later builds are quicker. hardware_compatibility: GPUs the engine
    runs on besides this one. version_compatible: runs under later versions of TensorRT too.
    max_batch_size: largest batch of one call; greater ones are split. lengths: of the input; from the
    data where not given (median and `length_percentile`). max_new_tokens: longest output; where not
    given that of `score: {generation: ...}`, else the model's own, else 128.
    """

    workspace_mib: int = Field(default=2048, ge=16, le=1 << 20)
    optimization_level: int = Field(default=3, ge=0, le=5)
    tf32: bool = True
    timing_cache: bool = True
    hardware_compatibility: Compatibility = "none"
    version_compatible: bool = False
    max_batch_size: int = Field(default=8, ge=1, le=4096)
    lengths: Lengths | None = None
    length_percentile: float = Field(default=99.0, ge=50, le=100)
    max_new_tokens: int | None = Field(default=None, ge=1, le=4096)


class TensorrtStage:
    """Build a TensorRT engine for each ONNX graph.

    Takes what `onnx: {target: tensorrt}` wrote; its dtype and quantization are the engine's, since
    TensorRT 11 knows no others. The file is checked first, because TensorRT builds some mistakes
    without a word. Sizes come from the data: batch 1 to `max_batch_size`, lengths 1 to the 99th
    percentile, fastest at the median. An engine runs on the kind of GPU that built it, unless
    `hardware_compatibility` says otherwise.

        - tensorrt: {optimization_level: 4, max_batch_size: 16}
          optional: true      # without TensorRT: skipped, and the report says so
    """

    name: ClassVar[str] = "tensorrt"
    accepts: ClassVar[frozenset[Format]] = frozenset({"onnx"})
    produces: ClassVar[Format] = "tensorrt"
    needs: ClassVar[frozenset[Need]] = frozenset({"tensorrt"})
    source: ClassVar[str] = "NVIDIA TensorRT 11 documentation, https://docs.nvidia.com/deeplearning/tensorrt"
    version: ClassVar[int] = 4
    settings_type: ClassVar[type[Settings]] = TensorrtSettings
    tasks: ClassVar[frozenset[Task]] = frozenset(TASKS)

    def __call__(self, src: Artifact, settings: TensorrtSettings, ctx: Context) -> None:
        """Write `NAME.plan` for every `NAME.onnx` of `src`, with config and tokenizer.

        Raises:
            InputError: the ONNX file was exported for another target, or no lengths are known.
            MissingDependencyError: TensorRT is not installed.
            RunError: the preflight found an error, or TensorRT refused the graph (node and remedy named).
        """
        target = src.manifest.facts.get("target")
        if target != "tensorrt":
            raise InputError(
                f"{src.path}: this ONNX was exported for '{target}'; TensorRT needs its own."
                " Put `- onnx: {target: tensorrt}` before the step, and `from:` where it branches off."
            )
        trt = import_tensorrt()
        ranges, limit = dimension_ranges(src.path, settings, ctx)
        graphs = plan_graphs(src.path, ranges, limit, ctx.warnings)
        options = _options(trt, settings)
        for path, shapes in graphs.items():
            plan, said = build_engine(trt, path, shapes, options, ctx.progress)
            (ctx.out / f"{path.stem}.plan").write_bytes(plan)
            ctx.warnings.extend(f"{path.name}: TensorRT: {line[:300]}" for line in said[:5])
        _copy_the_rest(src.path, ctx.out)
        kept = ("parameters", "dtype", "scheme")
        ctx.facts.update({k: src.manifest.facts[k] for k in kept if k in src.manifest.facts})
        ctx.facts.update(
            target="tensorrt",
            tensorrt=f"{trt.__name__} {trt.__version__}",
            profile={name: [r.min, r.opt, r.max] for name, r in ranges.items()},
        )


def dimension_ranges(
    folder: Path, settings: TensorrtSettings, ctx: Context
) -> tuple[dict[str, Range], int | None]:
    """Return the range of each dimension (batch, input, past) and the model's position limit.

    Raises:
        InputError: no data to take lengths from and none given.
    """
    from smelt.runtime.text.limits import position_limit

    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    limit = position_limit(config)
    most = limit or 10**6
    ranges = {"batch": Range(1, 1, settings.max_batch_size)}
    if ctx.task == "language-modeling":
        prompt = _prompt_length(folder, config, settings, ctx)
        longest = settings.max_new_tokens or longest_output(folder, ctx.task)
        return ranges | causal_ranges(prompt, longest, most), limit
    examples = [e for place in _PLACES if place in ctx.data for e in ctx.data[place].examples]
    examples = examples[:: max(1, len(examples) // _MOST_EXAMPLES)]
    if settings.lengths is None and not examples:
        raise InputError(
            "tensorrt: there is no train, calibration or validation data to take the lengths of texts from."
            " Name some in the recipe, or give tensorrt: {lengths: {opt: 32, max: 128}}."
        )
    lengths, outputs = _token_lengths(folder, examples, ctx.task)
    if settings.lengths is not None:
        ranges["input"] = Range(1, settings.lengths.opt, settings.lengths.max)
    else:
        ranges["input"] = input_range(lengths, settings.length_percentile, most)
    longer = sum(n > ranges["input"].max for n in lengths)
    if longer:
        ctx.warnings.append(
            f"{longer} of {len(lengths)} texts looked at are longer than the {ranges['input'].max} tokens"
            " that the engine takes and would be cut; see tensorrt: {length_percentile, lengths}"
        )
    if ctx.task in TEXT_TO_TEXT:
        longest = settings.max_new_tokens or longest_output(folder, ctx.task)
        ranges["past"] = past_range(outputs or lengths or [2], longest, most)
    return ranges, limit


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


def plan_graphs(
    folder: Path, ranges: dict[str, Range], limit: int | None, warnings: list[str]
) -> dict[Path, Shapes]:
    """Return the shapes to build each ONNX graph for, after all of them have passed the preflight.

    Raises:
        RunError: with every error of every graph.
    """
    graphs: dict[Path, Shapes] = {}
    problems: list[Problem] = []
    for path in sorted(folder.glob("*.onnx")):
        model = load_graph(path)
        problems += preflight(model, path)
        graphs[path] = shapes_of(model, ranges, path.name)
        found = check_profile(model, graphs[path], limit)
        problems += [problem._replace(graph=path.name) for problem in found]
    if not graphs:
        raise RunError(f"{folder}: no .onnx file in this folder.")
    warnings.extend(p.text for p in problems if p.severity == "warning")
    errors = [p.text for p in problems if p.severity == "error"]
    if errors:
        shown = errors[:20] + [f"... and {len(errors) - 20} more"] * (len(errors) > 20)
        raise RunError("TensorRT cannot take this graph:\n  " + "\n  ".join(shown))
    return graphs


def _options(trt: Any, settings: TensorrtSettings) -> BuildOptions:
    cache = None
    if settings.timing_cache:
        import platform

        import torch

        gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no gpu"
        cache = timing_cache_path(trt, f"{gpu} {platform.node()}")
    return BuildOptions(
        settings.workspace_mib, settings.optimization_level, settings.tf32,
        settings.hardware_compatibility, settings.version_compatible, cache,
    )  # fmt: skip


def _copy_the_rest(src: Path, out: Path) -> None:
    """Copy config, generation config and tokenizer: all that is neither a graph nor its weights."""
    from smelt.runtime.models.checkpoint import copy_tokenizer

    for name in ("config.json", "generation_config.json"):
        if (src / name).is_file():
            shutil.copyfile(src / name, out / name)
    copy_tokenizer(src, out)

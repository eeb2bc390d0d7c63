"""Export int8 caches for the onnx stage: calibrate scales, write the graph, compare it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from smelt.core.errors import InputError, RunError
from smelt.core.stage import Context
from smelt.export.graph_files import read_graph, write_graph
from smelt.export.parity.check_int8_caches import check_int8_caches
from smelt.export.parity.check_parity import ExportedModel
from smelt.export.parity.tolerances import check_output
from smelt.export.parity.torch_reference import TorchReference, logits_for
from smelt.export.precision.kv_cache.cache_ranges import (
    Float32Array,
    cache_calibration_rows,
    cache_calibration_split,
    cache_scales,
    max_cache_magnitudes,
)
from smelt.export.precision.kv_cache.int8_kv_cache import cached_attentions, quantize_kv_cache, rotated_keys
from smelt.export.precision.kv_cache.kv_cache_support import (
    unsupported_head_dim,
    unsupported_model,
    unsupported_task,
)

INT8_CACHE = "int8"


def require_int8_caches(attentions: Any, config: Any, ctx: Context) -> None:
    """Require, before tracing, a model whose caches can be int8.

    Args:
        attentions: the `AttentionModule`s of the model.
        config: config.json of the model.
        ctx: with task and data.

    Raises:
        InputError: the task, the heads or the data do not fit.
    """
    widths = [(one.heads.head_dim, one.parts.rotary) for one in attentions]
    found = unsupported_task(ctx.task) or unsupported_model(config)
    if why := found or next(filter(None, (unsupported_head_dim(*one) for one in widths)), None):
        code = "unsupported-task" if unsupported_task(ctx.task) else "unsupported-cache"
        raise InputError(f"onnx: kv_cache: int8: {why}", code=code, setting="kv_cache")
    cache_calibration_split(ctx.data)


def export_int8_cache(subject: ExportedModel, reference: TorchReference, source: Path, ctx: Context) -> None:
    """Convert keys and values of the finished graph in `ctx.out` to int8, in place; compare it.

    Args:
        subject: the graph, which passed the parity check.
        reference: the samples of the parity check.
        source: the folder with the tokenizer.
        ctx: gets details: the samples, the cache bytes per token, and the results of the comparison.

    Raises:
        InputError: there are no samples, or no text in them.
        RunError: a value is not finite, the structure of the graph is not supported, or ONNX Runtime does not
            support such caches.
        ParityError: the outputs differ.
    """
    name = subject.graphs[-1].name
    path = subject.folder / f"{name}.onnx"
    scales = _cache_scales(path, source, ctx)
    before = _graph_logits(subject, reference)
    model = read_graph(path, values=False)
    quantize_kv_cache(model, scales)
    write_graph(model, path)
    try:
        found = check_int8_caches(subject.folder, name, list(cached_attentions(model)), scales, reference)
    except InputError as error:
        raise RunError(
            f"onnx: kv_cache: int8: {error} Tested with ONNX Runtime 1.31 and newer. Update onnxruntime, or"
            " set kv_cache: float.",
            code="unsupported-operator",
        ) from error
    moved = check_output(name, "logits", before, _graph_logits(subject, reference), "int8-caches")
    numbers = sum(scale.size for scale in scales.values())
    ctx.details["kv_cache"] |= {
        "bytes_per_token": {"float32": 4 * numbers, INT8_CACHE: numbers},
        "against_float": moved,
        **found,
    }


def _cache_scales(path: Path, source: Path, ctx: Context) -> dict[str, Float32Array]:
    from smelt.core.files import read_json_object
    from smelt.runtime.backends.onnx_session import open_onnx_session
    from smelt.runtime.models.checkpoint import load_tokenizer
    from smelt.runtime.text.length_limits import max_input_length

    split, tokenizer = cache_calibration_split(ctx.data), load_tokenizer(source)
    limit = max_input_length(tokenizer, read_json_object(source / "config.json"))
    rows = cache_calibration_rows(ctx.data[split], tokenizer, limit)
    rotated = rotated_keys(read_graph(path, values=False))
    largest = max_cache_magnitudes(open_onnx_session(path, ctx.threads), rows, rotated, split)
    ctx.details["kv_cache"] = {
        "dtype": INT8_CACHE,
        "split": split,
        "rows": len(rows),
        "tokens": sum(map(len, rows)),
    }
    return {output: cache_scales(values) for output, values in largest.items()}


def _graph_logits(subject: ExportedModel, reference: TorchReference) -> Any:
    """Return the logits of the graph of a step in its folder."""
    from smelt.runtime.backends.open_runner import open_folder

    with open_folder(subject.folder, "onnx", subject.target, subject.threads) as runner:
        return logits_for(runner, reference)

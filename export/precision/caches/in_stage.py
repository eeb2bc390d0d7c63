"""Keys and values as int8, as the onnx stage finds their scales, writes the graph and compares it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from smelt.core.errors import InputError, RunError
from smelt.core.stage import Context
from smelt.export.graph_files import read_graph, write_graph
from smelt.export.parity.check import Subject
from smelt.export.parity.compare import check_parity
from smelt.export.parity.int8_caches import check_int8_caches
from smelt.export.parity.reference import Reference, logits_for
from smelt.export.precision.caches.codes import attentions_of, code_caches, rotated_keys
from smelt.export.precision.caches.fit import refused_model, refused_task, refused_width
from smelt.export.precision.caches.ranges import (
    Floats,
    calibration_rows,
    calibration_split,
    largest_magnitudes,
    scales_of,
)

INT8 = "int8"


def require_int8_caches(attentions: Any, config: Any, ctx: Context) -> None:
    """Refuse, before anything is traced, what has no caches that could be int8.

    Args:
        attentions: the `AttentionModule`s of the model.
        config: config.json of the model.
        ctx: whose task and data.

    Raises:
        InputError: the task, the heads or the data do not fit.
    """
    widths = [(one.heads.width, one.parts.rotary) for one in attentions]
    found = refused_task(ctx.task) or refused_model(config)
    if why := found or next(filter(None, (refused_width(*one) for one in widths)), None):
        code = "unsupported-task" if refused_task(ctx.task) else "unsupported-cache"
        raise InputError(f"onnx: kv_cache: int8: {why}", code=code, setting="kv_cache")
    calibration_split(ctx.data)


def keep_as_int8(subject: Subject, reference: Reference, source: Path, ctx: Context) -> None:
    """Let the finished graph in `ctx.out` keep keys and values as int8, in place; compare it.

    Args:
        subject: the graph, which agrees with its parent.
        reference: the rows that parity is asked on.
        source: the folder with the tokenizer.
        ctx: gets details: the rows, the bytes of cache that a token takes, and what was compared.

    Raises:
        InputError: no rows, or no text in them.
        RunError: a value is not finite, the graph is not wired as it is known, or ONNX Runtime has no such
            caches.
        ParityError: the graph computes something else.
    """
    name = subject.graphs[-1].name
    path = subject.folder / f"{name}.onnx"
    scales = _scales(path, source, ctx)
    before = _logits(subject, reference)
    model = read_graph(path, values=False)
    code_caches(model, scales)
    write_graph(model, path)
    try:
        found = check_int8_caches(subject.folder, name, list(attentions_of(model)), scales, reference)
    except InputError as error:
        raise RunError(
            f"onnx: kv_cache: int8: {error} Versions of ONNX Runtime before 1.31 were not tried: update it,"
            " or set kv_cache: float.",
            code="unsupported-operator",
        ) from error
    moved = check_parity(name, "logits", before, _logits(subject, reference), "int8-caches")
    numbers = sum(scale.size for scale in scales.values())
    ctx.details["kv_cache"] |= {
        "bytes_per_token": {"float32": 4 * numbers, INT8: numbers},
        "against_float": moved,
        **found,
    }


def _scales(path: Path, source: Path, ctx: Context) -> dict[str, Floats]:
    from smelt.core.files import read_json
    from smelt.runtime.backends.onnx_session import open_session
    from smelt.runtime.models.checkpoint import load_tokenizer
    from smelt.runtime.text.limits import length_limit

    split, tokenizer = calibration_split(ctx.data), load_tokenizer(source)
    limit = length_limit(tokenizer, read_json(source / "config.json"))
    rows = calibration_rows(ctx.data[split], tokenizer, limit)
    rotated = rotated_keys(read_graph(path, values=False))
    largest = largest_magnitudes(open_session(path, ctx.threads), rows, rotated, split)
    ctx.details["kv_cache"] = {
        "dtype": INT8,
        "split": split,
        "rows": len(rows),
        "tokens": sum(map(len, rows)),
    }
    return {output: scales_of(values) for output, values in largest.items()}


def _logits(subject: Subject, reference: Reference) -> Any:
    """Return the logits of the graph of a step as it lies in its folder."""
    from smelt.runtime.backends.open_runner import open_folder

    with open_folder(subject.folder, "onnx", subject.target, subject.threads) as runner:
        return logits_for(runner, reference)

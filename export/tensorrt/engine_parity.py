"""Compare engines with the graphs that they were built from, where the engines can run."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch

from smelt.core.artifact import Artifact
from smelt.core.errors import EngineWarning, InputError
from smelt.export.parity.parity_samples import PARITY_STEPS, parity_samples
from smelt.export.parity.references import (
    LOGITS_TOLERANCES,
    TorchReference,
    check_output,
    greedy_reference,
    logits_for,
    without_padded_tokens,
)
from smelt.generation.backend import Batch, FeedBatch
from smelt.generation.generating_runners import is_causal
from smelt.runtimes.registry import open_folder
from smelt.runtimes.single_call_runners import EMBEDDING_OUTPUT, EmbedderRunner
from smelt.stage import Context


def check_engines(source: Artifact, folder: Path, tf32: bool, ctx: Context) -> dict[str, float] | None:
    """Compare the engines in `folder` with the graphs of `source`, which run on the CPU, on the same samples.

    TensorRT's warnings about opened engines become warnings of the step.

    Args:
        source: the graphs that the engines were built from.
        folder: with the engines, config and tokenizer.
        tf32: whether they compute float32 matrix multiplications in TF32, which has the fraction of float16.
        ctx: with the data of the samples.

    Returns:
        The differences (largest, mean, agreement; see `check_output`). None where they cannot be compared:
        without a GPU, or, with a warning, if ONNX Runtime cannot run the graphs on the CPU (bf16).

    Raises:
        ParityError: an output is not finite, or differs by more than the tolerance of its precision.
    """
    if not torch.cuda.is_available():
        return None
    details = source.manifest.details
    dtype = details.get("dtype") or "fp32"
    try:
        graphs = open_folder(source.path, "onnx", "tensorrt", device="cpu", dtype=dtype)
    except InputError as error:
        ctx.warn("engine-not-compared", f"The engines were not compared with their graphs: {error}")
        return None
    with graphs, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", EngineWarning)
        with open_folder(folder, "tensorrt", "tensorrt") as engines:
            batch, _ = parity_samples(engines, folder, ctx.data, ctx.task)
            reference = _graph_outputs(graphs, batch, engines.backend.max_total_tokens)
            actual = logits_for(engines, reference)
    for item in caught:
        if isinstance(item.message, EngineWarning):
            ctx.warn(item.message.code, str(item.message)[:300])
        else:
            warnings.warn_explicit(item.message, item.category, item.filename, item.lineno)
    scheme = details.get("scheme")
    precision = "fp16" if dtype == "fp32" and tf32 else dtype
    kind = scheme if isinstance(scheme, str) and scheme in LOGITS_TOLERANCES else precision
    output = EMBEDDING_OUTPUT if isinstance(engines, EmbedderRunner) else "logits"
    return check_output("model", output, reference.logits, actual, kind)


def _graph_outputs(runner: Any, batch: Batch | FeedBatch, most: int | None) -> TorchReference:
    """Return the outputs of `runner` for a batch; a model that generates is decoded greedily.

    most: tokens that the engine's caches have room for.
    """
    is_decoder_only = is_causal(runner.config)
    if isinstance(batch, FeedBatch) or not (is_decoder_only or runner.config.get("is_encoder_decoder")):
        logits = np.asarray(runner.forward(batch))
        return TorchReference(batch, without_padded_tokens(logits, batch).copy())
    if is_decoder_only:
        start, length = batch.input_ids[:, -1], batch.input_ids.shape[1]
    else:
        start_token = runner.generation_config.get("decoder_start_token_id")
        start_token = runner.config["decoder_start_token_id"] if start_token is None else start_token
        start, length = np.full(batch.input_ids.shape[0], start_token, dtype=np.int64), 1
    steps = PARITY_STEPS if most is None else max(1, min(PARITY_STEPS, most - length))
    return greedy_reference(runner, batch, start, None, steps)

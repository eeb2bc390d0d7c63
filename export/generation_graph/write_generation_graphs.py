"""Write the generation graphs next to those of a step, and compare them with the loop in Python."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from smelt.core.errors import ParityError
from smelt.export.generation_graph.compose_graph import compose_generation_graph
from smelt.export.graph_files import read_graph
from smelt.export.weights.share_weights import share_weights
from smelt.runtime.backends.backend import BEAM_SEARCH_GRAPH, GREEDY_GRAPH
from smelt.runtime.batch import Batch
from smelt.runtime.generate.generation_config import GenerationConfig, resolve_generation
from smelt.runtime.generate.generation_loop import generate_resolved
from smelt.runtime.generate.graph_generation import generation_feeds, graph_supports, run_generation_graph
from smelt.runtime.generate.settings import GenerationSettings
from smelt.runtime.generate.shortlist import SHORTLIST_FILE as SHORTLIST
from smelt.runtime.runner import read_model_files

# New tokens in the comparison with the loop in Python
_COMPARED_TOKENS = 12
# nats; texts with a smaller difference are equally likely
_TOLERANCE = 1e-3
# beams if neither the recipe nor the model sets them
_DEFAULT_BEAMS = 4


def write_generation_graphs(folder: Path, steps: Sequence[str]) -> None:
    """Write `generate.onnx` and `generate_beams.onnx` from the graphs `steps` (names) in `folder`.

    All graphs then share one weight file.

    Args:
        folder: with the graphs, the config files of the model, and its shortlist, if it has one.
        steps: the encoder's, if there is one, and the decoder's.

    Raises:
        RunError: a graph cannot be part of a loop.
        InputError: smelt does not support a setting of the generation config.
    """
    import onnx

    share_weights([folder / f"{name}.onnx" for name in steps])
    model: Any = read_model_files(folder)
    graphs = [read_graph(folder / f"{name}.onnx", values=False) for name in steps]
    encoder, decoder = graphs if len(graphs) == 2 else (None, graphs[0])
    vocabulary = int(model.config.get("decoder_vocab_size") or model.config["vocab_size"])
    shortlist = folder if (folder / SHORTLIST).is_file() else None
    for name, beams in ((GREEDY_GRAPH, 1), (BEAM_SEARCH_GRAPH, default_num_beams(model))):
        decoding = resolve_generation(GenerationSettings(num_beams=beams), model)
        defaults = generation_feeds(decoding, 1, vocabulary)
        path = folder / f"{name}.onnx"
        onnx.save(compose_generation_graph(encoder, decoder, defaults, beams > 1, shortlist), path)
        onnx.checker.check_model(str(path))


def run_generation_graphs(runner: Any, batch: Batch) -> None:
    """Run each generation graph once.

    Raises:
        ParityError: ONNX Runtime cannot run one.
    """
    for name, beams in ((GREEDY_GRAPH, 1), (BEAM_SEARCH_GRAPH, 2)):
        try:
            _generate_by_graph(
                runner,
                batch,
                resolve_generation(GenerationSettings(num_beams=beams, max_new_tokens=2), runner),
            )
        except Exception as error:  # ONNX Runtime's errors share no other base class
            raise ParityError(
                f"{name}: ONNX Runtime cannot run the exported graph: {error}",
                code="graph-failed",
                file=f"{name}.onnx",
            ) from error


def _generate_by_graph(runner: Any, batch: Batch, decoding: GenerationConfig) -> list[list[int]]:
    """Return the new tokens of each row: by the graph, unless it does not support the model's settings."""
    search = run_generation_graph if graph_supports(decoding) else generate_resolved
    return search(runner, batch, decoding)


def default_num_beams(model: Any) -> int:
    """Return the number of beams in the model's generation config, or a common number."""
    asked = int(model.generation_config.get("num_beams") or 1)
    return asked if asked > 1 else _DEFAULT_BEAMS


def verify_generation_graphs(runner: Any, batch: Batch) -> None:
    """Compare the outputs of the generation graphs with those of the loop in Python.

    Args:
        runner: of the folder with both; its steps compute in float32, otherwise two tokens with close scores
            may change places.
        batch: real texts.

    Raises:
        ParityError: graph, row and the first token that differs.
    """
    run_generation_graphs(runner, batch)
    for name, beams in ((GREEDY_GRAPH, 1), (BEAM_SEARCH_GRAPH, 2)):
        decoding = resolve_generation(
            GenerationSettings(num_beams=beams, max_new_tokens=_COMPARED_TOKENS), runner
        )
        expected = generate_resolved(runner, batch, decoding)
        found = _generate_by_graph(runner, batch, decoding)
        for row, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
            if ours != theirs and not _equally_likely(runner, batch, row, (ours, theirs), decoding):
                at = next(
                    (i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), len(ours)
                )
                raise ParityError(
                    f"{name}: row {row}: token {at + 1} is {ours[at : at + 1]}, but the Python generation"
                    f" loop returned {theirs[at : at + 1]}.",
                    code="parity-failed",
                    file=f"{name}.onnx",
                )


def _equally_likely(
    runner: Any, batch: Batch, row: int, texts: tuple[list[int], list[int]], decoding: GenerationConfig
) -> bool:
    """Return whether two texts of a row are equally likely, so that rounding decides between them.

    Greedy search differs at one token, whose score counts; beam search scores whole texts by length.
    """
    ours, theirs = texts
    if decoding.num_beams == 1:
        same = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), None)
        if same is None:  # one continues where the other has ended
            return False
        ours, theirs = ours[: same + 1], theirs[: same + 1]
    scores = []
    for tokens in (ours, theirs):
        total = _log_likelihood(runner, batch, row, tokens, decoding)
        scores.append(total / len(tokens) ** (decoding.length_penalty if decoding.num_beams > 1 else 0))
    return bool(abs(scores[0] - scores[1]) < _TOLERANCE)


def _log_likelihood(
    runner: Any, batch: Batch, row: int, tokens: Sequence[int], decoding: GenerationConfig
) -> float:
    """Return the log-likelihood of `tokens` after a row of the batch, in nats."""
    real = batch.attention_mask[row] == 1
    one = Batch(batch.input_ids[row][real][None], np.ones((1, int(real.sum())), dtype=np.int64))
    state = runner.encode(one)
    before = int(one.input_ids[0, -1]) if decoding.start is None else decoding.start
    total = 0.0
    for token in tokens:
        logits = runner.decode_step(state, np.array([before]))[0].astype(np.float64)
        total += float(logits[token] - logits.max() - np.log(np.exp(logits - logits.max()).sum()))
        before = token
    return total

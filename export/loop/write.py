"""Writing the graphs of whole generations beside those of a step, and asking whether they say the same."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from smelt.core.errors import ParityError
from smelt.export.graph_files import read_graph
from smelt.export.loop.compose import compose
from smelt.export.weights.shared import share_weights
from smelt.runtime.backends.backend import BEAMS, GREEDY
from smelt.runtime.batch import Batch
from smelt.runtime.generate.decoding import Decoding, settle
from smelt.runtime.generate.in_graph import does, feeds_of, run_graph
from smelt.runtime.generate.loop import generate_with
from smelt.runtime.generate.settings import Generation
from smelt.runtime.generate.shortlist import FILE as SHORTLIST
from smelt.runtime.runner import read_files

# New tokens on which a graph is compared with the loop in Python
_COMPARED = 12
# nats; texts that are this close are as likely as each other
_NEAR = 1e-3
# beams where neither the recipe nor the model says how many
_BEAMS = 4


def write_loops(folder: Path, steps: Sequence[str]) -> None:
    """Write `generate.onnx` and `generate_beams.onnx` from the graphs `steps` (names) in `folder`.

    The weights of all graphs go into one file.

    Args:
        folder: with the graphs, the config files of the model, and its shortlist, if it has one.
        steps: the encoder's, where there is one, and the decoder's.

    Raises:
        RunError: a graph cannot go into a loop.
        InputError: the generation config asks for what smelt does not do.
    """
    import onnx

    share_weights([folder / f"{name}.onnx" for name in steps])
    model: Any = read_files(folder)
    graphs = [read_graph(folder / f"{name}.onnx", values=False) for name in steps]
    encoder, decoder = graphs if len(graphs) == 2 else (None, graphs[0])
    vocabulary = int(model.config.get("decoder_vocab_size") or model.config["vocab_size"])
    shortlist = folder if (folder / SHORTLIST).is_file() else None
    for name, beams in ((GREEDY, 1), (BEAMS, beams_of(model))):
        decoding = settle(Generation(num_beams=beams), model)
        defaults = feeds_of(decoding, 1, vocabulary)
        path = folder / f"{name}.onnx"
        onnx.save(compose(encoder, decoder, defaults, beams > 1, shortlist), path)
        onnx.checker.check_model(str(path))


def run_loops(runner: Any, batch: Batch) -> None:
    """Let the graphs of whole generations run once.

    Raises:
        ParityError: ONNX Runtime cannot run one.
    """
    for name, beams in ((GREEDY, 1), (BEAMS, 2)):
        try:
            _by_graph(runner, batch, settle(Generation(num_beams=beams, max_new_tokens=2), runner))
        except Exception as error:  # ONNX Runtime's errors share no other base
            raise ParityError(
                f"{name}: ONNX Runtime cannot run what was exported: {error}",
                code="graph-failed",
                file=f"{name}.onnx",
            ) from error


def _by_graph(runner: Any, batch: Batch, decoding: Decoding) -> list[list[int]]:
    """Return the new tokens of each row: by the graph, unless the model asks for what none does."""
    search = run_graph if does(decoding) else generate_with
    return search(runner, batch, decoding)


def beams_of(model: Any) -> int:
    """Return how many beams the model's generation config asks for, or a usual number."""
    asked = int(model.generation_config.get("num_beams") or 1)
    return asked if asked > 1 else _BEAMS


def check_loops(runner: Any, batch: Batch) -> None:
    """Compare what the graphs of whole generations say with what the loop in Python says.

    Args:
        runner: of the folder that holds both; its steps compute in float32, or two near words may change
            places.
        batch: real texts.

    Raises:
        ParityError: graph, row and the first token that differs.
    """
    run_loops(runner, batch)
    for name, beams in ((GREEDY, 1), (BEAMS, 2)):
        decoding = settle(Generation(num_beams=beams, max_new_tokens=_COMPARED), runner)
        expected = generate_with(runner, batch, decoding)
        found = _by_graph(runner, batch, decoding)
        for row, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
            if ours != theirs and not _as_good(runner, batch, row, (ours, theirs), decoding):
                at = next(
                    (i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), len(ours)
                )
                raise ParityError(
                    f"{name}: row {row}: token {at + 1} is {ours[at : at + 1]}, the loop in Python chose"
                    f" {theirs[at : at + 1]}.",
                    code="parity-failed",
                    file=f"{name}.onnx",
                )


def _as_good(
    runner: Any, batch: Batch, row: int, texts: tuple[list[int], list[int]], decoding: Decoding
) -> bool:
    """Say whether two texts of a row are equally likely, so that rounding decides between them.

    Greedy search parts at one token, which counts alone; beam search weighs whole texts by their lengths.
    """
    ours, theirs = texts
    if decoding.num_beams == 1:
        same = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), None)
        if same is None:  # one goes on where the other has ended
            return False
        ours, theirs = ours[: same + 1], theirs[: same + 1]
    scores = []
    for tokens in (ours, theirs):
        total = _log_likelihood(runner, batch, row, tokens, decoding)
        scores.append(total / len(tokens) ** (decoding.length_penalty if decoding.num_beams > 1 else 0))
    return bool(abs(scores[0] - scores[1]) < _NEAR)


def _log_likelihood(runner: Any, batch: Batch, row: int, tokens: Sequence[int], decoding: Decoding) -> float:
    """Return the log-likelihood of `tokens` behind a row of the batch, nats."""
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

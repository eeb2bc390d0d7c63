"""Whole models give the same for a text alone and in a batch with longer ones, where a scheme's products do.

The products of these schemes do so bit for bit. Attention and norms are float32 kernels, which
sum in another order in another batch; a value that lies between two codes may then round to the other one. So
words are compared one by one, numbers up to what a scheme's own rounding does.
"""

from contextlib import contextmanager

import numpy as np
import pytest

from smelt.generation.backend import Batch
from smelt.generation.config import GenerationSettings
from smelt.generation.search import generate
from smelt.runtimes.registry import open_folder, open_runner
from tests.support.graphs import graph_exports
from tests.support.models import tiny
from tests.support.pairs import matrix

# words of exports.SCHEMES -> of the registry
PROMISED = {"fp32": None, "static": "int8-static", "int4": "int4", "binary": "binary"}
LENGTHS = (5, 9, 12, 7, 14, 11, 8, 13)  # the first one is the text that is asked about


@contextmanager
def opened(family, scheme, runtime):
    found = graph_exports.exported_graphs(family, scheme)
    if runtime == "onnx":
        with open_folder(found.folder, "onnx", "ort-cpu", 1) as runner:
            yield runner
    else:
        parent = graph_exports.exported_model_folder(found.folder.parent)
        with open_runner(tiny.as_artifact(parent, graph_exports.FAMILIES[family][1]), 1, "cpu") as runner:
            yield runner


def batch(rows):
    """Return the first `rows` texts, padded to the longest of them."""
    lengths = LENGTHS[:rows]
    mask = (np.arange(max(lengths)) < np.array(lengths)[:, None]).astype(np.int64)
    ids = np.random.default_rng(3).integers(5, 40, (len(LENGTHS), max(LENGTHS)))[:rows, : max(lengths)]
    return Batch(np.where(mask == 1, ids, 0), mask)


def translated(runner, rows, beams):
    pad = runner.config["pad_token_id"]
    texts = batch(rows)
    ids = np.where(texts.attention_mask == 1, texts.input_ids, pad)
    return generate(
        runner, Batch(ids, texts.attention_mask), GenerationSettings(num_beams=beams, max_new_tokens=10)
    )[0]


@pytest.mark.parametrize(("scheme", "runtime"), matrix.matrix_cells(list(PROMISED), ["onnx", "torch"]))
def test_a_translation_is_the_same_alone_and_in_any_batch(scheme, runtime):
    with opened("marian", scheme, runtime) as runner:
        for beams in (1, 3):
            alone = translated(runner, 1, beams)
            assert len(set(alone)) > 1
            assert translated(runner, 3, beams) == alone
            assert translated(runner, 8, beams) == alone


@pytest.mark.parametrize(("scheme", "runtime"), matrix.matrix_cells(list(PROMISED), ["torch", "onnx"]))
def test_a_class_has_the_same_logits_alone_and_in_any_batch(scheme, runtime):
    with opened("bert", scheme, runtime) as runner:
        alone, *others = (runner.forward(batch(rows))[0] for rows in (1, 3, 8))
        for among in others:
            off = np.abs(among - alone).max()
            # of the codes of one activation, where one rounds the other way
            assert off < (1e-5 if scheme == "fp32" else 0.01 * np.abs(alone).max())

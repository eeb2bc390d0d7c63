"""The question whether a graph of a whole generation says what the loop in Python says."""

import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from smelt.core.errors import ParityError
from smelt.export.generation_graph.write import _equally_likely, verify_generation_graphs
from smelt.generation.backend import Batch
from smelt.generation.config import GenerationSettings, resolve_generation
from smelt.generation.search import generate_resolved
from tests.support.expected_errors import raises_code

PAD, EOS, START, VOCABULARY = 0, 1, 3, 8
BATCH = Batch(np.ones((2, 3), np.int64), np.ones((2, 3), np.int64))


def table():
    """Return the logits that follow each token: 5, 4, 2, end; 6 is as good as 5 everywhere."""
    logits = np.zeros((VOCABULARY, VOCABULARY), np.float32)
    for previous_token, token in ((START, 5), (5, 4), (4, 2), (2, EOS)):
        logits[previous_token, token] = 9
    logits[:, 6] = logits[:, 5] - 1e-5
    logits[6] = logits[5]
    return logits


class Follower:
    """A runner whose next token depends on the last one alone; its graphs answer as `edit` changes texts."""

    def __init__(self, edit=lambda graph, texts: texts, logits=None):
        self.open = set()  # of a large model only one graph is
        self.backend = SimpleNamespace(
            generation_graphs=("generate", "generate_beams"), free_large_graphs=self.open.clear
        )
        self.generation_cache = {}
        self.folder, self.generation_config = Path("test"), {}
        self.config = {
            "is_encoder_decoder": True, "decoder_start_token_id": START, "vocab_size": VOCABULARY,
            "eos_token_id": EOS, "pad_token_id": PAD,
        }  # fmt: skip
        self._edit, self._logits = edit, table() if logits is None else logits

    reduces_logits = False

    def encode(self, batch):
        return None

    def decode_step(self, state, tokens):
        self.open.clear()  # the backend closes what else is open
        self.open.add("step")
        return self._logits[tokens]

    def reorder_cache(self, state, rows):
        return state

    def generate_sequences(self, graph, batch, feeds):
        assert not self.open
        beams, new = int(feeds.get("num_beams", 1)), int(feeds["max_new_tokens"])
        decoding = resolve_generation(GenerationSettings(num_beams=beams, max_new_tokens=new), self)
        texts = generate_resolved(self, batch, decoding)
        if new > 2:  # the question whether it runs at all is not what is answered otherwise
            texts = self._edit(graph, texts)
        longest = max(map(len, texts))
        self.open.add(graph)
        return np.array([[START, *text, *[PAD] * (longest - len(text))] for text in texts])


def test_equal_sequences_pass():
    calls = []
    verify_generation_graphs(Follower(lambda graph, texts: calls.append((graph, texts)) or texts), BATCH)
    assert calls == [(graph, [[5, 4, 2, EOS]] * 2) for graph in ("generate", "generate_beams")]


def test_graph_is_verified_even_if_only_another_is_open():
    runner = Follower(lambda graph, texts: [[7, *text[1:]] for text in texts])
    runner.backend.whole = ()
    with raises_code("parity-failed", ParityError) as excinfo:
        verify_generation_graphs(runner, BATCH)
    assert excinfo.value.file == "generate.onnx"
    assert re.findall(r"\[?\d+\]?", str(excinfo.value)) == ["0", "1", "[7]", "[5]"]  # row, token, tokens


def test_equally_likely_sequence_passes():
    verify_generation_graphs(Follower(lambda graph, texts: [[6, *text[1:]] for text in texts]), BATCH)


@pytest.mark.parametrize("graph", ["generate", "generate_beams"])
@pytest.mark.parametrize(("text", "token", "ours", "theirs"), [
    ([7, 4, 2, EOS], "1", "[7]", "[5]"), ([5, 4, 2, PAD, PAD], "4", "[0]", "[1]"),
    ([5, 4, EOS], "3", "[1]", "[2]"),
])  # fmt: skip
def test_different_sequence_error_names_graph_row_and_token(graph, text, token, ours, theirs):
    def edit(name, texts):
        return [texts[0], text] if name == graph else texts

    with raises_code("parity-failed", ParityError) as excinfo:
        verify_generation_graphs(Follower(edit), BATCH)
    assert excinfo.value.file == f"{graph}.onnx"
    assert re.findall(r"\[?\d+\]?", str(excinfo.value)) == ["1", token, ours, theirs]  # the row is 1


def test_truncated_sequence_raises_error():
    with raises_code("parity-failed", ParityError) as excinfo:
        verify_generation_graphs(Follower(lambda graph, texts: [text[:-1] for text in texts]), BATCH)
    assert excinfo.value.file == "generate.onnx"
    assert re.findall(r"\[?\d+\]?|\[\]", str(excinfo.value)) == ["0", "4", "[]", "[1]"]


def test_graph_that_cannot_run_raises_parity_error():
    runner = Follower()
    runner.generate_sequences = None
    with raises_code("graph-failed", ParityError) as excinfo:
        verify_generation_graphs(runner, BATCH)
    assert excinfo.value.file == "generate.onnx"


@pytest.mark.parametrize(("penalty", "as_good"), [(1.0, True), (0.0, False)])
def test_beam_sequences_use_length_penalty(penalty, as_good):
    """Where all tokens are equally likely, every text has the same mean, and the shorter the higher sum."""
    runner = Follower(logits=np.zeros((VOCABULARY, VOCABULARY), np.float32))
    decoding = resolve_generation(GenerationSettings(num_beams=2, length_penalty=penalty), runner)
    assert _equally_likely(runner, BATCH, 0, ([4, EOS], [4, 5, 6, EOS]), decoding) is as_good

"""Beam search gives what Hugging Face `generate` gives, token for token, on six kinds of models."""

import generating
import numpy as np
import pytest
import tiny

from smelt.core.data import Example, Split
from smelt.core.stage import Context
from smelt.export.onnx_stage import Onnx, OnnxSettings
from smelt.runtime.backends.onnx_runner import OnnxRunner
from smelt.runtime.backends.torch_runner import TorchRunner
from smelt.runtime.batch import Batch
from smelt.runtime.generate.beam import _best
from smelt.runtime.generate.loop import generate
from smelt.runtime.generate.settings import Generation
from smelt.runtime.models.checkpoint import load_tokenizer
from smelt.runtime.predict import make_batches

KINDS = (*generating.SEQ2SEQ, *generating.CAUSAL)
# What the recipe asks for, and what the model's generation config says beside it.
SETTINGS = [
    ({"beams": 2}, {}),
    ({"beams": 4, "max_new_tokens": 1}, {}),
    ({"beams": 3, "length_penalty": 2.0, "early_stopping": True}, {"eos_token_id": [1, 5, 9, 11]}),
    ({"beams": 5, "length_penalty": -1.0, "early_stopping": False}, {"eos_token_id": [1, 5, 9]}),
    ({"beams": 4, "length_penalty": 0.5, "early_stopping": "never"}, {"eos_token_id": [1, 7, 8, 10]}),
    ({"beams": 4, "length_penalty": 0.0, "early_stopping": "never"}, {"eos_token_id": [1, 6]}),
    ({"beams": 3, "no_repeat_ngram_size": 2, "bad_words_ids": [[7], [3, 4], [5, 6, 9], [1]]}, {}),
    ({"beams": 3, "no_repeat_ngram_size": 1, "min_new_tokens": 4}, {"eos_token_id": [1, 5, 9, 11]}),
    ({"beams": 2, "repetition_penalty": 1.8}, {"renormalize_logits": True}),
    ({"beams": 4, "min_length": 9, "forced_eos_token_id": 1}, {"eos_token_id": [1, 4, 8]}),
    ({"beams": 4, "forced_bos_token_id": 6, "begin_suppress_tokens": [7, 8, 9, 10]}, {}),
    ({"beams": 3, "suppress_tokens": [4, 12, 13]}, {"remove_invalid_values": True}),
]


@pytest.fixture(scope="module")
def runners(tmp_path_factory):
    made = {kind: generating.CausalRunner(generating.model(kind)) for kind in generating.CAUSAL}
    for kind in generating.SEQ2SEQ:
        path = generating.folder(kind, tmp_path_factory.mktemp(kind))
        made[kind] = TorchRunner(tiny.artifact(path))
    return made


def both(runner, batch, wishes, config):
    before = dict(runner.generation_config)
    runner.generation_config.update(config)
    wishes = {"max_new_tokens": 12, **wishes}
    ours = generate(runner, batch, Generation.model_validate(wishes))
    runner.generation_config.clear()
    runner.generation_config.update(before)
    wishes["num_beams"] = wishes.pop("beams")
    return ours, generating.theirs(runner.model, batch, do_sample=False, **wishes, **config)


@pytest.mark.parametrize("kind", KINDS)
def test_beam_search_equals_generate(runners, kind):
    ended = differ = 0
    for number, (wishes, config) in enumerate(SETTINGS):
        for rows in (1, 4):
            batch = generating.batch(rows, seed=10 * number + rows, left=kind in generating.CAUSAL)
            ours, theirs = both(runners[kind], batch, wishes, config)
            assert ours == theirs, (wishes, config, rows)
            ended += sum(len(row) < 12 for row in ours)
            differ += len({tuple(row) for row in ours}) > 1
    assert ended >= 10, "hardly any text ended before the limit: the test shows nothing"
    assert differ >= 8, "every text gave the same tokens: the test shows nothing"


def test_beams_find_what_greedy_search_does_not(runners):
    batch = generating.batch(8, seed=3)
    greedy = generate(runners["bart"], batch, Generation(max_new_tokens=12))
    assert generate(runners["bart"], batch, Generation(max_new_tokens=12, beams=4)) != greedy


def test_a_sentence_gives_the_same_alone_and_in_a_padded_batch(runners):
    for kind in KINDS:
        left = kind in generating.CAUSAL
        whole = generating.batch(4, seed=5, left=left)
        wishes = Generation(beams=3, max_new_tokens=8)
        together = generate(runners[kind], whole, wishes)
        for row in range(4):
            used = whole.attention_mask[row].astype(bool)
            alone = Batch(whole.input_ids[row : row + 1, used], whole.attention_mask[row : row + 1, used])
            assert generate(runners[kind], alone, wishes) == [together[row]]


def test_a_prompt_of_one_token_is_like_a_start_token(runners):
    batch = Batch(np.array([[4], [9]]), np.ones((2, 1), dtype=np.int64))
    wishes = {"beams": 3, "forced_bos_token_id": 6, "max_new_tokens": 6}
    ours, theirs = both(runners["llama"], batch, wishes, {})
    assert ours == theirs
    assert {row[0] for row in ours} == {6}


def test_beams_in_onnx_runtime_equal_generate(tmp_path):
    folder = tiny.marian(tmp_path / "marian", encoder_layers=1, decoder_layers=1)
    source = tiny.artifact(folder)
    rows = Split("x", tuple(Example(s, references=(s,)) for s in tiny.SENTENCES))
    (tmp_path / "onnx").mkdir()
    context = Context(
        out=tmp_path / "onnx",
        task="translation",
        data={"validation": rows},
        seed=0,
        ancestors={},
        score=lambda artifact: {},
        threads=1,
    )
    Onnx()(source, OnnxSettings(), context)
    tokenizer = load_tokenizer(folder)
    found = []
    with TorchRunner(source) as torch_runner, OnnxRunner.over(tmp_path / "onnx", "ort-cpu", 1) as runner:
        for _, batch in make_batches(tiny.SENTENCES, tokenizer, 4, 40):
            ours = generate(runner, batch, Generation(beams=4, max_new_tokens=12, length_penalty=0.5))
            wishes = {"num_beams": 4, "length_penalty": 0.5, "max_new_tokens": 12}
            assert ours == generating.theirs(torch_runner.model, batch, do_sample=False, **wishes)
            found += ours
    assert len({tuple(row) for row in found}) > 5


def test_best_orders_by_score_and_of_equals_takes_the_first():
    scores = np.array([[1, 5, 5, 2, 5], [0, -1, -np.inf, 3, 2]], dtype=np.float32)
    assert _best(scores, 4).tolist() == [[1, 2, 4, 3], [3, 4, 0, 1]]
    assert _best(scores, 9).tolist() == [[1, 2, 4, 3, 0], [3, 4, 0, 1, 2]]


@pytest.mark.parametrize("width", [1290, 5000, 24])
def test_best_equals_a_full_sort(width):
    scores = np.random.default_rng(0).normal(size=(9, width)).astype(np.float32)
    scores[2, 700:] = -np.inf
    assert _best(scores, 8).tolist() == np.argsort(-scores, axis=1)[:, :8].tolist()

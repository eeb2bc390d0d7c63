"""Decoder-only runners in torch, against transformers."""

import math
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from smelt.core.errors import RunError
from smelt.core.store import Store
from smelt.data.splits import Columns, Windows
from smelt.generation import generating_runners
from smelt.generation.backend import Batch
from smelt.generation.config import GenerationSettings
from smelt.generation.generating_runners import is_causal, nll_from_logits, position_ids, token_nll
from smelt.generation.prompt_batches import pad_left
from smelt.models.checkpoint import load_model, save_model
from smelt.models.tokenizer import encode_prompts
from smelt.pipeline.execute.scoring import Scorer
from smelt.runtimes.predict_texts import generate_texts
from smelt.runtimes.registry import open_runner
from smelt.tasks.read_split import read_split
from tests.support.expected_errors import raises_code
from tests.support.models import causal, every_family, tiny

IDS = np.random.default_rng(0).integers(1, 290, (3, 9))


@pytest.fixture(scope="module", params=[*causal.FAMILIES, "opt"])
def folder(request, tmp_path_factory):
    make = causal.write_model if request.param in causal.FAMILIES else every_family.write_model
    return make(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture
def runner(folder):
    with open_runner(tiny.as_artifact(folder, "language-modeling")) as opened:
        yield opened


@pytest.fixture
def other(folder):
    return AutoModelForCausalLM.from_pretrained(folder).eval()


def _logits(model, ids, mask=None):
    with torch.no_grad():
        mask = None if mask is None else torch.from_numpy(mask)
        return model(torch.from_numpy(ids), attention_mask=mask).logits.numpy()


def test_forward_equals_transformers_with_right_padding(runner, other):
    mask = np.ones_like(IDS)
    mask[1, 6:] = 0
    actual = runner.forward(Batch(IDS, mask))
    assert actual.dtype == np.float32
    np.testing.assert_allclose(actual[mask == 1], _logits(other, IDS, mask)[mask == 1], atol=1e-5)


@pytest.mark.parametrize("beams", [1, 3])
def test_generation_equals_transformers_with_left_padding(runner, other, beams):
    texts = ["The old house", "", "A man in a red hat walks on the grass"]
    tokenizer = AutoTokenizer.from_pretrained(runner.folder)
    batch = pad_left(encode_prompts(texts, tokenizer, 64), 0)
    assert batch.attention_mask.sum(axis=1).min() == 1  # a row whose whole prompt is its last token
    expected = other.generate(
        torch.from_numpy(batch.input_ids), attention_mask=torch.from_numpy(batch.attention_mask),
        max_new_tokens=9, num_beams=beams, do_sample=False,
    )[:, batch.input_ids.shape[1] :]  # fmt: skip
    actual = generate_texts(runner, texts, GenerationSettings(max_new_tokens=9, num_beams=beams))
    decoded = tokenizer.batch_decode(expected, skip_special_tokens=True)
    assert actual == [a + b for a, b in zip(texts, decoded, strict=True)]


def test_reorder_moves_and_repeats_rows(runner):
    mask = np.ones_like(IDS)
    mask[1, :4] = 0
    state = runner.encode(Batch(IDS, mask))
    state = runner.reorder_cache(state, np.array([1, 1, 0, 2]))
    actual = runner.decode_step(state, IDS[[1, 1, 0, 2], -1])
    again = runner.decode_step(runner.encode(Batch(IDS, mask)), IDS[:, -1])
    np.testing.assert_allclose(actual, again[[1, 1, 0, 2]], atol=1e-5)


def test_losses_equal_transformers_with_chunked_logits(runner, other, monkeypatch):
    expected = torch.from_numpy(_logits(other, IDS)[:, :-1]).log_softmax(-1)
    expected = -expected.gather(2, torch.from_numpy(IDS[:, 1:, None]))[..., 0].numpy()
    np.testing.assert_allclose(token_nll(runner, IDS), expected, rtol=1e-4)
    three_tokens = 3 * 4 * runner.config["vocab_size"]  # bytes
    monkeypatch.setattr(generating_runners, "_LOGITS_BYTES", three_tokens)
    np.testing.assert_allclose(token_nll(runner, IDS), expected, rtol=1e-4)


def test_non_finite_outputs_have_no_perplexity():
    class Overflown:
        folder = Path("/a/.store/artifacts/928739efff78")
        config: ClassVar = {"vocab_size": 300}

        def start(self, rows):
            return None

        def extend(self, state, ids, mask):
            return np.full((*ids.shape, 300), np.nan, dtype=np.float32)

    with raises_code("non-finite-outputs", RunError) as caught:
        token_nll(Overflown(), IDS)
    assert "928739efff78" not in str(caught.value)


def test_perplexity_equals_a_manual_sum_with_overlapping_windows(folder, other, tmp_path):
    path = causal.write_lines(tmp_path / "t.txt", 2)
    split = replace(
        read_split("t.txt", "language-modeling", Columns(), tmp_path),
        windows=Windows(length=32, stride=12, separator="\n"),
    )
    scorer = Scorer(
        Store(tmp_path / "store"),
        "language-modeling",
        ("perplexity", "bits_per_byte"),
        GenerationSettings(),
        4,
        1,
    )
    scores = scorer.score(tiny.as_artifact(folder, "language-modeling"), split)["quality"]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = path.read_text().removesuffix("\n")
    ids = tokenizer(text, verbose=False)["input_ids"]
    total, begin, done = 0.0, 0, 0
    while done < len(ids) - 1:
        lead = ids[:1] if begin and ids[0] == tokenizer.bos_token_id else []  # before each window
        last = min(begin + 32 - len(lead), len(ids) - 1)
        window = np.array([[*lead, *ids[begin:last]]])
        log = torch.from_numpy(_logits(other, window)[0]).double().log_softmax(-1)
        total -= sum(
            float(log[position - begin + len(lead), ids[position + 1]]) for position in range(done, last)
        )
        begin, done = begin + 12, last
    perplexity, bits = scores["perplexity"], scores["bits_per_byte"]
    assert perplexity["value"] == pytest.approx(math.exp(total / (len(ids) - 1)), rel=1e-4)
    first = 0 if tokenizer.bos_token_id == ids[0] else len(tokenizer.decode(ids[:1]).encode())
    assert bits["value"] == pytest.approx(total / math.log(2) / (len(text.encode()) - first), rel=1e-4)
    assert (perplexity["n"], perplexity["higher_is_better"]) == (len(ids) - 1, False)
    assert perplexity["ci95"][0] < perplexity["value"] < perplexity["ci95"][1]
    assert "window:32|stride:12" in perplexity["signature"]


def test_unchanged_saved_model_loads_in_transformers(folder, other, tmp_path):
    model, edits = load_model(folder)
    save_model(model, edits, tmp_path, folder)
    assert not (tmp_path / "structure.json").exists()
    again = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    np.testing.assert_array_equal(_logits(again, IDS), _logits(other, IDS))


def test_checkpoint_saved_without_output_layer_is_loaded(tmp_path):
    folder = causal.write_model(tmp_path, "gpt2")
    expected = _logits(AutoModelForCausalLM.from_pretrained(folder).eval(), IDS)
    path = folder / "model.safetensors"
    tensors = {n.removeprefix("transformer."): t for n, t in load_file(path).items() if "lm_head" not in n}
    tensors["h.0.attn.bias"] = torch.ones(1, 1, 64, 64)  # the mask that the first checkpoints hold
    save_file(tensors, path, metadata={"format": "pt"})
    model, _ = load_model(folder)
    np.testing.assert_array_equal(_logits(model, IDS), expected)


def test_config_is_causal_for_known_families_with_a_language_head():
    assert is_causal({"model_type": "llama", "architectures": ["LlamaForCausalLM"]})
    assert not is_causal({"model_type": "llama", "architectures": ["LlamaForSequenceClassification"]})
    assert not is_causal({"model_type": "bert", "architectures": ["BertLMHeadModel"]})
    assert not is_causal({})


def test_positions_follow_the_mask_with_left_padding():
    mask = np.array([[0, 0, 1, 1], [1, 1, 1, 0]])
    assert position_ids(mask).tolist() == [[0, 0, 0, 1], [0, 1, 2, 0]]


def test_losses_of_uniform_logits_are_log_vocabulary_size():
    assert nll_from_logits(np.zeros((1, 2, 8), np.float32), np.array([[3, 7]])) == pytest.approx(math.log(8))

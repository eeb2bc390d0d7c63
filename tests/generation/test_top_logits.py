"""Generation from the highest logits of each step gives the tokens of generation from all logits."""

import numpy as np
import onnxruntime
import pytest
import torch

from smelt.generation.backend import top_logits
from smelt.generation.config import GenerationSettings
from smelt.generation.search import generate
from smelt.runtimes.device_operators import DeviceOperators
from smelt.runtimes.onnx_backend import OnnxBackend
from smelt.runtimes.registry import open_folder
from smelt.runtimes.torch_backend import TorchBackend
from tests.support.graphs import graph_exports
from tests.support.models import causal, tiny


@pytest.mark.quick
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_equal_logits_are_ordered_by_token_as_in_a_stable_sort(dtype):
    logits = torch.randint(-4, 4, (5, 300), generator=torch.Generator().manual_seed(0)).to(dtype)
    logits[0, ::3], logits[1, 7] = float("-inf"), float("inf")
    logits[2, ::2], logits[2, 1::2] = -0.0, 0.0
    top = top_logits(logits, 40)
    expected = np.argsort(-logits.double().numpy(), axis=-1, kind="stable")[:, :40]
    np.testing.assert_array_equal(top.tokens, expected)
    np.testing.assert_array_equal(top.values, np.take_along_axis(logits.float().numpy(), expected, -1))


SETTINGS = [
    {"max_new_tokens": 9},
    {"max_new_tokens": 9, "min_new_tokens": 6},
    {"max_new_tokens": 9, "num_beams": 4},
    {"max_new_tokens": 9, "num_beams": 4, "min_new_tokens": 6, "length_penalty": 0.5},
    {"max_new_tokens": 9, "num_beams": 3, "no_repeat_ngram_size": 2},
    {"max_new_tokens": 9, "do_sample": True, "top_k": 7, "temperature": 0.8, "seed": 5},
    {"max_new_tokens": 9, "do_sample": True, "top_k": 7, "top_p": 0.7, "seed": 5},
    {"max_new_tokens": 9, "do_sample": True, "top_k": 0, "seed": 5},
]


def texts_of(runner, settings):
    batch = runner.text.tokenizer.encode_batch(tiny.SENTENCES[:4], 20)
    batch = runner_batch(runner, batch)
    return generate(runner, batch, GenerationSettings(**settings))


def runner_batch(runner, encoded):
    from smelt.generation.prompt_batches import pad_left
    from smelt.runtimes.predict_texts import pad_batch

    pad = runner.config.get("pad_token_id") or 0
    if runner.chunked_prefill:
        return pad_left(encoded.ids, pad)
    return pad_batch(encoded, range(len(encoded.ids)), pad)


@pytest.fixture(scope="module", params=["torch translator", "torch writer", "onnx translator", "onnx writer"])
def runner(request, tmp_path_factory):
    runtime, kind = request.param.split()
    folder = tmp_path_factory.mktemp("model") / "m"
    if runtime == "onnx":
        family = {"translator": "marian", "writer": "llama"}[kind]
        folder = graph_exports.exported_graphs(family, "fp32", "ort-cpu").folder
    elif kind == "translator":
        tiny.write_marian(folder)
    else:
        causal.write_model(folder, "gpt2")
    with open_folder(folder, runtime, "ort-cpu" if runtime == "onnx" else None, 1, "cpu") as opened:
        yield opened


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_tokens_equal_generation_from_all_logits(runner, settings, monkeypatch):
    expected = texts_of(runner, settings)
    widths, backend_class = [], type(runner.backend)
    real_step = backend_class.step_top

    def step_top(self, held, feeds, count):
        top = real_step(self, held, feeds, count)
        widths.append(top.tokens.shape[1])
        return top

    monkeypatch.setattr(backend_class, "step_top", step_top)
    monkeypatch.setattr(backend_class, "reduces_logits", True)
    assert texts_of(runner, settings) == expected
    needs_all = "no_repeat_ngram_size" in settings or settings.get("top_k") == 0
    assert bool(widths) == (not needs_all)
    assert max(widths, default=0) < 30 < runner.config["vocab_size"]


def test_backends_on_the_cpu_keep_all_logits():
    for backend_class in (OnnxBackend, TorchBackend):
        backend = backend_class.__new__(backend_class)
        backend.device = "cpu"
        assert not backend.reduces_logits


@pytest.mark.parametrize("shape", [(3, 11), (3, 2, 11)])
def test_device_operators_equal_torch(shape):
    logits = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    value = onnxruntime.OrtValue.ortvalue_from_numpy(logits)
    actual = DeviceOperators("cpu", 0).top_logits(value, 4)
    expected = top_logits(torch.from_numpy(logits.reshape(3, -1, 11)[:, -1]), 4)
    assert np.array_equal(actual.tokens, expected.tokens)
    assert np.array_equal(actual.values, expected.values)
    np.testing.assert_allclose(actual.log_probs, expected.log_probs, atol=1e-6)
    assert DeviceOperators("cpu", 0).top_logits(value, 99).tokens.shape == (3, 11)


def test_equal_logits_are_in_the_order_of_their_tokens():
    value = onnxruntime.OrtValue.ortvalue_from_numpy(np.array([[1, 3, 3, 0, 3]], np.float32))
    assert DeviceOperators("cpu", 0).top_logits(value, 3).tokens.tolist() == [[1, 2, 4]]

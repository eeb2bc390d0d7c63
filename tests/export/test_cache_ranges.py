"""Scales of int8 caches are those of torch's own keys and values, on rows of the data, padding aside."""

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from transformers import AutoModelForCausalLM, AutoTokenizer

from smelt.core.errors import InputError, RunError
from smelt.data.splits import Columns, Example, Split, Windows
from smelt.export import kv_cache
from smelt.export.kv_cache import cache_calibration_rows, cache_calibration_split, cache_scales
from smelt.tasks.read_split import read_split
from tests.support.expected_errors import raises_code
from tests.support.graphs import exported_artifacts
from tests.support.models import causal


class Words:
    """A tokenizer: a character a token."""

    def __call__(self, text, verbose):
        return {"input_ids": [ord(character) for character in text]}


def test_scales_equal_largest_magnitudes_of_torch_caches():
    """For a rotated pair of numbers the largest length, which no place changes."""
    folder = exported_artifacts.exported_artifact("int8-caches")
    root_folder = folder.parents[2]
    split = read_split("data.txt", "language-modeling", Columns(), root_folder)
    token_rows = cache_calibration_rows(split, AutoTokenizer.from_pretrained(root_folder / "m"), 64)
    model = AutoModelForCausalLM.from_pretrained(root_folder / "m").eval()
    with torch.no_grad():
        caches = [model(torch.from_numpy(ids)[None], use_cache=True).past_key_values for ids in token_rows]
    cache_scales = scales_in(folder)
    assert len(cache_scales) == 4
    for layer in range(2):
        keys = np.concatenate([cache.layers[layer].keys[0].numpy() for cache in caches], axis=1)
        values = np.concatenate([cache.layers[layer].values[0].numpy() for cache in caches], axis=1)
        length = np.sqrt(keys[..., :8] ** 2 + keys[..., 8:] ** 2).max(axis=1, keepdims=True)
        length = np.concatenate([length, length], axis=2)
        assert (np.abs(keys).max(axis=1, keepdims=True) <= length * 1.0001).all()
        close = {"rtol": 1e-4, "atol": 0}
        np.testing.assert_allclose(cache_scales[f"past_key_values.{layer}.key_scale"], length / 127, **close)
        largest = np.abs(values).max(axis=1, keepdims=True)
        np.testing.assert_allclose(
            cache_scales[f"past_key_values.{layer}.value_scale"], largest / 127, **close
        )


def scales_in(folder):
    model = onnx.load(folder / "model.onnx")
    return {
        t.name: numpy_helper.to_array(t)
        for t in model.graph.initializer
        if t.name.endswith(("key_scale", "value_scale"))
    }


@pytest.mark.quick
def test_zero_channel_gets_largest_scale():
    scales = cache_scales(np.array([[127.0, 0.0], [254.0, 1e-38]], np.float32))
    assert scales.dtype == np.float32
    assert scales.tolist() == [[[1.0, 2.0]], [[2.0, 2.0]]]
    assert cache_scales(np.zeros((1, 2), np.float32)).tolist() == [[[np.float32(1 / 127)] * 2]]


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_non_finite_values_are_reported_with_cache_name(wrong):
    class Session:
        def get_outputs(self):
            return [onnx.ValueInfoProto(name="logits"), onnx.ValueInfoProto(name="present.3.value")]

        def get_inputs(self):
            return []

        def run(self, names, feeds):
            return [np.array([[[[1.0, 2.0], [wrong, 0.0]]]], np.float32)]

    with raises_code("non-finite-outputs", RunError):
        kv_cache.max_cache_magnitudes(Session(), [np.arange(2)], set(), "train")


def test_calibration_samples_cover_text_and_fill_model_length():
    examples = tuple(Example(chr(97 + example_index % 26) * 4) for example_index in range(320))
    split = Split("made", examples, Windows(separator="|"))
    token_rows = cache_calibration_rows(split, Words(), 7)
    assert len(token_rows) == kv_cache.CACHE_CALIBRATION_ROWS
    assert ["".join(map(chr, ids)) for ids in (token_rows[0], token_rows[1], token_rows[-1])] == [
        "aaaa|bb",
        "kkkk|ll",
        "hhhh",
    ]
    assert max(map(len, cache_calibration_rows(split, Words(), 10**6))) == kv_cache.CACHE_CALIBRATION_LENGTH
    with raises_code("empty-text", InputError):
        cache_calibration_rows(Split("made", (Example(""),)), Words(), 7)


def test_calibration_split_is_preferred_over_train(tmp_path):
    split = read_split(causal.write_lines(tmp_path / "t.txt").name, "language-modeling", Columns(), tmp_path)
    assert (
        cache_calibration_split({"train": split, "calibration": split, "validation": split}) == "calibration"
    )
    assert cache_calibration_split({"train": split, "calibration": Split("empty", ())}) == "train"
    with raises_code("no-calibration-data", InputError):
        cache_calibration_split({"validation": split})

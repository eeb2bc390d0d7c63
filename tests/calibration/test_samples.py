"""Calibration samples: as many as requested; by default as many as the model's widest layer needs."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from smelt.calibration.samples import (
    CalibrationSamples,
    default_sample_count,
    load_calibration_samples,
    token_rows,
)
from smelt.data.splits import Example, Split, spread_indices
from smelt.models.checkpoint import load_model, load_tokenizer
from smelt.runtimes.images import ImageInput
from smelt.tasks.samples import EncodedSample
from tests.support import harness
from tests.support.models import every_family, tiny


def rows_of(*sizes):
    """Batches of texts of 4 tokens, each text its number throughout."""
    numbers = torch.arange(sum(sizes)).split(sizes)
    batches = [{"input_ids": n[:, None].repeat(1, 4)} for n in numbers]
    batches = [batch | {"attention_mask": torch.ones_like(batch["input_ids"])} for batch in batches]
    return CalibrationSamples("made", batches, sum(sizes), 4 * sum(sizes))


def test_samples_of_subset_have_no_padding():
    tokens = {"input_ids": [[5, 6, 0, 0]], "attention_mask": [[1, 1, 0, 0]]}
    targets = {"decoder_input_ids": [[1, 7, 8]], "labels": [[7, 8, -100]]}
    batch = {name: torch.tensor(values).repeat(2, 1) for name, values in (tokens | targets).items()}
    samples = CalibrationSamples("made", [batch], 2, 8).subset(1)
    assert {name: value.tolist() for name, value in samples.batches[0].items()} == {
        "input_ids": [[5, 6]], "attention_mask": [[1, 1]], "decoder_input_ids": [[1, 7]], "labels": [[7, 8]],
    }  # fmt: skip


@pytest.mark.parametrize(("shape", "expected"), [
    ((2, 4, 3), 6), ((2, 4, 5, 3), 30), ((8, 3), 6), ((2, 4, 4), 6),
    ((2, 3), 2), ((2, 4), 2),  # one vector for each sample, also as wide as the batch is long
])  # fmt: skip
def test_inputs_of_padding_are_left_out(shape, expected):
    batch = {"attention_mask": torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])}
    x = torch.arange(math.prod(shape)).reshape(shape).float()
    assert token_rows(x, batch, source=True).shape == (expected, shape[-1])


@pytest.mark.parametrize(("sizes", "wanted", "numbers"), [
    ((3, 1, 4), 3, [0, 3, 4]),  # the first of each batch
    ((3, 1, 4), 2, [0, 4]), ((3, 1, 4), 5, [0, 2, 3, 5, 7]), ((8,), 3, [0, 1, 2]), ((8,), 8, list(range(8))),
    ((8,), 64, list(range(8))), ((3, 1, 4), 64, list(range(8))),
])  # fmt: skip
def test_requested_number_of_samples_is_returned(sizes, wanted, numbers):
    subset = rows_of(*sizes).subset(wanted)
    assert len(subset.batches) == subset.num_samples == min(wanted, sum(sizes))
    assert all(len(batch["input_ids"]) == 1 for batch in subset.batches)
    assert subset.tokens == 4 * subset.num_samples
    assert [int(batch["input_ids"][0, 0]) for batch in subset.batches] == numbers


@pytest.fixture(scope="module")
def marian():
    folder = every_family.model_with_layers("marian", 1)
    return folder, load_model(folder)[0]


def translations(number):
    """Pairs with different sources."""
    words = sorted(set(" ".join(tiny.SENTENCES).split()))
    size = len(words)
    pairs = [(f"{words[i % size]} {words[i // size]} {words[0]}", words[i % 7]) for i in range(number)]
    return Split("pairs.jsonl", tuple(Example(source, (target,)) for source, target in pairs))


@pytest.mark.parametrize(("widest", "lengths", "expected"), [
    (1024, [(10, 8)] * 128, 1280),  # 10,240 tokens of the target, which is shorter
    (1024, [(8, 10), (16, 10)] * 64, 1024),  # a mean of 10 tokens a side
    (1024, [(1024, 0)] * 128, 128),  # 10 windows have enough tokens
    (65536, [(1024, 0)] * 128, 256),  # no more than 262,144 tokens
    (1024, [(40, 0), (60, 0)] * 4, 205),  # 10,240 / 50
    (64, [(10, 8)] * 128, 128),
])  # fmt: skip
def test_default_samples_have_ten_tokens_per_input_of_widest_layer(widest, lengths, expected):
    model = torch.nn.Sequential(torch.nn.Linear(16, widest, bias=False, device="meta"))
    model.append(torch.nn.Linear(widest, 8, device="meta"))
    samples = [EncodedSample([5] * source, None, [5] * target or None) for source, target in lengths]
    assert default_sample_count(model, samples, len(samples)) == expected
    assert default_sample_count(model, samples * 2, len(samples)) == max(128, math.ceil(expected / 2))


def test_default_counts_both_texts_of_pair_and_patches_of_image():
    model = torch.nn.Linear(1024, 8)
    pairs = [EncodedSample([5] * 12, None, (0.5,), second_ids=[5] * 8)] * 128
    assert default_sample_count(model, pairs, 128) == 10 * 1024 // 20
    image = ImageInput("unread.png", "row 1", SimpleNamespace(shape=(64, 96)))  # 4 x 6 patches
    images = [EncodedSample([], None, 0, image=image)] * 128
    assert default_sample_count(model, images, 128) == math.ceil(10 * 1024 / 24)


@pytest.mark.parametrize(("rows", "wanted", "held_back", "numbers"), [
    (400, 8, False, (8, 0)), (400, 8, True, (8, 16)), (400, 300, True, (300, 30)),
    (400, 390, True, (361, 39)), (400, 500, True, (360, 40)), (100, None, True, (90, 10)),
    (8, None, True, (8, 0)), (8, 6, True, (6, 2)),
])  # fmt: skip
def test_samples_are_held_back_from_calibration(rows, wanted, held_back, numbers, marian, tmp_path):
    folder, model = marian
    ctx = harness.make_context(tmp_path / "out", data={"train": translations(rows)})
    artifact = tiny.as_artifact(folder)
    samples = load_calibration_samples(model, artifact, wanted, ctx, "test", held_back=held_back)
    parts = [samples, *([samples.held_back] if samples.held_back else [])]
    sources = [{tuple(ids) for b in part.batches for ids in b["input_ids"].tolist()} for part in parts]
    assert [*map(len, sources), 0][:2] == list(numbers)
    assert set.intersection(*sources) == set() or len(sources) == 1
    assert samples.details == {
        "origin": "pairs.jsonl", "samples": numbers[0], "tokens": samples.tokens,
    } | ({"held_back": numbers[1]} if numbers[1] else {})  # fmt: skip


def test_example_with_two_references_is_held_back_with_both(marian, tmp_path):
    folder, model = marian
    examples = tuple(
        replace(example, references=(example.references[0], example.references[0] + " too"))
        for example in translations(60).examples
    )
    ctx = harness.make_context(tmp_path / "out", data={"train": Split("pairs.jsonl", examples)})
    samples = load_calibration_samples(model, tiny.as_artifact(folder), 20, ctx, "test", held_back=True)
    sources = [
        {tuple(ids) for b in part.batches for ids in b["input_ids"].tolist()}
        for part in (samples, samples.held_back)
    ]
    assert [*map(len, sources)] == [20, 16]
    assert not set.intersection(*sources)
    alone = load_calibration_samples(model, tiny.as_artifact(folder), 20, ctx, "test")
    assert (alone.num_samples, alone.held_back) == (40, None)


def test_default_number_follows_from_token_lengths(marian, tmp_path):
    folder, model = marian  # its widest layer has 64 inputs
    split = translations(400)
    ctx = harness.make_context(tmp_path / "out", data={"train": split})
    samples = load_calibration_samples(model, tiny.as_artifact(folder), None, ctx, "test")
    tokenizer = load_tokenizer(folder)
    examples = [split.examples[i] for i in spread_indices(400, 128, 0)]
    target_tokens = sum(len(tokenizer(text_target=e.references[0]).input_ids) for e in examples)
    assert target_tokens < sum(len(tokenizer(e.text).input_ids) for e in examples)
    assert samples.num_samples == math.ceil(640 * 128 / target_tokens) > 128

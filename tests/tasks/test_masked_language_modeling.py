"""Samples of masked language modeling: windows, whose masks each pass over the data draws again."""

import pytest
import torch
import transformers

from smelt.data.splits import Columns
from smelt.models.checkpoint import load_model, load_tokenizer
from smelt.tasks.masked_language_modeling import TASK
from smelt.tasks.read_split import read_split
from smelt.tasks.samples import collate
from smelt.training.losses import label_objective
from smelt.training.trainer import _SamplesOrNone
from tests.support.models import masked


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    home = tmp_path_factory.mktemp("home")
    masked.write_lines(home / "t.txt")
    return masked.write_model(home / "m")


@pytest.fixture(scope="module")
def samples(folder):
    split = read_split("t.txt", TASK.name, Columns(), folder.parent)
    config = transformers.AutoConfig.from_pretrained(folder)
    return TASK.encode(split, config, load_tokenizer(folder), 32, 12)[0]


def test_loss_equals_that_of_transformers(folder, samples):
    model, _ = load_model(folder)
    batch = collate(samples, model.config)
    assert batch["labels"].shape == batch["input_ids"].shape == batch["attention_mask"].shape
    with torch.no_grad():
        expected = model(**batch).loss
        assert float(label_objective()(model, batch)) == pytest.approx(float(expected), rel=1e-5)


def test_each_pass_masks_other_tokens_and_repeats_for_equal_seed(samples):
    dataset, again, other = (_SamplesOrNone(samples, seed) for seed in (0, 0, 1))
    count = len(samples)
    first, second = ([dataset[number * count + i][0].target for i in range(count)] for number in (0, 1))
    assert first != second
    assert second == [again[count + i][0].target for i in range(count)]
    assert second != [other[count + i][0].target for i in range(count)]
    assert dataset[-1 - (count + 2)] == (dataset[count + 2][0], False)
    assert [sample.target for sample in samples] not in (first, second)


def test_targets_are_no_further_tokens_of_a_sample(samples):
    assert samples[0].token_counts == (12, 0)

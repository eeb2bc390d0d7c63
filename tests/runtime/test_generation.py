"""The greedy loop gives what Hugging Face `generate` gives, token for token."""

import numpy as np
import pytest
import tiny
import torch

from smelt.core.errors import InputError
from smelt.runtime.checkpoint import load_tokenizer
from smelt.runtime.generation import Generation, greedy
from smelt.runtime.predict import make_batches
from smelt.runtime.torch_runner import TorchRunner


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.marian(tmp_path_factory.mktemp("marian"))


@pytest.mark.parametrize(
    "extra",
    [
        {},
        {"min_length": 6},
        {"min_new_tokens": 5},
        {"suppress_tokens": [5, 9]},
        {"bad_words_ids": [[7], [3, 4], [0]]},
        {"forced_bos_token_id": 6},
        {"forced_eos_token_id": None},
    ],
)
def test_greedy_equals_generate_when_the_generation_config_asks_for(folder, extra):
    with TorchRunner(tiny.artifact(folder)) as runner:
        runner.generation_config.update(extra)
        ((_, batch),) = make_batches(tiny.SENTENCES, load_tokenizer(folder), 32, 40)
        ours = greedy(runner, batch, Generation(max_new_tokens=12))
        for name, value in extra.items():
            setattr(runner.model.generation_config, name, value)
        runner.model.generation_config.max_length = None
        theirs = runner.model.generate(
            torch.from_numpy(batch.input_ids),
            attention_mask=torch.from_numpy(batch.attention_mask),
            num_beams=1,
            do_sample=False,
            max_new_tokens=12,
        )
    pad = runner.generation_config["pad_token_id"]
    for own, other in zip(ours, theirs[:, 1:].tolist(), strict=True):
        length = other.index(0) + 1 if 0 in other else len(other)
        assert own == other[:length]
        assert set(other[length:]) <= {pad}
    assert len({tuple(row) for row in ours}) > 1, "every text gave the same tokens: the test shows nothing"


def test_greedy_refuses_a_setting_that_it_does_not_have(folder):
    with TorchRunner(tiny.artifact(folder)) as runner:
        runner.generation_config["no_repeat_ngram_size"] = 3
        ((_, batch),) = make_batches(["a man"], load_tokenizer(folder), 4, 40)
        with pytest.raises(InputError, match=r"no_repeat_ngram_size is 3.*set it to 0"):
            greedy(runner, batch, Generation())


def test_batches_keep_every_row_and_pad_on_the_right(folder):
    tokenizer = load_tokenizer(folder)
    batches = make_batches(tiny.SENTENCES, tokenizer, 4, 40)
    assert sorted(i for rows, _ in batches for i in rows) == list(range(len(tiny.SENTENCES)))
    for rows, batch in batches:
        for at, i in enumerate(rows):
            ids = tokenizer(tiny.SENTENCES[i])["input_ids"]
            assert batch.input_ids[at].tolist() == ids + [tokenizer.pad_token_id] * (
                batch.input_ids.shape[1] - len(ids)
            )
            assert batch.attention_mask[at].sum() == len(ids)
    assert all(np.diff([b.input_ids.shape[1] for _, b in batches]) <= 0)

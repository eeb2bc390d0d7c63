"""The loop gives what Hugging Face `generate` gives, token for token; the settings are checked."""

import numpy as np
import pytest

from smelt.generation.config import GenerationSettings
from smelt.generation.search import generate
from smelt.models.checkpoint import load_tokenizer
from smelt.runtimes.predict_texts import generate_texts, make_batches
from smelt.runtimes.registry import open_runner
from tests.support.models import generation_models, tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.write_marian(tmp_path_factory.mktemp("marian"))


def theirs_of(runner, batch, **wishes):
    return generation_models.transformers_tokens(runner.backend.model, batch, do_sample=False, **wishes)


@pytest.mark.parametrize("kind", generation_models.CAUSAL)
@pytest.mark.parametrize("wishes", [
    {}, {"no_repeat_ngram_size": 2}, {"repetition_penalty": 1.5, "min_new_tokens": 3},
    {"bad_words_ids": [[4], [9, 9], [11, 5]], "forced_eos_token_id": 1},
], ids=["plain", "ngrams", "repetition", "words"])  # fmt: skip
def test_greedy_decoder_only_output_equals_generate(kind, wishes):
    runner = generation_models.CausalRunner(generation_models.make_model(kind))
    for batch_size in (1, 4):
        batch = generation_models.random_batch(batch_size, seed=batch_size, left=True)
        actual = generate(runner, batch, GenerationSettings(max_new_tokens=12, **wishes))
        assert actual == generation_models.transformers_tokens(
            runner.backend.model, batch, max_new_tokens=12, do_sample=False, **wishes
        )


def test_maximum_length_of_the_model_is_used_by_default(folder):
    with open_runner(tiny.as_artifact(folder)) as runner:
        ((_, batch),) = make_batches(tiny.SENTENCES, load_tokenizer(folder), 32, 40)
        runner.generation_config.update({"max_length": 7, "eos_token_id": 0, "min_new_tokens": 30})
        assert {len(row) for row in generate(runner, batch, GenerationSettings())} == {6}
        assert {len(row) for row in generate(runner, batch, GenerationSettings(max_new_tokens=9))} == {9}
        # beyond the table of 48 positions nothing can be generated
        assert {
            len(r) for r in generate(runner, batch, GenerationSettings(max_new_tokens=99, min_length=99))
        } == {48}


def test_batches_of_sampled_texts_use_different_random_numbers(folder):
    with open_runner(tiny.as_artifact(folder)) as runner:
        wishes = GenerationSettings(do_sample=True, temperature=3.0, max_new_tokens=12)
        texts = generate_texts(runner, [tiny.SENTENCES[0]] * 4, wishes, batch_size=2)
    assert len(set(texts)) == 4


def test_batches_contain_every_row_with_right_padding(folder):
    tokenizer = load_tokenizer(folder)
    batches = make_batches(tiny.SENTENCES, tokenizer, 4, 40)
    assert sorted(i for rows, _ in batches for i in rows) == list(range(len(tiny.SENTENCES)))
    for rows, batch in batches:
        for index, i in enumerate(rows):
            ids = tokenizer(tiny.SENTENCES[i])["input_ids"]
            assert batch.input_ids[index].tolist() == ids + [tokenizer.pad_token_id] * (
                batch.input_ids.shape[1] - len(ids)
            )
            assert batch.attention_mask[index].sum() == len(ids)
    assert all(np.diff([b.input_ids.shape[1] for _, b in batches]) <= 0)


class Scripted:
    """A runner whose row i says its script's tokens one by one and knows which rows are still asked for."""

    name, version, device, folder, reduces_logits = "test", "0", "cpu", None, False
    config = {"is_encoder_decoder": True, "decoder_start_token_id": 3, "eos_token_id": 1, "pad_token_id": 0}  # noqa: RUF012
    generation_config = {}  # noqa: RUF012

    def __init__(self, scripts):
        self.scripts, self.fed = scripts, []

    def encode(self, batch):
        return {"rows": list(range(len(self.scripts))), "step": 0}

    def decode_step(self, state, tokens):
        assert len(tokens) == len(state["rows"])
        if state["step"]:
            expected = [(self.scripts[i] + [0] * 99)[state["step"] - 1] for i in state["rows"]]
            assert tokens.tolist() == expected
        self.fed.append(len(tokens))
        scores = np.zeros((len(tokens), 24), dtype=np.float32)
        for index, i in enumerate(state["rows"]):
            scores[index, (self.scripts[i] + [9] * 99)[state["step"]]] = 100.0
        state["step"] += 1
        return scores

    def reorder_cache(self, state, rows):
        return {"rows": [state["rows"][i] for i in rows], "step": state["step"]}


ENDS = (4, 1, 9, 2, 2, 6, 9, 3)
SCRIPTS = [[10 + i, *([5] * (end - 2)), 1] if end > 1 else [1] for i, end in enumerate(ENDS)]


@pytest.mark.parametrize(("wishes", "fed"), [
    # a quarter of eight has ended after two steps, when three of them have; then of five one, and so on
    ({}, [8, 8, 5, 4, 3, 3, 2, 2, 2]), ({"do_sample": True, "top_k": 1}, [8] * 9),
], ids=["greedy", "sampling"])  # fmt: skip
def test_ended_rows_leave_the_batch_and_are_kept_in_the_result(wishes, fed):
    runner = Scripted(SCRIPTS)
    batch = generation_models.random_batch(len(ENDS), seed=1)
    assert generate(runner, batch, GenerationSettings(max_new_tokens=12, **wishes)) == SCRIPTS
    assert runner.fed == fed


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_logits_rules_follow_the_remaining_rows(kind):
    """Prompts are padded on the left by different lengths, and what is padding counts for no rule."""
    runner = generation_models.CausalRunner(generation_models.make_model(kind))
    batch = generation_models.random_batch(9, seed=3, left=True)
    wishes = {"repetition_penalty": 1.7, "max_new_tokens": 14}
    runner.generation_config["eos_token_id"] = eos = [1, 5, 9, 13]
    actual = generate(runner, batch, GenerationSettings(**wishes))
    assert actual == theirs_of(runner, batch, eos_token_id=eos, **wishes)
    assert len({len(row) for row in actual}) > 3

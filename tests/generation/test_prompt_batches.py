"""Prompts: tokens, padding on the left, the end of a long one, and what reads behind them."""

import json
import shutil
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from smelt.core.errors import InputError
from smelt.generation.config import GenerationConfig, GenerationSettings
from smelt.generation.prompt_batches import (
    batch_prompts,
    decode_continuation,
    max_prompt_length,
    pad_left,
    padding_token,
)
from smelt.models.checkpoint import load_tokenizer
from smelt.models.tokenizer import encode_prompts, truncate_prompt
from smelt.runtimes.predict_texts import generate_texts
from smelt.runtimes.registry import open_runner
from tests.support.expected_errors import raises_code
from tests.support.models import causal, published_tokenizers, tiny

SENTENCE = "The old house stands near the river."
LONG = " ".join(causal.TEXT.split())


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    return causal.write_tokenizer(tmp_path_factory.mktemp("words"))


@pytest.fixture(scope="module", params=["gpt2", "llama"])
def folder(request, tmp_path_factory):
    """64 positions; the Llama puts a first token before each text."""
    return causal.write_model(tmp_path_factory.mktemp(request.param), request.param)


def test_prompts_of_different_lengths_are_left_padded():
    batch = pad_left([[5, 6, 7], [8]], 0)
    assert batch.input_ids.tolist() == [[5, 6, 7], [0, 0, 8]]
    assert batch.attention_mask.tolist() == [[1, 1, 1], [0, 0, 1]]


def test_end_of_a_too_long_prompt_is_kept(words):
    full = words(SENTENCE)["input_ids"]
    assert encode_prompts([SENTENCE], words, 3) == [full[-3:]]


def test_first_special_token_of_a_truncated_prompt_is_kept(tmp_path):
    words = causal.write_tokenizer(tmp_path, begin=True)
    full = words(SENTENCE)["input_ids"]
    assert full[0] == words.bos_token_id
    assert encode_prompts([SENTENCE], words, 4) == [[full[0], *full[-3:]]]
    assert truncate_prompt([7, 1, 2, 3], 3, 7) == [7, 2, 3]
    assert truncate_prompt([7, 1, 2, 3], 1, 7) == [3]  # room for one: the token that the text ends with
    assert truncate_prompt([7, 1, 2, 3], 3, None) == [1, 2, 3]
    assert truncate_prompt([7, 1], 2, 7) == [7, 1]


def test_empty_prompt_starts_with_the_first_token(words):
    assert encode_prompts([""], words, 8) == [[words.bos_token_id]]
    nameless = PreTrainedTokenizerFast(tokenizer_object=words.backend_tokenizer)
    assert (nameless.bos_token_id, nameless.eos_token_id) == (None, None)
    with raises_code("empty-prompt", InputError):
        encode_prompts([""], nameless, 8)


def test_batches_contain_all_positions_once_longest_first(words):
    texts = ["a", "the cat sleeps", SENTENCE]
    batches = batch_prompts(encode_prompts(texts, words, 64), 2, 0, GenerationConfig())
    assert [rows for rows, _ in batches] == [[2, 1], [0]]
    assert padding_token(words) == words.eos_token_id


@pytest.mark.parametrize(("length", "settings", "limit", "expected"), [
    (50, {"max_new_tokens": 4}, 64, 50),
    # the last new token is never fed
    (61, {"max_new_tokens": 4}, 64, 61),
    (62, {"max_new_tokens": 4}, 64, 61),
    # 128 new ones have no room anyway: what is left of 64 is enough
    (20, {}, 64, 20),
    (60, {}, 64, 32), (60, {"max_length": 64}, 64, 60),
    # longer than that already, so the default is asked for
    (60, {"max_length": 50}, 64, 32),
    (5, {"max_new_tokens": 900}, 1, 1), (500, {"max_new_tokens": 10}, 10**9, 500),
])  # fmt: skip
def test_prompt_is_truncated_only_if_new_tokens_need_the_space(length, settings, limit, expected):
    assert max_prompt_length(length, GenerationConfig(**settings), limit) == expected


def _continued(folder, text, **wishes):
    cuts = []
    with open_runner(tiny.as_artifact(folder, "language-modeling")) as runner:
        generated = generate_texts(
            runner,
            [text],
            GenerationSettings(**wishes),
            on_truncate=lambda count, limit: cuts.append((count, limit)),
        )
    return generated[0].removeprefix(text), cuts


def _theirs(folder, ids, new):
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    out = model.generate(torch.tensor([ids]), max_new_tokens=new, do_sample=False)[0].tolist()
    words = load_tokenizer(folder)
    full_text = words.decode(out, skip_special_tokens=True)
    return full_text.removeprefix(words.decode(ids, skip_special_tokens=True))


def _prompt(folder, tokens):
    """Return a text of exactly so many tokens, the first special one counted, and its ids."""
    words = load_tokenizer(folder)
    for end in range(len(LONG)):
        ids = words(LONG[:end], verbose=False)["input_ids"]
        if len(ids) == tokens:
            return LONG[:end], ids
    raise AssertionError(f"no prompt of {tokens} tokens")


def test_batches_of_sampled_continuations_use_different_random_numbers(folder):
    wishes = GenerationSettings(do_sample=True, temperature=3.0, max_new_tokens=8, seed=1)
    with open_runner(tiny.as_artifact(folder, "language-modeling")) as runner:
        first, again = (generate_texts(runner, [SENTENCE] * 4, wishes, batch_size=2) for _ in range(2))
    assert first == again
    assert first[:2] != first[2:]
    assert len(set(first)) == 4


@pytest.mark.parametrize("who", ["caller", "model"])
def test_prompt_is_not_truncated_if_requested_tokens_fit(folder, tmp_path, who):
    text, ids = _prompt(folder, 56)
    path = folder / "generation_config.json"
    before = path.read_text()
    try:
        if who == "model":
            path.write_text(json.dumps(json.loads(before) | {"max_new_tokens": 8}))
        output, cuts = _continued(folder, text, **({"max_new_tokens": 8} if who == "caller" else {}))
    finally:
        path.write_text(before)
    assert (output, cuts) == (_theirs(folder, ids, 8), [])


def test_prompt_without_space_left_is_truncated_after_its_first_token_and_counted(folder):
    text, ids = _prompt(folder, 62)
    output, cuts = _continued(folder, text)  # 128 new tokens, where nobody says
    begin = ids[:1] if ids[0] == load_tokenizer(folder).bos_token_id else []
    kept_ids = begin + ids[len(ids) - 32 + len(begin) :]
    assert len(kept_ids) == 32
    assert (output, cuts) == (_theirs(folder, kept_ids, 33), [(1, 64)])


@pytest.fixture(scope="module", params=["llama", "llama3", "gpt2", "opt"])
def reader(request, tmp_path_factory):
    folder = published_tokenizers.MAKERS[request.param](
        tmp_path_factory.mktemp(request.param), causal.TEXT.splitlines(), 40
    )
    return load_tokenizer(folder)


@pytest.mark.parametrize("head", ["The old house", "Zwei schöne Hunde laufen über die", "T", ""])
def test_continuation_is_decoded_as_after_its_prompt(reader, head):
    full_text = next(
        (t for t in (SENTENCE, *causal.TEXT.splitlines()) if t.startswith(head) and head), SENTENCE
    )
    ids, prompt = reader(full_text)["input_ids"], reader(head)["input_ids"]
    same = next((i for i, (a, b) in enumerate(zip(ids, prompt, strict=False)) if a != b), len(prompt))
    new_ids = ids[same:]
    expected = full_text.removeprefix(reader.decode(ids[:same], skip_special_tokens=True))
    assert decode_continuation(reader, ids[:same], new_ids) == expected
    assert (
        reader.decode(ids, skip_special_tokens=True) == full_text
    )  # so that nothing else makes a difference


def test_continuation_is_decoded_alone_if_the_prompt_would_change():
    class Joining:
        """Reads "1" and "2" as "one" and "two", but both together as "twelve"."""

        smelt_prefix, model_max_length, truncation_side, is_fast = "", 64, "right", False
        pad_token_id = bos_token_id = eos_token_id = mask_token_id = None
        said: ClassVar = {(1,): "one", (2,): "two", (1, 2): "twelve"}

        def batch_decode(self, rows, skip_special_tokens):
            return [self.said[tuple(row)] for row in rows]

    assert decode_continuation(Joining(), [1], [2]) == "two"


@pytest.mark.parametrize(("wishes", "config"), [
    ({"max_new_tokens": 50}, {}), ({"max_new_tokens": 50, "num_beams": 3}, {}), ({}, {"max_length": 40}),
    ({}, {"min_length": 30, "max_length": 60}),
], ids=str)  # fmt: skip
def test_prompt_has_the_same_continuation_alone_and_with_longer_ones(folder, tmp_path, wishes, config):
    """64 positions: batched with a prompt of 32 tokens, one of 10 may still have 50 new ones, as alone."""
    texts = [_prompt(folder, tokens)[0] for tokens in (32, 10, 24)]
    folder = Path(shutil.copytree(folder, tmp_path / "model"))
    path = folder / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    with open_runner(tiny.as_artifact(folder, "language-modeling")) as runner:
        together = generate_texts(runner, texts, GenerationSettings(**wishes))
        alone = [generate_texts(runner, [text], GenerationSettings(**wishes))[0] for text in texts]
    assert together == alone
    if wishes == {"max_new_tokens": 50}:
        for tokens, continuation in zip((32, 10, 24), together, strict=True):
            text, ids = _prompt(folder, tokens)
            assert continuation.removeprefix(text) == _theirs(folder, ids, min(50, 64 + 1 - tokens))


def test_only_prompts_of_equal_limits_share_a_batch():
    prompts = [[1] * n for n in (60, 40, 12, 10, 3)]
    free = batch_prompts(prompts, 3, 0, GenerationConfig(max_new_tokens=50, positions=64))
    assert [rows for rows, _ in free] == [[0], [1], [2, 3, 4]]
    assert [rows for rows, _ in batch_prompts(prompts, 3, 0, GenerationConfig(max_new_tokens=4))] == [
        [0, 1, 2],
        [3, 4],
    ]
    least = batch_prompts(prompts, 3, 0, GenerationConfig(max_new_tokens=4, min_length=12))
    assert [rows for rows, _ in least] == [[0, 1, 2], [3], [4]]

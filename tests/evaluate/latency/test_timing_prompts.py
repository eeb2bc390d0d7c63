from types import SimpleNamespace

import pytest

from smelt.core.errors import InputError
from smelt.evaluate.latency.settings import prompt_texts, truncate_prompts
from smelt.generation.runner import TextTools
from tests.support.expected_errors import raises_code
from tests.support.models import causal

pytestmark = pytest.mark.quick


def test_short_samples_are_joined_into_prompts():
    prompts = prompt_texts(["one two", "", " three four five"], 2)
    assert " ".join(prompts) == "one two three four"  # what is left over is too short
    assert prompt_texts(["one"], 100) == ["one"]
    with raises_code("empty-data", InputError):
        prompt_texts(["", " "], 2)


def test_prompts_end_before_the_word_that_exceeds_the_length(tmp_path):
    causal.write_model(tmp_path, "gpt2")
    tokenizer = causal.write_tokenizer(tmp_path)
    runner = SimpleNamespace(text=TextTools(tmp_path, {"max_position_embeddings": 64}, {}))
    texts = [causal.TEXT, "A man in a red hat walks on the grass"]
    prompts, new = truncate_prompts(texts, runner, (7, 5))
    assert new == 5
    for prompt, text in zip(prompts, texts, strict=True):
        text_words = text.split()
        count = len(prompt.split())
        assert prompt.split() == text_words[:count]
        assert len(tokenizer(prompt)["input_ids"]) <= 7
        assert len(tokenizer(" ".join(text_words[: count + 1]))["input_ids"]) > 7
    # one word too long is taken all the same, and a short table of positions leaves room for the rest
    assert truncate_prompts(["Straßenbahnhaltestelle"], runner, (1, 500)) == (["Straßenbahnhaltestelle"], 63)

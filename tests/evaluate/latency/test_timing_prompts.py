from types import SimpleNamespace

import pytest

from smelt.core.errors import InputError
from smelt.evaluate.latency.settings import prompt_texts, truncate_prompts
from smelt.runtimes.runner import TextTools
from tests.support.expected_errors import raises_code
from tests.support.models import causal

pytestmark = pytest.mark.quick


def test_prompts_are_stretches_of_the_text_when_rows_are_short():
    found = prompt_texts(["one two", "", " three four five"], 2)
    assert " ".join(found) == "one two three four"  # what is left over is too short
    assert prompt_texts(["one"], 100) == ["one"]
    with raises_code("empty-data", InputError):
        prompt_texts(["", " "], 2)


def test_prompts_hold_as_many_whole_words_as_the_tokens_allow(tmp_path):
    causal.write_model(tmp_path, "gpt2")
    words = causal.write_tokenizer(tmp_path)
    runner = SimpleNamespace(text=TextTools(tmp_path, {"max_position_embeddings": 64}, {}))
    texts = [causal.TEXT, "A man in a red hat walks on the grass"]
    found, new = truncate_prompts(texts, runner, (7, 5))
    assert new == 5
    for prompt, text in zip(found, texts, strict=True):
        whole = text.split()
        count = len(prompt.split())
        assert prompt.split() == whole[:count]
        assert len(words(prompt)["input_ids"]) <= 7
        assert len(words(" ".join(whole[: count + 1]))["input_ids"]) > 7
    # one word too long is taken all the same, and a short table of positions leaves room for the rest
    assert truncate_prompts(["Straßenbahnhaltestelle"], runner, (1, 500)) == (["Straßenbahnhaltestelle"], 63)

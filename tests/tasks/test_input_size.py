"""The mean size of inputs, from lengths that transformers' tokenizers return."""

import math
from statistics import mean

from transformers import AutoTokenizer

from smelt.data.splits import Columns, Example, Split
from smelt.tasks.input_size import mean_input_size
from smelt.tasks.read_split import read_split
from tests.support.models import causal, every_family, images

WORDS = ["a", "a b c d e", "a b c d e f g h i j"]


def _split(*examples):
    return Split("test", examples)


def _length(tokenizer, *texts):
    return len(tokenizer(*texts)["input_ids"])


def test_translation_has_mean_lengths_of_sources_and_targets():
    folder = every_family.model_with_layers("marian", 2)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    split = _split(*(Example(text, references=(f"{text} k",)) for text in WORDS))
    sources = [_length(tokenizer, text) for text in WORDS]
    targets = [len(tokenizer(text_target=f"{text} k")["input_ids"]) for text in WORDS]
    assert mean_input_size(folder, split, "translation") == (round(mean(sources)), round(mean(targets)))


def test_joined_pair_is_one_input_and_separate_texts_are_two():
    folder = every_family.model_with_layers("bert", 2)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    longer = "k l m n o p q r s t u v"
    split = _split(*(Example(text, text_pair=longer, label="yes") for text in WORDS))
    joined = [_length(tokenizer, text, longer) for text in WORDS]
    assert mean_input_size(folder, split, "text-classification")[0] == round(mean(joined))
    separate = [_length(tokenizer, text) for text in [*WORDS, *[longer] * len(WORDS)]]
    assert mean_input_size(folder, split, "sentence-similarity")[0] == round(mean(separate))


def test_input_is_truncated_to_limit_of_model():
    folder = every_family.model_with_layers("bert", 2)
    limit = AutoTokenizer.from_pretrained(folder).model_max_length
    split = _split(Example("a " * 2 * limit, label="yes"))
    assert mean_input_size(folder, split, "text-classification")[0] == limit


def test_window_has_an_input_less_than_tokens(tmp_path):
    folder = every_family.model_with_layers("gpt2", 2)
    path = causal.write_lines(tmp_path / "lines.txt", 1)
    split = read_split(str(path), "language-modeling", Columns(), tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    num_inputs = _length(tokenizer, path.read_text().strip()) - 1
    num_windows = math.ceil(num_inputs / tokenizer.model_max_length)
    assert num_windows > 1
    assert mean_input_size(folder, split, "language-modeling")[0] == round(num_inputs / num_windows)


def test_image_has_size_of_processor(tmp_path):
    folder = every_family.model_with_layers("vit", 2)
    split = images.read_rows(images.write_rows(tmp_path / "rows.jsonl", 2))
    assert mean_input_size(folder, split, images.TASK) == (images.IMAGE_SIZE, images.IMAGE_SIZE)

"""Samples of token classification: rows, the words' labels at their first tokens, and results."""

import json
import re

import datasets
import pytest
import torch
import transformers

from smelt.data.splits import Columns, Example
from smelt.models.checkpoint import load_model, load_tokenizer
from smelt.models.tokenizer import HubTokenizer
from smelt.runtimes.tag_words import Entity
from smelt.tasks.read_split import read_split
from smelt.tasks.samples import collate
from smelt.tasks.token_classification import TASK, tag_classes
from smelt.training.losses import label_objective
from tests.support.expected_errors import raises_code
from tests.support.models import published_tokenizers, taggers, tiny
from tests.support.models.taggers import TAGS

# words of several tokens, of one, and with punctuation and marks
WORDS = [["manhattan", "grass-dogs", "the", "cat"], ["Sun", ".", "na\u00efve", "\u732b", "river"], ["dogs"]]


def read(folder, *rows, **columns):
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return read_split(str(path), TASK.name, Columns(**columns), folder)


def ner_labels(tokenizer, words, classes, limit):
    """The labels as in transformers' example run_ner (examples/pytorch/token-classification)."""
    encoded = tokenizer(words, is_split_into_words=True, truncation=True, max_length=limit)
    labels = []
    for i, label in enumerate(classes):
        previous, row = None, []
        for index in encoded.word_ids(batch_index=i):
            row.append(-100 if index is None or index == previous else label[index])
            previous = index
        labels.append(row)
    return encoded["input_ids"], labels


@pytest.mark.parametrize("family", ["bert", "distilbert", "roberta", "xlm_roberta", "deberta_v2"])
@pytest.mark.parametrize("limit", [512, 7])
def test_ids_and_labels_equal_run_ner(tmp_path, family, limit):
    folder = tmp_path / family
    folder.mkdir()
    published_tokenizers.MAKERS[family](folder, tiny.SENTENCES * 4, 120)
    spaced = {"add_prefix_space": True} if family == "roberta" else {}
    reference = transformers.AutoTokenizer.from_pretrained(folder, **spaced)
    split = read(tmp_path, *({"tokens": w, "tags": [TAGS[i % 5] for i in range(len(w))]} for w in WORDS))
    config = transformers.BertConfig(id2label=dict(enumerate(TAGS)))
    samples, truncated = TASK.encode(split, config, load_tokenizer(folder), limit, None)
    classes = [[i % 5 for i in range(len(words))] for words in WORDS]
    ids, labels = ner_labels(reference, WORDS, classes, limit)
    assert [sample.input_ids for sample in samples] == ids
    assert [sample.target for sample in samples] == labels
    full_output = reference(WORDS, is_split_into_words=True)["input_ids"]
    assert truncated == sum(len(row) > limit for row in full_output)
    assert TASK.too_long_samples(split, HubTokenizer(reference), limit) == {
        i for i, row in enumerate(full_output) if len(row) > limit
    }


def test_loss_equals_that_of_transformers(tmp_path):
    folder = taggers.write_model(tmp_path / "m")
    split = read_split(taggers.write_rows(tmp_path / "r.jsonl").name, TASK.name, Columns(), tmp_path)
    model, _ = load_model(folder)
    samples, _ = TASK.encode(split, model.config, load_tokenizer(folder), 32, None)
    batch = collate(samples, model.config)
    assert batch["labels"].shape == batch["input_ids"].shape == batch["attention_mask"].shape
    assert samples[0].token_counts == (len(samples[0].input_ids), 0)
    with torch.no_grad():
        expected = model(**batch).loss
        assert float(label_objective()(model, batch)) == pytest.approx(float(expected), rel=1e-5)


def test_rows_of_tokens_and_of_entities_give_the_same_tags(tmp_path):
    text = "Ada lives in New York."
    entities = [{"start": 0, "end": 3, "label": "PER"}, {"start": 13, "end": 21, "label": "LOC"}]
    (example,) = read(tmp_path, {"text": text, "entities": entities}).examples
    assert example.label == ("B-PER", "O", "O", "B-LOC", "I-LOC", "O")
    assert (example.text, example.words) == (text, ())
    words = ["Ada", "lives", "in", "New", "York", "."]
    row = {"words": words, "ner": [1, 0, 0, 2, 2, 0]}
    (split_example,) = read(tmp_path, row, tokens="words", tags="ner").examples
    assert (split_example.words, split_example.label) == (tuple(words), (1, 0, 0, 2, 2, 0))
    assert split_example.text == "Ada lives in New York ."


def test_conll_file_is_read(tmp_path):
    (tmp_path / "a.conll").write_text("EU B-ORG\nacts O\n\nYes O\n")
    split = read_split("a.conll", TASK.name, Columns(), tmp_path)
    assert [(e.words, e.label, e.line) for e in split.examples] == [
        (("EU", "acts"), ("B-ORG", "O"), 1), (("Yes",), ("O",), 4),
    ]  # fmt: skip


def test_words_are_part_of_the_fingerprint(tmp_path):
    one = read(tmp_path, {"tokens": ["a b", "c"], "tags": ["O", "O"]}).fingerprint
    assert one != read(tmp_path, {"tokens": ["a", "b c"], "tags": ["O", "O"]}).fingerprint


@pytest.mark.parametrize(("row", "code"), [
    ({"tokens": ["a"], "tags": ["O", "O"]}, "tag-count-mismatch"),
    ({"tokens": [], "tags": []}, "empty-text"), ({"tokens": "a b", "tags": ["O"]}, "wrong-column-type"),
    ({"tokens": ["a", 1], "tags": ["O", "O"]}, "wrong-column-type"),
    ({"tokens": ["a", " "], "tags": ["O", "O"]}, "empty-word"),
    ({"tokens": ["a", "\ud800"], "tags": ["O", "O"]}, "lone-surrogate"),
    ({"tokens": ["a"], "tags": [1.5]}, "wrong-column-type"),
    ({"tokens": ["a"], "tags": [True]}, "wrong-column-type"),
    ({"tokens": ["a"], "tags": [""]}, "empty-label"), ({"tokens": ["a"]}, "partly-missing-column"),
    ({"tag": ["O"]}, "partly-missing-column"), ({"text": "a"}, "missing-column"),
    ({"text": " ", "entities": []}, "empty-text"), ({"text": "ab", "entities": {}}, "wrong-column-type"),
    ({"text": "ab", "entities": [{"start": 0, "end": 2}]}, "wrong-column-type"),
    ({"text": "ab", "entities": [{"start": 0, "end": 1, "label": "X"}]}, "entity-within-word"),
])  # fmt: skip
def test_wrong_row_is_named_by_file_and_line(tmp_path, row, code):
    good = {"tokens": ["a"], "tags": ["O"]}
    with raises_code(code) as error:
        read(tmp_path, good, row)
    assert error.value.line == 2
    assert error.value.file == str(tmp_path / "rows.jsonl")


def test_unknown_tag_is_named_by_line(tmp_path):
    split = read(tmp_path, {"tokens": ["a"], "tags": ["O"]}, {"tokens": ["a", "b"], "tags": ["O", "B-X"]})
    with raises_code("unknown-label") as error:
        tag_classes(split.examples, TAGS, split.origin)
    assert error.value.line == 2


def test_wrong_tag_of_conll_file_is_named_by_the_line_of_its_word(tmp_path):
    (tmp_path / "a.conll").write_text("a O\n\n# id = 1\na O\nb O\nc B-XX\nd B-YY\n")
    split = read_split("a.conll", TASK.name, Columns(), tmp_path)
    with raises_code("unknown-label") as error:
        tag_classes(split.examples, TAGS, split.origin)
    assert (error.value.file, error.value.line) == ("a.conll", 6)
    (tmp_path / "b.conll").write_text("a\tO\nb\t \n")
    with raises_code("empty-label") as error:
        read_split("b.conll", TASK.name, Columns(), tmp_path)
    assert error.value.line == 2


def test_line_with_several_wrong_tags_is_listed_once(tmp_path):
    split = read(
        tmp_path, {"tokens": ["a", "b", "c"], "tags": ["X", "Y", "Z"]}, {"tokens": ["a"], "tags": ["W"]}
    )
    with raises_code("unknown-label") as error:
        tag_classes(split.examples, TAGS, split.origin)
    numbers = re.findall(r"\d+", str(error.value).rpartition("Also")[2])
    assert numbers == ["2"]


@pytest.mark.parametrize("good_first", [True, False])
def test_row_without_entities_among_rows_with_them_is_incomplete(tmp_path, good_first):
    rows = [{"text": "a", "entities": []}, {"text": "b"}]
    with raises_code("partly-missing-column") as error:
        read(tmp_path, *rows[:: 1 if good_first else -1])
    assert error.value.line == (2 if good_first else 1)


@pytest.mark.parametrize("columns", ["tokens,tags", "text,entities"])
def test_table_cannot_hold_lists(tmp_path, columns):
    (tmp_path / "a.csv").write_text(f"{columns}\na b,O O\n")
    with raises_code("wrong-column-type") as error:
        read_split("a.csv", TASK.name, Columns(), tmp_path)
    assert {".csv", ".jsonl"} <= set(re.findall(r"\.\w+", str(error.value).partition(":2:")[2]))


def test_numbers_are_indices_of_the_tags_of_the_model(tmp_path):
    split = read(tmp_path, {"tokens": ["a", "b"], "tags": [0, 3]}, {"tokens": ["a"], "tags": ["B-PLACE"]})
    assert tag_classes(split.examples, TAGS, split.origin) == [[0, 3], [3]]


def test_data_sets_name_their_numbers(tmp_path, monkeypatch):
    names = ["O", "B-A"]
    features = datasets.Features(
        tokens=datasets.List(datasets.Value("string")),
        ner_tags=datasets.List(datasets.ClassLabel(names=names)),
    )
    table = datasets.Dataset.from_dict({"tokens": [["a", "b"]], "ner_tags": [[1, 0]]}, features=features)
    table.to_parquet(str(tmp_path / "a.parquet"))
    monkeypatch.setattr(datasets, "load_dataset", lambda *arguments, **options: table)
    for origin in ("a.parquet", "owner/name"):
        split = read_split(origin, TASK.name, Columns(tags="ner_tags"), tmp_path)
        assert split.examples[0].label == ("B-A", "O")


def test_tags_of_new_head_begin_with_outside():
    assert TASK.head_names(["B-A", "I-A", "O"]) == ["O", "B-A", "I-A"]
    with raises_code("unnamed-tags"):
        TASK.head_names(["0", "1"])


@pytest.mark.parametrize(("row", "is_recognized"), [
    ({"tokens": ["a"], "tags": ["O"]}, True), ({"text": "a", "entities": []}, True),
    ({"text": "a", "label": "b"}, False), ({"tokens": ["a"], "tags": ["x", "y"]}, False),
    ({"text": "a", "entities": "b"}, False),
])  # fmt: skip
def test_rows_are_recognized(row, is_recognized):
    assert TASK.recognizes_row(row, Columns(), Columns()) is is_recognized


def test_results_are_lines_and_fields():
    entity = Entity("PER", 0.98765, "Ada\nL", 3, 8)
    assert TASK.result_line([entity, entity]).split("\t") == ["Ada\\x0aL [PER 3:8 0.988]"] * 2
    assert TASK.result_line([]) == ""
    assert TASK.result_fields([entity]) == {
        "entities": [{"entity_group": "PER", "score": 0.98765, "word": "Ada\nL", "start": 3, "end": 8}]
    }


def test_placeholder_row_is_a_sample():
    row = TASK.placeholder_row("a text", {"id2label": {"0": "O"}})
    assert TASK.parse_row(row, "f:1", Columns(), False) == Example(
        "a text", label=("O", "O"), words=("a", "text")
    )

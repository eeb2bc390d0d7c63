"""Samples of question answering: rows, windows of contexts, labels, and the choice of answers."""

import json

import numpy as np
import pytest
import torch
import transformers
from scipy.special import softmax

from smelt.data.splits import Columns, Example
from smelt.models.checkpoint import load_model, load_tokenizer
from smelt.models.context_windows import MAX_LENGTH, STRIDE, encode_contexts
from smelt.models.tokenizer import HubTokenizer
from smelt.runtimes.answer_questions import Answer, best_answer
from smelt.tasks.question_answering import TASK
from smelt.tasks.read_split import read_split
from smelt.tasks.samples import collate
from smelt.training.losses import label_objective
from tests.support.expected_errors import raises_code
from tests.support.models import published_tokenizers, questions, tiny
from tests.support.models.questions import answered

# combining marks (also before an answer), an emoji of several code points, words without spaces, a ligature
TEXTS = {
    "cat": ("which animal ?", "a na\u0131\u0308ve m\u00e5nn \U0001f469\u200d\U0001f469 sees the cat e\u0301"),
    "\u732b": ("what ?", "the \ud558\uc580 dog \u732b\u304c\u597d\u304d and \ufb01sh \u2014 sun"),
    "e\u0301te\u0301 2021": ("when ?", "in e\u0301te\u0301 2021, the river \U0001f30a was high"),
}
LONG = " ".join(f"{word} river {i}" for i, word in enumerate(tiny.SENTENCES[0].split() * 12))


def read(folder, *rows, name="rows.jsonl", **columns):
    path = folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return read_split(str(path), TASK.name, Columns(**columns), folder)


def run_qa_features(tokenizer, example, limit, stride):
    """Ids and labels of the windows as transformers' example run_qa makes them (prepare_train_features)."""
    encoded = tokenizer(
        example.text, example.text_pair, truncation="only_second", max_length=limit, stride=stride,
        return_overflowing_tokens=True, return_offsets_mapping=True,
    )  # fmt: skip
    rows, labels = encoded["input_ids"], []
    for number, offsets in enumerate(encoded["offset_mapping"]):
        owners = encoded.sequence_ids(number)
        first, last = owners.index(1), len(owners) - 1 - owners[::-1].index(1)
        if not example.label:
            labels.append([0, 0])
            continue
        start, end = example.label[0], example.label[0] + len(example.references[0])
        if offsets[first][0] > start or offsets[last][1] < end:
            labels.append([0, 0])
            continue
        while first < len(offsets) and offsets[first][0] <= start and owners[first] == 1:
            first += 1
        while offsets[last][1] >= end and owners[last] == 1:
            last -= 1
        labels.append([first - 1, max(first - 1, last + 1)])  # marks on their own may end before the start
    return rows, labels


@pytest.mark.parametrize("family", ["bert", "distilbert", "roberta", "xlm_roberta", "deberta_v2"])
@pytest.mark.parametrize("limit", [MAX_LENGTH, 32])
def test_windows_and_labels_equal_run_qa(tmp_path, family, limit):
    folder = tmp_path / family
    folder.mkdir()
    texts = [*tiny.SENTENCES, *(context for _, context in TEXTS.values())]
    published_tokenizers.MAKERS[family](folder, texts * 4, 150)
    rows = [answered(question, context, answer) for answer, (question, context) in TEXTS.items()]
    long = LONG if limit < MAX_LENGTH else " ".join([LONG] * 5)
    rows += [answered("which river ?", long, "river 20"), answered("what is it ?", long)]
    split = read(tmp_path, *rows)
    reference = transformers.AutoTokenizer.from_pretrained(folder)
    config = transformers.BertConfig()
    samples, truncated = TASK.encode(split, config, load_tokenizer(folder), limit, None)
    ids, labels = [], []
    for example in split.examples:
        room = limit - reference.num_special_tokens_to_add(pair=True) - len(reference.tokenize(example.text))
        features = run_qa_features(reference, example, limit, min(STRIDE, room // 2))
        ids += features[0]
        labels += features[1]
    assert [sample.input_ids for sample in samples] == ids
    assert [sample.target for sample in samples] == labels
    assert len(samples) > len(rows)
    assert truncated == 0
    assert sum(label != [0, 0] for label in labels) >= 4


def test_labels_mark_the_answer_in_characters(tmp_path):
    published_tokenizers.MAKERS["roberta"](tmp_path, [*tiny.SENTENCES, *(c for _, c in TEXTS.values())], 200)
    tokenizer = HubTokenizer(load_tokenizer(tmp_path))
    split = read(tmp_path, *(answered(q, context, answer) for answer, (q, context) in TEXTS.items()))
    windows, _ = encode_contexts(tokenizer, *zip(*TEXTS.values(), strict=True), 384)
    samples, _ = TASK.encode(split, transformers.RobertaConfig(), load_tokenizer(tmp_path), 384, None)
    for window, sample, example in zip(windows, samples, split.examples, strict=True):
        first, last = sample.target
        text = example.text_pair[window.offsets[first][0] : window.offsets[last][1]]
        assert text.strip() == example.references[0]


def test_question_keeps_half_of_a_window(tmp_path):
    folder = questions.write_model(tmp_path / "m")
    tokenizer = load_tokenizer(folder)
    split = read(tmp_path, answered("cat " * 40, "the cat sees " * 9), answered("cat " * 12, "the cat"))
    samples, truncated = TASK.encode(split, load_model(folder)[0].config, tokenizer, 23, None)
    assert truncated == 1
    assert TASK.too_long_samples(split, tokenizer, 23) == {0}
    assert [len(sample.input_ids) for sample in samples[:-2]] == [23] * (len(samples) - 2)
    windows, _ = encode_contexts(HubTokenizer(tokenizer), ["cat " * 40], ["the cat sees " * 9], 23)
    spans = [[span for span in window.offsets if span] for window in windows]
    assert [len(row) for row in spans[:-1]] == [10] * (len(spans) - 1)
    [full], _ = encode_contexts(HubTokenizer(tokenizer), ["cat"], ["the cat sees " * 9], 99)
    assert {span for row in spans for span in row} == {span for span in full.offsets if span}


def test_lowercased_context_keeps_its_characters(tmp_path):
    tokenizer = HubTokenizer(load_tokenizer(questions.write_model(tmp_path / "m")))
    tokenizer.lower = True
    context = "\u0130 the CAT"  # in lower case the first letter is two characters
    [window], _ = encode_contexts(tokenizer, ["who ?"], [context], 99)
    [token_id] = tokenizer.encode_plain(["cat"])[0]
    assert window.offsets[window.ids.index(token_id)] == (6, 9)


@pytest.mark.parametrize("family", ["bert", "distilbert", "roberta"])
def test_loss_equals_that_of_transformers(tmp_path, family):
    folder = questions.write_model(tmp_path / "m", family)
    split = read_split(questions.write_rows(tmp_path / "r.jsonl").name, TASK.name, Columns(), tmp_path)
    model, _ = load_model(folder)
    samples, _ = TASK.encode(split, model.config, load_tokenizer(folder), 32, None)
    batch = collate(samples, model.config)
    assert batch["labels"].shape == (len(samples), 2)
    assert ("token_type_ids" in batch) is (family == "bert")
    assert samples[0].token_counts == (len(samples[0].input_ids), 0)
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    starts, ends = batch["labels"].T
    assert starts.max() > 0
    with torch.no_grad():
        expected = model(**inputs, start_positions=starts, end_positions=ends).loss
        assert float(label_objective()(model, batch)) == pytest.approx(float(expected), rel=1e-5)


def run_qa_answer(context, parts, version_2, n_best=20, longest=30):
    """Text and probability by the formulas of transformers' postprocess_qa_predictions."""
    spans, null = [], None
    for offsets, starts, ends in parts:
        score = starts[0] + ends[0]
        null = score if null is None else min(null, score)
        for first in np.argsort(starts)[::-1][:n_best]:
            for last in np.argsort(ends)[::-1][:n_best]:
                if offsets[first] and offsets[last] and first <= last <= first + longest - 1:
                    text = context[offsets[first][0] : offsets[last][1]]
                    spans.append((starts[first] + ends[last], text))
    spans += [(null, "")] * version_2
    spans = sorted(spans, key=lambda span: span[0], reverse=True)[:n_best]
    if version_2 and (null, "") not in spans:
        spans.append((null, ""))
    probabilities = softmax([score for score, _ in spans])
    index = next(i for i, (_, text) in enumerate(spans) if text)
    if version_2 and null - spans[index][0] > 0:
        index = spans.index((null, ""))
    return spans[index][1], probabilities[index]


@pytest.mark.parametrize("version_2", [False, True])
@pytest.mark.parametrize("null", [-3, 9])
def test_answers_equal_run_qa(tmp_path, version_2, null):
    folder = questions.write_model(tmp_path / "m")
    tokenizer = HubTokenizer(load_tokenizer(folder))
    windows, _ = encode_contexts(tokenizer, ["which river ?"], [LONG], 60)
    assert len(windows) > 3
    emptiness = set()
    for seed in range(8):
        draw = np.random.default_rng(seed)
        logits = [3 * draw.standard_normal((len(w.ids), 2)).astype(np.float32) for w in windows]
        for values in logits:
            values[0] = null
        parts = [(w.offsets, *v.T.astype(np.float64)) for w, v in zip(windows, logits, strict=True)]
        expected = run_qa_answer(LONG, parts, version_2)
        answer = best_answer(LONG, list(zip(windows, logits, strict=True)), version_2)
        assert (answer.answer, answer.score) == (expected[0], pytest.approx(expected[1], rel=1e-6))
        assert LONG[answer.start : answer.end] == answer.answer
        emptiness.add(answer.answer == "")
    assert emptiness == {version_2 and null == 9}


def test_answer_has_no_space_around_it_and_context_without_tokens_none(tmp_path):
    published_tokenizers.MAKERS["roberta"](tmp_path, tiny.SENTENCES, 120)
    tokenizer = HubTokenizer(load_tokenizer(tmp_path))
    tokenizer.inner.backend_tokenizer.post_processor = None
    context = "the cat  sees"
    [window], _ = encode_contexts(tokenizer, ["what"], [context], 99)
    logits = np.zeros((len(window.ids), 2), np.float32)
    position = next(i for i, span in enumerate(window.offsets) if span and span[0] == 3)
    logits[position] = 9
    answer = best_answer(context, [(window, logits)], may_be_unanswerable=False)
    assert context[answer.start : answer.end] == answer.answer == answer.answer.strip() != ""
    assert context[window.offsets[position][0]] == " "
    empty = [(window.__class__(0, window.ids, None, [None] * len(window.ids)), logits)]
    assert best_answer(context, empty, may_be_unanswerable=False) == Answer("", 0.0, 0, 0)
    assert best_answer(context, empty, may_be_unanswerable=True) == Answer("", 1.0, 0, 0)


ADA = answered("Who?", "Ada codes. Ada rests.", "Ada")


@pytest.mark.parametrize("row", [
    ADA, {**ADA, "answers": [{"text": "Ada", "answer_start": 0}], "id": "q1", "is_impossible": False},
])  # fmt: skip
def test_flat_rows(tmp_path, row):
    (example,) = read(tmp_path, row).examples
    assert example == Example("Who?", ("Ada",), "Ada codes. Ada rests.", label=(0,))


def test_squad_files_and_rows_with_one_answer(tmp_path):
    qas = [
        {"id": "a", "question": "Who?", "answers": ADA["answers"] and [{"text": "Ada", "answer_start": 11}]},
        {"id": "b", "question": "When?", "is_impossible": True, "answers": [],
         "plausible_answers": [{"text": "rests", "answer_start": 15}]},
    ]  # fmt: skip
    articles = [
        {"title": "One", "paragraphs": [{"context": ADA["context"], "qas": qas}] * 2},
        {"title": "None", "paragraphs": []},
    ]
    (tmp_path / "squad.json").write_text(json.dumps({"version": "v2.0", "data": articles}, indent=1))
    split = read_split("squad.json", TASK.name, Columns(), tmp_path)
    expected = [
        Example("Who?", ("Ada",), ADA["context"], label=(11,)),
        Example("When?", (), ADA["context"], label=()),
    ]  # fmt: skip
    assert list(split.examples[:4]) == expected * 2
    assert [e.row for e in split.examples[:4]] == [1, 2, 3, 4]
    (tmp_path / "a.csv").write_text("question,context,answer\nWho?,Ada codes.,Ada\nWhen?,Ada codes.,\n")
    split = read_split("a.csv", TASK.name, Columns(), tmp_path)
    assert [(e.references, e.label) for e in split.examples] == [(("Ada",), (0,)), ((), ())]
    renamed = read(
        tmp_path, {"q": "Who?", "text": "Ada codes", "answer": "Ada"}, question="q", context="text"
    )
    assert renamed.examples[0].label == (0,)


def test_answers_are_part_of_the_fingerprint(tmp_path):
    one = read(tmp_path, ADA).fingerprint
    assert one != read(tmp_path, {**ADA, "answers": {"text": ["Ada"], "answer_start": [11]}}).fingerprint


@pytest.mark.parametrize(("changed", "code"), [
    ({"answers": {"text": ["Ada"], "answer_start": [1]}}, "answer-not-in-context"),
    ({"answers": {"text": ["Ada"], "answer_start": [-21]}}, "answer-not-in-context"),
    ({"answers": {"text": ["Alan"], "answer_start": [0]}}, "answer-not-in-context"),
    ({"answers": {"text": ["Ada", "Ada"], "answer_start": [0, 12]}}, "answer-not-in-context"),
    ({"answers": {"text": ["Ada"], "answer_start": []}}, "wrong-column-type"),
    ({"answers": {"text": "Ada", "answer_start": 0}}, "wrong-column-type"),
    ({"answers": {"text": ["Ada"], "answer_start": ["0"]}}, "wrong-column-type"),
    ({"answers": [{"text": "Ada"}]}, "wrong-column-type"), ({"answers": None}, "wrong-column-type"),
    ({"answers": {"text": [" "], "answer_start": [3]}}, "empty-text"),
    ({"answers": [], "is_impossible": False}, "missing-answer"), ({"is_impossible": True}, "needless-answer"),
    ({"context": ""}, "empty-text"), ({"question": 3}, "wrong-column-type"),
    ({"question": "\ud800"}, "lone-surrogate"),
])  # fmt: skip
def test_wrong_row_is_named_by_file_and_line(tmp_path, changed, code):
    with raises_code(code) as error:
        read(tmp_path, ADA, {**ADA, **changed})
    assert (error.value.file, error.value.line) == (str(tmp_path / "rows.jsonl"), 2)


@pytest.mark.parametrize(("row", "code"), [
    ({"question": "Who?", "context": "Ada and Ada", "answer": "Ada"}, "ambiguous-answer"),
    ({"question": "Who?", "context": "Alan", "answer": "Ada"}, "answer-not-in-context"),
    ({"question": "Who?", "context": "Ada"}, "missing-column"),
    ({"question": "Who?", "answers": []}, "missing-column"), ({"answer": "Ada"}, "missing-column"),
])  # fmt: skip
def test_row_with_one_answer_is_unambiguous(tmp_path, row, code):
    with raises_code(code) as error:
        read(tmp_path, row)
    assert error.value.line == 1


@pytest.mark.parametrize(("lacks", "code"), [("answers", "missing-column"), ("question", "missing-column")])
def test_question_of_squad_file_without_column_is_named_by_its_id(lacks, code, tmp_path):
    """The line alone is that of the article, which may have hundreds of questions."""
    qa = {"id": "q7", "question": "Who?", "answers": [{"text": "Ada", "answer_start": 0}]}
    del qa[lacks]
    articles = [{"title": "T", "paragraphs": [{"context": "Ada codes", "qas": [qa]}]}]
    (tmp_path / "squad.json").write_text(json.dumps({"data": articles}, indent=1))
    with raises_code(code) as caught:
        read_split("squad.json", TASK.name, Columns(), tmp_path)
    assert "'q7'" in str(caught.value)
    complete_qa = {"id": "q6", "question": "Who?", "answers": [{"text": "Ada", "answer_start": 0}]}
    articles[0]["paragraphs"][0]["qas"].insert(0, complete_qa)
    (tmp_path / "squad.json").write_text(json.dumps({"data": articles}, indent=1))
    with raises_code("partly-missing-column") as caught:
        read_split("squad.json", TASK.name, Columns(), tmp_path)
    assert "'q7'" in str(caught.value)


def test_wrong_question_of_squad_file_is_named_by_line_of_article_and_id(tmp_path):
    qa = {"id": "wrong-one", "question": "Who?", "answers": [{"text": "Ada", "answer_start": 4}]}
    article = {"title": "T", "paragraphs": [{"context": "Ada codes", "qas": [qa]}]}
    articles = [{"title": "S", "paragraphs": []}, article]
    (tmp_path / "a.json").write_text(json.dumps({"data": articles}, indent=1))
    with raises_code("answer-not-in-context") as error:
        read_split("a.json", TASK.name, Columns(), tmp_path)
    line = 1 + (tmp_path / "a.json").read_text().split('"title": "T"')[0].rstrip("{ \n").count("\n") + 1
    assert error.value.line == line
    assert "wrong-one" in str(error.value)
    article["paragraphs"].append({"context": "Ada"})
    (tmp_path / "a.json").write_text(json.dumps({"data": [article]}))
    with raises_code("several-errors") as error:
        read_split("a.json", TASK.name, Columns(), tmp_path)
    assert {message.code for message in error.value.messages} == {"answer-not-in-context", "wrong-paragraph"}


@pytest.mark.parametrize(("row", "is_recognized"), [
    (ADA, True), ({"question": "a", "context": "b", "answer": "b"}, True),
    ({"question": "a", "context": "b", "label": 1}, False), ({"question": "a", "answers": []}, False),
])  # fmt: skip
def test_rows_are_recognized(row, is_recognized):
    assert TASK.recognizes_row(row, Columns(), Columns()) is is_recognized


def test_results_are_lines_and_fields():
    answer = Answer("Ada\nL", 0.98765, 3, 8)
    assert TASK.result_line(answer) == "Ada\\x0aL [3:8 0.988]"
    assert TASK.result_line(Answer("", 0.5, 0, 0)) == "[0.500]"
    assert TASK.result_fields(answer) == {"answer": "Ada\nL", "score": 0.98765, "start": 3, "end": 8}


def test_placeholder_row_is_a_sample():
    row = TASK.placeholder_row("a text", {})
    assert TASK.parse_row(row, "f:1", Columns(), False) == Example("Which?", ("a",), "a text", label=(0,))

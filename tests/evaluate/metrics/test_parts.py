"""Parts of BLEU and ROUGE against the numbers of sacrebleu and rouge-score."""

from statistics import mean

import pytest
from rouge_score.rouge_scorer import RougeScorer
from sacrebleu.metrics.bleu import BLEU

from smelt.evaluate.quality import score_texts
from smelt.pipeline.execute.run_result import step_row

pytestmark = pytest.mark.quick

REFERENCES = [
    "a man runs in the park",
    "two dogs play with a red ball",
    "the cat sleeps on the warm sofa today",
]
PREDICTIONS = {
    "near": ["a man runs in a park", "two dogs play with the ball", "a cat sleeps on the sofa"],
    "short": ["a man", "two dogs", "the cat sleeps"],
    "no match": ["qq ww", "qq ww", "qq ww"],
    "no 4-gram": ["the park a man", "dogs two ball red", "warm cat sofa today the"],
}


@pytest.mark.parametrize("name", PREDICTIONS)
def test_bleu_parts_equal_sacrebleu(name):
    score = score_texts(["bleu"], PREDICTIONS[name], [[text] for text in REFERENCES])["bleu"]
    expected = BLEU().corpus_score(PREDICTIONS[name], [REFERENCES])
    assert [score.parts[f"precision_{n}"] for n in (1, 2, 3, 4)] == pytest.approx(expected.precisions)
    assert score.parts["brevity_penalty"] == pytest.approx(expected.bp)
    assert score.parts["hypothesis_length"] == expected.sys_len
    assert score.parts["reference_length"] == expected.ref_len
    assert score.value == pytest.approx(expected.score)


@pytest.mark.parametrize("metric", ["rouge1", "rouge2", "rougeL"])
def test_rouge_parts_equal_scores_of_best_reference(metric):
    predictions = PREDICTIONS["near"]
    references = [[text, f"{text} and more"] for text in REFERENCES]
    parts = score_texts([metric], predictions, references)[metric].parts
    scorer = RougeScorer([metric])
    scores = [scorer.score_multi(*pair)[metric] for pair in zip(references, predictions, strict=True)]
    assert parts["precision"] == pytest.approx(100 * mean(score.precision for score in scores))
    assert parts["recall"] == pytest.approx(100 * mean(score.recall for score in scores))
    assert parts["precision"] != parts["recall"]


def test_table_has_a_column_for_each_part():
    score = score_texts(["bleu"], REFERENCES, [[text] for text in REFERENCES])["bleu"].to_report()
    row = step_row({"name": "s", "quality": {"bleu": score}, "against_baseline": {}, "latency": []})
    assert row["bleu_brevity_penalty"] == 1
    assert row["bleu_reference_length"] == sum(len(text.split()) for text in REFERENCES)

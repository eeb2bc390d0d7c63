"""WER and CER against jiwer, its documented examples, and edit distances by nltk."""

import jiwer
import pytest
from nltk.metrics.distance import edit_distance

from smelt.evaluate.metrics.registry import METRICS
from smelt.evaluate.quality import score_texts

# https://jitsi.github.io/jiwer/usage: pairs of a reference and a hypothesis
DOCUMENTED = [("hello world", "hello duck"), ("can you spell this", "can you spell that")]
TEXTS = [
    *DOCUMENTED,
    ("the cat sat on the mat", "cat sat on on the hat"),
    ("a b c", ""),
    ("one two", "one two three four"),
]


def scores(pairs, *metrics, **settings):
    references, predictions = zip(*pairs, strict=True)
    return score_texts(
        metrics, predictions, [[reference] for reference in references], dict.fromkeys(metrics, settings)
    )


def test_documented_pair_has_the_documented_rate():
    assert scores(DOCUMENTED[:1], "wer")["wer"].value == 50.0  # one of two words


@pytest.mark.parametrize(("metric", "compute"), [("wer", jiwer.wer), ("cer", jiwer.cer)])
def test_corpus_rate_equals_jiwer(metric, compute):
    references, predictions = map(list, zip(*TEXTS, strict=True))
    assert scores(TEXTS, metric)[metric].value == pytest.approx(100 * compute(references, predictions))


def test_rows_equal_edit_distances_of_nltk():
    rows = scores(TEXTS, "wer", "cer")
    words = [[edit_distance(a.split(), b.split()), len(a.split())] for a, b in TEXTS]
    characters = [[edit_distance(a, b), len(a)] for a, b in TEXTS]
    assert rows["wer"].statistics.rows == words
    assert rows["cer"].statistics.rows == characters


def test_nearest_reference_counts():
    score = score_texts(["wer"], ["two words"], [["three other words", "two words"]])["wer"]
    assert score.value == 0


@pytest.mark.parametrize(
    ("normalizer", "rate"),
    [("none", 100.0), ("basic", 75.0), ("english", 0.0)],
)
def test_normalized_rate_equals_jiwer_on_normalized_texts(normalizer, rate):
    from transformers.models.whisper.english_normalizer import BasicTextNormalizer, EnglishTextNormalizer

    reference, prediction = "It's TWO, Mister Fox.", "it is 2 mister fox"
    score = scores([(reference, prediction)], "wer", normalizer=normalizer)["wer"]
    normalize = {"none": str, "basic": BasicTextNormalizer(), "english": EnglishTextNormalizer({})}[
        normalizer
    ]
    assert score.value == pytest.approx(100 * jiwer.wer(normalize(reference), normalize(prediction)))
    assert f"normalizer:{normalizer}" in score.signature
    assert (score.value == 0) == (rate == 0.0)


def test_lower_is_better():
    assert not METRICS["wer"].higher_is_better
    assert not METRICS["cer"].higher_is_better


def test_chance_level_equals_rate_of_empty_texts():
    rows = scores([("a", "a"), ("b", "")], "wer")["wer"]
    assert METRICS["wer"].chance_level(rows.statistics.rows) == rows.value * 2

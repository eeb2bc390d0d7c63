import itertools
import json

import numpy as np
import pytest
from rouge_score.rouge_scorer import RougeScorer
from rouge_score.tokenizers import DefaultTokenizer
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF
from sklearn.metrics import f1_score, log_loss, matthews_corrcoef, precision_score, recall_score

from smelt.core.errors import InputError
from smelt.evaluate import significance
from smelt.evaluate.label_quality import score_label_sets, score_regression
from smelt.evaluate.metrics.registry import METRICS, TEXT_METRICS, find_metric
from smelt.evaluate.metrics.rouge import UnicodeTokenizer
from smelt.evaluate.quality import score_labels, score_texts, score_windows
from smelt.evaluate.significance import Statistics
from tests.support.expected_errors import raises_code
from tests.support.expected_intervals import student_interval

WORDS = [
    "ein",
    "der",
    "Mann",
    "Hund",
    "läuft",
    "über",
    "grünes",
    "Gras",
    "und",
    "springt",
    "schön",
    "vor",
    "einem",
    "weißen",
    "Zaun",
    "am",
    "Fluss",
]


def corpus(n, error, seed=0):
    """References of 4 to 14 words, and predictions in which a share of the words is another one."""
    rng = np.random.default_rng(seed)
    references = [" ".join(rng.choice(WORDS, size=rng.integers(4, 15))) + "." for _ in range(n)]
    predictions = [
        " ".join(str(rng.choice(WORDS)) if rng.random() < error else token for token in text.split())
        for text in references
    ]
    return predictions, references


@pytest.mark.parametrize(("name", "scorer"), [("bleu", BLEU), ("chrf", CHRF)])
def test_value_and_interval_equal_sacrebleu(name, scorer):
    predictions, references = corpus(200, 0.3)
    score = score_texts([name], predictions, [[text] for text in references])[name]
    metric = scorer()
    sacrebleu_score = metric.corpus_score(predictions, [references], n_bootstrap=1000)
    assert score.value == pytest.approx(sacrebleu_score.score, abs=1e-9)
    low, high = score.ci95
    # sacrebleu takes the 25th and 975th of the same 1000 resamples
    assert (high - low) / 2 == pytest.approx(sacrebleu_score._ci, rel=0.03)
    assert (high + low) / 2 == pytest.approx(sacrebleu_score._mean, abs=0.2)
    assert score.signature == str(metric.get_signature())
    assert "version:" in score.signature
    assert (score.n, score.unit, score.higher_is_better) == (
        200,
        {"bleu": "BLEU", "chrf": "chrF"}[name],
        True,
    )


@pytest.mark.parametrize(
    "predictions",
    [
        ["a b", "c d"],
        ["a b x d e", "c e x g h"],
        ["x", "y"],
        ["a b c d e f", ""],
        ["", ""],
        ["a b c d", "c e f g h i j k l m n o p"],
    ],
)
def test_corner_cases_equal_sacrebleu(predictions):
    references = ["a b c d e", "c e f g h"]
    scores = score_texts(["bleu", "chrf"], predictions, [[text] for text in references])
    assert scores["bleu"].value == pytest.approx(
        BLEU().corpus_score(predictions, [references]).score, abs=1e-9
    )
    assert scores["chrf"].value == pytest.approx(
        CHRF().corpus_score(predictions, [references]).score, abs=1e-9
    )


def test_references_of_differing_number_are_all_used():
    predictions = ["the cat sat on the mat", "a dog ran home today"]
    references = [["a cat sat on a mat", "the cat sat on the mat"], ["a dog ran home now"]]
    metrics = [name for name in TEXT_METRICS if not METRICS[name].reads_file]
    scores = score_texts(metrics, predictions, references)
    columns = [["a cat sat on a mat", "a dog ran home now"], ["the cat sat on the mat", None]]
    assert scores["bleu"].value == pytest.approx(BLEU().corpus_score(predictions, columns).score, abs=1e-9)
    assert scores["chrf"].value == pytest.approx(CHRF().corpus_score(predictions, columns).score, abs=1e-9)
    assert "nrefs:var" in scores["bleu"].signature
    assert "nrefs:var" in scores["rouge1"].signature
    # first example matches its second reference, the second shares 4 of 5 words
    assert scores["rouge1"].value == pytest.approx(100 * (1 + 0.8) / 2)
    assert list(scores) == metrics


def test_rouge_equals_rouge_score_on_english():
    predictions = ["The quick_brown fox, jumps over 2 dogs!", "it's raining"]
    references = ["The quick brown dog jumps on the 2 logs.", "it is raining now"]
    scorer = RougeScorer(["rouge1", "rouge2", "rougeL"])
    scores = score_texts(["rouge1", "rouge2", "rougeL"], predictions, [[r] for r in references])
    for name, score in scores.items():
        sentence_scores = [
            scorer.score(r, p)[name].fmeasure for r, p in zip(references, predictions, strict=True)
        ]
        assert score.value == pytest.approx(100 * np.mean(sentence_scores))
        assert "rouge-score" in score.signature
        assert "tok:smelt-unicode-words" in score.signature


def test_tokenizer_keeps_letters_of_all_scripts():
    tokenize = UnicodeTokenizer().tokenize
    assert tokenize("Schöne Grüße, Straße_7!") == ["schöne", "grüße", "straße", "7"]
    assert tokenize("scho\u0308n") == tokenize("schön")
    assert tokenize("हिन्दी में") == ["हिन्दी", "में"]
    assert tokenize("猫が好き") == ["猫", "が", "好", "き"]
    text = "Mr. O'Neil's 3rd_try -- e.g. 1,000 (one thousand)"
    assert tokenize(text) == DefaultTokenizer().tokenize(text)


def test_wrong_umlaut_lowers_rouge():
    score = score_texts(["rouge1"], ["schon"], [["schön"]])["rouge1"]
    assert score.value == 0


SKLEARN_METRICS = {"f1": f1_score, "precision": precision_score, "recall": recall_score}
LABELED = np.random.default_rng(7)
GOLD = LABELED.integers(0, 4, 80)
LOGITS = LABELED.normal(0, 1, (80, 6)).astype(np.float32)
LOGITS[np.arange(80), GOLD] += 1
LOGITS[:, 5] = -9  # a class that is neither predicted nor present
GUESS = LOGITS.argmax(axis=1)


def sklearn_value(metric, rows, only=None):
    if metric == "matthews":
        return 100 * matthews_corrcoef(GOLD[rows], GUESS[rows])
    if metric == "cross_entropy":
        probabilities = np.exp(LOGITS[rows]) / np.exp(LOGITS[rows]).sum(axis=1, keepdims=True)
        return log_loss(GOLD[rows], probabilities, labels=range(6))
    average = {"average": "macro"} if only is None else {"labels": [only], "average": "macro"}
    return 100 * SKLEARN_METRICS[metric](GOLD[rows], GUESS[rows], zero_division=0, **average)


@pytest.mark.parametrize(
    ("metric", "only"),
    [
        ("precision", None),
        ("recall", None),
        ("matthews", None),
        ("cross_entropy", None),
        ("f1", 2),
        ("precision", 3),
        ("recall", 1),
    ],
)
def test_class_metrics_equal_sklearn_on_all_rows_and_on_resamples(metric, only):
    metric_settings = {} if only is None else {metric: only}
    score = score_labels([metric], GUESS.tolist(), GOLD.tolist(), LOGITS, metric_settings)[metric]
    assert score.value == pytest.approx(sklearn_value(metric, np.arange(80), only), rel=1e-5)
    resampled_rows = np.random.default_rng(significance.BOOTSTRAP_SEED).integers(0, 80, size=(1000, 80))[:30]
    resampled_values = significance._resampled_values(score.statistics)
    assert resampled_values[:30] == pytest.approx(
        [sklearn_value(metric, row_indices, only) for row_indices in resampled_rows], rel=1e-5
    )
    limits = find_metric(metric).limits
    assert score.ci95 == pytest.approx(student_interval(score.value, resampled_values, 80, limits))
    confident_logits = LOGITS + 9 * np.eye(6, dtype=np.float32)[GOLD]
    better_score = score_labels([metric], GOLD.tolist(), GOLD.tolist(), confident_logits, metric_settings)[
        metric
    ]
    comparison = significance.compare_steps(better_score.statistics, score.statistics)
    assert (comparison["difference"] > 0) == score.higher_is_better
    assert comparison["difference"] == pytest.approx(better_score.value - score.value)


def test_chance_of_class_metrics_uses_most_frequent_class():
    scores = score_labels(
        ["recall", "precision", "matthews", "cross_entropy", "f1"],
        [0, 1, 1, 2],
        [0, 0, 0, 1],
        np.zeros((4, 3), np.float32),
        {"f1": 0},
    )
    constant, gold = [0, 0, 0, 0], [0, 0, 0, 1]
    assert scores["recall"].chance == pytest.approx(100 * recall_score(gold, constant, average="macro"))
    assert scores["precision"].chance == pytest.approx(100 * 0.75 / 2)
    assert scores["matthews"].chance == matthews_corrcoef(gold, constant) == 0
    assert scores["cross_entropy"].chance == pytest.approx(-(0.75 * np.log(0.75) + 0.25 * np.log(0.25)))
    assert scores["f1"].chance == pytest.approx(100 * f1_score(gold, constant, pos_label=0))


def test_labels_equal_sklearn_and_published_wilson_interval():
    gold = [1] * 81 + [0] * 182
    predicted = [1] * 81 + [1] * 182
    scores = score_labels(["accuracy", "f1"], predicted, gold)
    # Newcombe 1998, table I: 81 of 263 gives 0.2553 to 0.3662 by Wilson's method
    assert scores["accuracy"].value == pytest.approx(100 * 81 / 263)
    assert scores["accuracy"].ci95 == pytest.approx((25.53, 36.62), abs=0.01)
    assert "wilson" in scores["accuracy"].signature
    assert scores["f1"].value == pytest.approx(100 * f1_score(gold, predicted, average="macro"))
    low, high = scores["f1"].ci95
    assert low < scores["f1"].value < high


def test_f1_of_resamples_equals_sklearn():
    rng = np.random.default_rng(1)
    gold = rng.integers(0, 4, 20)
    predicted = np.where(rng.random(20) < 0.7, gold, rng.integers(0, 4, 20))
    score = score_labels(["f1"], predicted.tolist(), gold.tolist())["f1"]
    resampled_values = significance._resampled_values(score.statistics)
    draws = np.random.default_rng(12345).integers(0, 20, size=(1000, 20))[:40]
    sklearn_values = [100 * f1_score(gold[i], predicted[i], average="macro") for i in draws]
    assert resampled_values[:40] == pytest.approx(sklearn_values)
    assert score.ci95 == pytest.approx(student_interval(score.value, resampled_values, 20))


def test_statistics_round_trip_json_and_are_not_in_report():
    score = score_texts(["bleu"], ["a b c d"], [["a b c d e"]])["bleu"]
    restored = Statistics.model_validate(json.loads(json.dumps(score.statistics.dump())))
    assert restored == score.statistics
    named = {"value", "unit", "higher_is_better", "n", "ci95", "signature", "chance", "parts"}
    assert set(score.to_report()) == named
    json.dumps(score.to_report())


@pytest.mark.parametrize(
    ("call", "code", "named"),
    [
        (lambda: score_texts(["blue"], ["a"], [["a"]]), "unknown-metric", ("'blue'", "'bleu'?")),
        (lambda: score_texts(["bleu"], ["a"], []), "count-mismatch", ("1 ", "0 ")),
        (lambda: score_texts(["bleu"], [], []), "empty-data", ()),
        (lambda: score_texts(["bleu"], ["a", "b"], [["a"], []]), "missing-references", ("2 ", "[]")),
        (lambda: score_texts(["bleu"], ["a"], ["a"]), "missing-references", ("1 ", "'a'")),
        (lambda: score_labels(["bleu"], [1], [1]), "unknown-metric", ("'bleu'", ": accuracy, f1")),
        (lambda: score_labels(["f1"], [1, 2], [1]), "count-mismatch", ("2 ", "1 ")),
    ],
)
def test_errors_contain_the_invalid_value(call, code, named):
    with raises_code(code, InputError) as excinfo:
        call()
    assert [value for value in named if value not in str(excinfo.value)] == []


CHINESE = ["一个男人在街上骑自行车。", "两只狗在草地上奔跑。", "孩子们在河边玩耍。"]
NEAR = ["一个男人在路上骑自行车。", "两只狗在草地上跑。", "孩子们在河边玩耍。"]


def test_chinese_is_scored_by_characters():
    score = score_texts(["bleu"], NEAR, [[text] for text in CHINESE])["bleu"]
    sacrebleu = BLEU(tokenize="zh")
    assert score.value == pytest.approx(sacrebleu.corpus_score(NEAR, [CHINESE]).score, abs=1e-9)
    assert "|tok:zh|" in score.signature
    identical_scores = score_texts(["bleu", "rougeL"], CHINESE, [[text] for text in CHINESE])
    assert [identical_scores[name].value for name in identical_scores] == pytest.approx([100, 100])
    character_score = score_texts(
        ["bleu"], NEAR, [[text] for text in CHINESE], {"bleu": {"tokenize": "char"}}
    )["bleu"]
    sacrebleu = BLEU(tokenize="char").corpus_score(NEAR, [CHINESE])
    assert character_score.value == pytest.approx(sacrebleu.score, abs=1e-9)


# five subjects, five objects and two verbs give fifty sentences
PARTS = {
    "ja": ("彼は 彼女は 先生は 友達は 母は", "本を 水を 魚を 車を 花を", "見ました。 買いました。"),
    "ko": (
        "그는~ 그녀는~ 선생님은~ 친구는~ 어머니는~",
        "책을~ 물을~ 생선을~ 차를~ 꽃을~",
        "보았습니다. 샀습니다.",
    ),
    "th": ("เขา เธอ ครู เพื่อน แม่", "เห็น ซื้อ", "หนังสือ น้ำ ปลา รถ ดอกไม้"),
}


@pytest.mark.parametrize("language", PARTS)
def test_outputs_equal_to_references_have_bleu_100_in_every_script(language):
    word_parts = [part.split() for part in PARTS[language]]
    sentences = ["".join(parts).replace("~", " ") for parts in itertools.product(*word_parts)]
    assert len(sentences) == 50
    ruined = [text[::-1] for text in sentences]
    references = [[text] for text in sentences]
    for language_setting in (None, language):
        identical_score, other = (
            score_texts(["bleu"], texts, references, language=language_setting)["bleu"]
            for texts in (sentences, ruined)
        )
        assert identical_score.value == pytest.approx(100)
        assert "|tok:char|" in identical_score.signature
        sacrebleu_score = BLEU(tokenize="char").corpus_score(ruined, [sentences])
        assert other.value == pytest.approx(sacrebleu_score.score, abs=1e-9)
        assert identical_score.value - other.value > 40  # a gate with max_degradation: 1 fails
    if language != "ko":  # which has spaces
        with raises_code("bleu-tokenizer", InputError):
            score_texts(["bleu"], sentences, references, {"bleu": {"tokenize": "13a"}})


@pytest.mark.parametrize("ending", ["", ".", "。"])
def test_rouge_of_thai_counts_characters(ending):
    reference, half = "สุนัขสองตัว" + ending, "สุนัขสองคน" + ending
    score = score_texts(["rouge1"], [half], [[reference]])["rouge1"]
    assert 50 < score.value < 100


def test_chance_value_equals_library_on_constant_prediction():
    gold = [0, 0, 0, 1, 2, 2]
    scores = score_labels(["accuracy", "f1"], [0, 1, 2, 1, 2, 2], gold)
    assert scores["accuracy"].chance == pytest.approx(50)
    assert scores["f1"].chance == pytest.approx(100 * f1_score(gold, [0] * 6, average="macro"))
    assert score_texts(["bleu"], ["a b c d"], [["a b c d"]])["bleu"].chance == 0
    sets = score_label_sets(["subset_accuracy", "f1_micro"], [[0], [1], [0]], [[0], [0], [1]], 2)
    assert sets["subset_accuracy"].chance == pytest.approx(200 / 3)
    constant = [[1, 0]] * 3
    expected = f1_score([[1, 0], [1, 0], [0, 1]], constant, average="micro", zero_division=0)
    assert sets["f1_micro"].chance == pytest.approx(100 * expected)
    regression_scores = score_regression(["mse", "pearson"], [1.0, 2.0, 2.0], [1.0, 2.0, 6.0])
    assert regression_scores["mse"].chance == pytest.approx(np.var([1.0, 2.0, 6.0]))
    assert regression_scores["pearson"].chance == 0
    windows = score_windows(["perplexity", "bits_per_byte"], [9.0] * 8, [4] * 8, [10] * 8, "w", ["x"], 300)
    assert windows["perplexity"].chance == 300
    assert windows["bits_per_byte"].chance == pytest.approx(np.log2(300) * 4 / 10)


def test_rouge_lsum_splits_sentences_like_rouge_score_lines():
    reference = "The cat sat on the mat. It was warm! Was it asleep?"
    prediction = "It was warm. The cat slept on the mat."
    lines = [text.replace(". ", ".\n").replace("! ", "!\n") for text in (reference, prediction)]
    rouge_scores = RougeScorer(["rougeLsum", "rougeL"], tokenizer=UnicodeTokenizer()).score(*lines)
    scores = score_texts(["rougeL", "rougeLsum"], [prediction], [[reference]])
    assert scores["rougeLsum"].value == pytest.approx(100 * rouge_scores["rougeLsum"].fmeasure)
    assert scores["rougeL"].value == pytest.approx(100 * rouge_scores["rougeL"].fmeasure)
    assert scores["rougeLsum"].value > scores["rougeL"].value

"""Quality of a model's outputs: BLEU, chrF, ROUGE, exact match, accuracy, perplexity; with n and interval.

perplexity = exp(sum of losses / tokens); bits per byte = sum of losses / ln 2 / bytes of UTF-8, from the
losses of the windows of running text. Bits per byte does not depend on the tokenizer, so it compares models
of different vocabularies. For both lower is better. Intervals and tests resample whole windows (see
significance.py), because the tokens of one window depend on each other.
"""

from __future__ import annotations

import math
import re
import string
import unicodedata
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from smelt.core.errors import InputError, did_you_mean
from smelt.core.files import json_hash
from smelt.data.bleu_tokenizer import UNSPACED_PATTERN, bleu_tokenizer
from smelt.data.labels import MULTI_LABEL, SINGLE_LABEL
from smelt.evaluate.metrics import (
    AGREEMENT_METRIC,
    CHOICE_METRICS,
    METRICS_BY_PROBLEM,
    RESPONSE_PERPLEXITY,
    TEXT_METRICS,
    WINDOW_METRICS,
    MetricSettingValues,
    base_metric,
    find_metric,
)
from smelt.evaluate.significance import (
    BOOTSTRAP_SEED,
    RESAMPLES,
    Statistics,
    metric_interval,
    metric_value,
    student_interval,
    wilson_interval,
)
from smelt.evaluate.text_similarity import bertscore_rows, encoder_hash, meteor_rows
from smelt.runtimes.backend import check_finite_outputs

_ANSWER_METRICS = ("exact_match", "token_f1")
CLASS_METRICS = tuple(name for name in METRICS_BY_PROBLEM[SINGLE_LABEL] if name != AGREEMENT_METRIC)
CROSS_ENTROPY = "cross_entropy"
BOOTSTRAP_SIGNATURE = f"ci:t, bootstrap|bs:{RESAMPLES}|seed:{BOOTSTRAP_SEED}"


class MetricScore(BaseModel):
    """One metric on one set of examples.

    value: 0-100, in `unit`. ci95: lower and upper end of the 95 % interval, None where there are
    too few examples. signature: version and settings that the value depends on. chance: the value without a
    model (see `chance_level`), None where there is no such value. statistics: per example, for
    `significance.compare_steps`; not part of `model_dump`, store it with `score.statistics.dump()`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    metric: str
    value: float
    unit: str
    higher_is_better: bool = True
    n: int
    ci95: tuple[float, float] | None
    signature: str
    chance: float | None = None
    statistics: Statistics = Field(exclude=True, repr=False)

    def to_report(self) -> dict[str, Any]:
        """Return the entry of report.json under `quality.METRIC`."""
        return self.model_dump(mode="json", exclude={"metric"})


def score_texts(
    metrics: Sequence[str],
    predictions: Sequence[str],
    references: Sequence[Sequence[str]],
    settings: MetricSettingValues | None = None,
    language: str | None = None,
    base: Path = Path(),
    device: str = "cpu",
) -> dict[str, MetricScore]:
    """Score generated texts.

    Args:
        metrics: names from TEXT_METRICS; the result has their order.
        predictions: n texts.
        references: for each prediction one or more references; their number may differ.
        settings: by metric. `tokenize` of BLEU is sacrebleu's tokenizer; without it the language or else the
            script of the references decides, see `bleu_tokenizer`. The signature contains it.
        language: of the references, an ISO 639 code, where it is known.
        base: the folder that paths in `settings` are relative to.
        device: cpu or cuda, for the model of BERTScore.

    Raises:
        InputError: an unknown metric, no examples, an example without a reference, a tokenizer that cannot
            split the references, or as `bertscore_rows`.
        MissingDependencyError: METEOR's data are not installed.
    """
    check_inputs(metrics, TEXT_METRICS, len(predictions), len(references))
    for index, texts in enumerate(references, start=1):
        if isinstance(texts, str) or not texts:
            raise InputError(
                f"Example {index} needs a list with at least one reference text, got {texts!r}.",
                code="missing-references",
            )
    examples = json_hash([list(texts) for texts in references])
    scores = {}
    rouge = [metric for metric in metrics if metric.startswith("rouge")]
    rouge_rows = _rouge_f1(rouge, predictions, references) if rouge else {}
    for metric in metrics:
        if metric in rouge_rows:
            signature, rows = _rouge_signature(metric, references), rouge_rows[metric]
        elif metric in _ANSWER_METRICS:
            signature, rows = _answer_statistics(metric, predictions, references)
        elif metric == "meteor":
            rows, signature = meteor_rows(predictions, references)
            signature += f"|{BOOTSTRAP_SIGNATURE}|version:nltk {version('nltk')}"
        elif metric == "bertscore":
            own = (settings or {})[metric]
            rows = bertscore_rows(predictions, references, own, base, device)
            model = f"model:{Path(own['model']).name}|weights:{encoder_hash(own, base)[:12]}"
            signature = f"{model}|layer:{own['layer']}|idf:no|rescaled:no|refs:best|{BOOTSTRAP_SIGNATURE}"
        else:
            tokenize = (settings or {}).get(metric, {}).get("tokenize")
            signature, rows = _sacrebleu_statistics(metric, predictions, references, tokenize, language)
        scores[metric] = metric_score(
            Statistics(metric=metric, signature=signature, examples=examples, rows=rows)
        )
    return scores


def score_labels(
    metrics: Sequence[str],
    predicted: Sequence[int],
    gold: Sequence[int],
    logits: NDArray[np.float32] | None = None,
    only: Mapping[str, int] | None = None,
) -> dict[str, MetricScore]:
    """Score predicted classes against the gold ones.

    f1, precision and recall are the means over the classes that occur or are predicted (macro average), or
    those of one class. matthews is Matthews' correlation times 100; cross_entropy is the mean negative
    log-probability of the gold class, nats.

    Args:
        metrics: names from CLASS_METRICS, also as `variant_name`.
        predicted: n class numbers.
        gold: n class numbers.
        logits: float32 [n, C]; for cross_entropy.
        only: by metric the class that it scores; other metrics score all.

    Raises:
        InputError: an unknown metric, no examples, or lengths that differ.
        RunError: `non-finite-outputs`.
    """
    check_inputs([base_metric(name) for name in metrics], CLASS_METRICS, len(predicted), len(gold))
    from sklearn.metrics import accuracy_score, f1_score

    only = only or {}
    examples = json_hash([int(label) for label in gold])
    rows: list[list[int | float]] = [[int(p), int(g)] for p, g in zip(predicted, gold, strict=True)]
    library = f"version:scikit-learn {version('scikit-learn')}"
    scores = {}
    for metric in metrics:
        if metric == CROSS_ENTROPY:
            assert logits is not None
            scores[metric] = _score_cross_entropy(check_finite_outputs(logits), gold, examples)
            continue
        average = f"class:{only[metric]}" if metric in only else "average:macro"
        signature = f"{average}|{BOOTSTRAP_SIGNATURE}|{library}"
        if metric == "accuracy":
            signature = f"ci:wilson|{library}"
        elif metric == "matthews":
            signature = f"x100|constant:0|{BOOTSTRAP_SIGNATURE}|formula:{library}"
        own = [[*row, only[metric]] for row in rows] if metric in only else rows
        statistics = Statistics(metric=metric, signature=signature, examples=examples, rows=own)
        if metric == "accuracy":
            value = 100 * float(accuracy_score(gold, predicted))
            hits = int(accuracy_score(gold, predicted, normalize=False))
            scores[metric] = metric_score(statistics, value, wilson_interval(hits, len(rows)))
        elif metric == "f1" and metric not in only:
            scores[metric] = metric_score(statistics, 100 * float(f1_score(gold, predicted, average="macro")))
        else:
            scores[metric] = metric_score(statistics)
    return scores


def _score_cross_entropy(logits: NDArray[np.float32], gold: Sequence[int], examples: str) -> MetricScore:
    """Return the mean negative log-probability of the gold class; chance: of the classes' frequencies."""
    from scipy.special import log_softmax
    from scipy.stats import entropy

    losses = -log_softmax(logits.astype(np.float64), axis=1)[np.arange(len(gold)), list(gold)]
    signature = f"logits:float32|average:mean|{BOOTSTRAP_SIGNATURE}"
    rows: list[list[int | float]] = [[float(loss)] for loss in losses]
    score = metric_score(Statistics(metric=CROSS_ENTROPY, signature=signature, examples=examples, rows=rows))
    frequency = float(entropy(list(Counter(map(int, gold)).values())))
    return score.model_copy(update={"chance": frequency})


def metric_score(
    statistics: Statistics,
    value: float | None = None,
    interval: tuple[float, float] | None = None,
) -> MetricScore:
    """Return the score of `statistics`, with `value` and `interval` in its unit instead of the usual ones."""
    known = find_metric(statistics.metric)
    return MetricScore(
        metric=statistics.metric,
        value=metric_value(statistics) if value is None else value,
        unit=known.unit,
        higher_is_better=known.higher_is_better,
        n=len(statistics.rows),
        ci95=interval or metric_interval(statistics),
        signature=statistics.signature,
        chance=chance_level(statistics),
        statistics=statistics,
    )


def chance_level(statistics: Statistics) -> float | None:
    """Return the metric's value without a model, on the same examples.

    For generated texts it is the value of empty texts; for classes that of predicting the most frequent class
    (or set of classes) for every example; for numbers that of their mean, whose correlation is 0. None for
    other metrics.
    """
    metric, rows = base_metric(statistics.metric), statistics.rows
    if metric == AGREEMENT_METRIC:
        return None
    if metric in TEXT_METRICS or metric in ("pearson", "spearman"):
        return 0.0
    if metric == "mse":
        mean = sum(gold for _, gold in rows) / len(rows)
        constant = [[mean, gold] for _, gold in rows]
    elif metric in (*CLASS_METRICS, *METRICS_BY_PROBLEM[MULTI_LABEL]) and len(rows[0]) > 1:
        width = len(rows[0]) // 2  # 1 also where the class that is scored follows
        [(frequent, _)] = Counter(tuple(row[width : 2 * width]) for row in rows).most_common(1)
        constant = [[*frequent, *row[width:]] for row in rows]
    else:
        return None
    return metric_value(statistics.model_copy(update={"rows": constant}))


def check_inputs(metrics: Sequence[str], known: Sequence[str], outputs: int, expected: int) -> None:
    """Check that the metrics are `known`, and that there is one output for each example.

    Raises:
        InputError: they are not.
    """
    for metric in metrics:
        if metric not in known:
            raise InputError(
                f"Unknown metric '{metric}' for this task; known:"
                f" {', '.join(known)}.{did_you_mean(metric, known)}",
                code="unknown-metric",
            )
    if outputs != expected:
        raise InputError(
            f"{outputs} predictions for {expected} examples; one for each example is required.",
            code="count-mismatch",
        )
    if not expected:
        raise InputError("No examples to score; the data needs at least one example.", code="empty-data")


def _sacrebleu_statistics(
    metric: str,
    predictions: Sequence[str],
    references: Sequence[Sequence[str]],
    tokenize: str | None,
    language: str | None,
) -> tuple[str, list[list[int | float]]]:
    """Return sacrebleu's signature and its statistics per segment."""
    from sacrebleu.metrics.bleu import BLEU
    from sacrebleu.metrics.chrf import CHRF

    if metric == "bleu":
        every = (text for texts in references for text in texts)
        scorer: BLEU | CHRF = BLEU(tokenize=bleu_tokenizer(every, tokenize, language))
    else:
        scorer = CHRF()
    # sacrebleu expects the references transposed, and None where an example has fewer
    most = max(map(len, references))
    columns = [[texts[i] if i < len(texts) else None for texts in references] for i in range(most)]
    rows = scorer._extract_corpus_statistics(predictions, columns)  # type: ignore[arg-type]
    # the signature names the bootstrap only where these are set, as `corpus_score` does
    scorer.n_bootstrap, scorer.seed = RESAMPLES, str(BOOTSTRAP_SEED)
    return str(scorer.get_signature()), rows


# A sentence ends at a line end, or after a full stop, question or exclamation mark.
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+|(?<=[\u3002\uff01\uff1f])\s*")
_NO_LETTER = re.compile(r"[\W_]")


class UnicodeTokenizer:
    """A tokenizer for rouge-score that keeps the letters of every script.

    Text is lowercased; words are runs of letters, digits and combining marks. Characters of scripts without
    spaces (Chinese, Japanese, Thai, Lao, Khmer, Burmese, Tibetan) are one word each.
    For English it equals rouge-score's own tokenizer, which drops all but a-z and 0-9, so that
    German "schön" would become "sch", "n".
    """

    def tokenize(self, text: str) -> list[str]:
        """Split `text` into words."""
        text = unicodedata.normalize("NFC", text).lower()
        text = _NO_LETTER.sub(lambda hit: hit[0] if _is_mark(hit[0]) else " ", text)
        return UNSPACED_PATTERN.sub(r" \1 ", text).split()


def _is_mark(character: str) -> bool:
    return unicodedata.category(character).startswith("M")


def _rouge_f1(
    metrics: Sequence[str], predictions: Sequence[str], references: Sequence[Sequence[str]]
) -> dict[str, list[list[int | float]]]:
    """Return F1 per example (Lin 2004), the maximum over its references, by metric."""
    from rouge_score.rouge_scorer import RougeScorer

    scorer = RougeScorer(list(metrics), tokenizer=UnicodeTokenizer())
    score: Callable[[Sequence[str], str], dict[str, Any]] = scorer.score_multi
    results = [
        score([_sentence_lines(text) for text in texts], _sentence_lines(text))
        for texts, text in zip(references, predictions, strict=True)
    ]
    return {metric: [[float(result[metric].fmeasure)] for result in results] for metric in metrics}


def _sentence_lines(text: str) -> str:
    """Return `text` with one sentence per line, as ROUGE-Lsum reads it; other ROUGE ignore line ends."""
    return _SENTENCE_END.sub("\n", text)


def _rouge_signature(metric: str, references: Sequence[Sequence[str]]) -> str:
    counts = {len(texts) for texts in references}
    number = str(counts.pop()) if len(counts) == 1 else "var"
    settings = "case:lower|tok:smelt-unicode-words-2|stem:no|refs:best F1|average:mean"
    if metric == "rougeLsum":
        settings += "|sentences:line ends and .!?"
    return f"nrefs:{number}|{settings}|{BOOTSTRAP_SIGNATURE}|version:rouge-score {version('rouge-score')}"


_ARTICLE = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = frozenset(string.punctuation)


def normalize_answer(text: str) -> str:
    """Return `text` in lower case, without ASCII punctuation and English articles, with single spaces.

    Source: `normalize_answer` of the evaluation script of SQuAD v1.1 (Rajpurkar et al. 2016).
    """
    plain = "".join(letter for letter in text.lower() if letter not in _PUNCTUATION)
    return " ".join(_ARTICLE.sub(" ", plain).split())


def token_f1(prediction: str, reference: str) -> float:
    """Return the F1 of the words of two normalized answers, 0..1; `f1_score` of SQuAD v1.1."""
    own, gold = normalize_answer(prediction).split(), normalize_answer(reference).split()
    same = sum((Counter(own) & Counter(gold)).values())
    return 2 * same / (len(own) + len(gold)) if same else 0.0


def _answer_statistics(
    metric: str, predictions: Sequence[str], references: Sequence[Sequence[str]]
) -> tuple[str, list[list[int | float]]]:
    """Return the signature and the rows of exact match or token F1, the best over the references."""
    rows: list[list[int | float]] = []
    for text, wanted in zip(predictions, references, strict=True):
        if metric == "token_f1":
            rows.append([max(token_f1(text, reference) for reference in wanted)])
        else:
            own = normalize_answer(text)
            rows.append([int(any(own == normalize_answer(reference) for reference in wanted)), 1])
    interval = "ci:wilson" if metric == "exact_match" else BOOTSTRAP_SIGNATURE
    return f"norm:squad v1.1|refs:best|{interval}", rows


def score_responses(
    losses: Sequence[float],
    tokens: Sequence[int],
    sizes: Sequence[int],
    examples: object,
    vocabulary: int | None,
) -> MetricScore:
    """Return the perplexity of reference responses, given their prompts.

    It is exp(sum of losses / tokens). Intervals and tests resample responses.

    Args:
        losses: for each example the sum of the negative log-likelihoods of its response's tokens, nats.
        tokens: for each example the number of these tokens.
        sizes: for each example the UTF-8 bytes of its response.
        examples: prompts and responses (JSON-able); only scores on equal examples can be compared in pairs.
        vocabulary: number of tokens; it equals the perplexity of a uniform model.

    Raises:
        InputError: no examples, or lengths that differ.
        RunError: `non-finite-outputs`.
    """
    check_inputs((), (), len(losses), len(tokens))
    check_finite_outputs(np.asarray(losses, dtype=np.float64))
    signature = f"refs:first|tokens:response and its end|{BOOTSTRAP_SIGNATURE}"
    statistics = Statistics(
        metric=RESPONSE_PERPLEXITY,
        signature=signature,
        examples=json_hash(examples),
        rows=[list(row) for row in zip(losses, tokens, sizes, strict=True)],
    )
    score = metric_score(statistics)
    return score.model_copy(update={"chance": float(vocabulary) if vocabulary else None})


def score_choices(
    metrics: Sequence[str],
    losses: Sequence[Sequence[float]],
    choices: Sequence[Sequence[str]],
    answers: Sequence[int],
    examples: object,
) -> dict[str, MetricScore]:
    """Score choices by their likelihood, as lm-evaluation-harness scores multiple choice.

    acc is the percentage of examples whose right choice has the highest log-likelihood, acc_norm the same for
    the log-likelihood divided by the number of characters of the choice, without space around it.

    Args:
        metrics: names from CHOICE_METRICS; the result has their order.
        losses: for each example the negative log-likelihood of each choice, nats.
        choices: for each example the choices.
        answers: for each example the index of the right choice.
        examples: prompts, choices and answers (JSON-able); only scores on equal examples can be compared.

    Raises:
        InputError: an unknown metric, no examples, or lengths that differ.
        RunError: `non-finite-outputs`: argmin of NaN would be a choice.
    """
    check_inputs(metrics, CHOICE_METRICS, len(losses), len(choices))
    check_finite_outputs(np.asarray([sum(each) for each in losses], dtype=np.float64))
    scores = {}
    random = 100 * float(np.mean([1 / len(each) for each in choices]))
    for metric in metrics:
        rows: list[list[int | float]] = []
        for loss, texts, answer in zip(losses, choices, answers, strict=True):
            sizes = [len(text.strip()) if metric == "acc_norm" else 1 for text in texts]
            rows.append([int(np.argmin(np.divide(loss, sizes))), int(answer)])
        per = "characters" if metric == "acc_norm" else "no"
        statistics = Statistics(
            metric=metric,
            signature=f"choices:log-likelihood|normalized:{per}|ci:wilson",
            examples=json_hash(examples),
            rows=rows,
        )
        scores[metric] = metric_score(statistics).model_copy(update={"chance": random})
    return scores


def score_windows(
    metrics: Sequence[str],
    losses: Sequence[float],
    tokens: Sequence[int],
    sizes: Sequence[int],
    windows: str,
    examples: object,
    vocabulary: int | None = None,
) -> dict[str, MetricScore]:
    """Score a text that was predicted window by window.

    Args:
        metrics: names from WINDOW_METRICS; the result has their order.
        losses: the sum of the negative log-likelihoods of each window's tokens, nats.
        tokens: how many tokens each window predicts.
        sizes: UTF-8 bytes of these tokens.
        windows: how the text was cut, for the signature.
        examples: the predicted tokens (JSON-able); only scores on equal examples can be compared in pairs.
        vocabulary: number of tokens; it equals the perplexity of a uniform model.

    Raises:
        InputError: an unknown metric, no windows, or lengths that differ.
        RunError: `non-finite-outputs`.
    """
    for metric in metrics:
        if metric not in WINDOW_METRICS:
            known = ", ".join(WINDOW_METRICS)
            raise InputError(
                f"Unknown metric '{metric}' for perplexity; known:"
                f" {known}.{did_you_mean(metric, WINDOW_METRICS)}",
                code="unknown-metric",
            )
    if not losses or not len(losses) == len(tokens) == len(sizes):
        raise InputError(
            f"Perplexity needs one loss, token count and byte count per window; got {len(losses)},"
            f" {len(tokens)} and {len(sizes)}.",
            code="count-mismatch",
        )
    check_finite_outputs(np.asarray(losses, dtype=np.float64))
    signature = f"{windows}|ci:t, bootstrap over windows|bs:{RESAMPLES}|seed:{BOOTSTRAP_SEED}"
    rows: list[list[int | float]] = [
        [float(loss), int(count), int(size)] for loss, count, size in zip(losses, tokens, sizes, strict=True)
    ]
    uniform: dict[str, float] = {}
    if vocabulary:
        bits = sum(tokens) * math.log2(vocabulary) / max(1, sum(sizes))
        uniform = {"perplexity": float(vocabulary), "bits_per_byte": bits}
    scores = {}
    for metric in metrics:
        statistics = Statistics(metric=metric, signature=signature, examples=json_hash(examples), rows=rows)
        scores[metric] = MetricScore(
            metric=metric,
            value=metric_value(statistics),
            unit=find_metric(metric).unit,
            higher_is_better=find_metric(metric).higher_is_better,
            n=sum(tokens),
            ci95=student_interval(statistics),
            signature=signature,
            chance=uniform.get(metric),
            statistics=statistics,
        )
    return scores

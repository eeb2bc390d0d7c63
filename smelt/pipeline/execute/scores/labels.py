"""Score labels of samples: classes, sets of classes, numbers."""

from __future__ import annotations

from typing import Any

from smelt.data.labels import REGRESSION, check_labels, class_names, problem_type
from smelt.data.splits import Split
from smelt.evaluate.label_quality import class_counts, gold_outputs, score_classifier
from smelt.evaluate.metrics.registry import AGREEMENT_METRIC, is_custom_metric
from smelt.pipeline.execute.scores.base_scorer import BaseScorer, split_scores
from smelt.stage import Progress


def score_split(scorer: BaseScorer, runner: Any, split: Split, progress: Progress) -> dict[str, Any]:
    """Return the score of labels, as `Scorer.score`."""
    from smelt.evaluate.step_agreement import pack_logits
    from smelt.runtimes.predict_texts import class_logits

    names, problem = class_names(runner.config), problem_type(runner.config)
    metrics = [metric for metric in scorer.metrics if metric != AGREEMENT_METRIC]
    if metrics:  # check labels before running the model
        check_labels(split.examples, names, problem, split.origin)
    logits = class_logits(runner, split.examples, scorer.batch_size, progress)
    builtin_metrics = [metric for metric in metrics if not is_custom_metric(metric)]
    scores, predictions = score_classifier(
        builtin_metrics, runner.config, logits, split, scorer.metric_settings
    )
    if len(builtin_metrics) < len(metrics):
        sources = [e.text if e.text_pair is None else [e.text, e.text_pair] for e in split.examples]
        scores |= scorer.custom_scores(predictions, gold_outputs(runner.config, split), sources, split)
    scores |= scorer.agreement_score(runner, predictions, split, progress)
    counts = class_counts(runner.config, logits, split) if metrics else None
    value = {
        **split_scores({name: scores[name] for name in scorer.metrics if name in scores}),
        "predictions": predictions,
        "classes": counts,
    }
    return value if problem == REGRESSION else value | {"labels": names, "logits": pack_logits(logits)}

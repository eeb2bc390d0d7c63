"""Score tags of words."""

from __future__ import annotations

from typing import Any

from smelt.data.labels import class_names
from smelt.data.splits import Split
from smelt.data.tags import tag_scheme
from smelt.evaluate.label_quality import entity_scores
from smelt.evaluate.metrics.registry import is_custom_metric
from smelt.pipeline.execute.scores.base_scorer import BaseScorer, split_scores
from smelt.stage import Progress


def score_split(scorer: BaseScorer, runner: Any, split: Split, progress: Progress) -> dict[str, Any]:
    """Return the score of tags, as `Scorer.score`."""
    from smelt.evaluate.quality import score_tags
    from smelt.runtimes.tag_words import tag_words
    from smelt.tasks.token_classification import tag_classes

    names = class_names(runner.config)
    classes = tag_classes(split.examples, names, split.origin)  # check tags before running the model
    gold = [[names[index] for index in row] for row in classes]
    predicted = [tagged.tags for tagged in tag_words(runner, split.examples, scorer.batch_size, progress)]
    builtin_metrics = [name for name in scorer.metrics if not is_custom_metric(name)]
    scores = score_tags(builtin_metrics, predicted, gold, tag_scheme(names))
    scores |= scorer.custom_scores(predicted, gold, [e.text for e in split.examples], split)
    return {
        **split_scores({name: scores[name] for name in scorer.metrics if name in scores}),
        "predictions": predicted,
        "classes": entity_scores(predicted, gold, tag_scheme(names)),
    }

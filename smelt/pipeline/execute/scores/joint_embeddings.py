"""Score embeddings of images and texts in one space."""

from __future__ import annotations

from typing import Any

import numpy as np

from smelt.core.files import json_hash
from smelt.data.splits import Split
from smelt.evaluate.metrics.metric import ClassSamples, Samples
from smelt.evaluate.metrics.retrieval import RetrievalSamples
from smelt.pipeline.execute.scores.base_scorer import BaseScorer, split_scores
from smelt.stage import Progress


def score_split(scorer: BaseScorer, runner: Any, split: Split, progress: Progress) -> dict[str, Any]:
    """Return the score of retrieval, and with labels of classification, as `Scorer.score`.

    Equal captions are one candidate, and each image with this caption matches it.
    """
    from smelt.evaluate.quality import score_metrics
    from smelt.runtimes.image_text import embed_captions, embed_images
    from smelt.tasks.image_text import captions, class_embeddings

    texts = captions(split)
    names = [f"row {e.row}" if e.row else e.text for e in split.examples]
    references = [example.text for example in split.examples]
    images = embed_images(runner, references, scorer.batch_size, progress, names).astype(np.float64)
    vectors = embed_captions(runner, texts, scorer.batch_size).astype(np.float64)
    candidates = list(dict.fromkeys(texts))
    by_text = dict(zip(texts, vectors, strict=True))
    similarities = images @ np.stack([by_text[text] for text in candidates]).T
    matches = np.array([[text == candidate for candidate in candidates] for text in texts])
    examples = json_hash([list(split.row_contents), texts])
    samples: list[Samples] = [RetrievalSamples(examples, similarities, matches)]
    labels = [str(example.label) for example in split.examples]
    classes: list[str] = []
    if split.has_labels:
        classes, prototypes = class_embeddings(labels, texts, vectors)
        predicted = (images @ prototypes.T).argmax(axis=1).tolist()
        gold = [classes.index(label) for label in labels]
        samples.append(ClassSamples(json_hash([classes, gold]), predicted, gold))
    predictions = (
        [classes[i] for i in predicted] if classes else [candidates[i] for i in similarities.argmax(1)]
    )
    return {**split_scores(score_metrics(scorer.metrics, *samples)), "predictions": predictions}

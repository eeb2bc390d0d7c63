"""Score embeddings of texts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from smelt.core.artifact import Artifact
from smelt.core.files import json_hash
from smelt.core.messages import warning
from smelt.data.splits import Split, input_texts
from smelt.evaluate.metrics.registry import AGREEMENT_METRIC
from smelt.pipeline.execute.scores.base_scorer import BaseScorer, split_scores
from smelt.stage import Progress


def score_split(scorer: BaseScorer, runner: Any, split: Split, progress: Progress) -> dict[str, Any]:
    """Return the score of embeddings, as `Scorer.score`."""
    from smelt.evaluate.label_quality import ReferenceVectors, score_vectors
    from smelt.runtimes.predict_texts import embed_texts
    from smelt.tasks.sentence_similarity import paired_cosines

    texts, _ = input_texts(split.examples, scorer.task)
    vectors = embed_texts(runner, texts, scorer.batch_size, progress)
    reference = None
    if scorer.needs_reference and scorer.reference is not None:
        key = json_hash([scorer.reference.key, split.fingerprint])
        if scorer.reference.path == runner.folder:
            scorer.reference_cache[key] = vectors
        elif key not in scorer.reference_cache:
            scorer.reference_cache[key] = _reference_vectors(scorer, scorer.reference, texts, progress)
        reference = ReferenceVectors(scorer.reference_cache[key], scorer.reference.key)
    paired = split.examples[0].text_pair is not None
    halves = vectors[: len(split)], vectors[len(split) :]
    value = {
        **split_scores(score_vectors(scorer.metrics, vectors, texts, pair_scores(split), reference)),
        "predictions": [round(float(c), 6) for c in paired_cosines(*halves)] if paired else [],
    }
    if reference is not None and reference.vectors.shape != vectors.shape:
        value["warnings"] = [
            warning(
                "vectors-not-comparable",
                f"{AGREEMENT_METRIC}: vectors of size {vectors.shape[1]} cannot be compared with the"
                f" baseline's of size {reference.vectors.shape[1]}.",
            )
        ]
    return value


def _reference_vectors(
    scorer: BaseScorer, reference: Artifact, texts: Sequence[str], progress: Progress
) -> Any:
    """Return the embeddings of `texts` by the reference artifact."""
    from smelt.runtimes.predict_texts import embed_texts
    from smelt.runtimes.registry import open_runner

    with open_runner(reference, scorer.threads, scorer.device) as runner:
        return embed_texts(runner, texts, scorer.batch_size, progress)


def pair_scores(split: Split) -> list[float] | None:
    """Return the similarity scores of the pairs in `split`; None if they have no scores."""
    scores = [float(e.label) for e in split.examples if isinstance(e.label, float)]
    return scores if split.has_labels else None

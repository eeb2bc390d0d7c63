"""Recall of retrieval, against its formula on sorted candidates."""

import numpy as np
import pytest

from smelt.evaluate.metrics.retrieval import RetrievalSamples, match_ranks
from smelt.evaluate.quality import score_metrics

pytestmark = pytest.mark.quick
METRICS = [f"{kind}_retrieval_recall@{k}" for k in (1, 5) for kind in ("text", "image")]


def drawn_samples(images=40, texts=9, seed=0):
    """Similarities without ties; each image has one of the texts."""
    draw = np.random.default_rng(seed)
    owners = np.arange(images) % texts
    matches = owners[:, None] == np.arange(texts)[None, :]
    return draw.normal(size=(images, texts)) + matches, matches


def recall(similarities, matches, k):
    """The share of queries with a match among the first k of the sorted candidates."""
    order = np.argsort(-similarities, axis=1)[:, :k]
    return 100 * np.mean(np.take_along_axis(matches, order, axis=1).any(axis=1))


def test_recalls_equal_sorted_candidates():
    similarities, matches = drawn_samples()
    scores = score_metrics(METRICS, RetrievalSamples("x", similarities, matches))
    assert list(scores) == METRICS
    for k in (1, 5):
        texts, images = (scores[f"{kind}_retrieval_recall@{k}"] for kind in ("text", "image"))
        assert texts.value == pytest.approx(recall(similarities, matches, k))
        assert images.value == pytest.approx(recall(similarities.T, matches.T, k))
        assert (texts.n, images.n) == (40, 9)  # a row for each query
        assert "|pool:9|" in f"|{texts.signature}|"
        assert "|pool:40|" in f"|{images.signature}|"
    assert len({score.value for score in scores.values()}) == 4


def test_ties_count_against_the_match():
    matches = np.array([[False, True, False]])
    assert match_ranks(np.array([[0.5, 0.5, 0.5]]), matches) == [3]
    assert match_ranks(np.array([[0.4, 0.5, 0.5]]), matches) == [2]
    assert match_ranks(np.array([[0.4, 0.5, 0.4]]), matches) == [1]
    both = np.array([[True, True, False]])
    assert match_ranks(np.array([[0.1, 0.9, 0.8]]), both) == [1]  # the best of several matches


def test_equal_embeddings_find_nothing():
    _, matches = drawn_samples(12, 6)
    scores = score_metrics(METRICS, RetrievalSamples("x", np.ones((12, 6)), matches))
    assert {score.value for score in scores.values()} == {0.0}


def test_chance_level_equals_mean_of_random_orders():
    _, matches = drawn_samples(20, 10)
    scores = score_metrics(METRICS, RetrievalSamples("x", np.zeros((20, 10)), matches))
    draw = np.random.default_rng(1)
    for name, score in scores.items():
        query_matches = matches if name.startswith("text") else matches.T
        k = int(name[-1])
        drawn = [recall(draw.random(query_matches.shape), query_matches, k) for _ in range(2000)]
        assert score.chance == pytest.approx(np.mean(drawn), abs=1.0)

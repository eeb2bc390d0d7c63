"""The `agreement` of a step in report.json: how far its outputs equal the baseline's, without references.

The metric of that name, which recipes choose and gates judge, is in `smelt.evaluate.metrics.agreement`.

It does not tell whether a change is for the better or the worse: a step that corrects an error of the
baseline agrees less with it.

Shapes: n = examples, C = classes.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

import numpy as np
from numpy.typing import NDArray

from smelt.core.files import json_hash
from smelt.core.store import Store
from smelt.data.bleu_tokenizer import bleu_tokenizer

# Raised whenever equal outputs would give another result of `compare_outputs`.
AGREEMENT_VERSION = 1
# Logits are stored with a score up to this number (16 MB), those of the first examples.
_MAX_STORED_LOGITS = 4_000_000
Logits = NDArray[np.float32]


def pack_logits(logits: Logits) -> dict[str, Any]:
    """Return logits, float32 [n, C], as JSON values; only the first examples if there are too many."""
    stored_logits = logits[: max(1, _MAX_STORED_LOGITS // logits.shape[1])].astype("<f4")
    return {
        "shape": list(stored_logits.shape),
        "float32": base64.b64encode(stored_logits.tobytes()).decode("ascii"),
    }


def unpack_logits(packed: Mapping[str, Any]) -> Logits:
    """Return the logits of `pack_logits`, float32 [n, C]."""
    values = np.frombuffer(base64.b64decode(packed["float32"]), dtype="<f4")
    return values.reshape(packed["shape"]).astype(np.float32)


def kl_divergence(logits: Logits, expected: Logits, multi_label: bool = False) -> float:
    """Return the mean KL divergence KL(baseline || step) of the class probabilities, in nats per example.

    Args:
        logits: of the step, float32 [n, C].
        expected: of the baseline, float32 [n, C].
        multi_label: whether each label has a probability of its own; the divergences of the labels are added.
    """
    from scipy.special import log_expit, log_softmax

    step_logits, baseline_logits = logits.astype(np.float64), expected.astype(np.float64)
    if multi_label:
        pairs = [(log_expit(sign * baseline_logits), log_expit(sign * step_logits)) for sign in (1, -1)]
    else:
        pairs = [(log_softmax(baseline_logits, axis=1), log_softmax(step_logits, axis=1))]
    total = sum(float((np.exp(p) * (p - q)).sum()) for p, q in pairs)
    return max(0.0, total / len(step_logits))  # rounding errors may be negative


def compare_outputs(score: Mapping[str, Any], baseline: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the agreement of a step with the baseline, as `agreement` of a step in report.json.

    None if the outputs are neither texts nor classes (numbers, vectors, arrays), or if there are none.

    Args:
        score: a result of scoring a step: `predictions`; for classifiers also `labels`, the class names, and
            `logits` (see `pack_logits`).
        baseline: likewise, of the baseline on the same examples.
    """
    step_predictions, base = score.get("predictions") or [], baseline.get("predictions") or []
    if (
        not step_predictions
        or len(step_predictions) != len(base)
        or not isinstance(step_predictions[0], str | list)
        or any(isinstance(value, float) for value in step_predictions[0])  # numbers of a regression
    ):
        return None
    equal = 100 * sum(a == b for a, b in zip(step_predictions, base, strict=True)) / len(step_predictions)
    agreement: dict[str, Any] = {"n": len(step_predictions), "equal": equal}
    if isinstance(step_predictions[0], str) and "labels" not in score:
        return agreement | _text_agreement(step_predictions, base)
    if "logits" in score and "logits" in baseline and score["labels"] == baseline["labels"]:
        pair = [unpack_logits(side_score["logits"]) for side_score in (score, baseline)]
        agreement["kl_divergence"] = kl_divergence(
            pair[0], pair[1], multi_label=isinstance(step_predictions[0], list)
        )
        agreement["kl_n"] = len(pair[0])
    return agreement


def _text_agreement(step_texts: Sequence[str], base: Sequence[str]) -> dict[str, Any]:
    """Return corpus BLEU and chrF of sacrebleu, with the baseline's outputs as the references."""
    from sacrebleu.metrics.bleu import BLEU
    from sacrebleu.metrics.chrf import CHRF

    scores: dict[str, Any] = {"signatures": {}}
    for name, scorer in (("bleu", BLEU(tokenize=bleu_tokenizer(base))), ("chrf", CHRF())):
        scores[name] = float(scorer.corpus_score(step_texts, [base]).score)
        scores["signatures"][name] = str(scorer.get_signature())
    return scores


def cached_agreement(
    store: Store, score: Mapping[str, Any], baseline: Mapping[str, Any]
) -> dict[str, Any] | None:
    """Return `compare_outputs` of two scores; stored by their outputs and reused."""
    sides = [{part: side.get(part) for part in _OUTPUT_PARTS} for side in (score, baseline)]
    libraries = {"sacrebleu": version("sacrebleu")}
    key = json_hash({"agreement": AGREEMENT_VERSION, "outputs": sides, "libraries": libraries})
    stored = store.read_score(key)
    if stored is None:
        stored = {"artifact": score["artifact"], "agreement": compare_outputs(score, baseline)}
        store.write_score(key, stored)
    agreement: dict[str, Any] | None = stored["agreement"]
    return agreement


_OUTPUT_PARTS = ("predictions", "labels", "logits")

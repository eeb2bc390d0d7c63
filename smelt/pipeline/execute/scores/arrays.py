"""Score the outputs of a third-party graph, compared with the original graph's."""

from __future__ import annotations

from typing import Any

from smelt.core.artifact import Artifact
from smelt.core.files import json_hash
from smelt.core.messages import warning
from smelt.data.splits import Split
from smelt.evaluate.metrics.registry import is_custom_metric
from smelt.pipeline.execute.scores.base_scorer import BaseScorer, split_scores
from smelt.stage import Progress


def score_split(scorer: BaseScorer, runner: Any, split: Split, progress: Progress) -> dict[str, Any]:
    """Return the score of arrays, compared with the reference's, as `Scorer.score`."""
    from smelt.evaluate.tensor_quality import low_agreement_reason, require_finite_outputs, score_outputs
    from smelt.runtimes.single_call_runners import outputs_by_sample

    assert split.arrays is not None
    assert scorer.reference is not None  # a run scores the original first, `smelt eval` requires it
    outputs = outputs_by_sample(runner, split.arrays, scorer.batch_size, progress)
    key = json_hash([scorer.reference.key, split.fingerprint])
    if scorer.reference.path == runner.folder:
        scorer.reference_cache[key] = outputs
    elif key not in scorer.reference_cache:
        scorer.reference_cache[key] = _reference_outputs(scorer, scorer.reference, split, progress)
    expected = scorer.reference_cache[key]
    sources = [split.arrays.sample(index) for index in range(split.arrays.num_samples)]
    names = {n for n in runner.signature.input_batch_axes if not split.arrays.is_shared(n)}
    sample_inputs = [{name: source[name] for name in names} for source in sources]
    require_finite_outputs(outputs, expected, sample_inputs)
    scores = score_outputs(
        [name for name in scorer.metrics if not is_custom_metric(name)],
        outputs,
        expected,
        scorer.reference.key,
        split.fingerprint,
        _class_axes(scorer.reference),
        sources,
        scorer.metric_settings,
    )
    scores |= scorer.custom_scores(outputs, expected, sources, split, split.fingerprint)
    reason = low_agreement_reason(outputs, expected, sample_inputs)
    return {
        **split_scores({name: scores[name] for name in scorer.metrics if name in scores}),
        "predictions": [],
        "warnings": [warning("non-finite-outputs", reason)] if reason else [],
    }


def _reference_outputs(scorer: BaseScorer, reference: Artifact, split: Split, progress: Progress) -> Any:
    """Return the outputs of the reference graph on `split`."""
    from smelt.runtimes.registry import open_runner
    from smelt.runtimes.single_call_runners import GraphRunner, outputs_by_sample

    assert split.arrays is not None
    with open_runner(reference, scorer.threads, scorer.device) as runner:
        assert isinstance(runner, GraphRunner)
        return outputs_by_sample(runner, split.arrays, scorer.batch_size, progress)


def _class_axes(reference: Artifact) -> dict[str, int]:
    """Return the axes of the classes, by output of the reference graph with scores of classes."""
    import onnx

    from smelt.runtimes.onnx_import.class_outputs import class_outputs

    if reference.format != "onnx":
        return {}
    return class_outputs(onnx.load(reference.path / "model.onnx", load_external_data=False))

"""Score artifacts, and format a classifier's predictions. Scores are stored and reused."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from smelt.core.artifact import Artifact
from smelt.core.errors import InputError
from smelt.core.files import json_hash
from smelt.core.messages import Message, messages_to_json, warning, with_count
from smelt.core.process_group import from_first, process_rank
from smelt.core.store import Store
from smelt.core.system import package_versions
from smelt.data.labels import REGRESSION, check_labels, class_names, problem_type
from smelt.data.splits import Split, input_texts
from smelt.data.tags import tag_scheme
from smelt.data.tasks import Task, task_traits
from smelt.evaluate.label_quality import class_counts, gold_outputs, score_classifier
from smelt.evaluate.metrics.metric import ChoiceSamples, MetricSettingValues, ResponseSamples
from smelt.evaluate.metrics.registry import (
    AGREEMENT_METRIC,
    TEXT_METRICS,
    find_metric,
    is_custom_metric,
    is_lower_better,
    metrics_of,
)
from smelt.generation.config import GenerationSettings
from smelt.models.text_rules import read_text_rules
from smelt.pipeline.execute.likelihood_scores import score_given_choices, score_given_responses
from smelt.pipeline.inspect.machine import artifact_device
from smelt.runtimes.device import NO_PROVIDER, cuda_device_count
from smelt.runtimes.registry import find_runtime
from smelt.stage import Progress, no_progress
from smelt.tasks.registry import task_spec

if TYPE_CHECKING:
    from smelt.evaluate.quality import MetricScore


# Increased whenever the same artifact and data would give another score or other statistics.
SCORE_VERSION = 15
# Fraction of truncated outputs from which a warning is added.
TRUNCATED_OUTPUT_SHARE = 0.01


@dataclass(frozen=True)
class Scorer:
    """Scores artifacts with fixed metrics, generation settings and batch size.

    metric_settings: settings of metrics by metric, as in the recipe.
    base: the folder that paths in them are relative to, and where a user's custom metrics are found.
    reference: the artifact that outputs are compared with (`agreement`, and all metrics of `custom`); None if
        not available yet, then `agreement` is not computed.
    reference_cache: outputs of the reference by split.
    """

    store: Store
    task: Task
    metrics: Sequence[str]
    generation: GenerationSettings
    batch_size: int
    threads: int | None
    truncation: Literal["warn", "error"] = "warn"
    device: str = "auto"
    metric_settings: MetricSettingValues = field(default_factory=dict)
    base: Path = Path()
    reference: Artifact | None = None
    reference_cache: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def needs_reference(self) -> bool:
        """Whether a score also depends on the reference."""
        return task_traits(self.task).modality == "arrays" or AGREEMENT_METRIC in self.metrics

    @property
    def negated_metrics(self) -> frozenset[str]:
        """The scored metrics whose lower values are better."""
        return frozenset(name for name in self.metrics if is_lower_better(name, self.metric_settings))

    def score(self, artifact: Artifact, split: Split, progress: Progress = no_progress) -> dict[str, Any]:
        """Return `{"quality": {metric: score}, "statistics": ..., "warnings": [...], ...}`.

        `statistics` are per example, for paired comparisons of artifacts; `predictions` the outputs per
        example. Classifiers also have `labels`, the class names, and `logits` (see
        `smelt.evaluate.step_agreement.pack_logits`).

        Raises:
            InputError: texts are too long with truncation: error, or a label is unknown.
            RunError: outputs are NaN or infinite (`non-finite-outputs`).
        """
        from smelt.runtimes.registry import open_runner

        # several processes that score together decide alike
        cached = from_first(lambda: self.cached_score(artifact, split))
        if cached is not None:
            return cached
        with open_runner(artifact, self.threads, self.device) as runner:
            too_long = task_spec(self.task).count_truncated(runner, split.examples, self.generation)
            if too_long and self.truncation == "error":
                raise InputError(
                    f"{split.origin}: {with_count(too_long, 'text')} longer than the model's limit. Shorten"
                    " them, or set truncation: warn.",
                    code="texts-too-long",
                )
            value = _SCORE_METHODS[task_traits(self.task).output](self, runner, split, progress)
            value["runner"] = f"{runner.name} {runner.version}"
            value["device"] = runner.device
            value["artifact"] = artifact.key
            for scored in value["quality"].values():
                scored["signature"] += f"|device:{runner.device}"
        warnings: list[Message] = [*value.get("warnings", ()), *_device_warnings(artifact, value["device"])]
        if too_long:
            verb = "was" if too_long == 1 else "were"
            text = (
                f"{too_long} of {len(split)} texts {verb} longer than the model's limit and {verb} truncated."
            )
            warnings.insert(0, warning("truncated-texts", text))
        value["warnings"] = messages_to_json(warnings)
        if process_rank() == 0:
            self.store.write_score(self._key(artifact, split), value)
        return value

    def cached_score(self, artifact: Artifact, split: Split) -> dict[str, Any] | None:
        """Return the stored score of the same artifact, samples and settings; None if there is none."""
        stored = self.store.read_score(self._key(artifact, split))
        if stored is None:
            return None
        # in the recipe's order: the first metric is the main one
        quality = {name: stored["quality"][name] for name in self.metrics if name in stored["quality"]}
        return {**stored, "quality": quality}

    def key_conditions(self) -> dict[str, Any]:
        """Return what a score depends on, apart from artifact, samples and runtime, as JSON values."""
        return {
            "version": SCORE_VERSION,
            "generation": self.generation.model_dump() if task_traits(self.task).output == "text" else None,
            "batch_size": self.batch_size,
            "metric_settings": {name: dict(settings) for name, settings in self.metric_settings.items()},
            "metric_files": self._metric_files,
            "truncation": self.truncation,
            "libraries": package_versions(self._metric_libraries),
        }

    @property
    def _metric_libraries(self) -> tuple[str, ...]:
        libraries = {library for name in self.metrics for library in find_metric(name).libraries}
        return tuple(sorted(libraries))

    @cached_property
    def _metric_files(self) -> dict[str, str]:
        """The fingerprints of metrics that depend on files: a user's module, the model of BERTScore."""
        from smelt.evaluate.custom_metric import load_custom_metric

        fingerprints: dict[str, str | None] = {}
        for name in self.metrics:
            if is_custom_metric(name):
                fingerprints[name] = load_custom_metric(name, self.base).source_hash
            else:
                fingerprints[name] = find_metric(name).fingerprint(
                    self.metric_settings.get(name, {}), self.base
                )
        return {name: value for name, value in fingerprints.items() if value is not None}

    def _key(self, artifact: Artifact, split: Split) -> str:
        runtime = find_runtime(artifact.format, artifact.manifest.details.get("target"))
        libraries = package_versions((*runtime.libraries, *self._metric_libraries))
        reference_part = {"reference": self.reference and self.reference.key} if self.needs_reference else {}
        return json_hash(
            self.key_conditions()
            | {
                "kind": "quality",
                "artifact": artifact.key,
                "data": split.fingerprint,
                "metrics": sorted(self.metrics),
                "device": artifact_device(artifact, self.device),
                "libraries": libraries,
                **reference_part,
            }
        )

    def _score_texts(self, runner: Any, split: Split, progress: Progress) -> dict[str, Any]:
        from smelt.evaluate.degenerate_outputs import count_degenerate
        from smelt.evaluate.quality import score_texts
        from smelt.generation.config import resolve_generation
        from smelt.runtimes.predict_texts import generate_texts

        texts = [e.text for e in split.examples]
        truncations: list[tuple[int, int]] = []
        predictions = generate_texts(
            runner,
            texts,
            self.generation,
            self.batch_size,
            progress,
            lambda *truncation: truncations.append(truncation),
        )
        references = [e.references for e in split.examples]
        language = read_text_rules(runner.folder).target_language
        metrics = [name for name in self.metrics if name in TEXT_METRICS]
        scores: dict[str, MetricScore] = {}
        if metrics:  # samples that only agreement is scored on have no references
            scores = score_texts(
                metrics,
                predictions,
                references,
                self.metric_settings,
                language,
                self.base,
                self.device,
            )
        sources = [example.text for example in split.examples]
        scores |= self._own_scores(
            predictions, [list(references_of_text) for references_of_text in references], sources, split
        )
        scores |= self._score_agreement(runner, predictions, split, progress)
        value = {
            **_split_scores({name: scores[name] for name in self.metrics if name in scores}),
            "predictions": predictions,
            "outputs": count_degenerate(
                predictions, references, sum(count for count, _ in truncations)
            ).model_dump(),
            "warnings": _truncated_output_warnings(truncations, len(texts)),
        }
        for scored in value["quality"].values():
            scored["signature"] += f"|{resolve_generation(self.generation, runner).describe()}"
        return value

    def _own_scores(
        self,
        predictions: Sequence[Any],
        references: Sequence[Any],
        sources: Sequence[Any],
        split: Split,
        examples: str | None = None,
    ) -> dict[str, MetricScore]:
        """Return the scores by the user's custom metrics (see `smelt.evaluate.custom_metric`)."""
        from smelt.evaluate.custom_metric import load_custom_metric, score_custom_metric

        locations = [
            f"{split.origin}:{e.line or e.row or number}" for number, e in enumerate(split.examples, 1)
        ]
        return {
            name: score_custom_metric(
                load_custom_metric(name, self.base),
                predictions,
                references,
                sources,
                locations,
                not is_lower_better(name, self.metric_settings),
                examples,
            )
            for name in self.metrics
            if is_custom_metric(name)
        }

    def _score_generated(self, runner: Any, split: Split, progress: Progress) -> dict[str, Any]:
        text_metrics = (*TEXT_METRICS, AGREEMENT_METRIC)
        generated = any(name in text_metrics or is_custom_metric(name) for name in self.metrics)
        value = self._score_texts(runner, split, progress) if generated else None
        value = value or {"quality": {}, "statistics": {}, "predictions": []}
        scores: dict[str, MetricScore] = {}
        of_responses = [name for name in self.metrics if name in metrics_of(ResponseSamples)]
        if of_responses:
            scores |= (response_scores := score_given_responses(of_responses, runner, split, self.batch_size))
            if not response_scores:
                text = (
                    f"{', '.join(of_responses)}: not scored, because the model excludes tokens of references,"
                    " as a shortlist does: the loss is infinite."
                )
                value["warnings"] = [*value.get("warnings", ()), warning("infinite-loss", text)]
        of_choices = [name for name in self.metrics if name in metrics_of(ChoiceSamples)]
        if of_choices and split.has_choices:
            scores |= score_given_choices(of_choices, runner, split, self.batch_size, progress)
        for section, added in _split_scores(scores).items():
            value[section] |= added
        for section in ("quality", "statistics"):  # in the recipe's order
            value[section] = {name: value[section][name] for name in self.metrics if name in value[section]}
        return value

    def _score_windows(self, runner: Any, split: Split, progress: Progress) -> dict[str, Any]:
        from smelt.evaluate.quality import score_windows
        from smelt.generation.generating_runners import window_nll
        from smelt.models.checkpoint import load_tokenizer
        from smelt.models.text_rules import cut_windows, join_texts, max_input_length

        tokenizer = load_tokenizer(runner.folder)
        text = cut_windows(split, tokenizer, max_input_length(tokenizer, runner.config))
        losses = window_nll(runner, text, self.batch_size, progress)
        joined_text = join_texts(split)  # a trimmed vocabulary tokenizes the same text differently
        vocab_size = runner.config.get("vocab_size")
        scores = score_windows(
            self.metrics,
            losses,
            text.scored_tokens,
            text.scored_bytes,
            text.signature,
            joined_text,
            vocab_size,
        )
        return _split_scores(scores)

    def _score_masked_tokens(self, runner: Any, split: Split, progress: Progress) -> dict[str, Any]:
        from smelt.evaluate.quality import score_masked_windows
        from smelt.models.checkpoint import load_tokenizer
        from smelt.models.masked_windows import (
            MASKED_FRACTION,
            TokenMasker,
            cut_bidirectional_windows,
            fixed_masks,
        )
        from smelt.models.text_rules import join_texts, window_length
        from smelt.runtimes.fill_mask import score_masked_tokens

        tokenizer, limit = load_tokenizer(runner.folder), runner.text.max_input_length
        windows = cut_bidirectional_windows(split, tokenizer, limit)
        masked = fixed_masks(windows, TokenMasker(tokenizer))
        results = score_masked_tokens(runner, masked, self.batch_size, progress)
        signature = f"window:{window_length(split.windows, limit)}|masked:{MASKED_FRACTION}|seed:0"
        vocab_size = runner.config.get("vocab_size")
        return _split_scores(
            score_masked_windows(self.metrics, *results, signature, join_texts(split), vocab_size)
        )

    def _score_labels(self, runner: Any, split: Split, progress: Progress) -> dict[str, Any]:
        from smelt.evaluate.step_agreement import pack_logits
        from smelt.runtimes.predict_texts import class_logits

        names, problem = class_names(runner.config), problem_type(runner.config)
        metrics = [metric for metric in self.metrics if metric != AGREEMENT_METRIC]
        if metrics:  # check labels before running the model
            check_labels(split.examples, names, problem, split.origin)
        logits = class_logits(runner, split.examples, self.batch_size, progress)
        builtin_metrics = [metric for metric in metrics if not is_custom_metric(metric)]
        scores, predictions = score_classifier(
            builtin_metrics, runner.config, logits, split, self.metric_settings
        )
        if len(builtin_metrics) < len(metrics):
            sources = [e.text if e.text_pair is None else [e.text, e.text_pair] for e in split.examples]
            scores |= self._own_scores(predictions, gold_outputs(runner.config, split), sources, split)
        scores |= self._score_agreement(runner, predictions, split, progress)
        counts = class_counts(runner.config, logits, split) if metrics else None
        value = {
            **_split_scores({name: scores[name] for name in self.metrics if name in scores}),
            "predictions": predictions,
            "classes": counts,
        }
        return value if problem == REGRESSION else value | {"labels": names, "logits": pack_logits(logits)}

    def _score_tags(self, runner: Any, split: Split, progress: Progress) -> dict[str, Any]:
        from smelt.evaluate.label_quality import entity_scores
        from smelt.evaluate.quality import score_tags
        from smelt.runtimes.tag_words import tag_words
        from smelt.tasks.token_classification import tag_classes

        names = class_names(runner.config)
        classes = tag_classes(split.examples, names, split.origin)  # check tags before running the model
        gold = [[names[index] for index in row] for row in classes]
        predicted = [tagged.tags for tagged in tag_words(runner, split.examples, self.batch_size, progress)]
        builtin_metrics = [name for name in self.metrics if not is_custom_metric(name)]
        scores = score_tags(builtin_metrics, predicted, gold, tag_scheme(names))
        scores |= self._own_scores(predicted, gold, [e.text for e in split.examples], split)
        return {
            **_split_scores({name: scores[name] for name in self.metrics if name in scores}),
            "predictions": predicted,
            "classes": entity_scores(predicted, gold, tag_scheme(names)),
        }

    def _score_agreement(
        self, runner: Any, outputs: list[Any], split: Split, progress: Progress
    ) -> dict[str, MetricScore]:
        """Return the score `agreement` of texts or classes; empty if it is not a metric, or no reference."""
        if AGREEMENT_METRIC not in self.metrics or self.reference is None:
            return {}
        from smelt.evaluate.quality import score_agreement

        key = json_hash([self.reference.key, split.fingerprint])
        if self.reference.path == runner.folder:
            self.reference_cache[key] = outputs
        elif key not in self.reference_cache:
            self.reference_cache[key] = self.score(self.reference, split, progress)["predictions"]
        classes = task_traits(self.task).output == "labels"
        inputs = [[text, e.text_pair] for text, e in zip(split.row_contents, split.examples, strict=True)]
        expected = self.reference_cache[key]
        return {AGREEMENT_METRIC: score_agreement(outputs, expected, classes, self.reference.key, inputs)}

    def _score_vectors(self, runner: Any, split: Split, progress: Progress) -> dict[str, Any]:
        from smelt.evaluate.label_quality import ReferenceVectors, score_vectors
        from smelt.runtimes.predict_texts import embed_texts
        from smelt.tasks.sentence_similarity import paired_cosines

        texts, _ = input_texts(split.examples, self.task)
        vectors = embed_texts(runner, texts, self.batch_size, progress)
        reference = None
        if self.needs_reference and self.reference is not None:
            key = json_hash([self.reference.key, split.fingerprint])
            if self.reference.path == runner.folder:
                self.reference_cache[key] = vectors
            elif key not in self.reference_cache:
                self.reference_cache[key] = self._reference_vectors(self.reference, texts, progress)
            reference = ReferenceVectors(self.reference_cache[key], self.reference.key)
        paired = split.examples[0].text_pair is not None
        halves = vectors[: len(split)], vectors[len(split) :]
        value = {
            **_split_scores(score_vectors(self.metrics, vectors, texts, pair_scores(split), reference)),
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

    def _score_arrays(self, runner: Any, split: Split, progress: Progress) -> dict[str, Any]:
        from smelt.evaluate.tensor_quality import low_agreement_reason, require_finite_outputs, score_outputs
        from smelt.runtimes.single_call_runners import outputs_by_sample

        assert split.arrays is not None
        assert self.reference is not None  # a run scores the original first, `smelt eval` requires it
        outputs = outputs_by_sample(runner, split.arrays, self.batch_size, progress)
        key = json_hash([self.reference.key, split.fingerprint])
        if self.reference.path == runner.folder:
            self.reference_cache[key] = outputs
        elif key not in self.reference_cache:
            self.reference_cache[key] = self._reference_outputs(self.reference, split, progress)
        expected = self.reference_cache[key]
        sources = [split.arrays.sample(index) for index in range(split.arrays.num_samples)]
        names = {n for n in runner.signature.input_batch_axes if not split.arrays.is_shared(n)}
        sample_inputs = [{name: source[name] for name in names} for source in sources]
        require_finite_outputs(outputs, expected, sample_inputs)
        scores = score_outputs(
            [name for name in self.metrics if not is_custom_metric(name)],
            outputs,
            expected,
            self.reference.key,
            split.fingerprint,
            _class_axes(self.reference),
            sources,
            self.metric_settings,
        )
        scores |= self._own_scores(outputs, expected, sources, split, split.fingerprint)
        reason = low_agreement_reason(outputs, expected, sample_inputs)
        return {
            **_split_scores({name: scores[name] for name in self.metrics if name in scores}),
            "predictions": [],
            "warnings": [warning("non-finite-outputs", reason)] if reason else [],
        }

    def _reference_outputs(self, reference: Artifact, split: Split, progress: Progress) -> Any:
        """Return the outputs of the reference graph on `split`."""
        from smelt.runtimes.registry import open_runner
        from smelt.runtimes.single_call_runners import GraphRunner, outputs_by_sample

        assert split.arrays is not None
        with open_runner(reference, self.threads, self.device) as runner:
            assert isinstance(runner, GraphRunner)
            return outputs_by_sample(runner, split.arrays, self.batch_size, progress)

    def _reference_vectors(self, reference: Artifact, texts: Sequence[str], progress: Progress) -> Any:
        """Return the embeddings of `texts` by the reference artifact."""
        from smelt.runtimes.predict_texts import embed_texts
        from smelt.runtimes.registry import open_runner

        with open_runner(reference, self.threads, self.device) as runner:
            return embed_texts(runner, texts, self.batch_size, progress)


def _class_axes(reference: Artifact) -> dict[str, int]:
    """Return the axes of the classes, by output of the reference graph with scores of classes."""
    import onnx

    from smelt.runtimes.onnx_import.class_outputs import class_outputs

    if reference.format != "onnx":
        return {}
    return class_outputs(onnx.load(reference.path / "model.onnx", load_external_data=False))


# By the output of a task.
_SCORE_METHODS: dict[str, Callable[[Scorer, Any, Split, Progress], dict[str, Any]]] = {
    "text": Scorer._score_generated,
    "labels": Scorer._score_labels,
    "tags": Scorer._score_tags,
    "next-token": Scorer._score_windows,
    "masked-tokens": Scorer._score_masked_tokens,
    "embedding": Scorer._score_vectors,
    "arrays": Scorer._score_arrays,
}


def _split_scores(scores: Mapping[str, Any]) -> dict[str, Any]:
    """Split scores into `quality` for the report and `statistics` for paired tests."""
    return {
        "quality": {name: score.to_report() for name, score in scores.items()},
        "statistics": {name: score.statistics.dump() for name, score in scores.items()},
    }


def _truncated_output_warnings(truncated: Sequence[tuple[int, int]], texts: int) -> list[Message]:
    """Return a warning about truncated outputs; none below 1 %, which hardly changes a score."""
    cut = sum(count for count, _ in truncated)
    if cut < max(1, TRUNCATED_OUTPUT_SHARE * texts):
        return []
    longest = max(tokens for _, tokens in truncated)
    return [
        warning(
            "outputs-not-ended",
            f"{cut:,} of {texts:,} outputs ({100 * cut / texts:.1f} %) did not end within {longest} tokens"
            " and were truncated. Increase max_new_tokens.",
            setting="score.generation.max_new_tokens",
        )
    ]


def _device_warnings(artifact: Artifact, device: str) -> list[Message]:
    """Return a warning if a graph was scored on another device than it is for."""
    details = artifact.manifest.details
    target = details.get("target")
    if device == "cpu" and target == "ort-tensorrt":
        return [
            warning(
                "other-device",
                "This graph is for TensorRT but was run on the CPU without it. Scores and latency of its"
                " engines may differ.",
            )
        ]
    if device != "cpu" or target != "ort-cuda":
        return []
    is_fp16 = details.get("dtype") == "fp16"
    effect = ", where ONNX Runtime computes most float16 operators in float32" if is_fp16 else ""
    reason_text = f" ({NO_PROVIDER})" if cuda_device_count() else ""
    return [
        warning(
            "other-device",
            f"This graph is for CUDA but was run on the CPU{effect}. Scores and latency may differ on a"
            f" GPU{reason_text}.",
        )
    ]


def pair_scores(split: Split) -> list[float] | None:
    """Return the similarity scores of the pairs in `split`; None if they have no scores."""
    scores = [float(e.label) for e in split.examples if isinstance(e.label, float)]
    return scores if split.has_labels else None

"""Scores of artifacts, kept in the store so that the same one is never computed twice."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from smelt.core.artifact import Artifact
from smelt.core.data import (
    CLASSIFICATION,
    CUSTOM,
    IMAGES,
    SIMILARITY,
    TEXT_TO_TEXT,
    Example,
    Split,
    Task,
    texts_read,
)
from smelt.core.errors import InputError
from smelt.core.files import hash_of
from smelt.core.labels import class_names, problem_type
from smelt.core.messages import Message, as_json, warning
from smelt.core.rows.targets import check_labels
from smelt.core.stage import Progress, silent
from smelt.core.store.store import Store
from smelt.core.text import count
from smelt.look.machine import device_of
from smelt.recipe.problem import AGREEMENT
from smelt.runtime.backends.device import NO_PROVIDER, cuda_devices
from smelt.runtime.backends.ort_tensorrt.provider import PROVIDERS
from smelt.runtime.backends.registry import find_runtime
from smelt.runtime.generate.settings import Generation
from smelt.runtime.text.rules import read_text_rules

# Raised whenever the same artifact and data would give another score or other statistics.
VERSION = 9
# Outputs that did not end by themselves are warned of from this share on.
CUT_SHARE = 0.01


@dataclass(frozen=True)
class Scorer:
    """Scores artifacts on one split with fixed metrics, decoding and batches.

    tokenize: how BLEU splits texts, None for what the references need.
    reference: the artifact whose vectors others are compared with (`agreement`); None as long as there is
    none, and then the metric is left out. Of the outputs of graphs the untouched one. vectors: of the
    reference, by the rows that they are of.
    """

    store: Store
    task: Task
    metrics: Sequence[str]
    generation: Generation
    batch_size: int
    threads: int | None
    truncation: Literal["warn", "error"] = "warn"
    device: str = "auto"
    tokenize: str | None = None
    reference: Artifact | None = None
    vectors: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def compares(self) -> bool:
        """Whether a score depends on the reference too."""
        return self.task == CUSTOM or (self.task == SIMILARITY and AGREEMENT in self.metrics)

    def score(self, artifact: Artifact, split: Split, progress: Progress = silent) -> dict[str, Any]:
        """Return `{"quality": {metric: score}, "statistics": ..., "warnings": [...], ...}`.

        `statistics` are per example, so that two artifacts can be compared in pairs later.

        Raises:
            InputError: texts are too long with truncation: error, or a label is unknown.
            RunError: outputs that are no numbers (`non-finite-outputs`).
        """
        from smelt.runtime.backends.open_runner import open_runner

        kept = self.kept(artifact, split)
        if kept is not None:
            return kept
        with open_runner(artifact, self.threads, self.device) as runner:
            too_long = _count_too_long(runner, split.examples, self.task)
            if too_long and self.truncation == "error":
                raise InputError(
                    f"{split.origin}: {count(too_long, 'text')} longer than the model's limit"
                    " (truncation: error).",
                    code="texts-too-long",
                )
            value = _SCORED[self.task](self, runner, split, progress)
            value["runner"] = f"{runner.name} {runner.version}"
            value["device"] = runner.device
            value["artifact"] = artifact.key
            for scored in value["quality"].values():
                scored["signature"] += f"|device:{runner.device}"
        warnings: list[Message] = [*value.get("warnings", ()), *_of_device(artifact, value["device"])]
        if too_long:
            were = "was" if too_long == 1 else "were"
            text = f"{too_long} of {len(split)} texts {were} longer than the model's limit and {were} cut"
            warnings.insert(0, warning("truncated-texts", text))
        value["warnings"] = as_json(warnings)
        self.store.write_score(self._key(artifact, split), value)
        return value

    def kept(self, artifact: Artifact, split: Split) -> dict[str, Any] | None:
        """Return what `score` gave earlier for the same artifact, rows and settings; None for nothing."""
        kept = self.store.read_score(self._key(artifact, split))
        if kept is None:
            return None
        # the order of the metrics is the recipe's: the first one leads the report
        quality = {name: kept["quality"][name] for name in self.metrics if name in kept["quality"]}
        return {**kept, "quality": quality}

    def conditions(self) -> dict[str, Any]:
        """Return, JSON-able, what a score depends on besides the artifact, the rows and what runs it."""
        return {
            "version": VERSION,
            "generation": self.generation.model_dump() if self.task in TEXT_TO_TEXT else None,
            "batch_size": self.batch_size,
            "tokenize": self.tokenize,
            "truncation": self.truncation,
            "libraries": library_versions(_METRIC_LIBRARIES),
        }

    def _key(self, artifact: Artifact, split: Split) -> str:
        runtime = find_runtime(artifact.format, artifact.manifest.details.get("target"))
        libraries = library_versions((*runtime.libraries, *_METRIC_LIBRARIES))
        beside = {"reference": self.reference and self.reference.key} if self.compares else {}
        return hash_of(
            self.conditions()
            | {
                "kind": "quality",
                "artifact": artifact.key,
                "data": split.fingerprint,
                "metrics": sorted(self.metrics),
                "device": device_of(artifact, self.device),
                "libraries": libraries,
                **beside,
            }
        )

    def _texts(self, runner: Any, split: Split, progress: Progress) -> dict[str, Any]:
        from smelt.evaluate.quality import score_texts
        from smelt.runtime.generate.decoding import settle
        from smelt.runtime.predict import generate_texts

        texts = [e.text for e in split.examples]
        stopped: list[tuple[int, int]] = []
        predictions = generate_texts(
            runner, texts, self.generation, self.batch_size, progress, lambda *found: stopped.append(found)
        )
        references = [e.references for e in split.examples]
        language = read_text_rules(runner.folder).target_language
        scores = score_texts(self.metrics, predictions, references, self.tokenize, language)
        value = {**_dump(scores), "predictions": predictions, "warnings": _of_lengths(stopped, len(texts))}
        for scored in value["quality"].values():
            scored["signature"] += f"|{settle(self.generation, runner).describe()}"
        return value

    def _windows(self, runner: Any, split: Split, progress: Progress) -> dict[str, Any]:
        from smelt.evaluate.perplexity import score_windows
        from smelt.runtime.causal import window_losses
        from smelt.runtime.models.checkpoint import load_tokenizer
        from smelt.runtime.text.limits import length_limit
        from smelt.runtime.text.windows import cut_windows, joined

        tokenizer = load_tokenizer(runner.folder)
        text = cut_windows(split, tokenizer, length_limit(tokenizer, runner.config))
        losses = window_losses(runner, text, self.batch_size, progress)
        whole = joined(split)  # a trimmed vocabulary cuts the same text otherwise
        words = runner.config.get("vocab_size")
        scores = score_windows(self.metrics, losses, text.counted, text.bytes, text.signature, whole, words)
        return _dump(scores)

    def _labels(self, runner: Any, split: Split, progress: Progress) -> dict[str, Any]:
        from smelt.execute.label_scores import score_classifier
        from smelt.runtime.predict import class_logits

        # labels are read before the model works: one that it does not know is told at once
        check_labels(split.examples, class_names(runner.config), problem_type(runner.config), split.origin)
        logits = class_logits(runner, split.examples, self.batch_size, progress)
        scores, predictions = score_classifier(self.metrics, runner.config, logits, split)
        return {**_dump(scores), "predictions": predictions}

    def _vectors(self, runner: Any, split: Split, progress: Progress) -> dict[str, Any]:
        from smelt.evaluate.sentence_quality import Reference, cosines, score_vectors
        from smelt.runtime.predict import sentence_vectors

        texts, _ = texts_read(split.examples, self.task)
        vectors = sentence_vectors(runner, texts, self.batch_size, progress)
        reference = None
        if self.compares and self.reference is not None:
            key = hash_of([self.reference.key, split.fingerprint])
            if self.reference.path == runner.folder:
                self.vectors[key] = vectors
            elif key not in self.vectors:
                self.vectors[key] = self._reference_vectors(self.reference, texts, progress)
            reference = Reference(self.vectors[key], self.reference.key)
        paired = split.examples[0].text_pair is not None
        halves = vectors[: len(split)], vectors[len(split) :]
        value = {
            **_dump(score_vectors(self.metrics, vectors, texts, scores_of(split), reference)),
            "predictions": [round(float(c), 6) for c in cosines(*halves)] if paired else [],
        }
        if reference is not None and reference.vectors.shape != vectors.shape:
            value["warnings"] = [
                warning(
                    "vectors-not-comparable",
                    f"{AGREEMENT}: vectors of size {vectors.shape[1]} cannot be compared with the baseline's"
                    f" of size {reference.vectors.shape[1]}.",
                )
            ]
        return value

    def _arrays(self, runner: Any, split: Split, progress: Progress) -> dict[str, Any]:
        from smelt.evaluate.tensor_quality import require_numbers, score_outputs, why_low
        from smelt.runtime.foreign.runner import by_row

        assert split.arrays is not None
        assert self.reference is not None  # the run's root is scored first, `smelt eval` asks for it
        got = by_row(runner, split.arrays, self.batch_size, progress)
        key = hash_of([self.reference.key, split.fingerprint])
        if self.reference.path == runner.folder:
            self.vectors[key] = got
        elif key not in self.vectors:
            self.vectors[key] = self._reference_outputs(self.reference, split, progress)
        require_numbers(got, self.vectors[key], split.arrays.by_row)
        scores = score_outputs(self.metrics, got, self.vectors[key], self.reference.key, split.fingerprint)
        why = why_low(got, self.vectors[key], split.arrays.by_row)
        return {
            **_dump(scores),
            "predictions": [],
            "warnings": [warning("non-finite-outputs", why)] if why else [],
        }

    def _reference_outputs(self, reference: Artifact, split: Split, progress: Progress) -> Any:
        """Return the outputs of the untouched graph, which an earlier run scored."""
        from smelt.runtime.backends.open_runner import open_runner
        from smelt.runtime.foreign.runner import GraphRunner, by_row

        assert split.arrays is not None
        with open_runner(reference, self.threads, self.device) as runner:
            assert isinstance(runner, GraphRunner)
            return by_row(runner, split.arrays, self.batch_size, progress)

    def _reference_vectors(self, reference: Artifact, texts: Sequence[str], progress: Progress) -> Any:
        """Return the vectors that the reference, which an earlier run scored, makes of `texts`."""
        from smelt.runtime.backends.open_runner import open_runner
        from smelt.runtime.predict import sentence_vectors

        with open_runner(reference, self.threads, self.device) as runner:
            return sentence_vectors(runner, texts, self.batch_size, progress)


# How a model of each task is scored.
_SCORED: dict[Task, Callable[[Scorer, Any, Split, Progress], dict[str, Any]]] = {
    **dict.fromkeys(TEXT_TO_TEXT, Scorer._texts),
    **dict.fromkeys(CLASSIFICATION, Scorer._labels),
    "language-modeling": Scorer._windows,
    "sentence-similarity": Scorer._vectors,
    "custom": Scorer._arrays,
}
_METRIC_LIBRARIES = ("sacrebleu", "mecab-python3", "mecab-ko", "rouge-score", "scikit-learn")


def library_versions(names: Sequence[str]) -> dict[str, str]:
    """Return the installed versions of the packages `names` that are installed."""
    from importlib.metadata import PackageNotFoundError, version

    found = {}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _dump(scores: Mapping[str, Any]) -> dict[str, Any]:
    """Split scores into what the report shows and what paired tests need."""
    return {
        "quality": {name: score.public() for name, score in scores.items()},
        "statistics": {name: score.statistics.dump() for name, score in scores.items()},
    }


def _of_lengths(stopped: Sequence[tuple[int, int]], texts: int) -> list[Message]:
    """Say how many outputs were cut; fewer than one in a hundred change no score that is worth a word."""
    cut = sum(count for count, _ in stopped)
    if cut < max(1, CUT_SHARE * texts):
        return []
    longest = max(tokens for _, tokens in stopped)
    return [
        warning(
            "outputs-not-ended",
            f"{cut:,} of {texts:,} outputs ({100 * cut / texts:.1f} %) did not end within {longest} tokens"
            " (max_new_tokens) and were truncated.",
            setting="score.generation.max_new_tokens",
        )
    ]


def _of_device(artifact: Artifact, device: str) -> list[Message]:
    """Say where a graph was not scored on what it was made for."""
    details = artifact.manifest.details
    target = details.get("target")
    if device == "cpu" and target in PROVIDERS:
        return [
            warning(
                "other-device",
                "This graph is for TensorRT but was run on the CPU without it: scores and latency of its"
                " engines may differ.",
            )
        ]
    if device != "cpu" or target != "ort-cuda":
        return []
    half = details.get("dtype") == "fp16"
    how = ", where ONNX Runtime computes most of its float16 in float32" if half else ""
    why = f" ({NO_PROVIDER})" if cuda_devices() else ""
    return [
        warning(
            "other-device",
            f"This graph is for CUDA but was run on the CPU{how}: scores and latency may differ on a"
            f" GPU{why}.",
        )
    ]


def scores_of(split: Split) -> list[float] | None:
    """Return how similar each pair of `split` is, None where its rows do not say it."""
    found = [float(e.label) for e in split.examples if isinstance(e.label, float)]
    return found if split.labelled else None


def _count_too_long(runner: Any, examples: Sequence[Example], task: Task) -> int:
    from smelt.runtime.predict import encode_texts

    if task in (CUSTOM, IMAGES):
        return 0
    if task == "language-modeling":  # running text is cut in windows, so none of it is too long
        return 0
    texts, pairs = texts_read(examples, task)
    return encode_texts(texts, runner.text.tokenizer, runner.text.limit, pairs).truncated

"""Run an artifact on samples and format the outputs as lines or JSON, for `smelt predict`.

Shapes: D = size of an embedding.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from smelt.api.concurrent_calls import TruncationCounter
from smelt.api.loaded_model import CLASSIFICATION_TASK, parse_generation
from smelt.core.artifact import read_artifact
from smelt.core.data import IMAGE_CLASSIFICATION, SENTENCE_SIMILARITY, Example
from smelt.core.errors import TruncationWarning
from smelt.core.messages import Message, warning
from smelt.execute.label_scores import prediction_text
from smelt.inspect.machine import artifact_device
from smelt.runtime.class_predictions import ClassPrediction, predictions_from_logits
from smelt.runtime.third_party.artifact_safety import require_safe_artifact

# Texts per chunk: outputs are shown after each chunk.
_CHUNK_SIZE = 1024


@dataclass(frozen=True)
class ExampleOutput:
    """The output of the artifact for `example`.

    output: generated text; class prediction; embedding of a text, D numbers; cosine similarity of a pair.
    image: whether the example is an image.
    """

    example: Example
    output: str | ClassPrediction | list[float] | float
    image: bool = False

    @property
    def line(self) -> str:
        """The output as `smelt predict` prints it."""
        if isinstance(self.output, str):
            return self.output
        if isinstance(self.output, float):
            return f"{self.output:.4f}"
        return json.dumps(self.output) if isinstance(self.output, list) else prediction_text(self.output)

    @property
    def json_line(self) -> str:
        """Input and output as one line of JSON."""
        said: dict[str, Any] = {"image" if self.image else "text": self.example.text}
        if self.example.text_pair is not None:
            said["text_b"] = self.example.text_pair
        if isinstance(self.output, str):
            said["output"] = self.output
        elif isinstance(self.output, float):
            said["similarity"] = self.output
        elif isinstance(self.output, list):
            said["embedding"] = self.output
        else:
            said |= {"label": self.output.label, "probabilities": dict(self.output.probabilities)}
        return json.dumps(said, ensure_ascii=False)


class Predictor:
    """Runs the artifact in `folder`.

    Args:
        folder: an artifact.
        generation: settings as in `score.generation` of a recipe; None values use the default.
        threads: CPU threads (default: the artifact's setting, else the runtime's default).
        device: auto, cpu or cuda.
        batch_size: texts per batch.
        trust_engine: as in `smelt.load`.

    Raises:
        InputError: the folder is not an artifact, a file was changed, or generation settings are invalid.
    """

    def __init__(
        self,
        folder: Path,
        generation: Mapping[str, Any],
        threads: int | None = None,
        device: str = "auto",
        batch_size: int = 32,
        trust_engine: bool = False,
    ) -> None:
        self._artifact = read_artifact(folder)
        self._artifact.verify()
        require_safe_artifact(self._artifact, trust_engine)
        self._generation = parse_generation(generation)
        self._threads, self._device, self._batch_size = threads, device, batch_size
        self._cuts, self._seen = TruncationCounter(), 0

    @property
    def task(self) -> str:
        """The model's task, as in a recipe."""
        return self._artifact.manifest.task

    def run(self, examples: Sequence[Example]) -> Iterator[ExampleOutput]:
        """Yield the output for each of `examples`, in order."""
        if not examples:
            return
        from smelt.runtime.backends.open_runner import open_runner

        with open_runner(self._artifact, self._threads, self._device) as runner:
            # random draws depend on the batch number, so sampling is not split into chunks
            step = len(examples) if self._generation.do_sample else _CHUNK_SIZE
            for at in range(0, len(examples), step):
                part = examples[at : at + step]
                self._seen += len(part)
                found = self._predict_function()(runner, part)
                for example, one in zip(part, found, strict=True):
                    yield ExampleOutput(example, one, self.task == IMAGE_CLASSIFICATION)

    def _predict_classes(self, runner: Any, examples: Sequence[Example]) -> list[ClassPrediction]:
        from smelt.runtime.predict_texts import class_logits

        return predictions_from_logits(
            class_logits(runner, examples, self._batch_size, on_truncate=self._cuts), runner.config
        )

    def _predict_function(self) -> Callable[[Any, Sequence[Example]], Sequence[Any]]:
        """Return the prediction function for the model's task."""
        known: dict[str, Callable[[Any, Sequence[Example]], Sequence[Any]]]
        known = {
            CLASSIFICATION_TASK: self._predict_classes,
            IMAGE_CLASSIFICATION: self._predict_classes,
            SENTENCE_SIMILARITY: self._predict_vectors,
        }
        return known.get(self.task, self._generate_texts)

    def _predict_vectors(self, runner: Any, examples: Sequence[Example]) -> list[list[float] | float]:
        """Return the cosine similarity of each pair, and the embedding of each single text."""
        from smelt.evaluate.sentence_quality import paired_cosines
        from smelt.runtime.predict_texts import embed_texts

        paired = [i for i, e in enumerate(examples) if e.text_pair is not None]
        texts = [e.text for e in examples] + [str(examples[i].text_pair) for i in paired]
        vectors = embed_texts(runner, texts, self._batch_size, on_truncate=self._cuts)
        alike = paired_cosines(vectors[paired], vectors[len(examples) :])
        found: list[list[float] | float] = [[round(float(x), 7) for x in v] for v in vectors[: len(examples)]]
        for i, value in zip(paired, alike, strict=True):
            found[i] = float(value)
        return found

    def _generate_texts(self, runner: Any, examples: Sequence[Example]) -> list[str]:
        from smelt.runtime.predict_texts import generate_texts

        texts = [example.text for example in examples]
        return generate_texts(runner, texts, self._generation, self._batch_size, on_truncate=self._cuts)

    @property
    def warnings(self) -> list[Message]:
        """Warnings about truncated texts, and about an artifact that ran on another device than requested."""
        cuts = self._cuts
        cut = str(TruncationWarning(cuts.count, self._seen, cuts.limit))
        found = [warning("truncated-texts", cut)] if cuts.count else []
        if self._device == "cuda" and artifact_device(self._artifact, self._device) == "cpu":
            target = self._artifact.manifest.details.get("target") or self._artifact.format
            found.append(
                warning(
                    "other-device",
                    f"--device cuda: this artifact is for {target} and ran on the CPU. Export one for a GPU"
                    f" with `onnx: {{target: ort-cuda}}` in the recipe.",
                )
            )
        return found

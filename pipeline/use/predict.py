"""`smelt predict`: an artifact run on texts, and its answers as lines or as JSON.

Shapes: D = numbers of a text's vector.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from smelt.core.artifact import read_artifact
from smelt.core.data import IMAGES, SIMILARITY, Example
from smelt.core.errors import TruncationWarning
from smelt.core.messages import Message, warning
from smelt.execute.label_scores import answer
from smelt.look.machine import device_of
from smelt.runtime.class_predictions import Prediction, predictions
from smelt.runtime.foreign.tried import require_safe
from smelt.use.calls import Cuts
from smelt.use.loaded import CLASSIFIES, generation_of

# Texts that are run before their answers are shown: what comes early need not wait for all.
_AT_ONCE = 1024


@dataclass(frozen=True)
class Answer:
    """What the artifact made of `example`.

    found: a text; what a classifier says; the vector of a text, D numbers; how similar a pair is, a cosine.
    image: the example is one.
    """

    example: Example
    found: str | Prediction | list[float] | float
    image: bool = False

    @property
    def line(self) -> str:
        """The answer as `smelt predict` prints it."""
        if isinstance(self.found, str):
            return self.found
        if isinstance(self.found, float):
            return f"{self.found:.4f}"
        return json.dumps(self.found) if isinstance(self.found, list) else answer(self.found)

    @property
    def record(self) -> str:
        """Text and answer as one line of JSON."""
        said: dict[str, Any] = {"image" if self.image else "text": self.example.text}
        if self.example.text_pair is not None:
            said["text_b"] = self.example.text_pair
        if isinstance(self.found, str):
            said["output"] = self.found
        elif isinstance(self.found, float):
            said["similarity"] = self.found
        elif isinstance(self.found, list):
            said["embedding"] = self.found
        else:
            said |= {"label": self.found.label, "probabilities": dict(self.found.probabilities)}
        return json.dumps(said, ensure_ascii=False)


class Predictor:
    """Runs the artifact in `folder`.

    Args:
        folder: an artifact.
        generation: as a recipe's `score.generation`; None for what is not said.
        threads: processor threads (default: those that the artifact names, else the runtime's choice).
        device: auto, cpu or cuda.
        batch_size: texts at once.
        trust_engine: as of `smelt.load`.

    Raises:
        InputError: no artifact there, a file of it has changed, or generation settings that do not fit.
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
        require_safe(self._artifact, trust_engine)
        self._generation = generation_of(generation)
        self._threads, self._device, self._batch_size = threads, device, batch_size
        self._cuts, self._seen = Cuts(), 0

    @property
    def task(self) -> str:
        """What the model is for, as in a recipe."""
        return self._artifact.manifest.task

    def run(self, examples: Sequence[Example]) -> Iterator[Answer]:
        """Yield the answer to each of `examples`, in their order."""
        if not examples:
            return
        from smelt.runtime.backends.open_runner import open_runner

        with open_runner(self._artifact, self._threads, self._device) as runner:
            # draws are numbered by batch from the first one on, so they are not parted
            step = len(examples) if self._generation.do_sample else _AT_ONCE
            for at in range(0, len(examples), step):
                part = examples[at : at + step]
                self._seen += len(part)
                found = self._answers()(runner, part)
                for example, one in zip(part, found, strict=True):
                    yield Answer(example, one, self.task == IMAGES)

    def _classes(self, runner: Any, examples: Sequence[Example]) -> list[Prediction]:
        from smelt.runtime.predict import class_logits

        return predictions(class_logits(runner, examples, self._batch_size, cut=self._cuts), runner.config)

    def _answers(self) -> Callable[[Any, Sequence[Example]], Sequence[Any]]:
        """Return what answers for a model of this task."""
        known: dict[str, Callable[[Any, Sequence[Example]], Sequence[Any]]]
        known = {CLASSIFIES: self._classes, IMAGES: self._classes, SIMILARITY: self._vectors}
        return known.get(self.task, self._texts)

    def _vectors(self, runner: Any, examples: Sequence[Example]) -> list[list[float] | float]:
        """Return the cosine of each pair, and the vector of each text that stands alone."""
        from smelt.evaluate.sentence_quality import cosines
        from smelt.runtime.predict import sentence_vectors

        paired = [i for i, e in enumerate(examples) if e.text_pair is not None]
        texts = [e.text for e in examples] + [str(examples[i].text_pair) for i in paired]
        vectors = sentence_vectors(runner, texts, self._batch_size, cut=self._cuts)
        alike = cosines(vectors[paired], vectors[len(examples) :])
        found: list[list[float] | float] = [[round(float(x), 7) for x in v] for v in vectors[: len(examples)]]
        for i, value in zip(paired, alike, strict=True):
            found[i] = float(value)
        return found

    def _texts(self, runner: Any, examples: Sequence[Example]) -> list[str]:
        from smelt.runtime.predict import generate_texts

        texts = [example.text for example in examples]
        return generate_texts(runner, texts, self._generation, self._batch_size, cut=self._cuts)

    @property
    def warnings(self) -> list[Message]:
        """What is to be said of texts that were cut, and of an artifact that ran elsewhere than asked for."""
        cuts = self._cuts
        cut = str(TruncationWarning(cuts.count, self._seen, cuts.limit))
        found = [warning("truncated-texts", cut)] if cuts.count else []
        if self._device == "cuda" and device_of(self._artifact, self._device) == "cpu":
            target = self._artifact.manifest.details.get("target") or self._artifact.format
            found.append(
                warning(
                    "other-device",
                    f"--device cuda: this artifact is for {target} and ran on the CPU. `onnx:"
                    f" {{target: ort-cuda}}` in the recipe makes one for a GPU.",
                )
            )
        return found

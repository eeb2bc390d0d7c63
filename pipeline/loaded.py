"""An artifact, opened in Python: `smelt.load(folder)`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from smelt.core.artifact import read_artifact
from smelt.core.data import Example
from smelt.core.errors import InputError
from smelt.runtime.class_predictions import Prediction, predictions

CLASSIFIES = "text-classification"
Text = str | tuple[str, str]


class Model:
    """An artifact that was loaded into its runtime. A context manager: leaving it frees the memory.

    Args:
        folder: an artifact, such as runs/NAME/artifacts/onnx-int8.
        threads: processor threads (default: the runtime's choice).
        device: auto, cpu or cuda; see docs/recipe.md.

    Raises:
        InputError: no artifact there, or a file of it has changed; cuda is asked for and there is none.
        MissingDependencyError: the runtime of this artifact is not installed.
    """

    def __init__(self, folder: str | Path, threads: int | None = None, device: str = "auto") -> None:
        from smelt.runtime.runner import open_runner

        if device not in ("auto", "cpu", "cuda"):
            raise InputError(f"device: expected auto, cpu or cuda, read {device!r}.")
        self.artifact = read_artifact(Path(folder).expanduser())
        self.artifact.verify()
        self._runner = open_runner(self.artifact, threads, device)

    @property
    def task(self) -> str:
        """What the model is for, as in a recipe."""
        return self.artifact.manifest.task

    @property
    def config(self) -> dict[str, Any]:
        """The model's Hugging Face config."""
        return dict(self._runner.config)

    @property
    def device(self) -> str:
        """Where it runs: cpu or cuda."""
        return self._runner.device

    def generate(self, texts: Sequence[str], batch_size: int = 32, **generation: Any) -> list[str]:
        """Return what the model makes of each text: a translation, a summary, a continuation.

        Args:
            texts: in any order and of any lengths; results come in the same order.
            batch_size: texts at once.
            generation: as in a recipe's `score.generation`, for example max_new_tokens=64.

        Raises:
            InputError: the model classifies, or a setting of generation is unknown or out of range.
        """
        from smelt.runtime.predict import generate_texts

        if self.task == CLASSIFIES:
            raise InputError(f"{self.artifact.path}: this model classifies; use predict.")
        settings = generation_of(generation)
        return generate_texts(self._runner, _texts(texts), settings, batch_size) if texts else []

    def predict(self, texts: Sequence[Text], batch_size: int = 32) -> list[Prediction]:
        """Return the class of each text, or of each pair of texts (a tuple of two).

        Raises:
            InputError: the model generates text.
        """
        from smelt.runtime.predict import class_logits

        if self.task != CLASSIFIES:
            raise InputError(f"{self.artifact.path}: this model is for {self.task}; use generate.")
        if not texts:
            return []
        logits = class_logits(self._runner, [_example(text) for text in _texts(texts)], batch_size)
        return predictions(logits, self._runner.config)

    def close(self) -> None:
        """Free the memory; the model cannot be used any more."""
        self._runner.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _texts(texts: Any) -> Any:
    if isinstance(texts, str):
        raise InputError("expected a list of texts, read one text. Put it into a list: [TEXT].")
    return list(texts)


def _example(text: Text) -> Example:
    return Example(text) if isinstance(text, str) else Example(text[0], text_pair=text[1])


def generation_of(values: Mapping[str, Any]) -> Any:
    """Return the `Generation` that `values` describe.

    Raises:
        InputError: a setting is unknown, out of range, or means nothing beside the others.
    """
    from pydantic import ValidationError

    from smelt.core.errors import nearest
    from smelt.runtime.generation import Generation

    try:
        return Generation(**values)
    except ValidationError as error:
        found = error.errors(include_url=False)[0]
        if found["type"] == "value_error":
            raise InputError(f"generation: {found['ctx']['error']}.") from error
        name = ".".join(map(str, found["loc"]))
        known = f"Known: {', '.join(Generation.model_fields)}.{nearest(name, Generation.model_fields)}"
        raise InputError(f"generation: {name}: {found['msg']}, read {found['input']!r}. {known}") from error

"""An artifact, opened in Python: `smelt.load(folder)`."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from smelt.core.artifact import read_artifact
from smelt.core.data import CUSTOM, IMAGES, SIMILARITY, Example, Task
from smelt.core.errors import InputError, SettingError, TruncationWarning
from smelt.families.registry import find_family
from smelt.runtime.class_predictions import Prediction, predictions
from smelt.use.arguments import count_of, images_of, texts_of, texts_or_pairs_of
from smelt.use.calls import Calls, Cuts

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from PIL.Image import Image

CLASSIFIES: Task = "text-classification"
# Which method of a model is for its task, where it is not `generate`.
_METHODS: dict[str, str] = {
    CLASSIFIES: "predict", SIMILARITY: "embed", CUSTOM: "run", IMAGES: "classify",
}  # fmt: skip
Text = str | tuple[str, str]


class Model:
    """An artifact that was loaded into its runtime. A context manager: leaving it frees the memory.

    Several threads may use one model at the same time; see docs/how-to/serve.md.

    Args:
        folder: an artifact, such as runs/NAME/artifacts/onnx-int8.
        threads: processor threads (default: those that the artifact names, else the runtime's choice).
        device: auto, cpu or cuda; see docs/reference/recipe.md#device.
        trust_engine: open a TensorRT engine that was not built here by this user. An engine is native code.

    Raises:
        InputError: no artifact there, or a file of it has changed; cuda is asked for and there is none.
        MissingDependencyError: the runtime of this artifact is not installed.
    """

    def __init__(
        self,
        folder: str | PathLike[str],
        threads: int | None = None,
        device: str = "auto",
        trust_engine: bool = False,
    ) -> None:
        from smelt.runtime.backends.open_runner import open_runner
        from smelt.runtime.backends.registry import find_runtime
        from smelt.runtime.foreign.tried import require_safe

        if device not in ("auto", "cpu", "cuda"):
            raise InputError(
                f"device: expected auto, cpu or cuda, read {device!r}.", code="wrong-value", setting="device"
            )
        count = None if threads is None else count_of(threads, "threads")
        if not isinstance(folder, str | PathLike):
            raise InputError(
                f"artifact: expected the path of a folder, read {folder!r}.",
                code="wrong-value",
                setting="artifact",
            )
        self._folder = Path(folder).expanduser()  # as the caller knows it; the artifact's path is the store's
        self.artifact = read_artifact(self._folder)
        self.artifact.verify()
        require_safe(self.artifact, trust_engine)
        self._runner = open_runner(self.artifact, count, device)
        try:
            if self.task == IMAGES:
                self._runner.processor  # type: ignore[attr-defined]  # noqa: B018 -- a broken one is told at once
            elif self.task != CUSTOM:
                self._runner.text.tokenizer  # noqa: B018 -- opened here: the first request need not wait for it
        except BaseException:
            self._runner.close()
            raise
        runtime = find_runtime(self.artifact.format, self.artifact.manifest.details.get("target"))
        closed = f"{self._folder}: this model was closed. Open it again with smelt.load."
        self._calls = Calls(closed, runtime.calls)
        self._truncated = 0

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

    @property
    def tokenizer(self) -> str:
        """What reads the texts: tokenizers, sentencepiece, or transformers, which takes seconds to import.

        Raises:
            InputError: the model reads no texts.
        """
        if self.task in (IMAGES, CUSTOM):
            raise InputError(
                f"{self._folder}: a model for {self.task} reads no texts and has no tokenizer.",
                code="does-not-fit-task",
            )
        return self._runner.text.tokenizer.reader

    @property
    def truncated(self) -> int:
        """How many texts were longer than the model takes and were cut, since it was opened."""
        return self._truncated

    def generate(self, texts: Iterable[str], batch_size: int = 32, **generation: Any) -> list[str]:
        """Return what the model makes of each text: a translation, a summary, a continuation.

        Warns with `TruncationWarning` where texts were longer than the model takes.

        Args:
            texts: in any order and of any lengths; results come in the same order.
            batch_size: texts at once.
            generation: as in a recipe's `score.generation`, for example max_new_tokens=64.

        Raises:
            InputError: the model makes no text or was closed, something else than texts was given, or a
                setting of generation is unknown or out of range.
        """
        from smelt.runtime.predict import generate_texts

        with self._calls:
            self._require("generate")
            settings, given = generation_of(generation), texts_of(texts)
            size, cuts = count_of(batch_size, "batch_size"), Cuts()
            found = generate_texts(self._runner, given, settings, size, cut=cuts) if given else []
            self._report(cuts, len(given))
        return found

    def predict(self, texts: Iterable[Text], batch_size: int = 32) -> list[Prediction]:
        """Return the class of each text, or of each pair of texts (a tuple of two).

        Warns with `TruncationWarning` where texts were longer than the model takes.

        Raises:
            InputError: the model is no classifier or was closed, or something else than texts was given.
        """
        from smelt.runtime.predict import class_logits

        with self._calls:
            self._require("predict")
            given = [_example(text) for text in texts_or_pairs_of(texts)]
            size, cuts = count_of(batch_size, "batch_size"), Cuts()
            if not given:
                return []
            logits = class_logits(self._runner, given, size, cut=cuts)
            self._report(cuts, len(given))
        return predictions(logits, self._runner.config)

    def classify(
        self, images: Iterable[str | PathLike[str] | Image], batch_size: int = 32
    ) -> list[Prediction]:
        """Return the class of each image.

        Args:
            images: paths of image files, or images that Pillow has opened, of any size.
            batch_size: images at once; no more are decoded at a time.

        Raises:
            InputError: the model reads no images or was closed, something else than images was given, or one
                cannot be read.
        """
        from smelt.runtime.images.predict import image_logits

        with self._calls:
            self._require("classify")
            given = images_of(images)
            size = count_of(batch_size, "batch_size")
            if not given:
                return []
            logits = image_logits(self._runner, given, size)
        return predictions(logits, self._runner.config)

    def embed(self, texts: Iterable[str], batch_size: int = 32) -> NDArray[np.float32]:
        """Return the vector of each text, float32 [n, D], in their order.

        Warns with `TruncationWarning` where texts were longer than the model takes.

        Raises:
            InputError: the model makes no vectors or was closed, or something else than texts was given.
        """
        import numpy as np

        from smelt.runtime.predict import sentence_vectors

        with self._calls:
            self._require("embed")
            given = texts_of(texts)
            size, cuts = count_of(batch_size, "batch_size"), Cuts()
            if not given:
                return np.empty((0, self._width), dtype=np.float32)
            found = sentence_vectors(self._runner, given, size, cut=cuts)
            self._report(cuts, len(given))
        return found

    def run(self, arrays: Mapping[str, Any], batch_size: int = 32) -> dict[str, NDArray[Any]]:
        """Return the outputs of a graph of arrays, by name, for all rows.

        Args:
            arrays: by the names of the graph's inputs, a row per place of axis 0, or of the axis that the
                recipe named (`data: {axes: ...}`) or the dimension's name says.
            batch_size: rows at once; a graph whose batch is fixed gets as many as it takes.

        Raises:
            InputError: the model takes texts or was closed, or the arrays do not fit the graph.
            RunError: the graph cannot compute it.
        """
        from smelt.runtime.foreign.runner import GraphRunner
        from smelt.use.arrays import arrays_of, run_rows

        with self._calls:
            self._require("run")
            assert isinstance(self._runner, GraphRunner)
            rows = arrays_of(arrays, self._runner.signature)
            return run_rows(self._runner, rows, count_of(batch_size, "batch_size"))

    @property
    def _width(self) -> int:
        """How many numbers a text's vector has."""
        family = find_family(self._runner.config)
        return int(self._runner.config[family.width]) if family else 0

    def _require(self, method: str) -> None:
        """Require that `method` is for the model's task.

        Raises:
            InputError: another one is.
        """
        fitting = _METHODS.get(self.task, "generate")
        if method != fitting:
            raise InputError(
                f"{self._folder}: this model is for {self.task}; use {fitting}.", code="does-not-fit-task"
            )

    def _report(self, cuts: Cuts, total: int) -> None:
        if cuts.count:
            with self._calls.lock:
                self._truncated += cuts.count
            # the caller of generate, predict or embed
            warnings.warn(TruncationWarning(cuts.count, total, cuts.limit), stacklevel=3)

    def close(self) -> None:
        """Free the memory, once the calls that other threads are in have ended; no new ones are taken."""
        if self._calls.close():
            self._runner.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _example(text: Text) -> Example:
    return Example(text) if isinstance(text, str) else Example(text[0], text_pair=text[1])


def generation_of(values: Mapping[str, Any]) -> Any:
    """Return the `Generation` that `values` describe.

    Raises:
        InputError: a setting is unknown, out of range, or means nothing beside the others.
    """
    from pydantic import ValidationError

    from smelt.core.errors import nearest
    from smelt.runtime.generate.settings import Generation

    try:
        return Generation(**values)
    except ValidationError as error:
        found = error.errors(include_url=False)[0]
        if found["type"] == "value_error":
            refused = found["ctx"]["error"]
            code = refused.code if isinstance(refused, SettingError) else "wrong-setting"
            raise InputError(f"generation: {refused}.", code=code) from error
        name = ".".join(map(str, found["loc"]))
        code, what = "wrong-value", f"generation: {name}: {found['msg']}, read {found['input']!r}."
        if found["type"] == "extra_forbidden":
            code = "unknown-setting"
            what += f" Known: {', '.join(Generation.model_fields)}.{nearest(name, Generation.model_fields)}"
        raise InputError(what, code=code, setting=name) from error

"""The model that `smelt.load(folder)` returns.

The model counts its active calls and the texts that were truncated.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from smelt.api.arguments import as_count, as_images, as_list, as_paths, as_text, as_texts, as_texts_or_pairs
from smelt.core.artifact import read_artifact
from smelt.core.errors import InputError, SettingError, TruncationWarning, did_you_mean, rust_panics_as_errors
from smelt.data.splits import Example
from smelt.data.tasks import task_traits
from smelt.models.families.registry import find_family
from smelt.runtimes.predict_texts import embed_texts
from smelt.runtimes.single_call_runners import ClassPrediction, GraphRunner, predictions_from_logits
from smelt.tasks.registry import task_spec

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from PIL.Image import Image

    from smelt.runtimes.fill_mask import MaskPredictions
    from smelt.runtimes.tag_words import Entity


class TruncationCounter:
    """Counts truncated texts: `count` texts, truncated at `limit` tokens."""

    def __init__(self) -> None:
        self.count = self.limit = 0

    def __call__(self, count: int, limit: int) -> None:
        """Add `count` truncated texts."""
        self.count, self.limit = self.count + count, limit


class ActiveCalls:
    """Counts active calls of all threads. A context manager around each call.

    name: of the model, for the error of calls after `close`. most: maximum number of concurrent calls; others
    wait. None: no limit.
    """

    def __init__(self, name: str, most: int | None = None) -> None:
        self.lock = threading.Condition()
        self._name, self._max_calls = name, most
        self._closed = False
        self._active = 0

    def __enter__(self) -> None:
        with self.lock:
            self.lock.wait_for(
                lambda: self._closed or self._max_calls is None or self._active < self._max_calls
            )
            if self._closed:
                text = f"{self._name}: this model is closed. Open it again with smelt.load."
                raise InputError(text, code="model-closed")
            self._active += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self.lock:
            self._active -= 1
            self.lock.notify_all()
        if error is not None and not isinstance(error, Exception):
            with rust_panics_as_errors():
                raise error

    def close(self) -> bool:
        """Reject new calls and wait for the active ones; return False if it was closed before."""
        with self.lock:
            is_first_close, self._closed = not self._closed, True
            self.lock.notify_all()  # waiting calls raise the error
            self.lock.wait_for(lambda: self._active == 0)
        return is_first_close


TextOrPair = str | tuple[str, str]


class Model:
    """An artifact loaded in its runtime. A context manager that frees the memory on exit.

    Several threads may use one model at the same time; see docs/how-to/serve.md.

    Args:
        folder: an artifact, such as runs/NAME/artifacts/onnx-int8.
        threads: CPU threads (default: the artifact's setting, else the runtime's default).
        device: auto, cpu or cuda; see docs/reference/recipe.md#device.
        trust_engine: allow TensorRT engines that this user did not build on this machine (native code).
        workers: number of batches of one call that run at the same time, each with `threads` threads.
            TensorRT runs one at a time.

    Raises:
        InputError: the folder is not an artifact, a file was changed, or cuda is requested but not available.
        MissingDependencyError: the runtime of this artifact is not installed.
    """

    def __init__(
        self,
        folder: str | PathLike[str],
        threads: int | None = None,
        device: str = "auto",
        trust_engine: bool = False,
        workers: int = 1,
    ) -> None:
        from smelt.runtimes.onnx_import.trial_run import require_safe_artifact
        from smelt.runtimes.registry import find_runtime, open_runner

        if device not in ("auto", "cpu", "cuda"):
            raise InputError(
                f"device: expected auto, cpu or cuda, got {device!r}.", code="wrong-value", setting="device"
            )
        count = None if threads is None else as_count(threads, "threads")
        if not isinstance(folder, str | PathLike):
            raise InputError(
                f"artifact: expected the path of a folder, got {folder!r}.",
                code="wrong-value",
                setting="artifact",
            )
        self._folder = Path(folder).expanduser()  # the caller's path; the artifact's own is in the store
        self.artifact = read_artifact(self._folder)
        self.artifact.verify()
        require_safe_artifact(self.artifact, trust_engine)
        self._runner = open_runner(self.artifact, count, device, as_count(workers, "workers"))
        try:
            if task_traits(self.task).reads_images:
                self._runner.processor  # type: ignore[attr-defined]  # noqa: B018 -- report errors now
            if task_traits(self.task).has_tokenizer:
                self._runner.text.tokenizer  # noqa: B018 -- load it before the first call
        except BaseException:
            self._runner.close()
            raise
        runtime = find_runtime(self.artifact.format, self.artifact.manifest.details.get("target"))
        self._calls = ActiveCalls(str(self._folder), runtime.max_concurrent_calls)
        self._truncated = 0

    @property
    def task(self) -> str:
        """The model's task, as in a recipe."""
        return self.artifact.manifest.task

    @property
    def config(self) -> dict[str, Any]:
        """The model's Hugging Face config."""
        return dict(self._runner.config)

    @property
    def device(self) -> str:
        """The device in use: cpu or cuda."""
        return self._runner.device

    @property
    def tokenizer(self) -> str:
        """The tokenizer library: tokenizers, sentencepiece, or transformers (slow to import).

        Raises:
            InputError: the model has no text input.
        """
        if not task_traits(self.task).has_tokenizer:
            raise InputError(
                f"{self._folder}: a model for {self.task} has no tokenizer.",
                code="does-not-fit-task",
            )
        return self._runner.text.tokenizer.reader

    @property
    def truncated(self) -> int:
        """Number of texts truncated to the model's limit since the model was opened."""
        return self._truncated

    def generate(self, texts: Iterable[str], batch_size: int = 32, **generation: Any) -> list[str]:
        """Return the generated text for each input: a translation, a summary or a continuation.

        Warns with `TruncationWarning` if texts were truncated to the model's limit.

        Args:
            texts: input texts of any length.
            batch_size: texts per batch.
            generation: settings as in `score.generation` of a recipe, for example max_new_tokens=64.

        Returns:
            One text per input, in the order of the inputs.

        Raises:
            InputError: the model does not generate text or is closed, an input is not a string, or a
                generation setting is unknown or out of range.
        """
        from smelt.runtimes.predict_texts import generate_texts

        with self._calls:
            self._require_method("generate")
            settings, inputs = parse_generation(generation), as_texts(texts)
            size, truncations = as_count(batch_size, "batch_size"), TruncationCounter()
            outputs = (
                generate_texts(self._runner, inputs, settings, size, on_truncate=truncations)
                if inputs
                else []
            )
            self._warn_truncated(truncations, len(inputs))
        return outputs

    def transcribe(
        self, audio: Iterable[str | PathLike[str]], batch_size: int = 8, **generation: Any
    ) -> list[str]:
        """Return the transcript of each file of audio: wav, flac, or an `.npz` array.

        A file longer than the model's window (30 seconds of a Whisper) is cut into windows, whose texts are
        joined.

        Args:
            audio: paths.
            batch_size: windows per batch.
            generation: settings as in `score.generation` of a recipe, for example language="en".

        Raises:
            InputError: the model does not recognize speech or is closed, a file cannot be read, or a
                generation setting is unknown or out of range.
        """
        from smelt.runtimes.predict_texts import generate_texts

        with self._calls:
            self._require_method("transcribe")
            settings, inputs = parse_generation(generation), as_paths(audio)
            size = as_count(batch_size, "batch_size")
            return generate_texts(self._runner, inputs, settings, size) if inputs else []

    def predict(self, texts: Iterable[TextOrPair], batch_size: int = 32) -> list[Any]:
        """Return the prediction for each text, or for each pair of texts (a tuple of two).

        Warns with `TruncationWarning` if texts were truncated to the model's limit.

        Returns:
            For each input the result of the task, of a text classifier a `ClassPrediction`.

        Raises:
            InputError: the model is for a task with another method or is closed, or an input is not a text or
                pair.
        """
        from smelt.generation.config import GenerationSettings

        with self._calls:
            self._require_method("predict")
            inputs = [_example(text) for text in as_texts_or_pairs(texts)]
            size, truncations = as_count(batch_size, "batch_size"), TruncationCounter()
            if not inputs:
                return []
            predictions = task_spec(self.task).run(
                self._runner, inputs, GenerationSettings(), size, truncations
            )
            self._warn_truncated(truncations, len(inputs))
        return list(predictions)

    def fill_mask(self, texts: Iterable[str], batch_size: int = 32, top_k: int = 5) -> list[MaskPredictions]:
        """Return the likeliest tokens for each mask token of each text, as transformers' fill-mask pipeline.

        Warns with `TruncationWarning` if texts were truncated to the model's limit.

        Args:
            texts: texts with the model's mask token, such as [MASK].
            batch_size: texts per batch.
            top_k: tokens per mask.

        Returns:
            For each text a list with an item per mask: its `top_k` predictions (score, token, token_str,
            sequence), the likeliest first.

        Raises:
            InputError: the model is not a masked language model or is closed, or an input is not a string or
                has no mask token within the model's limit.
        """
        from smelt.runtimes.fill_mask import fill_masks, require_mask_tokens

        with self._calls:
            self._require_method("fill_mask")
            inputs = as_texts(texts)
            size, truncations = as_count(batch_size, "batch_size"), TruncationCounter()
            require_mask_tokens(self._runner, inputs)
            predictions = fill_masks(self._runner, inputs, size, as_count(top_k, "top_k"), truncations)
            self._warn_truncated(truncations, len(inputs))
        return predictions

    def tag(self, texts: Iterable[str | Sequence[str]], batch_size: int = 32) -> list[list[Entity]]:
        """Return the entities of each text, as transformers' pipeline with aggregation_strategy="first".

        Warns with `TruncationWarning` if texts were truncated to the model's limit.

        Args:
            texts: texts, or lists of the words of a text. A text is split as BERT does, at spaces and
                punctuation.
            batch_size: texts per batch.

        Returns:
            For each text its entities in order: entity_group, score, word, start and end (characters, end
            exclusive; of a list of words, in the words joined with spaces). Of a model that tags each word,
            as for parts of speech, each word is one.

        Raises:
            InputError: the model is not a token classifier or is closed, or an input is not a text or a list
                of words.
        """
        from smelt.runtimes.tag_words import find_entities

        with self._calls:
            self._require_method("tag")
            inputs = [_word_example(item, index) for index, item in enumerate(as_list(texts))]
            size, truncations = as_count(batch_size, "batch_size"), TruncationCounter()
            if not inputs:
                return []
            entities = find_entities(self._runner, inputs, size, truncations)
            self._warn_truncated(truncations, len(inputs))
        return entities

    def classify(
        self, images: Iterable[str | PathLike[str] | Image], batch_size: int = 32
    ) -> list[ClassPrediction]:
        """Return the class of each image.

        Args:
            images: paths of image files, or Pillow images, of any size.
            batch_size: images per batch; no more are decoded at a time.

        Raises:
            InputError: the model is not an image classifier or is closed, or an input is not an image or
                cannot be read.
        """
        from smelt.runtimes.images import image_logits

        with self._calls:
            self._require_method("classify")
            inputs = as_images(images)
            size = as_count(batch_size, "batch_size")
            if not inputs:
                return []
            logits = image_logits(self._runner, inputs, size)
        return predictions_from_logits(logits, self._runner.config)

    def match(
        self,
        images: Iterable[str | PathLike[str] | Image],
        texts: Iterable[str],
        batch_size: int = 32,
    ) -> list[dict[str, float]]:
        """Return for each image the probability of each of `texts`, best first.

        Of CLIP they add up to 1 over the texts, of SigLIP each is that of one pair.

        Args:
            images: as of `classify`.
            texts: different ones, such as "a photo of a cat".
            batch_size: images, or texts, per batch.

        Raises:
            InputError: the model is not one of images and texts or is closed, or an input cannot be read.
        """
        from smelt.runtimes.image_text import match_texts

        with self._calls:
            self._require_method("match")
            inputs, candidates, truncations = as_images(images), as_texts(texts), TruncationCounter()
            size = as_count(batch_size, "batch_size")
            matches = match_texts(self._runner, inputs, candidates, size, truncations) if inputs else []
            self._warn_truncated(truncations, len(candidates))
        return matches

    def embed(self, texts: Iterable[str], batch_size: int = 32) -> NDArray[np.float32]:
        """Return the embedding of each text, float32 [n, D], in the order of the texts.

        Warns with `TruncationWarning` if texts were truncated to the model's limit.

        Raises:
            InputError: the model is not a sentence embedder or is closed, or an input is not a string.
        """
        import numpy as np

        with self._calls:
            self._require_method("embed")
            inputs = as_texts(texts)
            size, truncations = as_count(batch_size, "batch_size"), TruncationCounter()
            if not inputs:
                return np.empty((0, self._embedding_size), dtype=np.float32)
            embeddings = embed_texts(self._runner, inputs, size, on_truncate=truncations)
            self._warn_truncated(truncations, len(inputs))
        return embeddings

    def run(self, arrays: Mapping[str, Any], batch_size: int = 32) -> dict[str, NDArray[Any]]:
        """Return the outputs of a `custom` model by name, for all samples.

        Args:
            arrays: arrays by input name. The batch axis is axis 0, or the one set in the recipe
                (`data: {axes: ...}`) or given by the dimension's name.
            batch_size: samples per batch; ignored if the graph has a fixed batch size.

        Raises:
            InputError: the model is for another task or is closed, or the arrays do not fit the graph.
            RunError: the graph failed.
        """
        from smelt.api.array_models import as_arrays, run_in_batches

        with self._calls:
            self._require_method("run")
            assert isinstance(self._runner, GraphRunner)
            samples = as_arrays(arrays, self._runner.signature)
            return run_in_batches(self._runner, samples, as_count(batch_size, "batch_size"))

    @property
    def _embedding_size(self) -> int:
        """Size of an embedding."""
        family = find_family(self._runner.config)
        return (family.hidden_size(self._runner.config) or 0) if family else 0

    def _require_method(self, method: str) -> None:
        """Require that `method` is the one for the model's task.

        Raises:
            InputError: it is not.
        """
        task_method = task_spec(self.task).method
        if method != task_method:
            raise InputError(
                f"{self._folder}: {method} does not support {self.task}. Use {task_method}.",
                code="does-not-fit-task",
            )

    def _warn_truncated(self, cuts: TruncationCounter, total: int) -> None:
        if cuts.count:
            with self._calls.lock:
                self._truncated += cuts.count
            # the caller of generate, predict or embed
            warnings.warn(TruncationWarning(cuts.count, total, cuts.limit), stacklevel=3)

    def close(self) -> None:
        """Reject new calls, wait for those of other threads, and free the memory."""
        if self._calls.close():
            self._runner.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _example(text: TextOrPair) -> Example:
    return Example(text) if isinstance(text, str) else Example(text[0], text_pair=text[1])


def _word_example(item: Any, index: int) -> Example:
    """Return the sample of a text, or of a list of its words."""
    if not isinstance(item, list | tuple):
        return Example(as_text(item, f"texts[{index}]", " The words of a text are a list."))
    words = tuple(as_text(text, f"texts[{index}][{number}]") for number, text in enumerate(item))
    if any(not text.strip() for text in words):
        raise InputError(
            f"texts[{index}]: a word is empty. Remove it.", code="empty-word", setting=f"texts[{index}]"
        )
    return Example(" ".join(words), words=words)


def parse_generation(values: Mapping[str, Any]) -> Any:
    """Return `values` as `GenerationSettings`.

    Raises:
        InputError: a setting is unknown, out of range, or in conflict with others.
    """
    from pydantic import ValidationError

    from smelt.generation.config import GenerationSettings

    try:
        return GenerationSettings(**values)
    except ValidationError as error:
        details = error.errors(include_url=False)[0]
        if details["type"] == "value_error":
            cause = details["ctx"]["error"]
            code = cause.code if isinstance(cause, SettingError) else "wrong-setting"
            raise InputError(f"generation: {cause}.", code=code) from error
        name = ".".join(map(str, details["loc"]))
        code, problem = "wrong-value", f"generation: {name}: {details['msg']}, got {details['input']!r}."
        if details["type"] == "extra_forbidden":
            code = "unknown-setting"
            setting_names = GenerationSettings.model_fields
            problem += f" Known settings: {', '.join(setting_names)}.{did_you_mean(name, setting_names)}"
        raise InputError(problem, code=code, setting=name) from error

"""Read samples, run an artifact on them, and format the outputs as lines or JSON, for `smelt predict`.

Samples come from arguments, from lines of standard input, or from a file.

Shapes: D = size of an embedding.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from smelt.api.arguments import as_count
from smelt.api.load import TruncationCounter, parse_generation
from smelt.api.scored_run import generation_with, scored_generation
from smelt.core.artifact import default_threads, read_artifact
from smelt.core.errors import InputError, did_you_mean, truncation_text
from smelt.core.messages import Message, find_lone_surrogate, warning
from smelt.data.images import check_image, read_image_rows
from smelt.data.json_rows import data_suffix, read_text_file
from smelt.data.read_rows import read_file_rows
from smelt.data.splits import Columns, Example, column_options
from smelt.data.tasks import task_traits
from smelt.pipeline.inspect.data_files import parse_columns
from smelt.pipeline.inspect.machine import artifact_device
from smelt.runtimes.onnx_import.trial_run import require_safe_artifact
from smelt.tasks.registry import task_spec
from smelt.tasks.spec import TaskSpec
from smelt.tasks.text_generation import parse_prompt

# Texts per chunk: outputs are shown after each chunk.
_CHUNK_SIZE = 1024


@dataclass(frozen=True)
class ExampleOutput:
    """The output of the artifact for `example`.

    output: as `TaskSpec.predict` returns it.
    """

    example: Example
    output: Any
    task: TaskSpec

    @property
    def line(self) -> str:
        """The output as `smelt predict` prints it."""
        return self.task.result_line(self.output)

    @property
    def json_line(self) -> str:
        """Input and output as one line of JSON."""
        reads_images = self.task.traits.reads_images
        fields: dict[str, Any] = {"image" if reads_images else self.task.traits.modality: self.example.text}
        if self.example.text_pair is not None:
            fields["text" if reads_images else "text_pair"] = self.example.text_pair
        return json.dumps(fields | self.task.result_fields(self.output), ensure_ascii=False)


class Predictor:
    """Runs the artifact in `folder`.

    Args:
        folder: an artifact.
        generation: settings as in `score.generation` of a recipe; None values use those that the artifact
            was scored with, else the default. Of a masked language model `top_k` is the number of tokens for
            each mask.
        threads: CPU threads of a batch (default: the artifact's, else the cores divided by `workers`).
        device: auto, cpu or cuda.
        batch_size: texts per batch.
        trust_engine: as in `smelt.load`.
        workers: batches that are computed at the same time; None: in ONNX Runtime on the CPU as many as the
            cores suffice for, else 1.

    Raises:
        InputError: the folder is not an artifact, a file was changed, or `workers` or generation settings
            are invalid.
    """

    def __init__(
        self,
        folder: Path,
        generation: Mapping[str, Any],
        threads: int | None = None,
        device: str = "auto",
        batch_size: int = 32,
        trust_engine: bool = False,
        workers: int | None = None,
    ) -> None:
        self._artifact = read_artifact(folder)
        self._artifact.verify()
        require_safe_artifact(self._artifact, trust_engine)
        self._top_k = generation.get("top_k") if fills_masks(folder) else None
        if self._top_k is not None:
            as_count(self._top_k, "top_k")
            generation = {**generation, "top_k": None}
        scored = scored_generation(folder, self._artifact)
        self._generation = parse_generation(generation_with(scored, generation))
        self._threads = default_threads(self._artifact.manifest) if threads is None else threads
        self._device, self._batch_size = device, batch_size
        self._workers = None if workers is None else as_count(workers, "workers")
        self._cuts, self._seen = TruncationCounter(), 0

    @property
    def task(self) -> str:
        """The model's task, as in a recipe."""
        return self._artifact.manifest.task

    def run(self, examples: Sequence[Example]) -> Iterator[ExampleOutput]:
        """Yield the output for each of `examples`, in order."""
        if not examples:
            return
        from smelt.runtimes.registry import open_runner

        spec = task_spec(self.task)
        # random draws depend on the batch number, so sampling is not split into chunks
        step = len(examples) if self._generation.do_sample else _CHUNK_SIZE
        threads, workers = self._concurrency(min(step, len(examples)))
        with open_runner(self._artifact, threads, self._device, workers) as runner:
            for start in range(0, len(examples), step):
                chunk = examples[start : start + step]
                self._seen += len(chunk)
                settings = self._generation, self._batch_size, self._cuts, self._top_k
                outputs = spec.predict(runner, chunk, *settings)
                for example, output in zip(chunk, outputs, strict=True):
                    yield ExampleOutput(example, output, spec)

    def _concurrency(self, count: int) -> tuple[int | None, int]:
        """Return the threads of a batch and the number of concurrent batches, for `count` examples.

        A batch takes half as much CPU time on one thread as on two (docs/measurements/peers.md#throughput).
        """
        from smelt.evaluate.environment import physical_cores
        from smelt.runtimes.registry import find_runtime

        # calls of the other runtimes take turns, or share one number of threads
        runtime = find_runtime(self._artifact.format, self._artifact.manifest.details.get("target"))
        uses_onnxruntime = runtime.format == "onnx" and runtime.target is None
        if not uses_onnxruntime or artifact_device(self._artifact, self._device) != "cpu":
            return self._threads, self._workers or 1

        cores, num_batches = physical_cores(), -(-count // self._batch_size)
        workers = self._workers or max(1, min(num_batches, cores // (self._threads or 1)))
        threads = self._threads or (max(1, cores // workers) if workers > 1 else None)
        return threads, workers

    @property
    def warnings(self) -> list[Message]:
        """Warnings about truncated texts, and about an artifact that ran on another device than requested."""
        truncations = self._cuts
        text = truncation_text(truncations.count, self._seen, truncations.limit)
        messages = [warning("truncated-texts", text)] if truncations.count else []
        if self._device == "cuda" and artifact_device(self._artifact, self._device) == "cpu":
            target = self._artifact.manifest.details.get("target") or self._artifact.format
            messages.append(
                warning(
                    "other-device",
                    f"--device cuda: this artifact is for {target} and ran on the CPU. Export one for a GPU"
                    f" with `onnx: {{target: ort-cuda}}` in the recipe.",
                )
            )
        return messages


def fills_masks(folder: Path) -> bool:
    """Return whether the artifact in `folder` is a masked language model."""
    return task_traits(read_artifact(folder).manifest.task).output == "masked-tokens"


def as_examples(texts: Sequence[str], task: str, name: str = "text") -> list[Example]:
    """Return texts as samples; for classifiers and sentence embedders a tab separates the texts of a pair.

    Args:
        texts: arguments or lines.
        task: the artifact's task.
        name: what a message calls one text.

    Raises:
        InputError: a text is not valid UTF-8 (Python represents invalid bytes as lone surrogates).
    """
    for number, text in enumerate(texts, 1):
        if find_lone_surrogate(text) is not None:
            raise InputError(
                f"{name} {number}: not UTF-8 text, got {repr(text)[:60]}. Convert it to UTF-8.",
                code="not-utf8",
            )
    examples, traits = [task_spec(task).parse_argument(text) for text in texts], task_traits(task)
    noun = name
    if name == "text":
        noun = "image" if traits.reads_images else traits.modality
    for number, example in enumerate(examples, 1):
        task_spec(task).check_input(example.text, f"{noun} {number}")
    return examples


def strip_lines(stream: Iterable[str]) -> list[str]:
    """Return the lines of `stream` without line ends and byte order mark.

    Not `str.splitlines`, which also splits at U+2028, so that there would be more outputs than lines.
    """
    lines = [line.removesuffix("\n") for line in stream]
    return [line.removeprefix("\ufeff") for line in lines[:1]] + lines[1:]


def read_examples(path: Path, task: str, columns: Sequence[str]) -> list[Example]:
    """Read the samples in `path`: a table, or a .txt file with one text per line.

    Args:
        path: a file in any format for data, or .txt.
        task: the artifact's task.
        columns: columns: NAME for the text, or ROLE=NAME with the role source, text, text_pair, prompt or
            tokens (a list of words). For text generation none are needed for a row with a prompt, an
            instruction or messages.

    Raises:
        InputError: the file cannot be read, is empty, or lacks a column.
    """
    if task_traits(task).modality == "image":
        return _read_images(path, task, columns)
    media_folder = task_traits(task).reads_media and path.is_dir()
    if not path.is_file() and not media_folder:
        code, problem = (
            ("not-a-file", "a folder, expected a file") if path.is_dir() else ("missing-file", "no such file")
        )
        raise InputError(f"--data {path}: {problem}.", code=code, file=str(path))
    if data_suffix(path) == ".txt":
        if columns:
            raise InputError(
                f"--column {columns[0]}: {path} is plain text and has no columns. Remove --column.",
                code="no-columns",
                file=str(path),
            )
        lines = strip_lines(io.StringIO(read_text_file(path), newline=None))
        if task_traits(task).reads_media:
            return _require_rows(_read_media_lines(path, lines, task), path)
        return _require_rows(as_examples(lines, task), path)
    if task_traits(task).samples == "prompts" and not columns:
        with column_options("prompt"):
            examples = [
                replace(parse_prompt(row, location, Columns()), line=None)
                for location, row in read_file_rows(path)
            ]
        return _require_rows(examples, path)
    if task_spec(task).input_roles:
        return _require_rows(_read_rows(path, task_spec(task), columns), path)
    text, pair = _column_names(columns, task)
    # a column for pairs is required only if it was named
    required_columns = {text: "text"} | (
        {pair: "text_pair"} if pair and any(item.startswith("text_pair=") for item in columns) else {}
    )
    examples = []
    for location, row in read_file_rows(path):
        if missing := [name for name in required_columns if name not in row]:
            raise _missing_columns(row, missing, location)
        pair_value = row.get(pair) if pair else None
        pair_text = _cell_text(pair_value, location, str(pair)) if pair_value else None
        examples.append(Example(_cell_text(row[text], location, text), text_pair=pair_text))
    return _require_rows(examples, path)


def _read_rows(path: Path, spec: TaskSpec, column_args: Sequence[str]) -> list[Example]:
    """Read samples as the task does, without targets; a name without a role is the column of the text."""
    default_role = "text" if "text" in spec.input_roles else spec.input_roles[0]
    columns = parse_columns([item if "=" in item else f"{default_role}={item}" for item in column_args])
    with column_options(*spec.input_roles):
        return [
            replace(spec.parse_row(row, location, columns, lacks_target=True), line=None)
            for location, row in spec.read_rows(path, columns)
        ]


def _read_images(path: Path, task: str, column_args: Sequence[str]) -> list[Example]:
    """Read the images of `path`: any format for data (labels are optional), or a list of files (.txt)."""
    columns = Columns(image=column_args[0].removeprefix("image=")) if column_args else Columns()
    if len(column_args) > 1:
        raise InputError(
            f"--column {column_args[1]}: expected only one column, the image column.", code="wrong-value"
        )
    if not path.exists():
        raise InputError(f"--data {path}: no such file or folder.", code="missing-file", file=str(path))
    if path.is_file() and data_suffix(path) == ".txt":
        lines = strip_lines(io.StringIO(read_text_file(path), newline=None))
        return _require_rows(_read_media_lines(path, lines, task), path)
    examples = []
    for location, row in read_image_rows(path, columns.image, columns.label):
        if columns.image not in row:
            raise _missing_columns(row, [columns.image], location)
        reference = _cell_text(row[columns.image], location, columns.image)
        check_image(reference, location)
        examples.append(Example(reference))
    return _require_rows(examples, path)


def _read_media_lines(path: Path, lines: Sequence[str], task: str) -> list[Example]:
    """Return the samples of lines of `path`, each a file next to it; texts of an image follow after tabs."""
    parts = [line.partition("\t") for line in lines if line.strip()]
    paths = [f"{path.parent / name}{tab}{texts}" for name, tab, texts in parts]
    return as_examples(paths, task, f"{path} line")


def _require_rows(examples: list[Example], path: Path) -> list[Example]:
    if not examples:
        raise InputError(f"{path}: the file contains no samples.", code="empty-data", file=str(path))
    return examples


def _column_names(columns: Sequence[str], task: str) -> tuple[str, str | None]:
    """Return the columns of the text and, for tasks with pairs, of the second text."""
    default_columns = Columns()
    text = (
        default_columns.source
        if task_traits(task).architecture == "encoder-decoder"
        else default_columns.text
    )
    pair = default_columns.text_pair if task_traits(task).text_pair else None
    column_by_role: dict[bool, str] = {}
    for item in columns:
        role, sep, name = item.partition("=")
        is_pair = bool(sep) and role == "text_pair"
        if (previous := column_by_role.setdefault(is_pair, item)) != item:
            raise InputError(
                f"--column {previous} and --column {item}: two columns for the same text. Remove one.",
                code="settings-conflict",
            )
        if is_pair:
            if not task_traits(task).text_pair:
                raise InputError(
                    f"--column {item}: a model for {task} does not support pairs of texts. Remove it.",
                    code="does-not-fit-task",
                )
            pair = name
        elif sep and role in ("source", "text", "prompt"):
            text = name
        else:
            text = item
    return text, pair


def _missing_columns(row: Mapping[str, Any], missing: Sequence[str], where: str) -> InputError:
    columns = ", ".join(map(str, row)) or "none"
    names = " and ".join(f"'{name}'" for name in missing)
    similar = "".join(did_you_mean(name, map(str, row)) for name in missing)
    option_hint = "--column text=NAME --column text_pair=NAME" if len(missing) > 1 else "--column NAME"
    return InputError(
        f"{where}: no column {names}. Columns: {columns}.{similar} Set the right names with {option_hint}.",
        code="missing-column",
    ).with_location(where)


def _cell_text(value: Any, where: str, column: str) -> str:
    if not isinstance(value, str):
        raise InputError(
            f"{where}: column '{column}': expected text, got {repr(value)[:80]}.", code="wrong-column-type"
        ).with_location(where)
    if (half := find_lone_surrogate(value)) is not None:
        raise InputError(
            f"{where}: column '{column}' contains {half!r}, a lone surrogate, which is not a valid character."
            " Remove it.",
            code="lone-surrogate",
        ).with_location(where)
    return value

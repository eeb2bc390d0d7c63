"""The interface of a task: all that is particular to one, as attributes and methods with defaults.

A task's file has what differs; `parse_row` and `encode` are abstract for all but arrays. Its traits
(`smelt.data.tasks`) are known to every package. Files of this folder import torch inside of functions only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from smelt.data.read_rows import RowIterator, read_file_rows
from smelt.data.splits import Columns, Example, Split, input_texts
from smelt.data.tasks import Task, TaskTraits, task_traits

if TYPE_CHECKING:
    from smelt.generation.config import GenerationSettings
    from smelt.generation.prompt_batches import OnTruncate
    from smelt.tasks.samples import EncodedSample


@dataclass(frozen=True)
class PackageClass:
    """The class of infer.py in a standalone package."""

    script: str
    """Its file in export/package/standalone, without suffix."""
    name: str
    usage: str
    """A program that calls it, for the README."""
    libraries: tuple[str, ...] = ()
    """Libraries that it needs besides onnxruntime, numpy and that of the tokenizer, with their own ones."""
    media: str | None = None
    """The media type of files that the service takes as a body; None if inputs are JSON."""


class TaskSpec:
    """A task; the defaults are those of a model from text to text."""

    name: ClassVar[Task]

    # Samples.
    column_roles: ClassVar[tuple[str, ...]] = ("text",)
    """The roles of a sample's columns (`smelt.data.splits.Columns`), in order."""
    optional_roles: ClassVar[tuple[str, ...]] = ("text_pair",)
    """Those that a sample may lack."""
    target_roles: ClassVar[tuple[str, ...]] = ()
    """Those with the expected output, of which any is enough."""

    input_roles: ClassVar[tuple[str, ...]] = ()
    """Those that `smelt predict --data` reads with `parse_row`; none if it reads a text, or two of a pair."""

    # The model in Python and on the command line.
    method: ClassVar[str] = "generate"
    """The method of `smelt.load`'s models."""
    command_input: ClassVar[str] = '"TEXT"'
    """An input of `smelt predict` in a hint."""
    service_input: ClassVar[str | None] = None
    """An input of a package's service as JSON; None if it is `command_input`."""

    # Latency, from the input of a user to the result.
    call: ClassVar[str] = "text to text"
    call_includes: ClassVar[str] = "tokenizing and detokenizing are"
    sample_noun: ClassVar[str] = "text"
    rate_unit: ClassVar[str] = "texts/s"
    """The unit of throughput; models that continue their input are measured in tokens/s."""
    preprocessing: ClassVar[str] = "tokenizing"
    """What is done before the model runs."""
    postprocessing: ClassVar[str] = "labels"
    """What is made of the outputs of a model that does not generate."""
    preprocessing_libraries: ClassVar[tuple[str, ...]] = ()
    """Libraries of it, besides those of tokenizers, whose versions are conditions of a latency."""

    # `smelt init`.
    row_example: ClassVar[str]
    suggested_metrics: ClassVar[tuple[str, ...]] = ()
    """Metrics that the recipe names; without them it leaves the choice to the samples' labels."""
    main_metric: ClassVar[str | None] = None
    """The metric of the suggested gate; None to choose by the samples' labels."""
    distill_losses: ClassVar[str] = "logits: 1.0, labels: 0.5"

    # Graphs and packages.
    hub_tag: ClassVar[str | None] = None
    """The name of the task on the Hub; None if it is the same."""
    graph_output: ClassVar[str | None] = None
    """The output of the only graph of a model; None if there is a graph with the generation loop."""
    package: ClassVar[PackageClass | None] = None

    @property
    def traits(self) -> TaskTraits:
        """The traits of the task."""
        return task_traits(self.name)

    def read_rows(self, path: Path, columns: Columns) -> RowIterator:
        """Yield the rows of a file, each with its position; paths in them are absolute.

        Raises:
            InputError: it cannot be read.
        """
        return read_file_rows(path)

    def check_input(self, text: str, location: str) -> None:
        """Check an input that is no text but names a file; location: for the message.

        Raises:
            InputError: there is no such file, or it cannot be read.
        """

    def parse_row(
        self, row: Mapping[str, Any], location: str, columns: Columns, lacks_target: bool
    ) -> Example:
        """Return the sample of a row, without its line.

        Args:
            row: values by column.
            location: of the row, for messages.
            columns: the names of the columns.
            lacks_target: the row has no expected output, and needs none.

        Raises:
            InputError: a column is missing, has another type or is empty.
        """
        raise NotImplementedError(f"{self.name}: its samples are no rows, and are not encoded")

    def parse_argument(self, text: str) -> Example:
        """Return the sample of an argument or a line of `smelt predict`; a tab separates the texts of a pair.

        Raises:
            InputError: it is no input of the task.
        """
        if not self.traits.text_pair:
            return Example(text)
        first_text, tab, second_text = text.partition("\t")
        return Example(first_text, text_pair=second_text if tab else None)

    def lacks_target(self, row: Mapping[str, Any], columns: Columns) -> bool:
        """Return whether a row has no expected output."""
        return all(row.get(getattr(columns, role)) in (None, "") for role in self.target_roles)

    def required_roles(self, row: Mapping[str, Any], columns: Columns) -> tuple[str, ...]:
        """Return the roles of the columns that `row` must have, for the error about several missing ones."""
        return tuple(role for role in self.column_roles if role not in self.optional_roles)

    def label_examples(self, examples: Sequence[Example]) -> Sequence[Example]:
        """Return an example for each label: `examples`, unless a sample has several."""
        return examples

    def head_names(self, names: Sequence[str]) -> list[str]:
        """Return the names of a new head's outputs, in order.

        Args:
            names: the labels of the data, sorted.

        Raises:
            InputError: the labels cannot be names.
        """
        return list(names)

    def package_settings(self, config: Mapping[str, Any], folder: Path) -> dict[str, Any]:
        """Return what the class of a package reads from infer.json, besides tokenizer and generation.

        Args:
            config: config.json.
            folder: the artifact's.
        """
        return {}

    def placeholder_row(self, text: str, config: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return a row of `text` with a target for the model of `config`; None if it cannot be text."""
        return {
            getattr(Columns(), role): text for role in self.column_roles if role not in self.optional_roles
        }

    def recognizes_row(self, row: Mapping[str, Any], columns: Columns, named: Columns) -> bool:
        """Return whether a row shows that a model which supports the task, by default for another, is for it.

        Args:
            row: the first row of the data.
            columns: with those that were inferred from it.
            named: with those that the user named.
        """
        return False

    def recognizes_model(self, config: Mapping[str, Any], is_embedder: bool) -> bool:
        """Return whether a checkpoint of a family with several tasks is for this one.

        Args:
            config: config.json.
            is_embedder: whether sentence-transformers wrote the folder.
        """
        return False

    def recognizes_graph(self, outputs: Set[str], config: Mapping[str, Any], is_embedder: bool) -> bool:
        """Return whether a third-party graph of token ids is for the task, by its outputs and its config."""
        return False

    def check_examples(self, examples: Sequence[Example], columns: Columns) -> None:
        """Check what concerns all samples of a file.

        Raises:
            InputError: some samples have what others lack.
        """

    def encode(
        self, split: Split, config: Any, tokenizer: Any, limit: int, length: int | None
    ) -> tuple[list[EncodedSample], int]:
        """Return the tokenized samples of `split`, and the number of texts that were truncated.

        Args:
            split: the samples.
            config: the model's, of transformers.
            tokenizer: the model's, or the image processor of an image model.
            limit: tokens of a text, of the model or of the settings; 0 for images.
            length: tokens of a text in the settings; None: not set.

        Raises:
            InputError: a label that is not in the model's config.
        """
        raise NotImplementedError(f"{self.name}: its samples are no rows, and are not encoded")

    def token_rows(self, split: Split, tokenizer: Any) -> list[list[int]]:
        """Return the ids of every text of `split` without truncation: inputs, then targets.

        tokenizer: the model's.
        """
        from smelt.models.text_rules import NO_LIMIT
        from smelt.models.tokenizer import encode_texts

        texts, second_texts = input_texts(split.examples, self.name)
        return list(encode_texts(texts, tokenizer, NO_LIMIT, second_texts).ids)

    def run(
        self,
        runner: Any,
        examples: Sequence[Example],
        generation: GenerationSettings,
        batch_size: int,
        on_truncate: OnTruncate | None = None,
    ) -> Iterable[Any]:
        """Return the output for each example, as the method of `smelt.load`'s models; this call is timed.

        Args:
            runner: of the model.
            examples: whose inputs are used.
            generation: settings of models that generate.
            batch_size: examples per batch.
            on_truncate: called with the number of texts that were longer than the limit, and that limit.
        """
        from smelt.runtimes.predict_texts import generate_texts

        texts = [example.text for example in examples]
        return generate_texts(runner, texts, generation, batch_size, on_truncate=on_truncate)

    def predict(
        self,
        runner: Any,
        examples: Sequence[Example],
        generation: GenerationSettings,
        batch_size: int,
        on_truncate: OnTruncate | None = None,
        top_k: int | None = None,
    ) -> Iterable[Any]:
        """Return the result of `smelt predict` for each example; arguments as of `run`.

        top_k: tokens for each mask; None for the default.
        """
        return self.run(runner, examples, generation, batch_size, on_truncate)

    def result_line(self, result: Any) -> str:
        """Return a result of `predict` as a line of text."""
        return str(result)

    def result_fields(self, result: Any) -> dict[str, Any]:
        """Return a result of `predict` as fields of a JSON object."""
        return {"output": result}

    def count_truncated(
        self, runner: Any, examples: Sequence[Example], generation: GenerationSettings
    ) -> int:
        """Return the number of input texts that the runner truncates."""
        from smelt.models.tokenizer import encode_texts

        texts, second_texts = input_texts(examples, self.name)
        return encode_texts(
            texts, runner.text.tokenizer, runner.text.max_input_length, second_texts
        ).truncated

    def too_long_samples(self, split: Split, tokenizer: Any, limit: int) -> set[int]:
        """Return the indices of samples with more than `limit` tokens, in both texts of a pair."""
        paired = [i for i, e in enumerate(split.examples) if e.text_pair is not None]
        single = [i for i, e in enumerate(split.examples) if e.text_pair is None]
        first = [e.text for e in split.examples]
        second = [str(split.examples[i].text_pair) for i in paired]
        lengths = [
            *zip(single, token_counts(tokenizer, [first[i] for i in single]), strict=True),
            *zip(paired, token_counts(tokenizer, [first[i] for i in paired], second), strict=True),
        ]
        return {i for i, length in lengths if length > limit}


def token_counts(tokenizer: Any, texts: Sequence[str], seconds: Sequence[str] | None = None) -> list[int]:
    """Return the number of tokens of each text, or of each pair of a text and a second one."""
    if not texts:
        return []
    text_batches = [list(texts)] if seconds is None else [list(texts), list(seconds)]
    return [len(ids) for ids in tokenizer(*text_batches, truncation=False, verbose=False)["input_ids"]]

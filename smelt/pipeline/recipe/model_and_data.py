"""Settings of the recipe keys `model`, `data` and `embedding`, and checks of a classifier's labels.

The problem type of a classifier is determined from them; metrics and labels must fit it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Discriminator, Field, Tag, model_validator

from smelt.core.errors import InputError, SettingError, did_you_mean
from smelt.core.messages import Message, error_message, with_count
from smelt.data.labels import (
    REGRESSION,
    SINGLE_LABEL,
    ProblemType,
    check_labels,
    class_names,
    class_targets,
    has_classifier,
    infer_label_names,
    infer_problem_type,
    is_blank_label,
    label_as_int,
    split_labels,
)
from smelt.data.read_rows import RowDraw
from smelt.data.splits import Columns, Example, Split, SplitName, Windows
from smelt.data.tasks import Task
from smelt.evaluate.metrics.metric import MetricSettingValues
from smelt.evaluate.metrics.ranking import RankedSamples, several_outputs_error
from smelt.evaluate.metrics.registry import (
    CLASSIFIER_METRICS,
    METRICS_BY_PROBLEM,
    base_metric,
    is_custom_metric,
    metrics_of,
)
from smelt.models.text_rules import Pooling
from smelt.stage import Settings
from smelt.tasks.read_split import UNLABELED

# name of a file, a folder or a hub repository
NonEmptyText = Annotated[str, Field(min_length=1)]
AxisSize = Annotated[int, Field(ge=1, strict=True)] | NonEmptyText


class NewTokenizer(Settings):
    """A new tokenizer, trained on the texts of the training samples."""

    train: Literal["bpe", "unigram", "wordpiece"] = Field(description="type of tokenizer to train")
    vocab_size: int = Field(default=8000, ge=1, le=1_000_000, description="number of tokens")


class UntrainedModel(Settings):
    """A model initialized from its config with random weights."""

    config: NonEmptyText = Field(description="config.json or its folder")
    tokenizer: NonEmptyText | NewTokenizer | None = Field(
        default=None, description="folder, hub id, or settings to train one"
    )
    image_size: int | None = Field(
        default=None,
        ge=1,
        le=4096,
        description="image models: pixels per side, if the config does not set it",
    )


def _check_function_name(value: str) -> str:
    """Return the name of a function.

    Raises:
        SettingError: `wrong-value`: it is not package.module:function.
    """
    module, _, function = value.partition(":")
    path = module.removesuffix(".py").replace("/", ".")
    if path != module:
        raise SettingError(
            f"name the module as in an import, without .py: {path}:{function or 'FUNCTION'}, got"
            f" {value[:80]!r}",
            code="wrong-value",
        )
    if not re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", value):
        raise SettingError(f"expected package.module:function, got {value[:80]!r}", code="wrong-value")
    return value


class ModuleModel(Settings):
    """A PyTorch module of the user's own."""

    module: Annotated[str, AfterValidator(_check_function_name)] = Field(
        description="function that returns a torch.nn.Module, as package.module:function; in the recipe's"
        " folder",
    )
    weights: NonEmptyText = Field(description="its state_dict, a .safetensors file")
    labels: tuple[NonEmptyText, ...] | None = Field(
        default=None, description="names of the classes, in the order of the outputs"
    )
    image_size: int | None = Field(
        default=None, ge=1, le=4096, description="pixels per side; the mean and std of images become 0.5"
    )
    processor: NonEmptyText | None = Field(
        default=None, description="preprocessor_config.json, instead of image_size"
    )
    tokenizer: NonEmptyText | None = Field(
        default=None, description="text-classification: folder of a tokenizer of transformers"
    )


def _form_of_model(value: Any) -> str:
    """Return the tag of the form; it is in the paths of pydantic's errors, so it must not be a setting."""
    if isinstance(value, ModuleModel) or (isinstance(value, dict) and "module" in value):
        return "user-module"
    return "untrained" if isinstance(value, UntrainedModel | dict) else "name"


ModelSetting = Annotated[
    Annotated[str, Tag("name")]
    | Annotated[UntrainedModel, Tag("untrained")]
    | Annotated[ModuleModel, Tag("user-module")],
    Discriminator(_form_of_model),
]


class SplitFractions(Settings):
    """The fraction of `train` that is moved to each split; see `smelt.data.split_division`."""

    test: float | None = Field(default=None, gt=0, lt=1, description="fraction of train")
    validation: float | None = Field(default=None, gt=0, lt=1, description="fraction of train")

    @model_validator(mode="after")
    def _check_fractions(self) -> Self:
        if sum(self.named_fractions().values()) >= 1:
            raise SettingError(
                "the fractions leave no training samples. Their sum must be less than 1",
                code="shares-too-large",
            )
        return self

    def named_fractions(self) -> dict[str, float]:
        """Return the fractions that are set, by split."""
        return self.model_dump(exclude_none=True)


class EmbeddingSettings(Settings):
    """Pooling and normalization of a sentence embedder; None uses the model's own value.

    See `smelt.models.text_rules.SentenceRules`.
    """

    pooling: Pooling | None = Field(default=None, description="default: the model's")
    normalize: bool | None = Field(
        default=None, description="scale vectors to length 1; default: the model's"
    )
    max_length: int | None = Field(
        default=None, ge=1, description="longest text in tokens; default: the model's"
    )


class DataSettings(Settings):
    """The data of each split: a file relative to the recipe, or a hub id.

    None in prefix, prompt_template, source_language and target_language uses the values of the model's files
    (see `smelt.pipeline.plan.task_checks`).
    """

    train: NonEmptyText | None = Field(default=None, description="training samples")
    unlabeled: NonEmptyText | None = Field(default=None, description="samples without labels, for `distill`")
    validation: NonEmptyText | None = Field(
        default=None, description="samples for choosing weights and settings"
    )
    calibration: NonEmptyText | None = Field(
        default=None, description="samples for calibration; most stages need no labels; default: train"
    )
    test: NonEmptyText | None = Field(default=None, description="samples for scoring; no stage reads them")
    split: SplitFractions = Field(
        default=SplitFractions(), description="fractions of train to use as other splits"
    )
    streaming: bool = Field(
        default=False, description="read data sets of the hub row by row, without a download of all rows"
    )
    max_samples: dict[SplitName, Annotated[int, Field(ge=1, strict=True)]] = Field(
        default_factory=dict,
        description="samples by split, drawn with `seed`; the others are not kept in memory; default: all",
    )
    buffer_size: int = Field(
        default=1000,
        ge=1,
        description="rows in memory among which the next of `max_samples` is drawn, as of `shuffle` of"
        " `datasets`",
    )
    columns: Columns = Field(default=Columns(), description="names of the columns")
    windows: Windows = Field(default=Windows(), description="language models: how text is split into windows")
    prefix: str | None = Field(default=None, description="text before each source; default: the model's")
    source_language: str | None = Field(
        default=None, description="multilingual models: language of the sources"
    )
    target_language: str | None = Field(
        default=None, description="language of the targets, also for BLEU's tokenizer"
    )
    prompt_template: NonEmptyText | None = Field(
        default=None,
        description="text-generation: text with {prompt}, or chat for the tokenizer's template; default: chat"
        " if there is one, else {prompt}",
    )
    axes: dict[NonEmptyText, Annotated[int, Field(ge=0, strict=True)] | None] = Field(
        default_factory=dict,
        description="ONNX models: batch axis of each input or output; null: none",
    )

    def row_draw(self, split: str, seed: int) -> RowDraw | None:
        """Return how samples of a split are drawn; None if all are read."""
        counts = (count for name, count in self.max_samples.items() if name == split)
        return next((RowDraw(count, self.buffer_size, seed) for count in counts), None)

    def split_sources(self) -> dict[str, str]:
        """Return the source of each split by name; splits taken from `train` have the source of `train`."""
        names = ("train", "unlabeled", "validation", "calibration", "test")
        sources = {name: value for name in names if (value := getattr(self, name)) is not None}
        train_fractions = (
            dict.fromkeys(self.split.named_fractions(), self.train) if self.train is not None else {}
        )
        return {
            name: origin
            for name in names
            if (origin := sources.get(name, train_fractions.get(name))) is not None
        }

    def split_files(self) -> dict[str, str]:
        """Return the sources to read: those of the splits that are not taken from `train`, by name."""
        train_fractions = self.split.named_fractions() if self.train is not None else {}
        return {name: origin for name, origin in self.split_sources().items() if name not in train_fractions}


_MAX_SHOWN = 5  # labels that a message names


def _labeled_splits(data: Mapping[str, Split]) -> dict[str, Split]:
    """Return the splits whose samples have labels."""
    return {name: split for name, split in data.items() if name != UNLABELED}


def resolve_problem_type(
    config: Mapping[str, Any], data: Mapping[str, Split], task: Task | None = None
) -> ProblemType:
    """Return the problem type from the model's config, or inferred from the labels of the data.

    task: whose classifier the config may have; None: any.

    Raises:
        InputError: the config's `problem_type` is not supported.
    """
    labels = (e.label for split in _labeled_splits(data).values() for e in split.examples)
    return infer_problem_type(config if has_classifier(config, task) else None, labels)


def new_class_names(data: Mapping[str, Split], problem: ProblemType) -> list[str]:
    """Return the class names of a new classifier for `data`: the labels of train.

    Without training samples, the labels of all splits.
    """
    label_splits = {"train": data["train"]} if "train" in data else _labeled_splits(data)
    labels = (e.label for split in label_splits.values() for e in split.examples)
    return infer_label_names((label for label in labels if label is not None), problem)


def _unseen_labels_text(split: Split, name: str, names: Sequence[str], problem: ProblemType) -> str:
    """Return a message about labels of `split` that train does not have; empty if there are none."""
    known_labels = set(names)
    rows_by_label: dict[str, list[int]] = {}
    for row_numbers, example in enumerate(split.examples):
        for item in [example.label] if problem == SINGLE_LABEL else split_labels(example.label):
            number = label_as_int(item)
            label = str(item if number is None else number)
            if label not in known_labels and not is_blank_label(item):
                rows_by_label.setdefault(label, []).append(example.line or example.row or row_numbers + 1)
    if not rows_by_label:
        return ""
    row_unit = "line" if split.examples[0].line else "row"
    entries = [
        f"{repr(label)[:80]} ({with_count(len(row_numbers), 'sample')}, {row_unit} {row_numbers[0]})"
        for label, row_numbers in rows_by_label.items()
    ]
    others = f" and {len(entries) - _MAX_SHOWN} more" if len(entries) > _MAX_SHOWN else ""
    labels = ", ".join(names[:20]) + (", ..." if len(names) > 20 else "")
    return (
        f"{split.origin}: labels that train does not have: {', '.join(entries[:_MAX_SHOWN])}{others}. A new"
        f" classifier learns only the labels of train: {labels}. Use the same labels in '{name}', add"
        " training samples, or remove these samples."
    )


def label_errors(
    config: Mapping[str, Any], data: Mapping[str, Split], problem: ProblemType, task: Task | None = None
) -> list[tuple[str, Message]]:
    """Return (split, error) for labels that do not fit the model; task: as of `resolve_problem_type`.

    An encoder without a classifier gets one for the labels of the data, so only their type can be wrong.
    """
    names = class_names(config) if has_classifier(config, task) else new_class_names(data, problem)
    errors = []
    if not has_classifier(config, task) and "train" in data and problem != REGRESSION:
        splits = {name: split for name, split in _labeled_splits(data).items() if name != "train"}
        unseen_texts = {
            name: _unseen_labels_text(split, name, names, problem) for name, split in splits.items()
        }
        errors = [(name, error_message("unknown-label", text)) for name, text in unseen_texts.items() if text]
        if errors:
            return errors
    if problem == SINGLE_LABEL and len(names) < 2:
        text = "all samples have the same label. A classifier needs at least two labels."
        return [("train" if "train" in data else "test", error_message("one-label", text))]
    for name, split in _labeled_splits(data).items():
        labeled_examples = [
            example for example in split.examples if example.label is not None
        ]  # see `read_split`
        try:
            check_labels(labeled_examples, names, problem, split.origin)
        except InputError as error:
            errors.append((name, error.as_message()))
    return errors


def metric_errors(
    metrics: Sequence[str], problem: ProblemType, num_outputs: int = 1
) -> list[tuple[int, Message]]:
    """Return (index, error) for the metrics that do not fit the problem type, or a regression's outputs."""
    supported = METRICS_BY_PROBLEM[problem]
    errors = [
        (index, unfit_metric(metric, problem))
        for index, metric in enumerate(metrics)
        if base_metric(metric) not in supported and not is_custom_metric(metric)
    ]
    if problem == REGRESSION and num_outputs > 1:
        ranking_metrics = metrics_of(RankedSamples)
        errors += [
            (index, several_outputs_error(metric, num_outputs))
            for index, metric in enumerate(metrics)
            if base_metric(metric) in ranking_metrics
        ]
    return errors


def metric_class_errors(
    metrics: Sequence[str], settings: MetricSettingValues, names: Sequence[str]
) -> list[tuple[int, Message]]:
    """Return (index, error) for the metrics of one class whose `label` is none of the classes `names`."""
    errors = []
    for index, metric in enumerate(metrics):
        label = settings.get(metric, {}).get("label")
        try:
            class_targets([Example("", label=label)] if label is not None else [], names)
        except InputError:
            class_list = ", ".join(names[:20]) + (", ..." if len(names) > 20 else "")
            text = f"'{metric}': no class {label!r}. Classes: {class_list}.{did_you_mean(str(label), names)}"
            errors.append((index, error_message("unknown-label", text)))
    return errors


def gate_errors(
    gates: Iterable[str], metrics: Sequence[str], problem: ProblemType
) -> list[tuple[str, Message]]:
    """Return (gate, error) for the gates on metrics that do not fit the problem type."""
    return [
        (g, unfit_metric(g, problem))
        for g in gates
        if base_metric(g) in CLASSIFIER_METRICS and g not in metrics
    ]


def unfit_metric(metric: str, problem: ProblemType) -> Message:
    """Return the error that `metric` does not fit `problem`, or is not one of its default metrics."""
    supported = METRICS_BY_PROBLEM[problem]
    if base_metric(metric) in supported:
        text = f"'{metric}' is not measured. Add it to score.quality."
        return error_message("metric-not-scored", text)
    owner = next((name for name, metrics in METRICS_BY_PROBLEM.items() if metric in metrics), None)
    problem_text = f"'{metric[:60]}' is a metric for {owner}" if owner else f"'{metric[:60]}' is not a metric"
    return error_message(
        "does-not-fit-labels" if owner else "unknown-metric",
        f"{problem_text}; the model and data are {problem}. Available metrics: {', '.join(supported)}."
        f"{did_you_mean(metric, supported)}",
    )
